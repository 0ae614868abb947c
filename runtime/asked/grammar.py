"""Compiles what an output must be for an engine's tokenizer, by llguidance."""

import json
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from ...errors import InputError, needs_extra
from ..text.channels import Channels
from ..text.reasoning import Reasoning
from ..text.tokenizer import EngineTokenizer
from .grammar_masks import GrammarMasks, check_matcher
from .habits import Habits
from .lark import channel_rules, json_options, literal, up_to

if TYPE_CHECKING:
    from llguidance import LLTokenizer


class Grammar:
    """What an output must be, compiled for an engine's tokenizer."""

    def __init__(
        self,
        text: EngineTokenizer,
        vocabulary: int,
        ends: Sequence[int],
        structured: Mapping[str, Any],
        reasoning: Reasoning | Channels | None = None,
    ):
        """ends: the model's end-of-sequence tokens. structured: as `checked_structured` returns it. reasoning: what the
        output may have ahead of it. Raises InputError for what cannot be kept, by name, and MissingPackageError."""
        with needs_extra("grammar", "structured output"):
            from llguidance import LLMatcher
        if not ends:
            raise InputError("structured: expected a model with an end-of-sequence token, got one without")
        self.vocabulary, self.ends = vocabulary, list(ends)
        compiled = _compiled(structured)
        if reasoning is not None and not structured["whole"]:
            compiled = _behind(reasoning, compiled, text)
        self._start = LLMatcher(_tokenizer(text, vocabulary, self.ends), compiled, log_level=0)
        check_matcher(self._start)
        with _lock:
            self._habits = _habits.setdefault(text, Habits())

    def masks(
        self, stops: Collection[int], least: int = 0, ends_late: bool = False, learning: bool = True
    ) -> GrammarMasks:
        """Those of one output. stops: the tokens that end it; least: how many tokens come before that, if the grammar
        goes on for so long; ends_late: whether it ends only where the grammar does not go on; learning: whether other
        outputs are drafted by this one."""
        habits = self._habits if learning else Habits()
        return GrammarMasks(self._start.deep_copy(), self.vocabulary, self.ends, stops, least, ends_late, habits)


_tokenizers: "WeakKeyDictionary[EngineTokenizer, LLTokenizer]" = WeakKeyDictionary()
_habits: "WeakKeyDictionary[EngineTokenizer, Habits]" = WeakKeyDictionary()
_lock = threading.Lock()


def _tokenizer(text: EngineTokenizer, vocabulary: int, ends: list[int]) -> "LLTokenizer":
    """An engine's, made once: it takes up to a second. Raises InputError."""
    from llguidance import LLTokenizer

    with _lock:
        if text not in _tokenizers:
            try:
                _tokenizers[text] = LLTokenizer(text.tokenizer.to_str(), n_vocab=vocabulary, eos_token=ends)
            except Exception as error:  # the library raises bare ones
                raise InputError(f"structured: expected a tokenizer of bytes, got one that is not ({error})") from None
        return _tokenizers[text]


def _compiled(structured: Mapping[str, Any]) -> str:
    """llguidance's grammar. Raises InputError."""
    from llguidance import LLMatcher, grammar_from

    kind, value = next(iter(structured.items()))
    if kind in ("json", "json_object"):
        options: Any = json_options(structured["lenient"], structured["disable_any_whitespace"])
        schema = {"json_object": '{"type": "object"}'}.get(kind, "{}" if value == "true" else value)
        try:
            return LLMatcher.grammar_from_json_schema(schema, options)
        except ValueError as error:  # of the schema `false`
            raise InputError(f"structured: json: expected a schema that some document keeps ({error})") from None
    if kind == "choice":
        return grammar_from("choice", json.dumps(value))
    try:
        return grammar_from("regex" if kind == "regex" else "gbnf", value)
    except ValueError as error:
        raise InputError(f"structured: {kind}: {error}") from None


def _behind(reasoning: Reasoning | Channels, grammar: str, text: EngineTokenizer) -> str:
    """The grammar of an output with reasoning ahead of it, in which all is allowed."""
    inner = json.loads(grammar)["grammars"] if grammar.startswith("{") else [{"lark_grammar": grammar}]
    if isinstance(reasoning, Channels):
        rules = ["start: ahead* final @output", *channel_rules(text)]
    else:
        begin = "thought GAP?" if reasoning.opened else f"({literal(reasoning.begin, text)} thought GAP?)?"
        rules = [f"start: {begin} @output", up_to("thought", reasoning.end, text), "GAP: /[ \\r\\n]{1,8}/"]
    return json.dumps({"grammars": [{"lark_grammar": "\n".join(rules)}, {**inner[0], "name": "output"}, *inner[1:]]})
