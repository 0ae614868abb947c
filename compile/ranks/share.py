"""The graphs of ranks: each has a share of the target and of draft models that were cut, and all of other drafters."""

import copy
import dataclasses
from contextlib import nullcontext
from threading import BrokenBarrierError
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import BuildError
from ...graphs.attention import chain_pass
from ...graphs.drafters.draft_model import DraftModel
from ...graphs.drafters.drafter import Scorer
from ...graphs.drafters.merged import parts
from ...graphs.kept import reason
from ...graphs.parts import ExpertsOfParts, LinearOfParts
from ...graphs.ranks import ExpertsOfRank, HeadOfRank, LinearOfRank
from ...graphs.target import CausalLM
from ...kernels.int8_rows import row_size
from ...kernels.native import has_library
from ...runtime.engine_file import EngineSpec, TensorSpec
from ..assemble import Assembled, FlatProgram
from .parts import Cut, frozen
from .slices import OutputBlock
from .threads import on_ranks

HEADS = {"num_heads", "num_attention_heads", "num_key_value_heads"}
TOKENS, SLOTS = 8, 64  # of the pass that is compared
# Of the norm of the logits; a wrong slice is off by 1 or so.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 3e-2}


def share(graphs: Assembled) -> Assembled:
    """Graphs whose target was cut into as many parts as there are ranks -> those of the first rank, and the programs of
    the `others`. Raises BuildError for what ranks cannot share."""
    ranks, spec = int(graphs.spec.config["ranks"]), graphs.spec
    whole = _models(graphs.step)[: len(graphs.cuts)]
    _check(spec, whole[0][0])
    for (model, place), cut in zip(whole, graphs.cuts, strict=True):
        spec = _spec_of_rank(spec, model, place, cut, ranks)
    every = []
    for rank in range(ranks):
        tensors = [tensor for each in graphs.programs.values() for tensor in (*each.parameters(), *each.buffers())]
        programs = copy.deepcopy(graphs.programs, {id(tensor): tensor for tensor in tensors})
        for (model, _), cut in zip(_models(programs["step"]), graphs.cuts, strict=False):
            take_share(model.model, cut, ranks, rank)
        every.append(programs)
    for index, (model, place) in enumerate(whole):
        shares = [_models(programs["step"])[index][0] for programs in every]
        _compare(model, graphs.spec, shares, spec, place, graphs.cuts[index].slices.field)
    first, *others = every
    step, plain = first["step"], first.get("plain")
    return dataclasses.replace(
        graphs, prefill=first["prefill"], step=step, plain=plain, spec=spec, others=tuple(others)
    )


def take_share(model: Any, cut: Cut, ranks: int, rank: int) -> None:
    """Replace what a rank has a share of, in place, in a model whose rowwise layers are sums of parts. Weights are
    views of the model's where they can be. Raises BuildError."""
    for name in cut.plan.rows:
        whole: Any = model.get_submodule(name)
        assert isinstance(whole, LinearOfParts)
        model.set_submodule(name, LinearOfRank(whole.weights[rank].detach(), _held(whole.bias), ranks))
    for name in cut.plan.experts:
        experts: Any = model.get_submodule(name)
        assert isinstance(experts, ExpertsOfParts)
        model.set_submodule(name, ExpertsOfRank(experts.parts[rank], ranks))
    for name in cut.plan.columns:
        _cut_columns(model, name, cut, ranks, rank)
    for attention in _attentions(model, cut).values():
        attention.config = copy.copy(attention.config)
        for holder in (attention, attention.config):  # some code reads the number of heads from one of them
            for field in HEADS & vars(holder).keys():
                setattr(holder, field, max(1, getattr(holder, field) // ranks))
    _cut_head(model, cut, ranks, rank)


def _cut_columns(model: Any, name: str, cut: Cut, ranks: int, rank: int) -> None:
    """Leave a rank's outputs of a linear layer."""
    linear: Any = model.get_submodule(name)
    weight, blocks = linear.weight.detach(), _blocks(name, linear, model.config.get_text_config(), ranks, rank)
    own = nn.Linear(1, 1, bias=linear.bias is not None, device="meta")
    own.weight = frozen(cut.slices.rows_of(weight, blocks))
    if linear.bias is not None:
        bias = cut.slices.rows_of(linear.bias.detach()[:, None], blocks)
        own.bias = frozen(bias[:, 0])
    own.out_features, own.in_features = own.weight.shape
    model.set_submodule(name, own)


def _blocks(name: str, linear: Any, config: Any, ranks: int, rank: int) -> list[OutputBlock]:
    """What lies behind each other in the outputs of a linear layer, each of which every rank has a part of. Heads for
    keys and values that are fewer than ranks lie in several of them: with 2 heads and 4 ranks, two ranks have each."""
    size, kind = linear.weight.shape[0], name.rpartition(".")[2]
    if kind == "gate_up_proj":
        return [OutputBlock(size // 2, ranks, rank)] * 2
    heads = min(_key_value_heads(config), ranks)
    key_value = heads, rank * heads // ranks
    if kind in ("k_proj", "v_proj"):
        return [OutputBlock(size, *key_value)]
    if kind == "qkv_proj":
        queries, keys = config.num_attention_heads, _key_value_heads(config)
        head = size // (queries + 2 * keys)
        return [OutputBlock(head * queries, ranks, rank), *[OutputBlock(head * keys, *key_value)] * 2]
    return [OutputBlock(size, ranks, rank)]


def _cut_head(model: Any, cut: Cut, ranks: int, rank: int) -> None:
    """Leave a rank's tokens of the head, where it is a linear layer. Hooks go with it."""
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        return
    name = next(name for name, module in model.named_modules() if module is head)
    weight, tokens = head.weight.detach(), len(head.weight)
    own = -(-tokens // ranks)
    if own * (ranks - 1) > tokens:
        raise BuildError(f"{cut.slices.field}: expected a part of the {tokens} tokens for each, got {ranks} ranks")
    start = min(rank * own, tokens - own)
    bias = None if head.bias is None else head.bias.detach()[start : start + own]
    share = HeadOfRank(cut.slices.note(weight[start : start + own], weight), bias, ranks, tokens)
    for hook in head._forward_pre_hooks.values():
        share.register_forward_pre_hook(hook)
    head._forward_pre_hooks.clear()
    model.set_submodule(name, share)


def _models(step: FlatProgram) -> list[tuple[CausalLM, int]]:
    """The target of a step and its draft models, each with the number of its first layer among the caches."""
    target, scorer = step.get_submodule("module.target"), step.get_submodule("module.drafter.scorer")
    assert isinstance(target, CausalLM) and isinstance(scorer, Scorer)
    found, place = [(target, 0)], target.layers
    for part in parts(scorer):
        if isinstance(part, DraftModel):
            found.append((part.model, place))
        place += len(part.cache_layers())
    return found


def _attentions(model: Any, cut: Cut) -> dict[int, Any]:
    """The attention modules that are cut, by the number of their layer."""
    parents = {name.rpartition(".")[0] for name in (*cut.plan.rows, *cut.plan.columns)}
    modules = [model.get_submodule(name) for name in sorted(parents)]
    return {each.layer_idx: each for each in modules if hasattr(each, "layer_idx") and hasattr(each, "config")}


def _key_value_heads(config: Any) -> int:
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def _check(spec: EngineSpec, model: CausalLM) -> None:
    """Raises BuildError for what no rank takes. model: the target."""
    if not has_library():
        raise BuildError("ranks: expected a machine on which our C++ kernels can be built, got one without a compiler")
    others = ", which has other layers, too"
    if model.windows or any(tensor.recurrent for tensor in model.states.values()):
        raise BuildError(f"ranks: expected a model of attention alone, got {type(model.model).__name__}{others}")
    if spec.recurrent:
        raise BuildError(f"ranks: expected a drafter of attention alone, got {spec.config['drafter']}{others}")


def _spec_of_rank(spec: EngineSpec, model: CausalLM, first: int, cut: Cut, ranks: int) -> EngineSpec:
    """What a rank allocates: its heads of a model's caches, which begin at a layer. Raises BuildError where there is no
    part for each."""
    attentions, layers = _attentions(model.model, cut), len(spec.caches) // 2

    def narrow(place: int, cache: TensorSpec) -> TensorSpec:
        layer = place % layers - first
        if not 0 <= layer < model.layers or model.cached[layer] not in attentions:
            return cache
        rows, heads, *rest = cache.shape
        if heads % ranks and ranks % heads:
            raise BuildError(
                f"{cut.slices.field}: expected a divisor or a multiple of the {heads} heads for keys and values of "
                f"{type(model.model).__name__}, got {ranks}"
            )
        return dataclasses.replace(cache, shape=(rows, max(1, heads // ranks), *rest))

    return dataclasses.replace(spec, caches=tuple(narrow(*each) for each in enumerate(spec.caches)))


def _compare(
    whole: CausalLM, spec: EngineSpec, shares: list[CausalLM], spec_of_rank: EngineSpec, first: int, field: str
) -> None:
    """Compare the logits of the ranks, as threads, with those of the whole model, whose caches begin at a layer. field:
    the option that asks for it. Raises BuildError."""
    name = type(whole.model).__name__
    tokens = torch.randint(0, whole.vocab_size, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    tokens = tokens.to(next(whole.parameters()).device)
    expected = _logits(whole, tokens, spec, first)
    got = on_ranks(len(shares), lambda rank: _logits(shares[rank], tokens, spec_of_rank, first))
    failed = sorted((each for each in got if isinstance(each, Exception)), key=_is_of_another)
    if failed:
        raise BuildError(f"{field}: {name} cannot be shared by {len(shares)} ranks: {reason(failed[0])}") from failed[0]
    # Of most tokens: rounding may turn one to another expert.
    norms = expected.float().norm(dim=-1)
    error = max(float(((each - expected).float().norm(dim=-1) / norms).median()) for each in got)
    if any(not torch.equal(each, got[0]) for each in got) or not error <= TOLERANCE[expected.dtype]:
        raise BuildError(
            f"{field}: {name} is not shared faithfully by {len(shares)} ranks: their logits are off by {error:.2g} of "
            f"their norm, expected at most {TOLERANCE[expected.dtype]:.2g}; this architecture is not supported"
        )


def _is_of_another(error: Exception) -> bool:
    """Whether a rank failed because another one has."""
    return isinstance(error, BrokenBarrierError) or "has ended" in str(error)


@torch.no_grad()
def _logits(model: CausalLM, tokens: Tensor, spec: EngineSpec, first: int) -> Tensor:
    """The logits of tokens [1, T] behind an empty cache, with caches of the spec's heads, from layer `first` on, and of
    the model's dtype."""
    layers, sizes = len(spec.caches) // 2, row_size if spec.config["kv_cache"] == "int8" else int
    shapes = [(1, cache.shape[1], SLOTS, sizes(cache.shape[3])) for cache in spec.caches]
    caches = [tokens.new_zeros(shape, dtype=getattr(torch, spec.config["dtype"])) for shape in shapes]
    where = chain_pass(tokens.new_zeros(1), TOKENS, TOKENS)
    keys, values = caches[:layers], caches[layers:]
    with torch.cuda.device(tokens.device) if tokens.is_cuda else nullcontext():  # which is a thread's own
        logits, _ = model(tokens, where, keys[first : first + model.layers], values[first : first + model.layers])
    return logits


def _held(bias: nn.Parameter | None) -> Tensor | None:
    return None if bias is None else bias.detach()
