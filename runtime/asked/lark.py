"""Pieces of llguidance's Lark grammars: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md"""

import json
import re
from collections.abc import Sequence
from typing import Any

from ..text.channels import CHANNEL, CONSTRAIN, END, MESSAGE, START
from ..text.tokenizer import EngineTokenizer

# Some models write blanks without end where a schema allows them.
BLANKS = r"[\x20\x0A\x0D\x09]{1,16}"
ANY = "/(?s:.*)/"


def literal(text: str, tokenizer: EngineTokenizer) -> str:
    """Terms for a text, none for an empty one: special tokens in it are those tokens, not their characters."""
    terms = []
    for part in _parts(text, tokenizer):
        token = tokenizer.special_names.get(part)
        terms.append(f"<[{token}]>" if token is not None else json.dumps(part))
    return " ".join(terms)


def any_but(names: Sequence[str]) -> str:
    """A term to put behind a regular expression of a name: none of these names."""
    taken = "|".join(re.escape(name).replace("/", r"\/").replace("\n", r"\n") for name in names)
    return f" & ~/({taken})/" if names else ""


def up_to(name: str, mark: str, tokenizer: EngineTokenizer, text: str = ANY) -> str:
    """A rule for text up to a mark and with it, as short as it can be. mark: a text, or a special token first."""
    special = _parts(mark, tokenizer)[0] in tokenizer.special_names
    return f"{name}{'' if special else '[lazy]'}: {text} {literal(mark, tokenizer)}"


def channel_rules(tokenizer: EngineTokenizer) -> list[str]:
    """Rules of an output in channels: `ahead` is a message that comes ahead of the last one, in which all is allowed;
    `final` is the head of an answer, `typed` what heads say where JSON follows."""
    channel, message = literal(CHANNEL, tokenizer), literal(MESSAGE, tokenizer)
    return [
        f'ahead: {channel} ("analysis" | "commentary") {message} thought',
        up_to("thought", f"{END}{START}assistant", tokenizer),
        f'final: {channel} "final" typed? {message}',
        f'typed: " "? {literal(CONSTRAIN, tokenizer)} "json" | " json"',
    ]


def json_options(lenient: bool, fixed_blanks: bool = False) -> dict[str, Any]:
    """llguidance's options for a JSON schema. lenient: whether keywords that cannot be kept are ignored. fixed_blanks:
    whether the only blanks between parts are one behind each comma and colon, as Python writes them."""
    free = {"whitespace_pattern": BLANKS}
    fixed = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    return (fixed if fixed_blanks else free) | {"lenient": lenient}


def schema_term(schema: object, lenient: bool, fixed_blanks: bool = False) -> str:
    """A term for what a JSON schema describes, see `json_options`."""
    options = {"x-guidance": json_options(lenient, fixed_blanks)}
    return f"%json {json.dumps({**(schema if isinstance(schema, dict) else {}), **options})}"


def _parts(text: str, tokenizer: EngineTokenizer) -> list[str]:
    """A text, cut around its special tokens."""
    names = sorted(filter(None, tokenizer.special_names), key=len, reverse=True)
    if not names:
        return [text] if text else []
    return [part for part in re.split(f"({'|'.join(map(re.escape, names))})", text) if part]
