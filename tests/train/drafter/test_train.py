"""Training drafters of each kind from a tiny model: they learn, go on where they were, and refuse what cannot be."""

import json
from collections import Counter

import pytest
import specstep
import torch
from block_drafters import D2T, DFLASH2, DSPARK, ZLAB, block_tensors, save_block
from models import greedy, save_eagle3, save_model, tiny_model
from safetensors.torch import load_file, save_file
from specstep.cli import main
from specstep.compile.drafters import eagle3_file
from specstep.compile.drafters.eagle3_config import FLAGS
from specstep.compile.drafters.peagle_file import is_peagle
from specstep.compile.source import load_source
from specstep.errors import BuildError, InputError
from specstep.train.collect.options import CollectOptions
from specstep.train.collect.run import collect
from specstep.train.data import hidden_states
from specstep.train.data.reader import Data, read_manifest
from specstep.train.drafter import train
from specstep.train.drafter.options import KIND_NAMES
from specstep.train.drafter.train import train_drafter
from transformers import PhiConfig, PhiForCausalLM

GIVEN = {
    "levels": 2, "epochs": 2, "draft_vocab_size": 300, "batch": 2, "width": 32, "held_out": 0.2, "dtype": "float32",
    "evaluations": 3, "learning_rate": 0.05,
}  # fmt: skip


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


def forgetful():
    """A tiny model whose next token follows from the last one alone: what a head can learn from little data."""
    model = tiny_model("Llama")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return model


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    forgetful().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    file, generator = tmp_path_factory.mktemp("data") / "said.jsonl", torch.Generator().manual_seed(3)
    tokens = torch.randint(2, 320, (64, 42), generator=generator).tolist()
    file.write_text("".join(json.dumps({"prompt_token_ids": t[:2], "token_ids": t[2:]}) + "\n" for t in tokens))
    return str(file)


# By how much the chain of each kind grows. A block starts with all of its first level right here, since the target
# follows from the last token alone.
GROWS = {"eagle3": 0.3, "p-eagle": 0.15, "block": 0.3}


@pytest.mark.parametrize("kind", KIND_NAMES)
def test_a_drafter_learns_and_is_exact(kind, target, data, tmp_path):
    given = GIVEN | {"epochs": 8, "kind": kind, "layers": None if kind == "eagle3" else 2}
    said = []
    head = train_drafter(str(target), [data], tmp_path / "head", progress=said.append, **given)
    history = [json.loads(line) for line in (head / "history.jsonl").read_text().splitlines()]
    assert history[-1]["top1"][0] > 0.5 > history[0]["top1"][1]
    assert history[-1]["chain"] > history[0]["chain"] + GROWS[kind]
    assert (head / "history.png").read_bytes()[:4] == b"\x89PNG" and not (head / "checkpoint.pt").exists()
    assert any("held out after 0 steps" in line for line in said)
    model = forgetful()
    prompts = [[5, 6], list(range(30, 53))]
    engine = specstep.eager(str(target), drafter=str(head), dtype="float32", max_seq_len=96)
    results = engine.generate(prompts, 40)
    assert [result.token_ids for result in results] == [greedy(model, prompt, 40, [1]) for prompt in prompts]
    assert sum(result.stats["steps"] for result in results) < 60, "of 80 tokens"
    assert len(load_file(head / "model.safetensors")["d2t"]) == 300


def test_a_head_is_written_as_the_field_publishes_them(target, data, tmp_path):
    head = train_drafter(str(target), [data], tmp_path / "head", **GIVEN | {"epochs": 1})
    tensors, config = load_file(head / "model.safetensors"), json.loads((head / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 1, 0] and config["draft_vocab_size"] == 300
    assert tensors["t2d"].nonzero()[:, 0].tolist() == (tensors["d2t"] + torch.arange(300)).tolist()


@pytest.mark.parametrize(
    ("dtype", "fast"),
    [
        ("bfloat16", False),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [("float32", True), ("float32", False), ("bfloat16", True)]
        ),
    ],
)
def test_a_head_trains_in_floats_where_bfloat16_is_slow(target, data, tmp_path, monkeypatch, dtype, fast):
    monkeypatch.setattr(train, "fast_bfloat16", lambda device: fast)
    head = train_drafter(str(target), [data], tmp_path / "head", **GIVEN | {"dtype": dtype, "epochs": 1})
    history = [json.loads(line) for line in (head / "history.jsonl").read_text().splitlines()]
    assert history[-1]["loss"][0] < history[0]["loss"][0]


@pytest.mark.parametrize("fast", [True, False])
def test_the_target_runs_in_the_quicker_dtype(target, data, tmp_path, monkeypatch, fast):
    loaded, real = [], train.load_source

    def load(*given):
        loaded.append(real(*given))
        return loaded[-1]

    monkeypatch.setattr(hidden_states, "fast_bfloat16", lambda device: fast)
    monkeypatch.setattr(train, "fast_bfloat16", lambda device: fast)
    monkeypatch.setattr(train, "load_source", load)
    train_drafter(str(target), [data], tmp_path / "head", **GIVEN | {"dtype": None, "epochs": 1})
    assert [source.model.dtype for source in loaded] == [torch.bfloat16 if fast else torch.float32]


@pytest.mark.parametrize("kind", KIND_NAMES)
def test_an_interrupted_run_goes_on_as_if_it_had_not_been(kind, target, data, tmp_path, monkeypatch):
    given = GIVEN | {"kind": kind}
    whole = train_drafter(str(target), [data], tmp_path / "whole", **given)
    real, made = train.Training._update, []

    def interrupted(self, *given):
        if len(made) == 30:
            raise KeyboardInterrupt
        made.append(1)
        return real(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(train.Training, "_update", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train_drafter(str(target), [data], tmp_path / "parts", **given)
    said = []
    train_drafter(str(target), [data], tmp_path / "parts", progress=said.append, **given)
    assert any("going on after" in line for line in said)
    one, other = (load_file(folder / "model.safetensors") for folder in (whole, tmp_path / "parts"))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("kind", KIND_NAMES)
def test_a_drafter_goes_on_from_another(kind, fast, target, data, tmp_path, monkeypatch):
    """Its first accuracy is the last one of the other one, its vocabulary that one's; it gets better."""
    monkeypatch.setattr(train, "fast_bfloat16", lambda device: fast)
    first = train_drafter(str(target), [data], tmp_path / "first", **GIVEN | {"kind": kind})
    more = GIVEN | {"kind": kind, "start": str(first), "draft_vocab_size": 17, "learning_rate": 0.02}
    second = train_drafter(str(target), [data], tmp_path / "second", **more)
    ended, history = (
        [json.loads(line) for line in (head / "history.jsonl").read_text().splitlines()] for head in (first, second)
    )
    assert history[0]["top1"] == pytest.approx(ended[-1]["top1"], abs=0.01)  # it was written in bfloat16
    assert history[-1]["loss"][0] < history[0]["loss"][0]
    d2t = [load_file(head / "model.safetensors")["d2t"] for head in (first, second)]
    assert torch.equal(*d2t) and len(d2t[0]) == 300
    configs = [json.loads((head / "config.json").read_text()) for head in (first, second)]
    assert configs[0] == configs[1]


def test_a_head_of_one_pass_goes_on_from_an_eagle3_head(target, data, tmp_path):
    """Its first level begins as that head ended."""
    first = train_drafter(str(target), [data], tmp_path / "first", **GIVEN)
    more = GIVEN | {"kind": "p-eagle", "start": str(first), "layers": 2, "learning_rate": 0.02}
    second = train_drafter(str(target), [data], tmp_path / "second", **more)
    ended, history = (
        [json.loads(line) for line in (head / "history.jsonl").read_text().splitlines()] for head in (first, second)
    )
    assert history[0]["top1"][0] == pytest.approx(ended[-1]["top1"][0], abs=0.01)
    assert history[-1]["chain"] > history[0]["chain"] and is_peagle(str(second)) and not is_peagle(str(first))
    with pytest.raises(InputError, match=r"layers: expected 2, as .*second has, or none, got 3"):
        train_drafter(str(target), [data], tmp_path / "third", **more | {"start": str(second), "layers": 3})


@pytest.mark.parametrize("norm_output", [False, True])
def test_a_head_of_one_pass_feeds_nothing_back(norm_output, target, data, tmp_path):
    """So it goes on from a head that does not say what is fed back."""
    first = save_eagle3(tmp_path / "first", norm_output=norm_output)
    given = GIVEN | {"kind": "p-eagle", "start": str(first), "epochs": 1}
    assert is_peagle(str(train_drafter(str(target), [data], tmp_path / "head", **given)))


@pytest.mark.parametrize("flag", FLAGS)
def test_a_head_keeps_the_architecture_that_it_goes_on_from(flag, target, data, tmp_path):
    first = save_eagle3(tmp_path / "first", **{flag: True})
    head = train_drafter(str(target), [data], tmp_path / "head", **GIVEN | {"start": str(first), "epochs": 1})
    source = load_source(str(target), "float32", "cpu")
    before, after = (eagle3_file.read_head(str(folder), source)[0].config for folder in (first, head))
    assert [getattr(after, name) for name in FLAGS] == [getattr(before, name) for name in FLAGS]
    assert getattr(after, flag)


@pytest.mark.parametrize("kind", ["eagle3", "p-eagle"])
def test_a_head_keeps_the_window_that_it_goes_on_from(kind, target, data, tmp_path):
    first = save_eagle3(tmp_path / "first", layer_types=["sliding_attention"], sliding_window=40)
    given = GIVEN | {"kind": kind, "start": str(first), "epochs": 1, "layers": None if kind == "eagle3" else 2}
    head = train_drafter(str(target), [data], tmp_path / "head", **given)
    config = json.loads((head / "config.json").read_text())
    assert config["sliding_window"] == 40
    assert config["layer_types"] == ["sliding_attention", "full_attention"][: given["layers"] or 1]
    with pytest.raises(
        InputError, match=r"sliding_window: expected none, or one of at least width \+ levels tokens, 42"
    ):
        train_drafter(str(target), [data], tmp_path / "wider", **given | {"width": 40})


def test_a_target_that_says_nothing_of_an_inner_size_has_a_head(data, tmp_path):
    folder = save_model(tmp_path / "gpt2", "GPT2")
    head = train_drafter(str(folder), [data], tmp_path / "head", **GIVEN | {"epochs": 1})
    assert json.loads((head / "config.json").read_text())["intermediate_size"] == 4 * 48


def test_texts_without_tokens_are_left_out(target, data, tmp_path):
    more = tmp_path / "more.jsonl"
    more.write_text('{"token_ids": []}\n' * 30)
    head = train_drafter(str(target), [data, str(more)], tmp_path / "head", **GIVEN | {"epochs": 1})
    assert (head / "model.safetensors").is_file()


def test_an_output_that_cannot_be_written_is_refused_at_once(target, tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    for output in (tmp_path / "file", tmp_path / "file" / "head"):
        assert main(["train-drafter", str(target), "no/data", "-o", str(output)]) == 2
        assert f"output: expected a folder that can be written, got {output}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--device", "tpu"], "device: expected one of cpu, cuda, got tpu"),
        (["--device", "cuda:1"], "device: expected one of cpu, cuda, got cuda:1"),
        (["--dtype", "fp16"], "dtype: expected one of bfloat16, float32, float16, got fp16"),
    ],
)
@pytest.mark.parametrize("command", ["train-drafter", "collect"])
def test_where_no_model_can_be_loaded_is_one_line(command, given, message, target, data, tmp_path, capsys):
    data = ["--prompts", data] if command == "collect" else [data]
    assert main([command, str(target), *data, "-o", str(tmp_path / "out"), *given]) == 2
    assert message in capsys.readouterr().err


def test_a_start_that_does_not_fit_is_refused(target, data, collected, tmp_path):
    head = train_drafter(str(target), [data], tmp_path / "head", **GIVEN | {"epochs": 1})
    tensors, config = load_file(head / "model.safetensors"), json.loads((head / "config.json").read_text())
    given = GIVEN | {"start": str(head)}
    (head / "config.json").write_text(json.dumps(config | {"eagle_aux_hidden_state_layer_ids": [1, 1, 0]}))
    with pytest.raises(InputError, match="hidden states of the same layers"):
        train_drafter(str(target), [str(collected)], tmp_path / "other", **given)
    (head / "config.json").write_text(json.dumps(config))
    save_file(tensors | {"embed_tokens.weight": torch.zeros(320, 48)}, head / "model.safetensors")
    with pytest.raises(InputError, match=r"start: .*head: expected a head that reads the target's embeddings"):
        train_drafter(str(target), [data], tmp_path / "other", **given)
    wider = save_eagle3(tmp_path / "wider", hidden_size=64, target_hidden_size=48)
    with pytest.raises(BuildError, match=r"wider: hidden_size: expected 48, that of the embeddings, got 64"):
        train_drafter(str(target), [data], tmp_path / "other", **GIVEN | {"start": str(wider)})
    open_ = save_eagle3(tmp_path / "open", norm_output=True)
    with pytest.raises(InputError, match=r"open: norm_feedback: expected true or false in its config.json"):
        train_drafter(str(target), [data], tmp_path / "other", **GIVEN | {"start": str(open_)})
    for kind, words in (("eagle3", "an EAGLE-3 head"), ("p-eagle", "a P-EAGLE or"), ("block", "a block drafter")):
        with pytest.raises(InputError, match=rf"start: expected {words} .*, got .*nowhere"):
            train_drafter(
                str(target), [data], tmp_path / kind, **GIVEN | {"kind": kind, "start": str(tmp_path / "nowhere")}
            )


UNFIT = [  # a published block drafter, its own tables, and what cannot be trained of it
    (
        ZLAB,
        [],
        "no draft vocabulary of its own and slots that see those behind them and a first slot that says nothing",
    ),
    (DSPARK, D2T, "embeddings of its own and .* and layers that see a part of the text"),
    (DFLASH2, [], ".*convolutions and .* and scaled or capped logits and a correction that is no table of bigrams"),
]


@pytest.mark.parametrize(("config", "tables", "words"), UNFIT, ids=["dflash", "dspark", "dflash2"])
def test_a_block_drafter_that_cannot_be_trained_here_is_refused(config, tables, words, target, data, tmp_path):
    folder = save_block(tmp_path / "start", config, block_tensors(config, tables))
    with pytest.raises(InputError, match=f"start: .*start: expected a block drafter as .* got one with {words}"):
        train_drafter(str(target), [data], tmp_path / "out", **GIVEN | {"kind": "block", "start": str(folder)})


def test_a_block_drafter_of_fewer_levels_is_refused(target, data, tmp_path):
    first = train_drafter(str(target), [data], tmp_path / "first", **GIVEN | {"kind": "block", "epochs": 1})
    with pytest.raises(InputError, match=r"of at least 3 levels, got one with blocks of 2 slots"):
        more = GIVEN | {"kind": "block", "start": str(first), "levels": 3}
        train_drafter(str(target), [data], tmp_path / "more", **more)


def test_a_checkpoint_of_another_run_is_refused(target, data, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "write_history", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        train_drafter(str(target), [data], tmp_path, **GIVEN)
    with pytest.raises(InputError, match=r"epochs: expected 2, as the run began, got 3; remove .*checkpoint.pt"):
        train_drafter(str(target), [data], tmp_path, **GIVEN | {"epochs": 3})
    (tmp_path / "checkpoint.pt").write_bytes(b"nonsense")
    with pytest.raises(InputError, match="expected a checkpoint"):
        train_drafter(str(target), [data], tmp_path, **GIVEN)


def test_a_loss_that_is_no_number_stops_and_keeps_the_checkpoint(target, data, tmp_path, monkeypatch):
    real = train.unroll
    calls = []

    def broken(*given):
        calls.append(1)
        return real(*given) * (float("nan") if len(calls) > 40 else 1.0)

    monkeypatch.setattr(train, "unroll", broken)
    with pytest.raises(InputError, match=r"loss: expected a number, got nan at step \d+; the last checkpoint is kept"):
        train_drafter(str(target), [data], tmp_path, **GIVEN)
    assert (tmp_path / "checkpoint.pt").is_file()


@pytest.fixture(scope="module")
def collected(target, data, tmp_path_factory):
    """The same text as a data directory, with hidden states."""
    options = CollectOptions(prompts=data, hidden_states=True, dtype="float32")
    return str(collect(str(target), tmp_path_factory.mktemp("collected"), options))


def test_what_the_target_wrote_is_counted_from_tokens_alone(target, data, collected, monkeypatch):
    written = Counter(token for tokens, prompt, *_ in Data(collected) for token in tokens[prompt:].tolist())
    monkeypatch.setattr(Data, "__getitem__", None)  # reads hidden states
    source = load_source(str(target), "float32", "cpu")
    for file in (data, collected):
        counts = train.count_written([train.open_data(file, source)], 320).tolist()
        assert counts == [written[token] for token in range(320)] and sum(counts) == 64 * 40


def test_the_tokens_reported_are_those_of_the_manifest_and_the_examples(target, collected):
    source = load_source(str(target), "float32", "cpu")
    training = train.Training(source, [train.open_data(collected, source)], train.TrainOptions(**GIVEN))
    assert training.tokens == sum(shard.tokens for shard in read_manifest(collected).shards)
    assert training.tokens == sum(len(example.tokens) for example in Data(collected)) == 64 * 42


def test_kept_hidden_states_train_as_fresh_ones_do(target, data, collected, tmp_path):
    heads = [
        train_drafter(str(target), [file], tmp_path / name, **GIVEN)
        for file, name in ((data, "fresh"), (collected, "kept"))
    ]
    fresh, kept = (load_file(head / "model.safetensors") for head in heads)
    assert torch.equal(fresh["d2t"], kept["d2t"])
    fresh, kept = (map(json.loads, (head / "history.jsonl").read_text().splitlines()) for head in heads)
    for one, other in zip(fresh, kept, strict=True):
        assert one["top1"] == pytest.approx(other["top1"], abs=0.02)
        assert one["loss"] == pytest.approx(other["loss"], rel=0.01)


BAD = [
    ({"levels": 0}, "levels: expected 1 to 16, got 0"),
    ({"kind": "medusa"}, "kind: expected one of eagle3, p-eagle, block, got medusa"),
    ({"layers": 2}, "layers: expected none with kind eagle3, got 2"),
    ({"markov_rank": 8}, "markov_rank: expected none with kind eagle3, got 8"),
    (
        {"kind": "block", "start": "x", "layers": 2},
        "expected none with kind block and a start, whose sizes",
    ),
    ({"kind": "p-eagle", "start": "x", "intermediate_size": 96}, "intermediate_size: expected none with kind p-eagle"),
    ({"width": 8, "levels": 8}, "width: expected more than the 8 levels, got 8"),
    ({"learning_rate": 2.0}, "learning_rate and held_out: expected between 0 and 1"),
    ({"batch": 4096}, "data: expected over .* tokens to learn from"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=["-".join(change) for change, _ in BAD])
def test_bad_options_are_refused(change, message, target, data, tmp_path):
    with pytest.raises(InputError, match=message):
        train_drafter(str(target), [data], tmp_path / "head", **GIVEN | change)


def test_bad_data_is_one_line(target, tmp_path, capsys):
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"token_ids": [5, 9999]}) + "\n")
    command = ["train-drafter", str(target), str(other), "-o", str(tmp_path / "head"), "--dtype", "float32"]
    assert main(command) == 2
    assert "expected token ids from 0 to 319, got 9999: ids of another tokenizer?" in capsys.readouterr().err
    other.write_text("")
    assert main(command) == 2
    assert "data: expected" in capsys.readouterr().err


def test_a_target_with_capped_logits_is_refused(data, tmp_path):
    folder = save_model(tmp_path / "gemma", "Gemma2", final_logit_softcapping=1.0)
    with pytest.raises(InputError, match="expected logits straight from its output layer"):
        train_drafter(str(folder), [data], tmp_path / "head", **GIVEN)


def test_a_target_with_biased_logits_is_refused(data, tmp_path):
    sizes = {"vocab_size": 320, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3}
    model = PhiForCausalLM(PhiConfig(**sizes, num_attention_heads=4))
    torch.nn.init.normal_(model.lm_head.bias)
    model.save_pretrained(folder := tmp_path / "phi")
    with pytest.raises(InputError, match="straight from its output layer, got scaled, capped or biased"):
        train_drafter(str(folder), [data], tmp_path / "head", **GIVEN)


def test_a_head_of_another_target_is_refused_and_its_own_finds_it(target, data, tmp_path, monkeypatch):
    head = train_drafter(str(target), [data], tmp_path / "data" / "head", **GIVEN | {"epochs": 1})
    monkeypatch.setattr(eagle3_file, "SHIPPED", tmp_path / "data")
    assert eagle3_file.shipped_head(load_source(str(target), "float32", "cpu")) == head
    other = save_model(tmp_path / "other", num_hidden_layers=4)
    assert eagle3_file.shipped_head(load_source(str(other), "float32", "cpu")) is None
    with pytest.raises(BuildError, match="num_hidden_layers: expected the target's 4, got 3; train a head for"):
        specstep.eager(str(other), drafter=str(head), dtype="float32", max_seq_len=96)
