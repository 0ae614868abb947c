"""From loaded models and a config to the two graphs of an engine and the layout of its state."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..graphs.drafters.draft_model import DraftModel
from ..graphs.drafters.drafter import Drafter, Scorer
from ..graphs.drafters.ngram import Ngram
from ..graphs.drafters.none import NoDraft
from ..graphs.prefill import Prefill
from ..graphs.state import row_state
from ..graphs.step import SpeculativeStep
from ..graphs.target import CacheLayer, CausalLM, UnsupportedModel, cache_layers
from ..graphs.tree import DynamicTree, TreeShape, chain
from ..runtime.engine_file import EngineSpec, ProgramSpec, TensorSpec
from ..runtime.errors import BuildError
from .config import EngineConfig
from .source import Source, check_same_vocabulary, is_model, load_source

SLOT_STEP = 64


@dataclass(frozen=True)
class Graphs:
    """The modules of an engine, flat (see `FlatProgram`), and its spec, in which the programs' files are not set
    yet."""

    prefill: "FlatProgram"
    step: "FlatProgram"
    spec: EngineSpec


class FlatProgram(nn.Module):
    """A graph with flat tensors in and out, in the order of its names: what every backend compiles and the session
    calls."""

    def __init__(
        self,
        module: nn.Module,
        lead: Sequence[str],
        state: Sequence[str],
        caches: Sequence[str],
        outputs: Sequence[str],
    ):
        """lead: arguments ahead of the state; caches: all keys, then all values."""
        super().__init__()
        self.module = module
        self.lead, self.state, self.caches = tuple(lead), tuple(state), tuple(caches)
        self.inputs, self.outputs = (*lead, *state, *caches), tuple(outputs)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Tensors named `self.inputs` -> tensors named `self.outputs`."""
        rest = tensors[len(self.lead) :]
        state, caches = dict(zip(self.state, rest, strict=False)), rest[len(self.state) :]
        layers = len(caches) // 2
        result = self.module(*tensors[: len(self.lead)], state, caches[:layers], caches[layers:])
        report, after = result if isinstance(result, tuple) else (None, result)
        return tuple(report if name == "report" else after[name] for name in self.outputs)


def assemble(target: Source, config: EngineConfig) -> Graphs:
    """Put the graphs together. Raises BuildError for what does not fit."""
    try:
        layers = cache_layers(target.model)
        scorer, default = _drafter(target, config, len(layers))
        drafter = Drafter(scorer, _tree(config, default))
        model = CausalLM(target.model, feature_layers=scorer.feature_layers)
    except UnsupportedModel as error:
        raise BuildError(str(error)) from None
    if model.max_positions is not None and config.max_seq_len > model.max_positions:
        raise BuildError(
            f"max_seq_len: expected at most the model's {model.max_positions} positions, got {config.max_seq_len}"
        )
    spec = _spec(target, model, drafter, layers + scorer.cache_layers(), config)
    state, caches = [tensor.name for tensor in spec.state], [tensor.name for tensor in spec.caches]
    return Graphs(
        FlatProgram(Prefill(model, drafter), ("tokens", "count"), state, caches, spec.prefill.outputs),
        FlatProgram(SpeculativeStep(model, drafter), (), state, caches, spec.step.outputs),
        spec,
    )


def _drafter(target: Source, config: EngineConfig, first_layer: int) -> tuple[Scorer, TreeShape]:
    """The scorer that `config.drafter` names, and the tree it grows by default. A new method adds a line here."""
    methods: dict[str, Callable[[], tuple[Scorer, TreeShape]]] = {
        "none": lambda: (NoDraft(), chain(0)),
        "ngram": lambda: (Ngram(), DynamicTree(depth=7, top_k=3, nodes=7)),
    }
    if config.drafter in methods:
        return methods[config.drafter]()
    if not is_model(config.drafter):
        raise BuildError(f"drafter: expected {', '.join(methods)} or a path to a smaller model, got {config.drafter!r}")
    source = load_source(config.drafter, config.dtype, config.device)
    check_same_vocabulary(target, source)
    layers = cache_layers(source.model)
    vocabulary = target.model.get_output_embeddings().weight.shape[0]
    return DraftModel(CausalLM(source.model, first_layer), layers, vocabulary), chain(4)


def _tree(config: EngineConfig, default: TreeShape) -> TreeShape:
    """The tree that the config asks for; what it leaves open is taken from the drafter's default."""
    if config.drafter == "none":
        return default
    nodes = default.nodes if config.nodes is None else config.nodes
    if nodes == 0:
        return chain(0)
    kind = config.tree or ("chain" if default.top_k == 1 and (config.top_k or 1) == 1 else "dynamic")
    try:
        if kind == "chain":
            if config.depth not in (None, nodes) or config.top_k not in (None, 1):
                raise ValueError(
                    f"tree: chain: expected depth {nodes} (the nodes) and top_k 1, got {config.depth}, {config.top_k}"
                )
            return chain(nodes)
        top_k = config.top_k or max(default.top_k, 2)
        depth = config.depth or min(nodes, max(1, nodes // 2 + 1) if nodes > 7 else nodes)
        return DynamicTree(depth, top_k, nodes)
    except ValueError as error:
        raise BuildError(str(error)) from None


def _spec(
    target: Source, model: CausalLM, drafter: Drafter, layers: list[CacheLayer], config: EngineConfig
) -> EngineSpec:
    shape = drafter.shape
    scratch = max(shape.nodes + 1, shape.depth + 2, 1 + sum(shape.frontiers))
    capacity = -(-(config.max_seq_len + scratch) // SLOT_STEP) * SLOT_STEP + SLOT_STEP
    batch = config.max_batch
    declared = row_state(capacity)
    own = drafter.scorer.state(shape)
    state = [
        TensorSpec(name, (batch, *tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.fill)
        for name, tensor in (declared | own).items()
    ]
    caches = [
        TensorSpec(f"{kind}.{index}", (batch, layer.heads, capacity, size), config.dtype)
        for kind, sizes in (("keys", [x.key_size for x in layers]), ("values", [x.value_size for x in layers]))
        for index, (layer, size) in enumerate(zip(layers, sizes, strict=True))
    ]
    names = tuple(tensor.name for tensor in [*state, *caches])
    return EngineSpec(
        config=dataclasses.asdict(config) | {"nodes": shape.nodes, "depth": shape.depth, "top_k": shape.top_k},
        max_batch=batch,
        max_seq_len=config.max_seq_len,
        capacity=capacity,
        slot_step=SLOT_STEP,
        scratch=scratch,
        prefill_chunk=min(config.prefill_chunk, config.max_seq_len),
        vocab_size=model.vocab_size,
        stop_ids=target.stop_ids,
        device=config.device,
        state=tuple(state),
        caches=tuple(caches),
        prefill=ProgramSpec("", ("tokens", "count", *names), ("lengths", *own)),
        step=ProgramSpec("", names, ("report", "lengths", "finish", *own)),
    )


def example_inputs(spec: EngineSpec, program: FlatProgram, slots: int) -> list[Tensor]:
    """Tensors of the right shapes and strides to trace a program with: one row of prompt length 1, caches of
    `slots` slots."""
    batch = 1 if program.lead else spec.max_batch
    tensors = {
        t.name: torch.full(t.shape, t.fill, dtype=getattr(torch, t.dtype), device=spec.device)[:batch]
        for t in spec.state
    }
    for tensor in spec.caches:
        whole = torch.zeros(tensor.shape, dtype=getattr(torch, tensor.dtype), device=spec.device)
        tensors[tensor.name] = whole[:batch, :, :slots]
    tokens = min(8, spec.prefill_chunk)
    tensors["tokens"] = torch.zeros(1, tokens, dtype=torch.int64, device=spec.device)
    tensors["count"] = torch.full((1,), tokens, device=spec.device)
    return [tensors[name] for name in program.inputs]
