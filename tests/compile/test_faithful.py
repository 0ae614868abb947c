"""The fidelity check fails when our side of a model leaves something out, for every architecture, in any dtype."""

import contextlib
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import specstep
import torch
from models import ALIKE, ARCHITECTURES, save_model, tiny_model
from specstep.compile import faithful, raised, routing
from specstep.compile.assemble import Assembled, assemble
from specstep.compile.build import make_config
from specstep.compile.faithful import check_faithful
from specstep.compile.raised import RaisedTo
from specstep.compile.source import Source
from specstep.graphs import convolution as convolution_module
from specstep.graphs import hybrid_cache as hybrid_cache_module
from specstep.graphs import linear_attention as linear_attention_module
from specstep.graphs import rwkv as rwkv_module
from specstep.graphs.attention import Pass
from specstep.graphs.convolution import convolve
from specstep.graphs.experts import EXPERTS_NAME, mix_experts
from specstep.graphs.rwkv import SHIFT
from specstep.graphs.target import CausalLM
from specstep.kernels.bits import chain_bits
from specstep.kernels.linear_attention.op import linear_attention
from specstep.kernels.wkv.op import wkv
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from model_table import small_config

DTYPES = ["bfloat16", "float16", "float32"]
WINDOWED = ["Qwen2", "Mistral", "Phi3", "Gemma2", "Gemma3Text", "Gemma3nText", "Gemma4Text", "GptOss"]
NORMED = ["Qwen3", "Gemma3Text", "Gemma3nText", "Gemma4Text", "Qwen3Moe"]  # by these names
LATENT = ["DeepseekV3"]
ROUTED = ["Qwen3Moe", "DeepseekV3", "GptOss", "Lfm2Moe", "Qwen3Next", "Jamba"]
GATED = ["Qwen3Next", "Qwen3_5Text", "OlmoHybrid", "KimiLinear"]  # linear attention with a gate
MAMBA = ["Mamba", "FalconMamba", "Jamba"]
LINEAR = [*GATED, "Mamba2", *MAMBA, "MiniMax"]
CONVOLVED = ["Lfm2", "Lfm2Moe", *GATED, "Mamba2", *MAMBA]
ATTENDING = [name for name in ARCHITECTURES if name not in ("Mamba", "FalconMamba", "Mamba2", "Rwkv")]
SCALED = [name for name in ATTENDING if name not in ("Gemma3nText", "Gemma4Text")]  # those have a scale of 1
PLACED = [name for name in ATTENDING if name not in ("NemotronH", "Jamba", "KimiLinear")]  # those that know positions


@functools.cache
def graphs_of(architecture: str, dtype: str, max_seq_len: int = 128, **changes: Any) -> Assembled:
    model = tiny_model(architecture, **changes).to(getattr(torch, dtype))
    return assemble(
        Source(architecture, model, None), make_config({"drafter": "none", "dtype": dtype, "max_seq_len": max_seq_len})
    )


def attention(change: Callable[..., tuple[Any, ...]]) -> Callable[[pytest.MonkeyPatch], None]:
    """A mutation of what attention is given: change(scale, window, softcap, sinks) -> the same, changed."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        whole = Pass.attention
        patch.setattr(Pass, "attention", lambda self, q, k, v, *rest: whole(self, q, k, v, *change(*rest)))

    return apply


def siblings_see_each_other(patch: pytest.MonkeyPatch) -> None:
    whole = Pass.attention

    def mutated(self: Pass, *rest: Any) -> torch.Tensor:
        bits = chain_bits(self.depths.shape[1], self.ancestors.shape[2], self.depths.device)
        changed = Pass(self.lengths, self.depths, bits.expand_as(self.ancestors), self.key_depths)
        return whole(changed, *rest)

    patch.setattr(Pass, "attention", mutated)


def positions_one_off(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Pass, "positions", property(lambda self: self.lengths[:, None] + self.depths + 1))


def slots_one_off(patch: pytest.MonkeyPatch) -> None:
    """The pass writes its keys one slot too late."""
    own = Pass.slots.fget
    patch.setattr(Pass, "slots", property(lambda self: own(self) + 1))


def convolution(change: Callable[..., tuple[Any, ...]]) -> Callable[[pytest.MonkeyPatch], None]:
    """A mutation of what a convolution is given: change(weight, tokens) -> the same, changed. tokens: `Pass.window`."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        whole = convolve

        def mutated(inputs: Any, weight: torch.Tensor, bias: Any) -> torch.Tensor:
            weight, tokens = change(weight, inputs.where.window(weight.shape[1]))
            with pytest.MonkeyPatch.context() as inner:
                inner.setattr(inputs.where, "_windows", {weight.shape[1]: tokens})
                return whole(inputs, weight, bias)

        patch.setattr(convolution_module, "convolve", mutated)

    return apply


def neighbours(weight: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tokens ahead of a token's own, whoever they follow."""
    back = torch.arange(tokens.shape[2] - 1, -1, -1)
    return weight, tokens[:, :, -1:] - back


def linear_attention_given(change: Callable[..., dict[str, Any]]) -> Callable[[pytest.MonkeyPatch], None]:
    """A mutation of what linear attention is given: change(given) -> what is other, by its name."""
    names = "query", "key", "value", "decay", "rates", "beta", "state", "parents"

    def apply(patch: pytest.MonkeyPatch) -> None:
        def mutated(*inputs: Any) -> Any:
            given = dict(zip(names, inputs, strict=True))
            return linear_attention(*(given | change(given)).values())

        patch.setattr(linear_attention_module, "linear_attention", mutated)

    return apply


def wkv_given(change: Callable[..., dict[str, Any]]) -> Callable[[pytest.MonkeyPatch], None]:
    """A mutation of what RWKV's attention is given, as above."""
    names = "key", "value", "decay", "first", "state", "parents"

    def apply(patch: pytest.MonkeyPatch) -> None:
        def mutated(*inputs: Any) -> Any:
            given = dict(zip(names, inputs, strict=True))
            return wkv(*(given | change(given)).values())

        patch.setattr(rwkv_module, "wkv", mutated)

    return apply


def shifted(change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[[pytest.MonkeyPatch], None]:
    """A mutation of what is ahead of RWKV's tokens: change(ahead, own), [B, T, C] each."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        whole = rwkv_module.taps

        def mutated(inputs: Any, size: int) -> list[torch.Tensor]:
            ahead, own = whole(inputs, size)
            return [change(ahead, own), own]

        patch.setattr(rwkv_module, "taps", mutated)

    return apply


def follows_neighbour(ahead: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """As in a chain, whatever the tree."""
    return torch.cat([ahead[:, :1], own[:, : 1 - SHIFT]], 1)


def no_commit(module: Any, name: str) -> Callable[[pytest.MonkeyPatch], None]:
    """What the tokens of a pass leave is not kept."""
    return lambda patch: patch.setattr(module, name, lambda *_: None)


def during_forward(change: Callable[[CausalLM, pytest.MonkeyPatch], None]) -> Callable[[pytest.MonkeyPatch], None]:
    """A mutation of the modules themselves, in our passes alone."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        whole = CausalLM.forward

        def mutated(self: CausalLM, *rest: Any) -> Any:
            with pytest.MonkeyPatch.context() as inner:
                change(self, inner)
                return whole(self, *rest)

        patch.setattr(CausalLM, "forward", mutated)

    return apply


def without_norm(suffix: str) -> Any:
    """Leave out the norms whose names end so."""

    @during_forward
    def mutate(model: CausalLM, patch: pytest.MonkeyPatch) -> None:
        for name, module in model.named_modules():
            if name.endswith(suffix):
                patch.setattr(module, "forward", lambda x: x)

    return mutate


@during_forward
def other_rope_base(model: CausalLM, patch: pytest.MonkeyPatch) -> None:
    """As if the base were 1.5 times as large in its exponent."""
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if name.endswith("inv_freq"):
                patch.setitem(module._buffers, name, buffer**1.5)


def experts(change: Callable[[Any, torch.Tensor], tuple[Any, torch.Tensor]]) -> Callable[[pytest.MonkeyPatch], None]:
    """A mutation of what `mix_experts` is given: change(module, weights) -> the same, changed."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        def mutated(module: Any, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            module, weights = change(module, weights)
            return mix_experts(module, x, index, weights)

        patch.setitem(ALL_EXPERTS_FUNCTIONS, EXPERTS_NAME, mutated)

    return apply


def turn_routers(model: CausalLM, count: int, patch: pytest.MonkeyPatch) -> None:
    """In our passes alone, the first `count` tokens of each mixture take the next expert in place of their last."""

    def turn(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        x, index, weights = (*args, *kwargs.values())
        if module.config._experts_implementation != EXPERTS_NAME:
            return None
        index = index.clone()
        chosen = torch.zeros(len(index), 64, dtype=torch.bool).scatter_(1, index, True)
        index[:count, -1] = (~chosen).int().argmax(1)[:count]
        return (x, index, weights), {}

    whole = routing._ahead

    @contextlib.contextmanager
    def ahead(module: torch.nn.Module, hook: Any) -> Any:
        with whole(module, turn), whole(module, hook):
            yield

    patch.setattr(routing, "_ahead", ahead)


class WithoutBias:
    """A module of experts that says that it has no bias."""

    has_bias = False

    def __init__(self, module: torch.nn.Module):
        self.module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


MUTATIONS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], list[str]]] = {
    "no window": (attention(lambda scale, window, *rest: (scale, 0, *rest)), WINDOWED),
    "window one off": (attention(lambda scale, window, *rest: (scale, window and window + 1, *rest)), WINDOWED),
    "no softcap": (attention(lambda scale, window, cap, sinks: (scale, window, 0.0, sinks)), ["Gemma2"]),
    "no sinks": (attention(lambda *numbers_and_sinks: (*numbers_and_sinks[:3], None)), ["GptOss"]),
    "no scale": (attention(lambda scale, *rest: (1.0, *rest)), SCALED),
    "no query norm": (without_norm("q_norm"), NORMED),
    "no key norm": (without_norm("k_norm"), NORMED),
    "no norm of latent keys": (without_norm("kv_a_layernorm"), LATENT),
    "no weights of experts": (experts(lambda module, weights: (module, torch.ones_like(weights))), ROUTED),
    "no bias of experts": (experts(lambda module, weights: (WithoutBias(module), weights)), ["GptOss"]),
    "other rope base": (other_rope_base, [name for name in PLACED if name != "GPT2"]),
    "positions one off": (positions_one_off, PLACED),
    "slots one off": (slots_one_off, ATTENDING),
    "a tap one off": (convolution(lambda weight, tokens: (weight.roll(1, 1), tokens)), CONVOLVED),
    "no oldest tap": (
        convolution(lambda weight, tokens: (weight * (torch.arange(weight.shape[1]) > 0), tokens)),
        CONVOLVED,
    ),
    "inputs of neighbours": (convolution(neighbours), CONVOLVED),
    "inputs not kept": (no_commit(convolution_module, "shift"), [*CONVOLVED, "Rwkv"]),
    "no decay": (linear_attention_given(lambda given: {"decay": torch.ones_like(given["decay"])}), LINEAR),
    "one rate for a channel": (
        linear_attention_given(lambda given: {"rates": given["rates"].mean(1, keepdim=True).expand_as(given["rates"])}),
        MAMBA,
    ),
    "rates of other channels": (linear_attention_given(lambda given: {"rates": given["rates"].flip(2)}), MAMBA),
    "no gate": (linear_attention_given(lambda given: {"beta": torch.ones_like(given["beta"])}), GATED),
    "no correction": (
        linear_attention_given(lambda given: {"value": given["value"] * given["beta"][..., None], "beta": None}),
        GATED,
    ),
    "heads in other groups": (linear_attention_given(lambda given: {"key": given["key"].flip(2)}), [*GATED, "Mamba2"]),
    "keys in another order": (linear_attention_given(lambda given: {"key": given["key"].flip(3)}), LINEAR),
    "states of neighbours": (linear_attention_given(lambda given: {"parents": None}), LINEAR),
    "no state": (linear_attention_given(lambda given: {"state": torch.zeros_like(given["state"])}), LINEAR),
    "states not kept": (no_commit(hybrid_cache_module, "fold"), LINEAR),
    "sums not kept": (no_commit(rwkv_module, "shift"), ["Rwkv"]),
    "no sums": (wkv_given(lambda given: {"state": torch.zeros_like(given["state"])}), ["Rwkv"]),
    "sums of neighbours": (wkv_given(lambda given: {"parents": None}), ["Rwkv"]),
    "sums that do not fade": (wkv_given(lambda given: {"decay": torch.zeros_like(given["decay"])}), ["Rwkv"]),
    "no weight of its own": (wkv_given(lambda given: {"first": torch.zeros_like(given["first"])}), ["Rwkv"]),
    "channels in another order": (wkv_given(lambda given: {"decay": given["decay"].flip(0)}), ["Rwkv"]),
    "no shift": (shifted(lambda ahead, own: own), ["Rwkv"]),
    "nothing ahead": (shifted(lambda ahead, own: torch.zeros_like(own)), ["Rwkv"]),
    "shift along neighbours": (shifted(follows_neighbour), ["Rwkv"]),
    "siblings see each other": (siblings_see_each_other, ATTENDING),
}
FEW = 4  # architectures that a mutation is tried with in the suite; the sweep tries all


def is_slow(name: str, dtype: str, architectures: list[str]) -> bool:
    tried = [name for name in architectures if name not in ALIKE][:FEW]
    return dtype != DTYPES[0] or name not in tried


CASES = [
    pytest.param(name, mutation, dtype, marks=[pytest.mark.slow] * is_slow(name, dtype, architectures))
    for mutation, (_, architectures) in MUTATIONS.items()
    for name in architectures
    for dtype in DTYPES
]


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow), "float32"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_faithful_models_pass_by_an_order_of_magnitude(architecture, dtype, monkeypatch):
    monkeypatch.setattr(faithful, "TOLERANCE", faithful.TOLERANCE / 10)
    check_faithful(graphs_of(architecture, dtype))


@pytest.mark.parametrize(("architecture", "mutation", "dtype"), CASES)
def test_what_is_left_out_is_found(architecture, mutation, dtype, monkeypatch):
    graphs = graphs_of(architecture, dtype)
    MUTATIONS[mutation][0](monkeypatch)
    with pytest.raises(specstep.BuildError, match="is not traced faithfully"):
        check_faithful(graphs)


@pytest.mark.parametrize("max_seq_len", [1030, 2048])
@pytest.mark.parametrize("architecture", ["Mistral", "Gemma2"])
def test_a_wide_window_is_passed_where_a_row_can_outgrow_it(architecture, max_seq_len, monkeypatch):
    wide = {"sliding_window": 1024, "max_position_embeddings": 4096}
    graphs = graphs_of(architecture, "bfloat16", max_seq_len, **wide)
    check_faithful(graphs)
    MUTATIONS["no window"][0](monkeypatch)
    with pytest.raises(specstep.BuildError, match=r"after 1\d\d\d cached tokens"):
        check_faithful(graphs)
    check_faithful(graphs_of(architecture, "bfloat16", 1024, **wide))  # no row gets there


@pytest.mark.parametrize("architecture", ["Llama", "Mistral", "GPT2"])
def test_short_rows_are_checked_too(architecture, monkeypatch):
    graphs = graphs_of(architecture, "bfloat16", 4)
    check_faithful(graphs)
    MUTATIONS["no scale"][0](monkeypatch)
    with pytest.raises(specstep.BuildError, match="is not traced faithfully"):
        check_faithful(graphs)


def test_a_draft_model_is_checked_as_the_target_is(tmp_path, monkeypatch):
    drafter = save_model(tmp_path / "drafter", "Gemma2")
    source = Source("Llama", tiny_model("Llama"), None)
    graphs = assemble(source, make_config({"drafter": str(drafter), "dtype": "float32", "max_seq_len": 64}))
    check_faithful(graphs)
    MUTATIONS["no softcap"][0](monkeypatch)
    with pytest.raises(specstep.BuildError, match="Gemma2ForCausalLM is not traced faithfully"):
        check_faithful(graphs)


def test_what_transformers_itself_is_off_by_in_float32_is_allowed_for(monkeypatch):
    """With a bound below rounding, models pass by their own; one that leaves something out does not."""
    graphs = graphs_of("Gemma2", "float32")
    monkeypatch.setattr(faithful, "TOLERANCE", 1e-10)
    check_faithful(graphs)
    monkeypatch.setattr(faithful, "ROUNDINGS", 0.0)
    with pytest.raises(specstep.BuildError, match=r"off by .*e-0\d of their norm, expected at most 1e-10"):
        check_faithful(graphs)
    monkeypatch.setattr(faithful, "ROUNDINGS", 1e9)
    MUTATIONS["no softcap"][0](monkeypatch)
    with pytest.raises(specstep.BuildError, match=r"expected at most 0\.005"):
        check_faithful(graphs)


def test_weights_keep_their_dtype_and_nothing_is_copied():
    graphs = graphs_of("Llama", "bfloat16")
    before = {name: (tensor.dtype, tensor.data_ptr()) for name, tensor in graphs.step.named_parameters()}
    check_faithful(graphs)
    assert before == {name: (tensor.dtype, tensor.data_ptr()) for name, tensor in graphs.step.named_parameters()}


def test_operations_in_float32_write_low_precision_tensors_in_place():
    x = torch.ones(3, dtype=torch.bfloat16)
    with RaisedTo(torch.float32):
        assert (x + x).dtype == x.to(torch.float16).dtype == torch.zeros(2, dtype=torch.bfloat16).dtype == torch.float32
        assert torch.stack([x, x]).dtype == torch.float32
        x.add_(x.exp())
    assert x.dtype == torch.bfloat16 and torch.equal(x.float(), (1 + torch.ones(3).exp()).bfloat16().float())


def test_views_in_float32_are_views_and_tables_are_not_copied():
    x, table = torch.ones(3, dtype=torch.bfloat16), torch.rand(6, 4, dtype=torch.bfloat16)
    rows = torch.tensor([4, 1])
    with RaisedTo(torch.float32), Copied() as copied:
        x[1:].fill_(5)
        assert table[2].data_ptr() == table.data_ptr() + 2 * 4 * 2
        for got in (torch.nn.functional.embedding(rows, table), table[rows], table.index_select(0, rows)):
            assert got.dtype == torch.float32 and torch.equal(got.bfloat16(), table[[4, 1]])
        assert (table[2] @ table[3]).dtype == torch.float32
    assert x.tolist() == [1, 5, 5] and max(copied.sizes) < table.numel()


@torch.no_grad()
@pytest.mark.parametrize("most", [1, 64, 300])
def test_large_weights_are_raised_in_parts(most, monkeypatch):
    monkeypatch.setattr(raised, "MOST", most)
    x, weight, bias = torch.randn(3, 8).bfloat16(), torch.randn(33, 8).bfloat16(), torch.randn(33).bfloat16()
    whole = weight.T.contiguous()
    with RaisedTo(torch.float32):
        got = torch.nn.functional.linear(x, weight), torch.nn.functional.linear(x, weight, bias)
        got += (x @ whole, torch.addmm(bias[:1], x, whole), x @ weight[:0].T)
    products = x.float() @ weight.float().T
    expected = products, products + bias.float(), products, products + bias[:1].float(), products[:, :0]
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@torch.no_grad()
def test_products_in_float32_are_those_of_wider_copies():
    """Of matrices that grow and shrink, lie turned, or have gaps; and each is still right when others were made."""
    torch.manual_seed(0)
    made = []
    for rows, depth, columns in ((3, 8, 5), (7, 20, 30), (2, 4, 4), (7, 20, 30)):
        x, weight, bias = torch.randn(rows, depth), torch.randn(columns, depth), torch.randn(columns)
        gaps = torch.randn(columns, 2 * depth)[:, ::2]
        narrow = [each.bfloat16() for each in (x, weight, bias, gaps)]
        wide = [each.float() for each in narrow]
        with RaisedTo(torch.float32):
            made += [(narrow[0] @ narrow[1].T, wide[0] @ wide[1].T), (narrow[0] @ narrow[3].T, wide[0] @ wide[3].T)]
            made += [(torch.addmm(narrow[2], narrow[0], narrow[1].T), torch.addmm(wide[2], wide[0], wide[1].T))]
            made += [(narrow[0] @ narrow[0].T, wide[0] @ wide[0].T)]
    for got, expected in made:
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, expected)


class Copied(TorchDispatchMode):
    """The sizes of the float32 tensors that are made."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.sizes += [out.numel()] if isinstance(out, torch.Tensor) and out.dtype == torch.float32 else []
        return out


@pytest.mark.parametrize("architecture", ROUTED)
def test_a_token_that_takes_another_expert_refuses_no_model(architecture, monkeypatch):
    """One token of each layer is turned, as rounding does where two experts are nearly alike."""
    graphs = graphs_of(architecture, "float32")
    turn_routers(graphs.step.module.target, 1, monkeypatch)
    check_faithful(graphs)


@pytest.mark.parametrize("architecture", ROUTED)
def test_tokens_that_take_other_experts_refuse_a_model(architecture, monkeypatch):
    """More of them are turned than rounding explains."""
    graphs = graphs_of(architecture, "float32")
    turn_routers(graphs.step.module.target, 5, monkeypatch)
    with pytest.raises(specstep.BuildError, match="is not traced faithfully"):
        check_faithful(graphs)


@pytest.mark.parametrize("model_type", ["jetmoe", pytest.param("longcat_flash", marks=pytest.mark.slow)])
def test_where_nothing_says_what_a_token_takes_rounding_turns_none(model_type):
    """Both passes in float64: the logits are those of transformers to its last digits, and every one counts."""
    config = small_config(CONFIG_MAPPING[model_type])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    target = assemble(Source("it", model, None), make_config({"drafter": "none", "max_seq_len": 96})).step.module.target
    assert faithful._hides_experts(target)
    with torch.no_grad(), RaisedTo(torch.float64):
        tree, layers, states = faithful._compare_tree(target, faithful.PATH)
        _, chain = faithful._compare_chain(target, layers, states, 96)
    assert max(tree.error, chain.error) < 1e-12


@pytest.mark.parametrize("architecture", ["Qwen3Moe", "GptOss", "Llama"])
def test_logits_that_are_off_for_one_text_refuse_a_model(architecture, monkeypatch):
    graphs = graphs_of(architecture, "float32")
    unlucky = faithful._tokens(graphs.step.module.target, 4)
    whole = faithful._engine_logits

    def mutated(model: CausalLM, tokens: torch.Tensor, *rest: Any) -> torch.Tensor:
        logits = whole(model, tokens, *rest)
        return logits + torch.randn_like(logits) * 0.05 * torch.equal(tokens[:, :4], unlucky)

    monkeypatch.setattr(faithful, "_engine_logits", mutated)
    with pytest.raises(specstep.BuildError, match="is not traced faithfully"):
        check_faithful(graphs)


def test_no_number_is_no_match_on_either_branch(monkeypatch):
    graphs = graphs_of("Llama", "float32")
    whole = faithful._engine_logits

    def mutated(*given: Any) -> torch.Tensor:
        logits = whole(*given)
        if logits.shape[1] > faithful.CHAIN:
            logits[:, -1] = float("nan")
        return logits

    monkeypatch.setattr(faithful, "_engine_logits", mutated)
    with pytest.raises(specstep.BuildError, match="off by nan of their norm"):
        check_faithful(graphs)
