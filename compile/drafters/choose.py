"""From a drafter's name to its scorer, and from the tree options to the shape of its tree."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from ...controls import LEARNED_TOKENS
from ...errors import BuildError
from ...graphs.drafters.draft_model import DraftModel
from ...graphs.drafters.drafter import Drafter, Scorer
from ...graphs.drafters.merged import Merged
from ...graphs.drafters.ngram import Ngram
from ...graphs.drafters.ngram_tables import NgramTables
from ...graphs.drafters.none import NoDraft
from ...graphs.drafters.pard import Pard
from ...graphs.kept import cache_layers
from ...graphs.static_tree import StaticTree, likely_choices
from ...graphs.target import CausalLM
from ...graphs.tree import DynamicTree, TreeShape, chain
from ..config import EngineConfig
from ..hub import here
from ..locate import is_model
from ..source import Source, load_source
from .beside import drafters_beside
from .block_file import is_block, load_block
from .eagle3_file import is_eagle3, load_eagle3, shipped_head
from .eagle_file import is_eagle, load_eagle
from .early_exit import NAME as EARLY_EXIT
from .early_exit import load_early_exit
from .factory import call_factory, is_factory
from .hydra_file import is_hydra, load_hydra
from .medusa_file import is_medusa, load_medusa
from .mlp_speculator_file import is_mlp_speculator, load_mlp_speculator
from .mtp_file import NAME as MTP
from .mtp_file import is_mtp_speculator, load_mtp, load_mtp_speculator
from .ngram_file import is_ngram_file, load_tables, shipped_tables
from .pard2_file import is_pard2, load_pard2
from .pard_config import mask_token
from .peagle_file import is_peagle, load_peagle
from .shared_cache_file import is_shared_cache, load_shared_cache
from .validate import check_declared
from .vocabulary import tokens_between

NGRAM_TREE = DynamicTree(depth=7, top_k=4, nodes=7)
# What is published: how it is known, and what loads it. The first that knows a path has it.
PUBLISHED: tuple[tuple[Callable[[str], bool], Callable[[str, Source, EngineConfig], Scorer]], ...] = (
    (is_shared_cache, load_shared_cache),
    (is_block, load_block),
    (is_mtp_speculator, load_mtp_speculator),
    (is_peagle, load_peagle),
    (is_eagle3, load_eagle3),
    (is_mlp_speculator, load_mlp_speculator),
    (is_medusa, load_medusa),
    (is_hydra, load_hydra),
    (is_eagle, load_eagle),
)


def make_drafter(target: Source, config: EngineConfig, scorer: Scorer | None = None) -> Drafter:
    """The drafter that the config asks for, on its device: `scorer` where one was handed in, else those that it names.
    Raises BuildError."""
    chosen, default = adopt(scorer, target, config) if scorer is not None else scorers(target, config)
    try:
        shape = _shape(config, default, chosen.most_depth)
    except ValueError as error:
        raise BuildError(str(error)) from None
    if chosen.most_depth is not None and shape.depth > chosen.most_depth:
        raise BuildError(
            f"depth: expected at most {chosen.most_depth}, which is how many levels {config.drafter} scores, got "
            f"{shape.depth}"
        )
    return Drafter(chosen, shape).to(config.build_device)


def scorers(target: Source, config: EngineConfig) -> tuple[Scorer, TreeShape]:
    """The scorer that `config.drafter` asks for, and the tree it grows by default: the one it names, or a mixture of
    those it lists. Raises BuildError."""
    stand_for = {"default": default_drafters, "auto": fitting_drafters}
    names = [
        part
        for name in config.drafter.split(",")
        for part in (stand_for[name](target) if name in stand_for else [name])
    ]
    if len(names) > 1 and "none" in names:
        raise BuildError(
            f"drafter: expected none by itself, got it in a list, {config.drafter!r}; remove it to mix the others"
        )
    found = [_scorer(name, target, config) for name in names]
    return found[0] if len(found) == 1 else (Merged([scorer for scorer, _ in found]), NGRAM_TREE)


def default_drafters(target: Source) -> list[str]:
    """The names that "default" stands for: this package's count tables and head if they were made for the target, else
    the row's own history."""
    return [str(path) for path in (shipped_tables(target), shipped_head(target)) if path] or ["ngram"]


def fitting_drafters(target: Source) -> list[str]:
    """The names that "auto" stands for where nothing was tuned: what the package has for the target, else the row's own
    history and what the engine learns, and a head that lies beside the target or a module in its checkpoint."""
    default = default_drafters(target)
    return default if default != ["ngram"] else [*default, *drafters_beside(target)[:1]]


def _scorer(name: str, target: Source, config: EngineConfig) -> tuple[Scorer, TreeShape]:
    """The scorer of one name, and the tree it grows by default. A new method adds a line here."""
    methods: dict[str, Callable[[], tuple[Scorer, TreeShape]]] = {
        "none": lambda: (NoDraft(), chain(0)),
        "ngram": lambda: (_ngram(target, config, None), NGRAM_TREE),
        MTP: lambda: _with_tree(load_mtp(target, config)),
    }
    if name in methods:
        return methods[name]()
    name = here(name)
    if EARLY_EXIT.fullmatch(name):
        return load_early_exit(name, target), chain(4)
    if is_factory(name):
        return adopt(call_factory(name, target), target, config)
    if is_ngram_file(name):
        return _ngram(target, config, load_tables(name, target)), NGRAM_TREE
    if load := next((load for is_one, load in PUBLISHED if is_one(name)), None):
        return _with_tree(load(name, target, config))
    if is_model(name):
        return _draft_model(name, target, config)
    known = ", ".join((*methods, "early-exit:N", "default", "auto"))
    raise BuildError(
        f"drafter: expected {known}, a path to tables, a smaller model or a head, or module:factory, got {name!r}"
    )


def _with_tree(scorer: Scorer) -> tuple[Scorer, TreeShape]:
    """A head with the tree it grows by default, no deeper than it can score."""
    depth = scorer.most_depth or (8 if scorer.all_at_once else 4)  # a pass for each level, or one for all
    nodes = max(depth, min(12, sum(DynamicTree.level_sizes(depth, 4))))
    return scorer, DynamicTree(depth, top_k=4, nodes=nodes)


def _ngram(target: Source, config: EngineConfig, tables: NgramTables | None) -> Ngram:
    """One that learns, where an entry of its table has room for the target's tokens."""
    fits = target.model.get_output_embeddings().weight.shape[0] <= LEARNED_TOKENS
    return Ngram(tables, learned_rows=config.learned_rows if fits else 0)


def adopt(scorer: Scorer, target: Source, config: EngineConfig) -> tuple[Scorer, TreeShape]:
    """A scorer of a third party with its parameters in the engine's dtype, and the tree it grows by default. Buffers
    keep their dtypes: they hold tables, frequencies and the like. Raises BuildError."""
    check_declared(scorer, target.model.config.get_text_config().num_hidden_layers)
    for parameter in scorer.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(getattr(torch, config.dtype))
    return scorer.eval().requires_grad_(False), chain(4) if scorer.neural else NGRAM_TREE


def _draft_model(name: str, target: Source, config: EngineConfig) -> tuple[Scorer, TreeShape]:
    source = load_source(name, config.dtype, config.build_device, disk=target.disk)
    tokens, layers, mask = tokens_between(target, source), cache_layers(source.model), mask_token(source)
    if mask is None:
        return DraftModel(CausalLM(source.model), layers, tokens), chain(4)
    if is_pard2(source):
        return load_pard2(source, target, config, layers, tokens, mask), chain(8)
    return Pard(CausalLM(source.model), layers, tokens, mask), chain(8)


def _shape(config: EngineConfig, default: TreeShape, deepest: int | None) -> TreeShape:
    """The tree that the config asks for; what it leaves open comes from the drafter's default, and from how deep the
    drafter scores at most. Raises ValueError."""
    if config.drafter == "none" or config.nodes == 0:
        return chain(0)
    if config.depth == 0:
        raise ValueError("depth: expected at least 1, got 0; --nodes 0 or --drafter none drafts nothing")
    kinds: dict[str, Callable[[EngineConfig, TreeShape], TreeShape]] = {
        "chain": _chain, "static": _static, "dynamic": partial(_dynamic, deepest=deepest)
    }  # fmt: skip
    kind = config.tree or ("static" if config.tree_choices else "dynamic" if default.top_k > 1 else "chain")
    if config.tree_choices and kind != "static":
        raise ValueError(f"tree_choices: expected with tree static, got tree {kind}")
    return kinds[kind](config, default)


def _chain(config: EngineConfig, default: TreeShape) -> TreeShape:
    length = config.nodes or config.depth or default.depth
    if config.depth not in (None, length) or config.top_k not in (None, 1):
        raise ValueError(
            f"tree: chain: expected depth {length} (its nodes) and top_k 1, got {config.depth}, {config.top_k}"
        )
    return chain(length)


def _static(config: EngineConfig, default: TreeShape) -> TreeShape:
    if config.tree_choices is None:
        depth, top_k = config.depth or default.depth, config.top_k or max(default.top_k, 3)
        return StaticTree(likely_choices(config.nodes or default.nodes, depth, top_k))
    tree = StaticTree(_read_choices(config.tree_choices))
    for field in ("nodes", "depth", "top_k"):
        if getattr(config, field) not in (None, getattr(tree, field)):
            raise ValueError(
                f"{field}: expected {getattr(tree, field)}, that of the tree choices, got {getattr(config, field)}"
            )
    return tree


def _read_choices(file: str) -> list[list[int]]:
    try:
        choices = json.loads(Path(file).read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"tree_choices: expected a JSON file with a list of paths, got {file}: {error}") from None
    good = isinstance(choices, list) and all(isinstance(p, list) and all(type(r) is int for r in p) for p in choices)
    if not good:
        raise ValueError(f"tree_choices: expected a list of lists of ranks, as [[0], [1], [0, 0]], got {file}")
    return choices


def _dynamic(config: EngineConfig, default: TreeShape, deepest: int | None) -> TreeShape:
    nodes, top_k = config.nodes or default.nodes, config.top_k or max(default.top_k, 2)
    depth = _depth(nodes, default)
    return DynamicTree(config.depth or min(depth, deepest or depth), top_k, nodes)


def _depth(nodes: int, default: TreeShape) -> int:
    """How deep a dynamic tree of so many nodes grows. Levels of n-grams are cheap, and bring more in a deep tree."""
    if nodes <= default.nodes:
        return min(nodes, default.depth)
    cheap = min(16, nodes - nodes // 4) if default is NGRAM_TREE else 0
    return max(default.depth, 1 + nodes // 2, cheap)
