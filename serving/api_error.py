"""An answer that is an error, as OpenAI's API has it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastapi.responses import Response

INVALID, BUSY, BROKEN = "invalid_request_error", "rate_limit_error", "server_error"
LONGEST = 300  # characters of a message


class ApiError(Exception):
    """An answer that is an error."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.headers = status, headers
        self.body = error_body(message, kind, param, code)

    def response(self) -> "Response":
        """As it is sent."""
        from fastapi.responses import JSONResponse  # tools are read without a server as well

        return JSONResponse(self.body, self.status, self.headers)


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The JSON of an error. Names that a client made up may be no Unicode, or long."""
    return {"error": {"message": _sent(message), "type": kind, "param": param and _sent(param), "code": code}}


def _sent(text: str) -> str:
    whole = text.encode("utf-8", "replace").decode()
    return whole if len(whole) <= LONGEST else f"{whole[:LONGEST]}…"
