"""The graphs of ranks: what each has a share of, and what is refused."""

import pytest
import specstep
import torch
from models import save_model
from specstep.compile.assemble import assemble
from specstep.compile.config import make_config
from specstep.compile.ranks import share as sharing
from specstep.compile.ranks.share import share
from specstep.compile.ranks.slices import OutputBlock
from specstep.compile.source import load_source
from specstep.graphs.ranks import ExpertsOfRank, HeadOfRank, LinearOfRank

TWO = {"vocab_size": 321}  # an odd number of tokens: the last share of the head overlaps
THREE = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 96}


def shared(folder, architecture, ranks=2, drafter="ngram", dtype="float32", draft_ranks=1, **changes):
    """The graphs of a tiny model on ranks, whose logits were compared with those of one device."""
    model = save_model(folder / "model", architecture, **changes)
    options = {"dtype": dtype, "max_seq_len": 64, "ranks": ranks, "draft_ranks": draft_ranks}
    config = make_config({"drafter": drafter} | options)
    return share(assemble(load_source(str(model), config.dtype, "cpu", None), config))


@pytest.mark.parametrize("architecture", ["Llama", "Qwen2", "Qwen3Moe", "Gemma3Text", "Phi3", "GPTNeoX", "DeepseekV3"])
def test_ranks_have_the_logits_of_one_device(architecture, tmp_path):
    assert len(shared(tmp_path, architecture, **TWO).others) == 1


@pytest.mark.parametrize("architecture", ["Llama", "Phi3", "Qwen3Moe"])
def test_heads_for_keys_that_are_fewer_than_ranks_lie_in_several(architecture, tmp_path):
    graphs = shared(tmp_path, architecture, 4, vocab_size=320)
    assert len(graphs.others) == 3 and {cache.shape[1] for cache in graphs.spec.caches} == {1}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_three_ranks_in_short_dtypes(dtype, tmp_path):
    assert len(shared(tmp_path, "Llama", 3, dtype=dtype, **THREE).others) == 2


def test_what_a_rank_has(tmp_path):
    graphs = shared(tmp_path, "Qwen3Moe", mlp_only_layers=[0], **TWO)
    for programs in (graphs.programs, *graphs.others):
        target = programs["step"].module.target
        assert programs["prefill"].module.target is target is programs["plain"].module.target
        model = target.model
        assert isinstance(model.lm_head, HeadOfRank) and model.lm_head.weight.shape == (161, 48)
        attention, mlp, mixture = model.model.layers[0].self_attn, model.model.layers[0].mlp, model.model.layers[1].mlp
        assert attention.q_proj.weight.shape == (24, 48) and attention.k_proj.weight.shape == (12, 48)
        assert isinstance(attention.o_proj, LinearOfRank) and attention.o_proj.weight.shape == (48, 24)
        assert mlp.gate_proj.weight.shape == (32, 48) and mlp.down_proj.weight.shape == (48, 32)
        assert isinstance(mixture.experts, ExpertsOfRank)
        assert mixture.experts.part.gate_up_proj.shape == (4, 32, 48)
        assert model.model.embed_tokens.weight.shape == (321, 48)
    assert {cache.shape[1] for cache in graphs.spec.caches} == {1}
    first, second = (each["step"].module.target.model.lm_head for each in (graphs.programs, *graphs.others))
    assert torch.equal(first.weight[160], second.weight[0])  # of the token that both have
    assert first.weight.untyped_storage().data_ptr() == second.weight.untyped_storage().data_ptr()


@pytest.mark.parametrize("draft_ranks", [1, 2])
def test_what_a_rank_has_of_a_draft_model(draft_ranks, tmp_path, drafter_folder, head_folder):
    """Behind a head, whose one layer of the caches is whole."""
    drafter = f"{head_folder},{drafter_folder},ngram"
    graphs = shared(tmp_path, "Llama", drafter=drafter, draft_ranks=draft_ranks, vocab_size=320)
    whole = save_model(tmp_path / "other", num_hidden_layers=2, hidden_size=32)
    expected = load_source(str(whole), "float32", "cpu", None).model
    for programs in (graphs.programs, *graphs.others):
        draft = programs["step"].module.drafter.scorer.scorers[1].model
        assert programs["prefill"].module.scorer.scorers[1].model is draft
        for name in ("self_attn.q_proj", "mlp.gate_proj"):
            rows = expected.model.layers[0].get_submodule(name).weight.shape[0]
            assert draft.model.model.layers[0].get_submodule(name).weight.shape[0] == rows // draft_ranks
        assert isinstance(draft.model.lm_head, HeadOfRank) == (draft_ranks > 1)
        assert isinstance(draft.model.model.layers[1].self_attn.o_proj, LinearOfRank) == (draft_ranks > 1)
    heads = [cache.shape[1] for cache in graphs.spec.caches]
    assert heads == 2 * [1, 1, 1, 2, *[2 // draft_ranks] * 2]


def test_a_wrong_share_of_a_draft_model_is_refused(tmp_path, drafter_folder, monkeypatch):
    real = sharing.take_share

    def wrong(model, cut, ranks, rank):  # the first rank's, of the draft model
        real(model, cut, ranks, rank if model.config.hidden_size == 48 else 0)

    monkeypatch.setattr(sharing, "take_share", wrong)
    message = "draft_ranks: LlamaForCausalLM is not shared faithfully by 2 ranks"
    with pytest.raises(specstep.BuildError, match=message):
        shared(tmp_path, "Llama", drafter=str(drafter_folder), draft_ranks=2, vocab_size=320)


def test_a_draft_model_whose_heads_have_no_share_is_refused(tmp_path):
    draft = save_model(tmp_path / "draft", vocab_size=320, **THREE)
    with pytest.raises(specstep.BuildError, match="draft_ranks: expected a divisor or a multiple of the 3 heads"):
        shared(tmp_path, "Llama", drafter=str(draft), draft_ranks=2, vocab_size=320)


def test_a_recurrent_draft_model_is_refused_by_its_name(tmp_path):
    draft = save_model(tmp_path / "draft", "Mamba", vocab_size=320)
    with pytest.raises(specstep.BuildError, match=r"ranks: expected a drafter of attention alone, got .*draft, which"):
        shared(tmp_path, "Llama", drafter=str(draft), vocab_size=320)


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        ("ngram", "draft_ranks: expected 1 with this drafter, of which each rank has all, got 2; a draft model takes"),
        ("early-exit:1", "draft_ranks: expected 1 with early-exit, whose layers are the target's, got 2"),
    ],
)
def test_drafters_that_ranks_do_not_share_are_refused(drafter, message, tmp_path):
    with pytest.raises(specstep.BuildError, match=message):
        shared(tmp_path, "Llama", drafter=drafter, draft_ranks=2)


def test_a_wrong_share_is_refused(tmp_path, monkeypatch):
    real = sharing._blocks
    monkeypatch.setattr(
        sharing, "_blocks", lambda name, linear, config, *which: [OutputBlock(len(linear.weight), *which)]
    )  # of fused layers, too
    with pytest.raises(specstep.BuildError, match="ranks: Phi3ForCausalLM is not shared faithfully by 2 ranks"):
        shared(tmp_path, "Phi3")
    assert real is not sharing._blocks


@pytest.mark.parametrize(
    ("architecture", "options", "message"),
    [
        ("GPT2", {}, "ranks: expected a model that transformers can cut into parts.*got GPT2LMHeadModel"),
        ("Olmo2", {}, "ranks: Olmo2ForCausalLM cannot be shared by 2 ranks"),  # norms that span the heads
        (
            "Llama",
            {"ranks": 3, "intermediate_size": 96, "num_attention_heads": 6},
            "ranks: expected a divisor or a multiple of the 2 heads for keys and values of LlamaForCausalLM, got 3",
        ),
        ("Llama", {"ranks": 5}, "ranks: expected a divisor of the 48 inputs of LlamaForCausalLM's"),
    ],
)
def test_what_cannot_be_shared_is_refused_by_name(architecture, options, message, tmp_path):
    with pytest.raises(specstep.BuildError, match=message):
        shared(tmp_path, architecture, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": 65}, "ranks: expected 1 to 64, got 65"),
        ({"ranks": 2, "sum_parts": 2}, "sum_parts: expected 1 with 2 ranks, which have those parts, got 2"),
        ({"ranks": 3, "draft_ranks": 2}, "draft_ranks: expected 1, or 3 as the target has, got 2"),
        ({"sum_parts": 2, "draft_ranks": 3}, "draft_ranks: expected 1, or 2 as the target has, got 3"),
        ({"draft_ranks": 2}, "draft_ranks: expected 1 without --ranks, got 2"),
        ({"ranks": 2, "backend": "onnx"}, "ranks: expected 1 for backend onnx, got 2; inductor takes it"),
        ({"ranks": 2, "backend": "tensorrt"}, "ranks: expected 1 for backend tensorrt, got 2; inductor takes it"),
        (
            {"sum_parts": 2, "device": "cuda", "compute_capability": ("9.0",)},
            "sum_parts: expected 1 with device cuda, got 2; device cpu takes it",
        ),
    ],
)
def test_options_that_do_not_go_with_ranks(options, message):
    with pytest.raises(specstep.BuildError, match=message):
        make_config(options)


def test_ranks_may_have_a_gpu_each():
    options = {"ranks": 2, "draft_ranks": 2, "device": "cuda", "compute_capability": ("9.0",)}
    assert make_config(options).ranks == 2


def test_without_an_artifact_there_are_no_ranks():
    with pytest.raises(specstep.BuildError, match="ranks: expected 1 without an artifact, got 2; `specstep build`"):
        specstep.eager("none", ranks=2)
