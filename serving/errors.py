"""Errors as OpenAI's API has them: an object `error` of message, type, param, code. None tells a path, key, prompt."""

import logging

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from ..errors import EngineError, InputError
from .api_error import BROKEN, ApiError
from .field_errors import of_fields, of_input

logger = logging.getLogger(__name__)


def closing() -> ApiError:
    """Of an answer that ends with the server."""
    return ApiError(503, "the server shuts down", BROKEN, headers={"Connection": "close"})


def add_handlers(app: FastAPI) -> None:
    """Give every error that a route may raise OpenAI's form."""

    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def refused(_: Request, error: RequestValidationError) -> Response:
        return of_fields(error.errors()).response()

    @app.exception_handler(InputError)
    async def bad_input(_: Request, error: InputError) -> Response:
        return of_input(error).response()

    @app.exception_handler(EngineError)
    async def closed(_: Request, error: EngineError) -> Response:
        logger.warning("%s", error)
        return ApiError(503, "the model is not available", BROKEN, headers={"Retry-After": "5"}).response()

    @app.exception_handler(HTTPException)
    async def http(_: Request, error: HTTPException) -> Response:
        return ApiError(error.status_code, str(error.detail), headers=error.headers).response()

    @app.exception_handler(Exception)
    async def broken(_: Request, error: Exception) -> Response:
        return ApiError(500, "the server failed; its log says why", BROKEN).response()
