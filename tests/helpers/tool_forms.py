"""Tools, arguments and texts for the forms of calls, and how they are held and read."""

from itertools import pairwise

from hypothesis import strategies as st
from specstep.runtime.calls.formats import HARMONY
from specstep.runtime.calls.tool import Tool, Tools
from specstep.runtime.text.channels import CALL, CHANNEL, CONSTRAIN, END, MESSAGE, RETURN, START

MARKS = [START, END, CHANNEL, MESSAGE, CONSTRAIN, CALL, RETURN]
SPECIAL = [
    "<s>", "</s>", "[TOOL_CALLS]", "[ARGS]", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "<|tool_call|>", "<|tool_call_start|>", "<|python_tag|>", "[THINK]",
    "[/THINK]", *MARKS,
]  # fmt: skip
WEATHER = Tool(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"enum": ["c", "f"]},
            "rain": {"type": "boolean"},
            "at": {"type": "array", "items": {"type": "number"}},
        },
        "required": ["city"],
        "additionalProperties": False,
    },
    True,
)
NOW = Tool("now.utc", {"type": "object", "properties": {}, "additionalProperties": False}, False)
TOOLS = [WEATHER, NOW]
# A special token's name in a text would be encoded as that token, which no grammar takes inside a string.
TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=12).filter(
    lambda drawn: not any(name in drawn for name in SPECIAL)
)
# In the order of the schema, in which a grammar has them.
ARGUMENTS = st.fixed_dictionaries(
    {"city": TEXTS},
    optional={
        "days": st.integers(-99, 99),
        "unit": st.sampled_from(["c", "f"]),
        "rain": st.booleans(),
        "at": st.lists(st.integers(0, 9), max_size=3),
    },
).map(lambda given: {name: given[name] for name in WEATHER.properties if name in given})


def taken(text, matcher, grammar, written):
    """How much of a text a grammar takes, as text, and whether it may end there."""
    grammar, tokens = matcher(grammar), text.encode_part(written)
    assert not grammar.is_error(), grammar.get_error()
    count = grammar.try_consume_tokens(tokens)
    shown = text.showing(SPECIAL)
    return shown.decode(tokens[:count]), grammar.is_accepting()


def said(form, words):
    """Text of an answer that is no call."""
    return f"{CHANNEL}final{MESSAGE}{words}" if form is HARMONY else words


def ahead_of(form):
    """What may stand ahead of a call."""
    if form is HARMONY:
        between = f"{END}{START}assistant"
        return f"{CHANNEL}analysis{MESSAGE}Hm.{between}{CHANNEL}commentary{MESSAGE}Let me see:{between}"
    return "" if form.leads else "Let me see: "


def asked(tools=TOOLS, many=True, required=False):
    return Tools(tools, many, required, False)


def read(reader, pieces):
    """All that a reader says of pieces of text, put together as a client does."""
    reasoning, content, calls = "", "", []
    grown = [reader.push(piece) for piece in pieces] + [reader.push("", last=True)]
    for each in grown:
        reasoning, content = reasoning + each.reasoning, content + each.content
        for index, new, arguments in each.calls:
            assert (index == len(calls)) == (new is not None), "a name comes once, and first"
            if new is not None:
                calls.append([new[1], ""])
            calls[index][1] += arguments
    return reasoning, content, [tuple(call) for call in calls]


def cut(draw, text):
    """A text in pieces."""
    places = sorted(draw(st.sets(st.integers(0, len(text)), max_size=len(text))) | {0, len(text)})
    return [text[start:end] for start, end in pairwise(places)]
