"""Special tokens that a user wrote: text like any other.

A model's turns are told apart by special tokens, as <|im_end|>, and a tokenizer makes one of every place where its name
is written. In what a user wrote it must not: the user would end the turn, and begin one of the system. Some tokenizers
do not call them special, as DeepSeek's <｜User｜>: a token of such a form that the chat template writes counts as one.

A chat template renders a conversation to one text, and may look at the messages, trim and cut them. So the first
character of each such name is replaced, before the template runs, by a character of private use that stands nowhere
else, and put back behind it: what the tokenizer finds in between, the template wrote.
"""

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from tokenizers import AddedToken, Encoding, Tokenizer

from ...errors import InputError

FIRST, LAST = 0x10FFFD, 0x100000  # characters of private use, from the last one down
LONG = 2**13  # characters
TURN_MARK = re.compile(r"<[|｜][^<>]+[|｜]>")
Places = list[tuple[int, int]]  # where names of special tokens begin and end in a text


class SpecialText:
    """The special tokens of a tokenizer, and texts in which their names are text."""

    def __init__(self, tokenizer: Tokenizer, template: str = ""):
        """template: the model's chat template."""
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        turns = set(TURN_MARK.findall(template))
        self._ids = {token.content: at for at, token in added.items() if token.special or token.content in turns}
        self._tokens = [added[number] for number in self._ids.values()]
        self._lengths = sorted({len(name) for name in self._ids}, reverse=True)
        firsts = {name[0] for name in self._ids}
        self._begins = re.compile(f"[{re.escape(''.join(firsts))}]") if firsts else re.compile(r"(?!)")
        self._parts = {name[:end] for name in self._ids for end in range(1, len(name))}
        self._rests = {name[begin:] for name in self._ids for begin in range(1, len(name))}
        self._inside = "\0".join(self._ids)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a text in which no name is a token. add_special_tokens: put those of the model around it."""
        return self._encode(text, [], add_special_tokens)

    def encode_rendered(self, text: str, marks: "Marks") -> list[int]:
        """Token ids of a text that was rendered of marked data: the names that are whole in it are the template's."""
        return self._encode(marks.removed(text), self._find(text), False)

    def suspicious(self, text: str) -> set[int]:
        """Places in a text whose characters are to be marked: where a name begins, or the part of one that what comes
        before or after may make whole. (A template that writes "<|" ahead of a plain word is taken to mean it.)"""
        places = {begin for begin, _ in self._all(text)}
        core = text.strip()
        if core and not core.isidentifier():
            begin, end = text.find(core[0]), len(text.rstrip())
            sizes = range(1, min(len(core), self._lengths[0] if self._lengths else 0) + 1)
            places |= {end - size for size in sizes if core[-size:] in self._parts}
            if core in self._inside or any(core[:size] in self._rests for size in sizes):
                places.add(begin)
        return places

    def _all(self, text: str) -> Iterator[tuple[int, int]]:
        """Every place where a name stands, the longest that begins there."""
        for match in self._begins.finditer(text):
            begin = match.start()
            length = next((each for each in self._lengths if text[begin : begin + each] in self._ids), 0)
            if length:
                yield begin, begin + length

    def _find(self, text: str) -> Places:
        """Those that a tokenizer takes: from the left, none within another."""
        found: Places = []
        for begin, end in self._all(text):
            if not found or begin >= found[-1][1]:
                found.append((begin, end))
        return found

    def _encode(self, text: str, own: Places, add_special_tokens: bool) -> list[int]:
        """Token ids of a text in which the names at these places alone are tokens."""
        found = self._find(text)
        if found == own:
            return encoded(self._tokenizer, text, add_special_tokens).ids
        tokens = self._with_stand_ins(text, own, [], add_special_tokens)
        if tokens is None:  # a model that has the names among its pieces: they are cut
            cuts = [begin + 1 for begin, end in found if (begin, end) not in own]
            tokens = self._with_stand_ins(text, own, cuts, add_special_tokens)
        if tokens is None:  # a name of one character, as a rule
            raise InputError(
                "text: expected none that holds the name of a special token which this tokenizer cannot write as text, "
                f"got {sorted({text[begin:end] for begin, end in found})[0]!r}; parse_special takes it as the token"
            )
        return tokens

    def _with_stand_ins(self, text: str, own: Places, cuts: Sequence[int], special: bool) -> list[int] | None:
        """Token ids, None where a name became a token. cuts: places that no token goes across."""
        tokenizer, names, ids = self._stand_ins
        written, done = [], 0
        for begin, end in sorted([*own, *((cut, cut) for cut in cuts)]):
            written += [text[done:begin], names[text[begin:end]]]
            done = end
        found = encoded(tokenizer, "".join(written) + text[done:], special)
        around, known = found.special_tokens_mask, set(self._ids.values())
        if any(token in known and not put for token, put in zip(found.ids, around, strict=True)):
            return None
        return [ids.get(token, token) for token in found.ids if ids.get(token, token) >= 0]

    @cached_property
    def _stand_ins(self) -> tuple[Tokenizer, dict[str, str], dict[int, int]]:
        """A tokenizer that takes names as text; it has tokens of other names, which nobody can guess, in their place,
        and one, for an empty name, that stands for nothing. Name -> the other, token -> the one it stands for."""
        tokenizer = Tokenizer.from_str(self._tokenizer.to_str())
        tokenizer.encode_special_tokens = True
        secret = secrets.token_hex(8)
        tokens, names = [*self._tokens, AddedToken("x", normalized=False)], dict[str, str]()
        added = []
        for place, token in enumerate(tokens):
            names[token.content if place < len(self._tokens) else ""] = name = f"\ue000{secret}.{place}\ue001"
            how = {"lstrip": token.lstrip, "rstrip": token.rstrip, "single_word": token.single_word}
            added.append(AddedToken(name, normalized=False, special=False, **how))
        tokenizer.add_tokens(added)
        numbers = [*self._ids.values(), -1]
        vocabulary = tokenizer.get_vocab()
        ids = {vocabulary[name]: number for name, number in zip(names.values(), numbers, strict=True)}
        return tokenizer, names, ids


def encoded(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> Encoding:
    """A text as tokens. One that takes a while does not keep the interpreter, and with it all other threads."""
    if len(text) < LONG:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0]


class Marks:
    """Marks in the data of one conversation."""

    def __init__(self, special: SpecialText):
        self._special = special
        self._back: dict[int, str] = {}  # mark -> the character in whose place it stands

    def put(self, data: Any) -> Any:
        """A copy of data, which JSON could hold, with the names of special tokens in it marked. Called once."""
        texts = set(_texts(data))
        places = {text: found for text in texts if (found := self._special.suspicious(text))}
        used = set[str]().union(*texts)
        free = (char for code in range(FIRST, LAST, -1) if (char := chr(code)) not in used)
        marked = sorted({text[at] for text, found in places.items() for at in found})
        marks = dict(zip(marked, free, strict=False))
        if len(marks) < len(marked):
            raise InputError(
                "messages: expected a character of private use that stands in none of them, got all of them"
            )
        self._back = {ord(mark): char for char, mark in marks.items()}
        return _replaced(data, {text: _marked(text, found, marks) for text, found in places.items()})

    def removed(self, text: str) -> str:
        """A text without marks."""
        return text.translate(self._back) if self._back else text


def _marked(text: str, places: set[int], marks: Mapping[str, str]) -> str:
    chars = list(text)
    for at in places:
        chars[at] = marks[chars[at]]
    return "".join(chars)


def _texts(data: Any) -> Iterator[str]:
    """All texts in data. Keys of mappings are among them."""
    if isinstance(data, str):
        yield data
    elif isinstance(data, Mapping):
        for key, value in data.items():
            yield from _texts(key)
            yield from _texts(value)
    elif isinstance(data, list | tuple):
        for each in data:
            yield from _texts(each)


def _replaced(data: Any, marked: Mapping[str, str]) -> Any:
    if isinstance(data, str):
        return marked.get(data, data)
    if isinstance(data, Mapping):
        return {_replaced(key, marked): _replaced(value, marked) for key, value in data.items()}
    return type(data)(_replaced(each, marked) for each in data) if isinstance(data, list | tuple) else data
