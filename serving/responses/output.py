"""The output of a response as it grows: items for reasoning, text and calls, and events that tell of each change."""

import secrets
from collections.abc import Iterator
from typing import Any

from ..tools.answer_reader import AnswerReader, GrownAnswer

Json = dict[str, Any]
PREFIXES = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}
PARTS = {"message": "output_text", "reasoning": "reasoning_text"}


class Output:
    """The items of one response. An event is a JSON object with its type, without a number."""

    def __init__(self, reader: AnswerReader):
        self._reader = reader
        self.items: list[Json] = []
        self._open = False  # the last item is not done

    def push(self, text: str) -> Iterator[Json]:
        """Add text -> events."""
        yield from self._grow(self._reader.push(text))

    def end(self, whole: bool) -> Iterator[Json]:
        """Add what was held back, and end the last item -> events. whole: the answer was not cut."""
        yield from self._grow(self._reader.push("", last=True))
        if not self.items:
            yield from self._begin("message", {"role": "assistant", "content": []})
        yield from self._done("completed" if whole else "incomplete")

    def _grow(self, grown: GrownAnswer) -> Iterator[Json]:
        if grown.reasoning:
            yield from self._text("reasoning", grown.reasoning)
        if grown.content:
            yield from self._text("message", grown.content)
        for _, new, arguments in grown.calls:
            if new is not None:
                id, name = new
                yield from self._begin("function_call", {"call_id": id, "name": name, "arguments": ""})
            if arguments:
                self.items[-1]["arguments"] += arguments
                yield self._of_item("response.function_call_arguments.delta", delta=arguments)

    def _text(self, kind: str, text: str) -> Iterator[Json]:
        """Text of the last item, or of a new one."""
        part = PARTS[kind]
        if not self._open or self.items[-1]["type"] != kind:
            more: Json = {"role": "assistant"} if kind == "message" else {"summary": []}
            yield from self._begin(kind, {**more, "content": []})
            self.items[-1]["content"].append(_part(part, ""))
            yield self._of_part("response.content_part.added", part=_part(part, ""))
        self.items[-1]["content"][0]["text"] += text
        logprobs: Json = {"logprobs": []} if kind == "message" else {}
        yield self._of_part(f"response.{part}.delta", delta=text, **logprobs)

    def _begin(self, kind: str, fields: Json) -> Iterator[Json]:
        yield from self._done("completed")
        item = {"id": PREFIXES[kind] + secrets.token_hex(12), "type": kind, "status": "in_progress", **fields}
        self.items.append(item)
        self._open = True
        shown = {**item, "content": []} if "content" in item else item
        yield {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": dict(shown)}

    def _done(self, status: str) -> Iterator[Json]:
        """End the item that is open."""
        if not self._open:
            return
        item, self._open = self.items[-1], False
        if item["type"] == "function_call":
            done = {"arguments": item["arguments"], "name": item["name"]}
            yield self._of_item("response.function_call_arguments.done", **done)
        elif item["content"]:
            part, text = item["content"][0], item["content"][0]["text"]
            logprobs: Json = {"logprobs": []} if item["type"] == "message" else {}
            yield self._of_part(f"response.{part['type']}.done", text=text, **logprobs)
            yield self._of_part("response.content_part.done", part=dict(part))
        item["status"] = status
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}

    def _of_item(self, kind: str, **fields: Any) -> Json:
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **fields}

    def _of_part(self, kind: str, **fields: Any) -> Json:
        return self._of_item(kind, content_index=0, **fields)


def _part(kind: str, text: str) -> Json:
    return {"type": kind, "text": text, **({"annotations": [], "logprobs": []} if kind == "output_text" else {})}
