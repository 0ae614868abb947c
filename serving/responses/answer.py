"""A response, whole or as typed server-sent events."""

from collections.abc import Iterator
from typing import Any

from ..answering import EventStream, ServedCall, event
from ..bridge import Grown
from .fields import ResponsesRequest
from .output import Json, Output

PREFIX = "resp_"


class StatelessResponse:
    """What all objects of one response are made of."""

    def __init__(self, call: ServedCall, body: ResponsesRequest, output: Output):
        self.call, self.body, self.output = call, body, output

    def whole(self, texts: list[str]) -> Json:
        """The object of a response that was not streamed, of the text of its one choice."""
        for _ in self.output.push(texts[0]):
            pass
        for _ in self.output.end(self.is_whole):
            pass
        return self.told("completed" if self.is_whole else "incomplete")

    @property
    def is_whole(self) -> bool:
        """Whether the answer was not cut at its limit."""
        return self.call.answer.requests[0].finish_reason != "length"

    def told(self, status: str, error: Json | None = None) -> Json:
        """The object of a response. status: in_progress, completed, incomplete or failed."""
        body, sampling = self.body, self.call.answer.requests[0]
        return {
            "id": self.call.id,
            "object": "response",
            "created_at": self.call.created,
            "status": status,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self.call.served.name,
            "output": self.output.items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": (body.text and body.text.format) or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": self._usage() if status in ("completed", "incomplete") else None,
            "user": body.user,
            "metadata": body.metadata or {},
        }

    def _usage(self) -> Json:
        told = self.call.usage()
        details = told.get("completion_tokens_details", {})
        return {
            "input_tokens": told["prompt_tokens"],
            "input_tokens_details": {**told["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": told["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": details.get("reasoning_tokens", 0)},
            "total_tokens": told["total_tokens"],
        }


class ResponseStream(EventStream):
    """Events with their type and number; the last has the whole response."""

    def __init__(self, response: StatelessResponse):
        self._response, self._number = response, 0
        super().__init__(response.call)

    def begin(self) -> Iterator[bytes]:
        """See `EventStream`."""
        for kind in ("created", "in_progress"):
            yield self._event({"type": f"response.{kind}", "response": self._response.told("in_progress")})

    def grow(self, grown: Grown) -> Iterator[bytes]:
        """See `EventStream`."""
        yield from map(self._event, self._response.output.push(grown.text))

    def end(self) -> Iterator[bytes]:
        """See `EventStream`."""
        whole = self._response.is_whole
        yield from map(self._event, self._response.output.end(whole))
        status = "completed" if whole else "incomplete"
        yield self._event({"type": f"response.{status}", "response": self._response.told(status)})

    def fail(self, error: Json) -> bytes:
        """See `EventStream`."""
        told = {"code": "server_error", "message": error["error"]["message"]}
        return self._event({"type": "response.failed", "response": self._response.told("failed", told)})

    def _event(self, data: dict[str, Any]) -> bytes:
        self._number += 1
        return event({**data, "sequence_number": self._number - 1}, data["type"])
