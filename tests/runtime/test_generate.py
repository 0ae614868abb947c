"""The generation loop and its limits, on a compiled engine."""

import subprocess
import sys

import pytest
import specstep


@pytest.fixture(scope="module")
def engine(engine_folder):
    return specstep.load(engine_folder)


def test_runtime_imports_neither_compiler_nor_transformers(engine_folder):
    program = f"""
import sys, specstep
assert "torch" not in sys.modules, "import specstep is not light"
engine = specstep.load({str(engine_folder)!r})
engine.generate([5, 6, 7], 4)
heavy = [m for m in sys.modules if m.split(".")[0] in ("transformers", "onnx")]
names = ("torch._dynamo", "torch._inductor", "specstep.compile", "specstep.graphs")
heavy += [m for m in sys.modules if m.startswith(names)]
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_stream_adds_up_to_the_text(engine):
    pieces = list(engine.stream("hello", 30, ignore_eos=True))
    assert "".join(pieces) == engine.generate("hello", 30, ignore_eos=True).text


def test_leaving_a_stream_early_frees_its_row(engine):
    expected = engine.generate([7, 8, 9], 20).token_ids
    for _ in range(3):
        next(iter(engine.stream("hello", 30, ignore_eos=True)))
    assert engine.generate([[7, 8, 9]] * 3, 20)[2].token_ids == expected


def test_stop_ids_and_reasons(engine):
    free = engine.generate([40, 41], 30, ignore_eos=True)
    assert free.finish_reason == "length" and len(free.token_ids) == 30
    stop = free.token_ids[9]
    cut = engine.generate([40, 41], 30, ignore_eos=True, stop_ids=[stop])
    assert cut.finish_reason == "stop"
    assert cut.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]


def test_statistics_count_what_happened(engine):
    result = engine.generate([40, 41], 30, ignore_eos=True)
    assert result.stats["new_tokens"] == 30
    assert result.stats["tokens_per_step"] == round(30 / result.stats["steps"], 3)
    assert result.prompt_token_ids == [40, 41]


def test_no_prompts_is_no_work(engine):
    assert engine.generate([]) == []


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("", {}, "expected at least one token"),
        ([[]], {}, "prompt 0: expected at least one token"),
        ([[2] * 192], {}, "expected at most 191 tokens .max_seq_len 192., got 192"),
        ([3, 320], {}, "expected integers from 0 to 319, got 320"),
        ([3, -1], {}, "got -1"),
        ([3, 2.5], {}, "got 2.5"),
        ([3], {"max_new_tokens": 0}, "max_new_tokens: expected an integer of at least 1, got 0"),
        ([3], {"stop_ids": list(range(20))}, "stop_ids: expected at most 16"),
    ],
)
def test_bad_input_is_refused(engine, prompt, options, message):
    with pytest.raises(specstep.InputError, match=message):
        engine.generate(prompt, **({"max_new_tokens": 4} | options))


def test_empty_prompt_spoils_nothing(engine):
    before = engine.generate([7, 8, 9], 20).token_ids
    with pytest.raises(specstep.InputError, match="prompt 1"):
        engine.generate([[7, 8, 9], []], 20)
    assert engine.generate([7, 8, 9], 20).token_ids == before
