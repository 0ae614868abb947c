"""The tables of speed on a GPU, on a CPU: that they are written, whole and consistent."""

import json
import sys
from pathlib import Path

import pytest
import specstep
import torch

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))

import bench_floor  # noqa: E402
import gpu_table  # noqa: E402
from on_gpu import attention, clock, ours, page, peers, products, shapes  # noqa: E402

CELL = {"model": "m", "tree": "t", "nodes": 16, "batch": 4, "cache": 100, "step_ms": 2.0, "verify_ms": 1.5}
CELL |= {"draft_share": 0.25, "host_us": 40.0}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A random model and a head for it."""
    folder = tmp_path_factory.mktemp("tiny")
    model = shapes.save_random_model(folder / "model", "tiny", "cpu", torch.float32)
    return model, shapes.save_random_head(folder / "head", "tiny")


def eager(tiny, tree, **options):
    model, head = tiny
    sizes = {"dtype": "float32", "max_batch": 2, "max_seq_len": 192}
    built = sizes | {"forced_acceptance": ours.FORCED} | shapes.TREES[tree] | options
    return specstep.eager(str(model.folder), drafter=str(head), **built)


@pytest.mark.parametrize("tree", shapes.TREES)
def test_a_cell_accepts_what_it_is_told_to_and_adds_up(tree, tiny):
    cell = ours.measure_cell(eager(tiny, tree).session, batch=2, tokens=96, steps=3)
    assert cell["tokens_per_step"] == ours.TOKENS[-1]
    assert all(cell[name] > 0 for name in ("step_ms", "verify_ms", "device_ms", "host_us"))
    assert cell["draft_share"] == pytest.approx(1 - cell["verify_ms"] / cell["step_ms"])


def test_rows_have_the_tokens_that_were_asked_for_and_stand_still(tiny):
    session = eager(tiny, "chain 4").session
    with ours.Rows(session, 2, 96, room=1):
        assert session.lengths == [96, 96]
        assert all(cache[:2, :, :96].abs().amin() > 0 for cache in session.caches.values())
        for _ in range(4):
            session.step()
        assert session.lengths == [97, 97]
    assert session.free_rows == 2


def test_the_bytes_that_a_pass_reads(tiny):
    sizes = shapes.MODELS["tiny"]
    hidden, inner, layers = sizes["hidden_size"], sizes["intermediate_size"], sizes["num_hidden_layers"]
    layer = hidden * (2 * hidden + 2 * hidden // 2) + 3 * hidden * inner + 2 * hidden
    found = tiny[0].sizes
    assert found["weight_bytes"] == 4 * (layers * layer + hidden + sizes["vocab_size"] * hidden)
    assert found["cache_bytes"] == 4 * 2 * layers * hidden // 2
    tied = tiny[0].load("cpu")
    tied.lm_head.weight = tied.model.embed_tokens.weight
    assert shapes.weight_bytes(tied) == found["weight_bytes"]
    assert shapes.weight_bytes(shapes.new_model("llama-3.2-1b", "meta", torch.bfloat16)) == 2 * 1_235_814_400


def test_ratios_and_goals():
    cell = page.with_ratios(CELL, weight_bytes=1000, cache_bytes=10, bandwidth=5e6)
    assert cell["floor_ms"] == pytest.approx((1000 + 4 * 100 * 10) / 5e6 * 1e3) == pytest.approx(1.0)
    assert (cell["step_over_floor"], cell["verify_over_floor"]) == (pytest.approx(2.0), pytest.approx(1.5))
    assert cell["tokens_s"] == {tokens: pytest.approx(4 * tokens / 2e-3) for tokens in (1, 2, 3, 4)}
    at = {"model": "m", "batch": 4, "cache": 100}
    found = [at | {"peer": "generate", "token_ms": 0.1}, at | {"peer": "torch.compile", "token_ms": 3.0}]
    found += [at | {"peer": "generate, compiled", "token_ms": 2.0}, at | {"cache": 7, "peer": "torch.compile"}]
    assert page.over_compiled(cell, found, 3) == pytest.approx(3.0)  # beside the faster of the compiled ones
    assert page.over_compiled(cell | {"batch": 1}, found, 3) is None
    single = page.with_ratios(CELL | {"batch": 1, "model": "llama-3-8b"}, 4000, 10, 5e6)
    lines = page.goals({"cells": [cell, single], "peers": []})
    assert "llama-3-8b: verify 16 nodes over floor, at most 1.25: 1.50" in lines
    assert "share of the draft, below 0.2: 0.25" in lines and lines[-1].endswith("at least 2.5: not measured")
    whole = page.page({"cells": [cell], "peers": [*found, at | {"peer": "generate", "cache": 7, "error": "E"}]})
    assert "| m | t | 4 | 100 | 2.00 | 1.50 | 1.00 | 1.50 | 25% | 40 | 2000 | 4000 | 6000 | 8000 | 3.00 |" in whole
    assert "| m | 4 | 7 | failed |" in whole and "| m | 4 | 100 | 40000 | 2000 | 1333 |" in whole


def test_a_graph_is_timed_by_the_device(monkeypatch):
    """The host's launch is hidden behind work that is there already; the clock starts ahead of the graph."""
    calls = []

    class Event:
        def __init__(self, enable_timing):
            calls.append("event")

        def record(self):
            calls.append("record")

        def synchronize(self):
            calls.append("wait")

        def elapsed_time(self, other):
            return 2.5

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: calls.append("work"), raising=False)
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: calls.append("replay"))

    class Session:
        class spec:
            device = "cuda"

    with clock.programs_timed(Session()) as taken:
        torch.cuda.CUDAGraph.replay(None)
    torch.cuda.CUDAGraph.replay(None)
    assert taken == [2.5e-3]
    assert calls == ["event", "event", "work", "record", "replay", "record", "wait", "replay"]


def test_contenders_of_attention_agree_and_one_that_does_not_is_an_error(monkeypatch):
    monkeypatch.setattr(attention, "flex_attention", lambda q, k, v, **_: attention_of_all(q, k, v))
    monkeypatch.setattr(attention.torch, "compile", lambda function, **_: function)
    sizes = {"batches": [2], "nodes": [5], "lengths": [70]}
    with pytest.raises(RuntimeError, match=r"flex: expected what ours says within 0\.0001"):
        next(attention.measure_attention("tiny", "cpu", torch.float32, 1e9, **sizes))


def attention_of_all(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16])
def test_attention_is_measured_against_its_floor(dtype):
    [found] = attention.measure_attention("tiny", "cpu", dtype, 1e9, batches=[2], nodes=[17], lengths=[70])
    assert found["floor_us"] == pytest.approx(2 * 2 * 2 * 87 * 16 * dtype.itemsize / 1e9 * 1e6)
    assert all(found[f"{name}_us"] > 0 for name in ("ours", "sdpa", "flex"))
    assert found["ours_over_floor"] == pytest.approx(found["ours_us"] / found["floor_us"])


def test_products_are_measured_against_their_floors():
    found = list(products.measure_products("tiny", "cpu", torch.float32, 1e9, counts=[1, 5]))
    assert [(each["product"], each["rows"]) for each in found][:3] == [("q, k, v", 1), ("q, k, v", 5), ("o", 1)]
    assert len(found) == 2 * len(products.products("tiny"))
    assert found[0]["floor_us"] == pytest.approx(64 * (64 + 32 + 32) * 4 / 1e9 * 1e6)
    assert all(each["whole_us"] > 0 and each["apart_us"] > 0 for each in found)


def test_nothing_is_begun_when_time_is_over(tiny, tmp_path):
    model = tiny[0].load("cpu")
    deadline = clock.Deadline(-1)
    assert list(peers.measure_peers(model, [1], [8], deadline, print)) == [] and deadline.refused
    out = tmp_path / "floor.json"
    assert bench_floor.main(["--device", "cpu", "--models", "tiny", "--seconds", "-1", "--out", str(out)]) == 1


def test_a_peer_that_fails_is_said_so_and_the_others_go_on(tiny, monkeypatch):
    def broken(*_):
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr(peers, "PEERS", {"broken": broken, "generate": peers.generate})
    model = tiny[0].load("cpu")
    first, second = peers.measure_peers(model, [2], [12], clock.Deadline(1e9), print)
    assert first == {"peer": "broken", "batch": 2, "cache": 12, "error": "RuntimeError: first line"}
    assert second["token_ms"] > 0


@pytest.mark.parametrize("module", [gpu_table, bench_floor])
def test_without_a_gpu_nothing_is_measured(module, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert module.main(["--out", str(tmp_path / "table.json")]) == 2
    assert "expected an NVIDIA GPU" in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_run_from_end_to_end(tmp_path, capsys):
    out, kept = tmp_path / "table.json", tmp_path / "kept"
    command = ["--device", "cpu", "--models", "tiny", "--trees", "chain 4", "--batches", "1", "2", "--lengths", "64"]
    command += ["--steps", "5", "--threads", "1", "--keep", str(kept), "--out", str(out)]
    assert gpu_table.main([*command, "--build-only"]) == 0 and not out.exists()
    built = (kept / "tiny" / "chain-4" / "manifest.json").stat().st_mtime_ns
    assert gpu_table.main(command) == 0
    assert (kept / "tiny" / "chain-4" / "manifest.json").stat().st_mtime_ns == built
    result = json.loads(out.read_text())
    assert [(cell["tree"], cell["batch"]) for cell in result["cells"]] == [("chain 4", 1), ("chain 4", 2)]
    model = result["models"]["tiny"]
    for cell in result["cells"]:
        assert cell["tokens_per_step"] == 4 and cell["step_ms"] > 0 and cell["host_us"] > 0 and cell["build_s"] > 0
        assert cell["floor_bytes"] == model["weight_bytes"] + cell["batch"] * 64 * model["cache_bytes"]
        assert cell["floor_ms"] == pytest.approx(cell["floor_bytes"] / model["bandwidth"] * 1e3)
        assert cell["tokens_s"]["3"] == pytest.approx(3 * cell["batch"] / cell["step_ms"] * 1e3)
    assert [(peer["batch"], peer["peer"]) for peer in result["peers"]] == [(b, p) for b in (1, 2) for p in peers.PEERS]
    assert all(peer["token_ms"] > 0 for peer in result["peers"]) and not result["errors"]
    assert result["left_out"] is None and "Goals:" in capsys.readouterr().out
