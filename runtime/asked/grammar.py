"""Keeps an output inside a grammar: what may follow each node of a step's tree, by llguidance.

The text is that of plain decoding under the same grammar, whatever is drafted: a node's mask depends on the tokens
ahead of it alone.
"""

import json
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError, needs_extra
from ...report import DraftedTree
from ..text.channels import Channels
from ..text.reasoning import Reasoning
from ..text.tokenizer import EngineTokenizer
from .fitted_tree import FittedTree, TokenPath, fitted_tree
from .habits import BEHIND, Habits
from .lark import channel_rules, json_options, literal, up_to

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Masks = Callable[[Sequence[int], DraftedTree], NDArray[np.int32]]


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
        _check(self._start)
        with _lock:
            self._habits = _habits.setdefault(text, Habits())

    def masks(
        self, stops: Collection[int], least: int = 0, ends_late: bool = False, learning: bool = True
    ) -> "GrammarMasks":
        """Those of one output. stops: the tokens that end it; least: how many tokens come before that, if the grammar
        goes on for so long; ends_late: whether it ends only where the grammar does not go on; learning: whether other
        outputs are drafted by this one."""
        habits = self._habits if learning else Habits()
        return GrammarMasks(self._start.deep_copy(), self.vocabulary, self.ends, stops, least, ends_late, habits)


class GrammarMasks:
    """Says before each step what may follow the nodes of its tree."""

    def __init__(
        self,
        matcher: "LLMatcher",
        vocabulary: int,
        ends: Sequence[int],
        stops: Collection[int],
        least: int,
        ends_late: bool,
        habits: Habits,
    ):
        self._matcher, self._words = matcher, -(-vocabulary // 32)
        self._stops = self._bits(stops)
        self._others = ~(self._stops | self._bits(ends))
        self._end_bits = [(end // 32, 1 << end % 32) for end in ends]
        self._leaves = frozenset(ends) | frozenset(stops)
        self._least, self._late, self._read = least, ends_late, 0
        self._fitted, self._known = (
            FittedTree(DraftedTree([], []), [], 0),
            dict[int, NDArray[np.uint32]](),
        )  # its nodes' masks, some
        self._below = dict[TokenPath, "LLMatcher"]()  # matchers behind paths below the root
        self._habits = habits
        self._last = DraftedTree([], []), np.zeros((0, self._words), np.uint32)  # the last step's tree and its masks

    def __call__(self, output: Sequence[int], tree: DraftedTree) -> NDArray[np.int32]:
        """The output so far and the tree -> bits int32 [nodes, ceil(vocabulary / 32)]. Raises InputError where the
        grammar fails, as one that takes too long to follow."""
        self._read_up_to(output)
        known = self._known if self._fitted.begins(tree) else {}
        bits = np.zeros((len(tree.tokens), self._words), np.uint32)
        paths: dict[int, TokenPath] = {0: ()}  # of nodes that the grammar allows
        ended = set[int]()  # nodes that end the output, and those below them, which will not be
        for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
            allowed = parent in paths and bool(bits[parent, token // 32] >> token % 32 & 1)
            if parent in ended or (allowed and token in self._leaves):
                bits[node] = self._stops  # each must allow something
                ended.add(node)
            elif allowed:
                paths[node] = (*paths[parent], token)
            if node in paths:
                bits[node] = known[node] if node in known else self._mask_behind(len(output), paths[node])
        self._last = tree, bits
        return bits.view(np.int32)

    def fit(self, output: Sequence[int], tree: DraftedTree, nodes: int, depth: int) -> FittedTree:
        """The output so far and the tree that was drafted for it -> at most so many nodes below the root, down to the
        depth: those that the grammar allows, and where it leaves no choice, the tokens that it forces. A forced node
        comes right behind what forces it, being as likely. Raises InputError, see `__call__`."""
        self._read_up_to(output)
        before = output[-BEHIND:] or tree.tokens[:1]  # the root, the prompt's last token, ahead of an output

        def likely(mask: NDArray[np.uint32], path: TokenPath) -> int | None:
            return self._habits.likely(mask, [*before, *path])

        self._fitted, self._known = fitted_tree(
            tree, partial(self._mask_behind, len(output)), likely, self._leaves, nodes, depth
        )
        return self._fitted

    def _mask_behind(self, written: int, path: TokenPath) -> NDArray[np.uint32]:
        """What may follow a path behind so many tokens. A stop token may where the grammar may end."""
        matcher = self._at(path)
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint32)[: self._words]
        _check(matcher)
        may_end = any(int(mask[word]) & bit for word, bit in self._end_bits)
        mask = mask & self._others
        goes_on = bool(np.count_nonzero(mask))
        if may_end and not (goes_on and (self._late or written + len(path) < self._least)):
            mask |= self._stops
        elif not goes_on:
            raise InputError("structured: expected a grammar that some text keeps, got one that nothing may follow")
        return mask

    def _at(self, path: TokenPath) -> "LLMatcher":
        """The matcher behind a path below the root that the grammar allows: a copy, made once. None goes back: after
        `rollback` llguidance (1.7 to 1.9) may give the mask of the path that was left."""
        if not path:
            return self._matcher
        if path not in self._below:
            below = self._at(path[:-1]).deep_copy()
            _consume(below, path[-1:])
            self._below[path] = below
        return self._below[path]

    def _read_up_to(self, output: Sequence[int]) -> None:
        """Move to the end of an output, and learn from it. Raises InputError, see `__call__`."""
        new = output[self._read :]
        _consume(self._matcher, new)
        self._read, self._below = len(output), {} if new else self._below
        (tree, masks), node = self._last, 0
        children, behind = tree.children(), [*(output[: -len(new)][-BEHIND:] or tree.tokens[:1])] if new else []
        for token in new if tree.tokens else ():
            self._habits.learn(masks[node], behind, token)
            behind.append(token)
            node = next((child for child in children[node] if tree.tokens[child] == token), 0)
            if not node:
                break
        self._last = DraftedTree([], []), masks

    def _bits(self, tokens: Collection[int]) -> NDArray[np.uint32]:
        bits = np.zeros(self._words, np.uint32)
        for token in tokens:
            bits[token // 32] |= np.uint32(1 << token % 32)
        return bits


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


def _consume(matcher: "LLMatcher", tokens: Sequence[int]) -> None:
    """Raises InputError, see `GrammarMasks.__call__`."""
    if tokens and not matcher.consume_tokens(list(tokens)):
        _check(matcher)
        raise InputError("structured: the output left its grammar")


def _check(matcher: "LLMatcher") -> None:
    """Raises InputError with what a matcher says."""
    if matcher.is_error():
        said = " ".join(matcher.get_error().split())
        raise InputError(f"structured: expected a grammar that can be kept, got: {said:.300}")
