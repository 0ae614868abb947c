"""The output of a response as it grows: items for reasoning, text and calls, and events that tell of each change."""

import secrets
from collections.abc import Iterator
from typing import Any

from ..tools.answer_reader import AnswerReader, GrownAnswer

Json = dict[str, Any]
PREFIXES = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_", "custom_tool_call": "ctc_"}
# Kinds of calls -> the field of what a call gives, and the events that tell how that grows.
GIVEN = {
    "function_call": ("arguments", "response.function_call_arguments"),
    "custom_tool_call": ("input", "response.custom_tool_call_input"),
}
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
        for index, new, text in grown.calls:
            kind = "custom_tool_call" if self._reader.answer.calls[index].custom else "function_call"
            field, event = GIVEN[kind]
            if new is not None:
                id, name = new
                yield from self._begin(kind, {"call_id": id, "name": name, field: ""})
            if text:
                self.items[-1][field] += text
                yield self._of_item(f"{event}.delta", delta=text)

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
        if item["type"] in GIVEN:
            field, event = GIVEN[item["type"]]
            named = {"name": item["name"]} if item["type"] == "function_call" else {}
            yield self._of_item(f"{event}.done", **{field: item[field]}, **named)
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
