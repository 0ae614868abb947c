"""A chat as the HTTP server takes it: the same body, prepared in the same way."""

from typing import TYPE_CHECKING, Any

from ...errors import InputError, needs_extra
from ..api_error import ApiError
from ..field_errors import of_fields, of_input
from ..served import Served

if TYPE_CHECKING:
    from ..prepare import Prepared

CHAT_REQUEST = "chat_request"


def prepare(served: Served, asked: Any) -> "Prepared":
    """From the body of a chat, as data, to the engine's requests. Fields that say how an answer is sent are without
    effect: it comes in pieces, with its counts. Raises InputError, which names the field."""
    with needs_extra("serve", CHAT_REQUEST):
        from pydantic import ValidationError

        from ..fields import ChatRequest
        from ..prepare import prepare_chat
    try:
        body = ChatRequest.model_validate(asked)
        if body.stream_options is not None and body.stream_options.include_drafts:
            raise InputError("stream_options.include_drafts: expected false, since responses have no drafts, got true")
        return prepare_chat(served, body, "")
    except ValidationError as error:
        told = of_fields([{**each, "loc": ("body", *each["loc"])} for each in error.errors()])
    except InputError as error:
        told = of_input(error)
    except ApiError as error:
        told = error
    raise InputError(str(told))
