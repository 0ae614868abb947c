"""`bench/quality.py`: losses and differences by their definition, our kernels in transformers' code, the same text for
all."""

import json
import sys
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))

import quality  # noqa: E402
from models import save_model, tiny_model  # noqa: E402
from specstep.compile.source import Source  # noqa: E402
from specstep.errors import InputError  # noqa: E402
from specstep.kernels.linear.quantize import quantize_int4, quantize_int8  # noqa: E402
from teacher_forcing.ours import as_built, measure  # noqa: E402
from teacher_forcing.scores import Scores, difference, joined, score  # noqa: E402
from teacher_forcing.sequences import read_sequences  # noqa: E402

IDS = [[3, 14, 15, 92, 65, 35, 89, 79, 32, 38], [46, 26, 43, 38, 32, 79, 50, 28, 84]]


def silent(line):
    assert "warning" not in line


def test_losses_by_their_definition():
    logits, ids = torch.randn(300, 50, dtype=torch.float64), torch.randint(50, (300,)).tolist()
    found = score(logits, ids)
    expected = -logits.log_softmax(-1)[torch.arange(299), ids[1:]]
    torch.testing.assert_close(found.losses, expected, rtol=0, atol=1e-5)
    assert found.greedy.tolist() == logits[:-1].argmax(-1).tolist()
    assert joined([found, found]).perplexity == pytest.approx(float(expected.mean().exp()), rel=1e-5)


def test_a_difference_is_taken_token_by_token():
    losses = torch.rand(1000, dtype=torch.float64) * 5
    worse = losses + 0.01 + 0.1 * torch.tensor([1.0, -1.0]).repeat(500)
    greedy = torch.arange(1000)
    found = difference(Scores(worse, greedy), Scores(losses, greedy.where(greedy % 10 > 0, -1)))
    assert found.change == pytest.approx(2.718281828**0.01 - 1) and found.agreement == 0.9
    assert found.error == pytest.approx(0.1 / 1000**0.5, rel=0.02)  # not that of the losses, which vary by 1.4


@pytest.mark.parametrize("tied", (True, False))
@pytest.mark.parametrize("weights", ("bfloat16", "int8", "int4"))
def test_ours_computes_with_the_weights_of_a_build(weights, tied):
    """The same as a model that holds what the packed weights stand for, but for the rounding of activations."""
    model = tiny_model("Llama", tie_word_embeddings=tied).bfloat16().eval()
    source = Source("tiny", model, None)
    found = measure(source, as_built(source, "bfloat16", weights), IDS, silent)
    wide = tiny_model("Llama", tie_word_embeddings=tied).bfloat16().eval()
    for module in wide.modules():
        if isinstance(module, torch.nn.Linear) and weights != "bfloat16":
            head = module.weight.shape[0] == wide.config.vocab_size
            quantize = quantize_int8 if weights == "int8" or head else quantize_int4
            module.weight.data = quantize(module.weight.data).values(module.weight.shape[1]).bfloat16()
    if tied:
        wide.model.embed_tokens.weight = wide.lm_head.weight
    with torch.inference_mode():
        expected = joined([score(wide(torch.tensor([ids])).logits[0], ids) for ids in IDS])
    torch.testing.assert_close(found.scores.losses, expected.losses, rtol=0.05, atol=0.2)
    sizes = {"bfloat16": 2, "int8": 34 / 32, "int4": 18 / 32}
    assert found.size < sum(p.numel() for p in model.parameters()) * 2.2
    layers = sum(p.numel() for p in model.model.layers.parameters())
    assert found.size > layers * sizes[weights]


def test_what_is_not_packed_is_said():
    model = tiny_model("GPT2").bfloat16().eval()
    source, lines = Source("tiny", model, None), []
    measure(source, as_built(source, "bfloat16", "int8"), IDS, lines.append)
    assert any("warning" in line and "keep their dtype" in line for line in lines)


class Letters:
    """A token for each character, and one that begins every prompt, if there is one."""

    def __init__(self, begin=""):
        self.begin = begin

    def __call__(self, text, add_special_tokens=True, verbose=True):
        return {"input_ids": [ord(letter) for letter in self.begin * add_special_tokens + text]}


def test_text_is_cut_into_sequences(tmp_path):
    plain, lines = tmp_path / "text.txt", tmp_path / "text.jsonl"
    plain.write_text("a" * 45)
    assert [len(ids) for ids in read_sequences(plain, Letters(), 20, 1000)] == [20, 20]  # 5 are too few
    lines.write_text(json.dumps({"turns": ["abcdefgh", "ij"]}) + "\n\n" + json.dumps({"prompt": "k" * 30}) + "\n")
    found = read_sequences(lines, Letters(), 20, 1000)
    assert ["".join(map(chr, ids)) for ids in found] == ["abcdefgh\n\nij", "k" * 20, "k" * 10]
    begun = read_sequences(lines, Letters(">"), 20, 1000)
    assert ["".join(map(chr, ids)) for ids in begun] == [">abcdefgh\n\nij", ">" + "k" * 19, ">" + "k" * 11]
    plain.write_text("a" * 1000)
    assert len(read_sequences(plain, Letters(), 20, 200)) == 10
    for bad in ("", "not JSON", '{"other": 1}'):
        lines.write_text(bad)
        with pytest.raises(InputError, match="text: "):
            read_sequences(lines, Letters(), 20, 1000)


def test_a_run_from_end_to_end(tmp_path, capsys, monkeypatch):
    """On a model that is no GGUF file: llama.cpp is left out with a line."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    threads = torch.get_num_threads()
    model = save_model(tmp_path / "model", tokenizer=True)
    arguments = ["--model", str(model), "--tokens", "60", "--length", "20", "--finer", "down_proj", "--threads", "1"]
    assert quality.main([*arguments, "--out", str(tmp_path / "found")]) == 0
    torch.set_num_threads(threads)
    printed = capsys.readouterr()
    assert "| specstep int8 |" in printed.out and "| specstep int4, int8 in down_proj |" in printed.out
    assert "llama.cpp q4_0 is left out" in printed.err
    found = json.loads((tmp_path / "found.json").read_text())
    sizes = {name: variant["bytes"] for name, variant in found["variants"].items()}
    assert sizes["specstep int4"] < sizes["specstep int4, int8 in down_proj"] < sizes["specstep int8"]
    assert (tmp_path / "found.md").read_text() == printed.out[:-1]
    assert quality.main(["--text", str(tmp_path / "none.txt"), "--model", str(model)]) == 2
