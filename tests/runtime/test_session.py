"""Rows of a session: what one leaves behind never reaches the next, whatever it was."""

import dataclasses
import functools

import pytest
import specstep
import torch
from fake_session import POISON, FakeSession, PrefillFailedError
from models import save_eagle3, save_model, tiny_model, tiny_tokenizer
from specstep.report import CHEAP, NOTHING, WHOLE
from specstep.runtime.cuda_graphs import CudaGraphs
from specstep.runtime.inductor.torch_session import ALIGNMENT

BAD, SLOT_STEP = {"nan": 7, "inf": 11}, 64  # tokens whose embeddings are that


def poisoned(folder):
    """A tiny Llama of which two tokens make every number that depends on them NaN."""
    model = tiny_model("Llama")
    for value, token in BAD.items():
        model.get_input_embeddings().weight.data[token] = float(value)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """The session of each backend that runs here: torch with a draft model and with a head, ONNX Runtime."""
    folder = poisoned(tmp_path_factory.mktemp("poisoned"))
    head = save_eagle3(tmp_path_factory.mktemp("head"))
    small = save_model(tmp_path_factory.mktemp("small"), seed=1, num_hidden_layers=2, hidden_size=32, tokenizer=True)
    options = {"dtype": "float32", "max_batch": 2, "max_seq_len": 128, "prefill_chunk": 16}

    def onnx():
        engine = tmp_path_factory.mktemp("engines") / "onnx"
        return specstep.load(specstep.build(str(folder), engine, drafter="none", backend="onnx", **options))

    return {
        "eagle3": functools.cache(lambda: specstep.eager(str(folder), drafter=str(head), **options)),
        "draft model": functools.cache(lambda: specstep.eager(str(folder), drafter=str(small), nodes=3, **options)),
        "onnx": functools.cache(onnx),
    }


@pytest.mark.parametrize("bad", list(BAD.values()), ids=list(BAD))
@pytest.mark.parametrize("name", ["eagle3", "draft model", pytest.param("onnx", marks=pytest.mark.slow)])
def test_numbers_that_are_not_finite_stay_with_their_request(name, bad, engines):
    engine, prompts = engines[name](), [[5, 6], list(range(20, 60))]
    expected = [engine.generate(prompt, 24, ignore_eos=True).token_ids for prompt in prompts]
    for prompt, wanted in zip(prompts, expected, strict=True):
        engine.generate([[5, bad, 8] * 12, [bad]], 30, ignore_eos=True)
        row = engine.session.admit([5, bad, 8] * 12, 64, [])
        long = engine.session.read(2, SLOT_STEP)["keys.1"][row]  # heads x slots x width
        engine.session.release(row)
        assert long[:, 0].any() and not long[:, 1].any(), "what is not finite is kept as 0"
        assert engine.generate(prompt, 24, ignore_eos=True).token_ids == wanted
    beside = engine.run([engine.request([5, bad, 8] * 12, 40, ignore_eos=True)])
    next(beside)  # it runs in row 0 while the others follow each other in row 1
    assert [engine.generate(prompt, 24, ignore_eos=True).token_ids for prompt in prompts] == expected
    beside.cancel()


@pytest.mark.parametrize("name", ["eagle3", "draft model"])
def test_what_a_step_is_given_begins_where_a_gpu_loads_16_bytes_at_once(name, engines, monkeypatch):
    """A program for a GPU would copy it in each step."""
    session, begins, caught_up = engines[name]().session, set(), set()
    program, place = session.step_program, session.spec.step.inputs.index("catch_up")

    def noted(inputs):
        begins.update(tensor.data_ptr() % ALIGNMENT for tensor in inputs)
        caught_up.add(bool((inputs[place] >= 0).all()))
        return program(inputs)

    monkeypatch.setattr(session, "step_program", noted)
    engines[name]().generate([[5, 6, 8] * 9, [9]], 24, ignore_eos=True)
    assert begins == {0} and True in caught_up


def test_a_failed_prefill_leaves_no_length_to_pay_for():
    session = FakeSession(2)
    with pytest.raises(PrefillFailedError):
        session.admit([*range(20), POISON, 1], 60, [])
    assert session.free_rows == 2 and session.lengths == [0, 0] and session.next_size() == (1, SLOT_STEP)


def test_no_row_is_taken_twice():
    session = FakeSession(2)
    assert [session.admit([5], 9, []), session.admit([6], 9, [])] == [0, 1]
    with pytest.raises(RuntimeError, match="expected a free row, got 2 rows in use"):
        session.admit([7], 9, [])
    session.release(0)
    assert session.admit([7], 9, []) == 0


def test_what_cannot_be_captured_runs_without_a_graph(monkeypatch, caplog):
    """A graph that holds half of a step must never run."""
    from specstep.runtime.inductor.cuda_graph import graph_capture

    calls, failing = [], []

    class Graph:
        def replay(self):
            calls.append("replay")

    class Capture:
        def __init__(self, graph, **options):
            assert options["capture_error_mode"] == "thread_local"

        def __enter__(self):
            return self

        def __exit__(self, *_):
            if failing:
                raise RuntimeError("operation not permitted")

    for name, value in (("CUDAGraph", Graph), ("graph", Capture), ("graph_pool_handle", object)):
        monkeypatch.setattr(torch.cuda, name, value)
    graphs = CudaGraphs(graph_capture(), (RuntimeError,))
    steps = [graphs.of(lambda: calls.append("run") or torch.zeros(1)) for _ in range(3)]
    for _ in range(3):
        steps[0]()
    assert calls == ["run", "run", "replay", "replay"], "once for real, once recorded"
    calls.clear()
    failing.append(True)
    for step in steps[1:]:
        for _ in range(2):
            step()
    assert calls == ["run"] * 5, "a capture was tried once"
    (record,) = caplog.records
    assert record.getMessage() == (
        "steps run without CUDA graphs, and slower: a capture failed: operation not permitted"
    )
    calls.clear()
    steps[0]()
    assert calls == ["replay"]


def test_onnx_caches_are_not_copied_twice_by_an_admission(onnx_folder):
    """The step after a prefill may need more slots than the prompt does: the caches grow once for both."""
    engine = specstep.load(onnx_folder)
    session, sizes = engine.session, []
    move = session._use_slots

    def count(slots):
        if slots != session._slots_bound:
            sizes.append(slots)
        move(slots)

    session._use_slots = count
    session.admit([40 + index % 9 for index in range(12)], 100, [])
    session.step()
    assert sizes == [64]
    session.admit([40 + index % 9 for index in range(62)], 100, [])
    session.step()
    assert sizes == [64, 128]


def test_a_drafter_with_caches_catches_up_on_what_it_paused_for_but_not_on_what_was_skipped():
    session, sizes = FakeSession(1), []
    session.spec, session._gaps = dataclasses.replace(session.spec, plain=session.spec.step, catch_up=20), True
    replay = session.replay
    session.replay = lambda *size: (sizes.append(size[-2:]), replay(*size))[1]
    row = session.admit([3, 4, 5], 60, [])
    for draft in (CHEAP, CHEAP, WHOLE):
        session.step(0, draft)
    assert session.processed(row) == session.lengths[row]
    for draft in (NOTHING, NOTHING, WHOLE, CHEAP, WHOLE):
        session.step(0, draft)
    plain = (None, 0)
    assert sizes == [(0, 0), (0, 0), (0, 4), plain, plain, (0, 1), (0, 0), (0, 2)], "a prompt's last token waits, too"
    assert session.processed(row) < session.lengths[row], "its caches have a gap for good"
