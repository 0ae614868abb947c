"""How answers are written down."""

import json
import sys

from specstep.serving.answering import event


def test_an_event_is_one_line_for_every_client():
    """Clients that split text at each end of a line that Unicode knows would cut a string in two."""
    text = "".join(map(chr, [*range(0xD800), *range(0xE000, sys.maxunicode + 1)]))
    line, empty, rest = event({"text": text}).decode().split("\n")
    assert line.splitlines() == [line] and (empty, rest) == ("", "")
    assert json.loads(line.removeprefix("data: ")) == {"text": text}
