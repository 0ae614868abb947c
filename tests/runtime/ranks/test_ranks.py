"""Engines whose model several processes share: the bits of one device that adds as many parts, and their end."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import run_rank
import specstep
import torch
from models import save_model
from safetensors.torch import load_file, save_file
from specstep.commands.describe import describe
from specstep.commands.profile import _check as check_profile
from specstep.compile.locate import ALIASES
from specstep.errors import EngineError
from specstep.kernels.communicator import make_shared_memory
from specstep.runtime.engine_file import MANIFEST, read_manifest
from specstep.runtime.inductor.aoti import open_weights
from specstep.runtime.ranks.cores import shared_cores

pytestmark = pytest.mark.slow  # engines are built for it; `.ci/run` has those of `pair`
PROMPTS = [[5], [7, 8], [3, 9, 4] * 7]
SAMPLED = specstep.SamplingParams(temperature=0.8, seed=3, logprobs=2)
WIDE = {"hidden_size": 64, "intermediate_size": 128}  # so that each rank has whole groups
SMALL = {"num_hidden_layers": 1, "vocab_size": 321}  # an odd number of tokens: the last share of the head overlaps


def build_pair(folder, architecture="Llama", ranks=2, changes=None, **options):
    """An engine of several ranks, and one of as many parts, of the same model."""
    model = save_model(folder / "model", architecture, **SMALL | (changes or {}))
    options = {"drafter": "ngram", "nodes": 4, "dtype": "float32", "max_batch": 2, "max_seq_len": 64} | options
    specstep.build(str(model), folder / "parts", sum_parts=ranks, **options)
    specstep.build(str(model), folder / "ranks", ranks=ranks, **options)


@pytest.fixture(scope="module")
def pair(once):
    return once("ranks", build_pair)


def texts(engine):
    """Tokens and log-probabilities: greedy and sampled, together."""
    greedy = engine.generate(PROMPTS, 30, ignore_eos=True)
    sampled = engine.generate(PROMPTS, 30, ignore_eos=True, sampling=SAMPLED)
    return [(result.token_ids, repr(result.logprobs)) for result in (*greedy, *sampled)]


def test_texts_and_log_probabilities_have_the_bits_of_one_device(pair):
    before = set(os.listdir("/dev/shm"))
    with specstep.load(pair / "parts", nodes="all") as engine:
        expected = texts(engine)
    with specstep.load(pair / "ranks", nodes="all", prefix_cache_bytes=2**20) as engine:
        assert set(os.listdir("/dev/shm")) == before
        (other,) = engine.session.others
        assert texts(engine) == expected
        assert texts(engine) == expected  # from kept prefixes
        alone = [engine.generate(prompt, 30, ignore_eos=True).token_ids for prompt in PROMPTS]
        assert alone == [tokens for tokens, _ in expected[: len(PROMPTS)]]
    assert not Path(f"/proc/{other.process}").exists()


def test_every_rank_has_the_state_of_one_device_and_its_share_of_the_caches(pair, tmp_path):
    with specstep.load(pair / "parts", nodes="all") as engine:
        one = run_rank.steps(engine.session)
    memory = make_shared_memory(2)
    command = [sys.executable, run_rank.__file__, str(pair / "ranks")]
    started = [
        subprocess.Popen([*command, str(rank), str(memory), str(tmp_path / f"{rank}.npz")], pass_fds=[memory])
        for rank in range(2)
    ]
    os.close(memory)
    assert [each.wait(300) for each in started] == [0, 0]
    first, second = (np.load(tmp_path / f"{rank}.npz") for rank in range(2))
    assert set(one) == set(first) and one["lengths"].min() >= 1 + run_rank.STEPS
    for name, expected in one.items():
        if name.startswith(("keys.", "values.")):
            assert np.array_equal(np.concatenate([first[name], second[name]], 1), expected), name
        else:
            assert np.array_equal(first[name], expected) and np.array_equal(second[name], expected), name


@pytest.fixture
def flush_denormals():
    """`torch.set_flush_denormal`, of this thread and those that it starts."""
    if not torch.set_flush_denormal(True):
        pytest.skip("needs a processor that flushes denormals")
    torch.set_flush_denormal(False)
    yield torch.set_flush_denormal
    torch.set_flush_denormal(False)


def test_denormals_are_zero_in_all_ranks_or_in_none(pair, flush_denormals, tmp_path):
    """A model whose attention is made of them: its text is another one where they are 0."""
    model = shutil.copytree(pair / "model", tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith("input_layernorm.weight"):
            weights[name] = torch.rand_like(weight) * 1e-38
        elif name.endswith("o_proj.weight"):
            weights[name] = weight * 1e38
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    options = {"drafter": "ngram", "nodes": 4, "dtype": "float32", "max_batch": 2, "max_seq_len": 64}
    for name, parts in (("parts", {"sum_parts": 2}), ("ranks", {"ranks": 2})):
        specstep.build(str(model), tmp_path / name, **options, **parts)
    said = {}
    for flush in (False, True):
        flush_denormals(flush)
        for name in ("parts", "ranks"):
            with specstep.load(tmp_path / name, nodes="all") as engine:
                flush_denormals(flush if name == "parts" else not flush)  # ranks keep the mode that they were loaded in
                said[name, flush] = texts(engine)
                flush_denormals(flush)
    assert said["ranks", False] == said["parts", False] != said["parts", True] == said["ranks", True]


def test_further_ranks_run_on_cores_of_their_own(pair):
    """And the process that loaded the engine where it was."""
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        pytest.skip("needs two cores")
    with specstep.load(pair / "ranks") as engine:
        engine.generate([5, 6], 4)
        (other,) = engine.session.others
        threads = [int(thread) for thread in os.listdir(f"/proc/{other.process}/task")]
        assert {frozenset(os.sched_getaffinity(thread)) for thread in threads} == {frozenset(shared_cores(2)[1])}
    assert os.sched_getaffinity(0) == allowed


def test_a_killed_rank_ends_the_engine_with_one_line(pair):
    with specstep.load(pair / "ranks", nodes="all") as engine:
        (other,) = engine.session.others
        stream = (
            engine.stream([5, 6, 7], 50, ignore_eos=True)
            if engine.text
            else engine.submit(engine.request([5, 6, 7], 50, ignore_eos=True))
        )
        next(iter(stream))
        os.kill(other.process, signal.SIGKILL)
        with pytest.raises(specstep.EngineError) as told:
            for _ in range(100):
                engine.generate([5, 6], 40, ignore_eos=True)
        line = f"rank 1 (process {other.process}), which was killed by signal 9; load the engine again"
        assert line in str(told.value) and str(told.value).isprintable()
        with pytest.raises(specstep.EngineError, match="was killed by signal 9"):
            engine.generate([5], 2)
        assert engine.broken is not None
    assert not Path(f"/proc/{other.process}").exists()


def test_ranks_end_with_the_first(pair):
    script = (
        "import specstep, sys, time\n"
        f"engine = specstep.load({str(pair / 'ranks')!r}, nodes='all')\n"
        "print(engine.session.others[0].process, flush=True)\n"
        "time.sleep(600)"
    )
    first = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    other = Path(f"/proc/{int(first.stdout.readline())}")
    assert other.exists()
    first.kill()
    first.communicate()
    until = time.monotonic() + 60
    while other.exists() and " Z " not in (other / "stat").read_text() and time.monotonic() < until:
        time.sleep(0.05)
    assert not other.exists() or " Z " in (other / "stat").read_text()


def test_two_engines_at_once_do_not_meet(pair):
    with specstep.load(pair / "ranks", nodes="all") as one, specstep.load(pair / "ranks", nodes=2) as two:
        assert one.session.others[0].process != two.session.others[0].process
        with ThreadPoolExecutor() as pool:
            first, second = pool.map(texts, (one, two))
    assert first == second


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ranks": 3}, "files: expected weights.rank0.safetensors weights.rank1.safetensors weights.rank2"),
        ({"ranks": 1}, "files: expected weights.safetensors, got 'weights.rank0.safetensors"),
        ({"ranks": 0}, "ranks: expected an integer from 1 to 64, got 0"),
    ],
)
def test_other_ranks_than_there_are_weights_for_are_refused(pair, tmp_path, change, message):
    folder = shutil.copytree(pair / "ranks", tmp_path / "engine")
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["spec"]["config"] |= change
    (folder / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(specstep.EngineError, match=message):
        specstep.load(folder)


def test_a_rank_that_does_not_load_is_told(pair, tmp_path):
    folder = shutil.copytree(pair / "ranks", tmp_path / "engine")
    file = folder / "weights.rank1.safetensors"
    file.write_bytes(b"\xff" * file.stat().st_size)
    with pytest.raises(specstep.EngineError, match=r"weights.rank1.safetensors: expected a safetensors file"):
        specstep.load(folder)
    (folder / "weights.rank0.safetensors").rename(file)
    with pytest.raises(EngineError, match=r"got that which was written as weights.rank0.safetensors"):
        open_weights(file, read_manifest(folder).spec)


def test_inspect_names_the_ranks_and_profile_refuses_them(pair):
    manifest = read_manifest(pair / "ranks")
    page = describe(manifest)
    assert "\nranks       2 processes share the model; the drafter is in each\n" in page
    whole = sum(manifest.files[f"weights.rank{rank}.safetensors"]["bytes"] for rank in range(2))
    caches = 2 * sum(cache.nbytes for cache in manifest.spec.caches)
    assert f"memory      {(whole + caches) / 2**20:.0f} MiB" in page
    assert manifest.about["drafts_may_change_text"] == []
    with pytest.raises(specstep.EngineError, match=r"profile: expected an engine of one rank.*got 2 ranks"):
        check_profile(None, manifest.spec)


@pytest.mark.parametrize(
    ("drafter", "dtype"), [("head_folder", "bfloat16"), ("drafter_folder", "float32"), ("head_folder", "float16")]
)
def test_each_rank_has_the_drafter(tmp_path, request, drafter, dtype):
    drafter = str(request.getfixturevalue(drafter))
    changes = {"vocab_size": 320, "num_hidden_layers": 2}  # which the head reads
    build_pair(tmp_path, changes=changes, drafter=drafter, nodes=None, dtype=dtype)
    found = []
    for name, nodes in (("parts", "all"), ("ranks", "all"), ("ranks", 0)):
        with specstep.load(tmp_path / name, nodes=nodes) as engine:
            found.append(texts(engine))
    assert found[0] == found[1]
    if dtype != "float16":  # in which drafts may change a text
        assert [tokens for tokens, _ in found[1]] == [tokens for tokens, _ in found[2]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ranks_share_a_draft_model(tmp_path, dtype):
    """And so do parts: the same drafts come, so the same number of steps. Its weights are packed in bfloat16."""
    drafter = f"{save_model(tmp_path / 'draft', vocab_size=320, seed=1, **WIDE)},ngram"
    changes = {"vocab_size": 320}
    build_pair(tmp_path, changes=changes, drafter=drafter, nodes=None, dtype=dtype, draft_ranks=2)
    found, steps = [], []
    for name, nodes in (("parts", "all"), ("ranks", "all"), ("ranks", 0)):
        with specstep.load(tmp_path / name, nodes=nodes) as engine:
            found.append(texts(engine))
            steps.append([result.stats["steps"] for result in engine.generate(PROMPTS, 30, ignore_eos=True)])
    assert found[0] == found[1] and steps[0] == steps[1]
    assert [tokens for tokens, _ in found[1]] == [tokens for tokens, _ in found[2]]
    manifest = read_manifest(tmp_path / "ranks")
    assert "\nranks       2 processes share the model and the draft model\n" in describe(manifest)
    sizes = [manifest.files[f"weights.rank{rank}.safetensors"]["bytes"] for rank in range(2)]
    assert sizes[0] == sizes[1]


def test_each_rank_of_a_quantised_file_has_the_bits_of_one_device(tmp_path):
    """The default model's: blocks of four and of eight bits, three heads for keys and values."""
    if find_spec(ALIASES["smollm2-135m"][0]) is None:
        pytest.skip("the default model is not installed")
    found = []
    for name, options in (("parts", {"sum_parts": 3}), ("ranks", {"ranks": 3})):
        specstep.build("smollm2-135m", tmp_path / name, drafter="none", max_seq_len=128, **options)
        assert {"int4_least", "int8"} == set(read_manifest(tmp_path / name).about["weights"])
        with specstep.load(tmp_path / name) as engine:
            found.append(texts(engine))
    assert found[0] == found[1]


THREE = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 96}


@pytest.mark.parametrize(
    ("architecture", "ranks", "options"),
    [
        ("Llama", 2, {"dtype": "bfloat16"}),
        ("Llama", 2, {"dtype": "float16"}),
        ("Llama", 3, {"changes": THREE}),
        ("Llama", 4, {"dtype": "bfloat16"}),  # which has two heads for keys and values
        *(("Llama", 2, {"dtype": "bfloat16", "weights": kind, "changes": WIDE}) for kind in ("int8", "int4")),
        ("Qwen3", 2, {"drafter": "none"}),
        ("Qwen3Moe", 2, {}),
        ("Qwen3Moe", 2, {"dtype": "bfloat16"}),
        ("Gemma3Text", 2, {"changes": {"num_hidden_layers": 3}}),
        ("Phi3", 2, {}),
        ("GPTNeoX", 2, {}),
    ],
)
def test_every_architecture_has_the_bits_of_one_device(tmp_path, architecture, ranks, options):
    build_pair(tmp_path, architecture, ranks, **options)
    found = []
    for name, nodes in (("parts", "all"), ("ranks", "all"), ("ranks", 0)):
        with specstep.load(tmp_path / name, nodes=nodes) as engine:
            found.append(texts(engine))
    assert found[0] == found[1]
    if options.get("dtype") != "float16":  # in which drafts may change a text
        assert [tokens for tokens, _ in found[1]] == [tokens for tokens, _ in found[2]]
