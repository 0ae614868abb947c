"""From loaded models and a config to the graphs of an engine and the layout of its state."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..backends import BACKENDS
from ..errors import BuildError
from ..graphs.choice import sampled_choice
from ..graphs.drafters.drafter import Drafter, Scorer, most_catch_up
from ..graphs.forced import forced_choice
from ..graphs.kept import CacheLayer, UnsupportedModel, cache_layers
from ..graphs.prefill import Prefill
from ..graphs.state import StateTensor, row_state
from ..graphs.step import PlainStep, SpeculativeStep
from ..graphs.target import CausalLM
from ..kernels.int8_rows import row_bytes
from ..runtime.engine_file import TREE, EngineSpec, ProgramSpec, TensorSpec
from ..runtime.manifest_fields import SLOT_STEP
from ..runtime.manifest_rules import capacity_for, scratch_for
from ..runtime.unreserved import unreserved
from .config import EngineConfig
from .drafters.choose import make_drafter
from .drafters.validate import check_drafter
from .gpus import GPU
from .precision import Precision, choose_precision, kept_on
from .ranks.drafts import cut_drafters
from .ranks.parts import Cut, cut_rows
from .source import Source, quantized_file


@dataclass(frozen=True)
class Assembled:
    """The programs of an engine before they are lowered."""

    prefill: "FlatProgram"  # a chunk of a prompt into the caches
    step: "FlatProgram"  # verify, accept, commit, draft
    plain: "FlatProgram | None"  # one token a row and no draft; None: the engine has no such step
    spec: EngineSpec  # layout and limits; the programs' files are not set yet
    precision: Precision  # from a weight to what it is packed as, where a backend packs weights
    gpu: GPU | None = None  # the GPU to build for where it is not here; the modules then lie on the CPU
    cuts: "tuple[Cut, ...]" = ()  # how the target was cut into parts, and draft models behind it; none: all is whole
    others: "tuple[dict[str, FlatProgram], ...]" = ()  # the programs of ranks 1, 2, ... by name, see `ranks.share`

    @property
    def programs(self) -> dict[str, "FlatProgram"]:
        """All of them by name."""
        plain = {} if self.plain is None else {"plain": self.plain}
        return {"prefill": self.prefill, "step": self.step} | plain


class FlatProgram(nn.Module):
    """A graph with flat tensors in and out, in the order of its names: what every backend compiles and the session
    calls."""

    def __init__(
        self,
        module: nn.Module,  # takes the lead tensors, the state by name, keys, values
        lead: Sequence[str],  # names of the inputs ahead of the state
        state: Sequence[str],  # names of the rows' state
        shared: Sequence[str],  # names of what all rows share
        caches: Sequence[str],  # names of all keys, then all values
        outputs: Sequence[str],  # names of the outputs, in order
        in_place: Sequence[str] = (),  # state that is written where it lies, as shared and caches are
    ):
        super().__init__()
        self.module = module
        self.lead, self.state, self.shared, self.caches = tuple(lead), tuple(state), tuple(shared), tuple(caches)
        self.inputs, self.outputs = (*lead, *state, *shared, *caches), tuple(outputs)
        self.in_place, self.written = tuple(in_place), {*in_place, *shared, *caches}

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Tensors named `self.inputs` -> tensors named `self.outputs`."""
        rest = tensors[len(self.lead) :]
        names = (*self.state, *self.shared)
        state, caches = dict(zip(names, rest, strict=False)), rest[len(names) :]
        layers = len(caches) // 2
        result = self.module(*tensors[: len(self.lead)], state, caches[:layers], caches[layers:])
        report, after = result if isinstance(result, tuple) else (None, result)
        named = (report if name == "report" else after[name] for name in self.outputs)
        # An output that is an input would change under the session when it copies the state back.
        return tuple(out.clone() if any(out is tensor for tensor in tensors) else out for out in named)


def assemble(target: Source, config: EngineConfig, scorer: Scorer | None = None) -> Assembled:
    """Put the graphs together, with the drafter that the config names or with a scorer that was handed in. Raises
    BuildError for what does not fit."""
    cuts = _cut(target, config)
    try:
        layers = cache_layers(target.model)
        drafter = make_drafter(target, config, scorer)
        model = CausalLM(target.model, feature_layers=drafter.scorer.feature_layers)
    except UnsupportedModel as error:
        raise BuildError(str(error)) from None
    if model.max_positions is not None and config.max_seq_len > model.max_positions:
        raise BuildError(
            f"max_seq_len: expected at most the model's {model.max_positions} positions, got {config.max_seq_len}"
        )
    check_drafter(drafter, model)
    spec = _spec(target, drafter, layers, model, config)
    choice = sampled_choice if config.forced_acceptance is None else forced_choice(config.forced_acceptance)
    files = [file for name in (target.name, *config.drafter.split(",")) if (file := quantized_file(name)) is not None]
    addresses = [{p.data_ptr() for p in module.parameters()} for module in (drafter.scorer, target.model)]
    precision = choose_precision(config, files, model.vocab_size, addresses[0] - addresses[1])
    cuts += cut_drafters(drafter.scorer, config.draft_ranks)
    for cut in cuts:
        precision = cut.slices.precision(precision)
    precision = precision if target.disk is None else kept_on(target.disk, precision)
    prefill, step = Prefill(model, drafter.scorer, spec.prefill_chunk), SpeculativeStep(model, drafter, choice)
    modules: dict[str, nn.Module] = {"prefill": prefill, "step": step, "plain": PlainStep(model, drafter, choice)}
    declared = row_state(1, 1, 1) | model.states | drafter.scorer.state(drafter.shape)
    in_place = {name for name, tensor in declared.items() if tensor.in_place}
    flat = {name: _flat(modules[name], program, spec, in_place) for name, program in spec.programs.items()}
    return Assembled(flat["prefill"], flat["step"], flat.get("plain"), spec, precision, config.gpu, cuts)


def _cut(target: Source, config: EngineConfig) -> tuple[Cut, ...]:
    """Cut the target into the parts that were asked for, if any. Raises BuildError."""
    asked = [field for field in ("ranks", "sum_parts") if getattr(config, field) > 1]
    return tuple(cut_rows(target.model, getattr(config, field), field) for field in asked)


def _flat(module: nn.Module, program: ProgramSpec, spec: EngineSpec, in_place: set[str]) -> FlatProgram:
    """A module with the inputs and outputs of the program."""
    state, shared, caches = (
        [tensor.name for tensor in kind if tensor.name in program.inputs]
        for kind in (spec.state, spec.shared, spec.caches)
    )
    lead = [name for name in ("tokens", "count", "nodes") if name in program.inputs]
    sizes = [name for name in program.inputs if name == "catch_up"]
    return FlatProgram(module, lead, [*sizes, *state], shared, caches, program.outputs, sorted(in_place & {*state}))


def _spec(
    target: Source, drafter: Drafter, target_layers: list[CacheLayer], model: CausalLM, config: EngineConfig
) -> EngineSpec:
    shape, layers = drafter.shape, target_layers + drafter.scorer.cache_layers()
    catch_up = most_catch_up(shape) if drafter.scorer.pauses else 0
    scratch = scratch_for(shape.nodes, shape.depth, shape.frontiers, catch_up)
    capacity = capacity_for(config.max_seq_len, scratch, SLOT_STEP)
    batch = config.max_batch
    declared = row_state(capacity, shape.nodes, model.vocab_size) | model.states
    own = drafter.scorer.state(shape)
    state = [_tensor(name, tensor, (batch,)) for name, tensor in (declared | own).items()]
    shared = [_tensor(name, tensor, ()) for name, tensor in drafter.scorer.shared().items()]
    caches = _caches(layers, capacity, config)
    names = tuple(tensor.name for tensor in [*state, *shared, *caches])
    returned = [name for name, tensor in own.items() if not tensor.in_place]
    drafters = (*own, *(f"{kind}.{i}" for kind in ("keys", "values") for i in range(len(target_layers), len(layers))))
    moved = ("report", "lengths", "finish")
    plain = ProgramSpec("", tuple(name for name in names if name not in drafters), moved)
    catch = ["catch_up"] if drafter.scorer.pauses else []
    return EngineSpec(
        config=dataclasses.asdict(config) | {"nodes": shape.nodes, "depth": shape.depth, "top_k": shape.top_k},
        max_batch=batch,
        max_seq_len=config.max_seq_len,
        capacity=capacity,
        slot_step=SLOT_STEP,
        scratch=scratch,
        catch_up=catch_up,
        drafter_tensors=drafters,
        recurrent=tuple(name for name, tensor in (model.states | own).items() if tensor.recurrent),
        prefill_chunk=min(config.prefill_chunk, config.max_seq_len),
        vocab_size=model.vocab_size,
        stop_ids=target.stop_ids,
        device=config.device,
        state=tuple(state),
        shared=tuple(shared),
        caches=tuple(caches),
        prefill=ProgramSpec("", ("tokens", "count", *names), ("lengths", *returned)),
        step=ProgramSpec("", ("nodes", *catch, *names), (*moved, *TREE, *returned)),
        lookahead=drafter.scorer.lookahead,
        plain=plain if shape.nodes and drafter.scorer.skippable and BACKENDS[config.backend].any_nodes else None,
    )


def _caches(layers: list[CacheLayer], capacity: int, config: EngineConfig) -> list[TensorSpec]:
    """Keys and values of each layer, [max_batch, heads, capacity, size], those of int8 as wide as a row's bytes."""
    dtype, width = ("int8", row_bytes) if config.kv_cache == "int8" else (config.dtype, int)
    return [
        TensorSpec(f"{kind}.{index}", (config.max_batch, layer.heads, capacity, width(size)), dtype)
        for kind, sizes in (("keys", [x.key_size for x in layers]), ("values", [x.value_size for x in layers]))
        for index, (layer, size) in enumerate(zip(layers, sizes, strict=True))
    ]


def _tensor(name: str, tensor: StateTensor, leading: tuple[int, ...]) -> TensorSpec:
    return TensorSpec(name, (*leading, *tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.fill)


def example_inputs(spec: EngineSpec, program: FlatProgram, slots: int) -> list[Tensor]:
    """Tensors of the right shapes and strides to trace a program with: one row of prompt length 1, caches of
    `slots` slots, and fewer nodes than a tree has."""
    rows = 1 if "tokens" in program.inputs else spec.max_batch

    def whole(t: TensorSpec) -> Tensor:
        return torch.full(t.shape, t.fill, dtype=getattr(torch, t.dtype), device=spec.device)

    def cache(t: TensorSpec) -> Tensor:  # 64 rows of 8,192 tokens are more than a machine has
        try:
            return whole(t) if spec.device != "cpu" else unreserved(t.shape, getattr(torch, t.dtype))[1]
        except OSError:
            return whole(t)

    tensors = {t.name: whole(t)[:rows] for t in spec.state} | {t.name: whole(t) for t in spec.shared}
    tensors |= {t.name: cache(t)[:rows, :, :slots] for t in spec.caches}
    tokens = min(8, spec.prefill_chunk)
    tensors["tokens"] = torch.zeros(1, tokens, dtype=torch.int64, device=spec.device)
    tensors["nodes"] = torch.arange(min(1 + spec.nodes, max(2, spec.nodes)), device=spec.device)
    tensors["catch_up"] = torch.arange(2, device=spec.device)
    tensors["count"] = torch.full((1,), tokens, device=spec.device)
    return [tensors[name] for name in program.inputs]
