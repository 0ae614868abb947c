"""The command line contract that other tools read."""

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import specstep
from specstep.cli import main
from specstep.runtime import load as engines


def lines_of(text):
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def prompts(tmp_path):
    def write(*lines):
        path = tmp_path / "prompts.jsonl"
        path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
        return str(path)

    return write


def test_json_lines(engine_folder, prompts, capsys):
    file = prompts({"id": "a", "prompt": "hello"}, {"id": 7, "token_ids": [5, 6, 7]}, "", {"id": None, "prompt": "x"})
    assert (
        main(
            [
                "generate",
                str(engine_folder),
                "--prompts",
                file,
                "--json",
                "--raw",
                "--max-new-tokens",
                "9",
                "--ignore-eos",
            ]
        )
        == 0
    )
    results = lines_of(capsys.readouterr().out)
    assert [result["id"] for result in results] == ["a", 7, None]
    for result in results:
        assert set(result) == {"id", "prompt_token_ids", "token_ids", "text", "finish_reason", "stats"}
        assert len(result["token_ids"]) == 9 and result["finish_reason"] == "length"
        assert {"steps", "new_tokens", "tokens_per_step", "prefill_s", "decode_s"} <= set(result["stats"])
    assert results[1]["prompt_token_ids"] == [5, 6, 7]


def test_a_prediction_changes_no_text(engine_folder, prompts, tmp_path, capsys):
    """The tiny tokenizer has a token for each byte."""
    line, options = {"token_ids": [5, 6, 7]}, ["--json", "--raw", "--max-new-tokens", "30", "--ignore-eos"]
    file = prompts(line, line | {"prediction": "hello"}, line | {"prediction": [9] * 12}, line | {"prediction": 5})
    assert main(["generate", str(engine_folder), "--prompts", file, *options]) == 2
    told = capsys.readouterr()
    results = lines_of(told.out)
    assert [result["token_ids"] for result in results] == [results[0]["token_ids"]] * 3
    counts = ("accepted_prediction_tokens", "rejected_prediction_tokens")
    assert [sum(result["stats"].get(name, 0) for name in counts) for result in results] == [0, 5, 12]
    assert "prompt 4: prediction: expected text or token ids, got int" in told.err
    (tmp_path / "likely.txt").write_text("hello hello")
    options += ["--prompt", "x", "--prediction", str(tmp_path / "likely.txt")]
    assert main(["generate", str(engine_folder), *options]) == 0
    [result] = lines_of(capsys.readouterr().out)
    assert sum(result["stats"][name] for name in counts) == 11


def test_choices_seeds_and_logprobs_in_json_lines(engine_folder, prompts, capsys):
    """The same text again with the seed that was told."""
    own = {"n": 2, "logprobs": 1}
    file = prompts({"id": "a", "prompt": "hello", "sampling": own}, {"id": "b", "token_ids": [5, 6]})
    options = ["--json", "--raw", "--max-new-tokens", "6", "--ignore-eos", "--temperature", "1.5", "--top-k", "50"]
    assert main(["generate", str(engine_folder), "--prompts", file, *options]) == 0
    first, second, other = lines_of(capsys.readouterr().out)
    assert [line["id"] for line in (first, second, other)] == ["a", "a", "b"]
    assert [line.get("choice") for line in (first, second, other)] == [0, 1, None]
    assert second["seed"] == first["seed"] + 1 and other["seed"] not in (first["seed"], second["seed"])
    assert "logprobs" not in other
    for line in (first, second):
        assert [each["token_id"] for each in line["logprobs"]] == line["token_ids"]
        for each in line["logprobs"]:
            [best] = each["top"]
            assert set(best) == {"token_id", "logprob"} and each["logprob"] <= best["logprob"] <= 0
    again = prompts({"prompt": "hello"})
    assert main(["generate", str(engine_folder), "--prompts", again, *options, "--seed", str(second["seed"])]) == 0
    assert lines_of(capsys.readouterr().out)[0]["token_ids"] == second["token_ids"]


def test_choices_as_text(engine_folder, capsys):
    options = ["--temperature", "1", "--seed", "3", "--n", "2", "--max-new-tokens", "4"]
    assert main(["generate", str(engine_folder), "--prompt", "hi", *options]) == 0
    out = capsys.readouterr().out
    assert out.startswith("[0, choice 0] ") and "[0, choice 1] " in out


def test_what_is_learned_is_kept(engine_folder, tmp_path, capsys):
    learned = tmp_path / "learned"
    asked = ["generate", str(engine_folder), "--prompt", "hi", "--max-new-tokens", "20", "--ignore-eos"]
    assert main([*asked, "--learned", str(learned)]) == 0
    said, begun = capsys.readouterr().out, learned.read_bytes()
    assert main([*asked, "--learned", str(learned), "--no-learning"]) == 0
    assert capsys.readouterr().out == said and learned.read_bytes() == begun
    assert main([*asked, "--learned", str(learned)]) == 0
    assert capsys.readouterr().out == said and learned.read_bytes() != begun
    learned.write_bytes(begun[:50])
    assert main([*asked, "--learned", str(learned)]) != 0
    assert "expected a file of format specstep.learned.1" in capsys.readouterr().err


def test_what_a_model_recommends_is_told_and_taken(model_folder, engine_folder, tmp_path, capsys, monkeypatch):
    folder = tmp_path / "model"
    folder.mkdir()
    for file in model_folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "generation_config.json").read_text())
    config |= {"do_sample": True, "temperature": 0.5, "top_p": 0.9}
    (folder / "generation_config.json").write_text(json.dumps(config))
    opened = specstep.eager(str(folder), drafter="none", dtype="float32", max_seq_len=64)
    assert opened.recommended == specstep.SamplingParams(temperature=0.5, top_p=0.9)
    asked, real = [], opened.requests
    monkeypatch.setattr(engines, "load", lambda folder, **_: opened)
    monkeypatch.setattr(opened, "close", lambda: None)  # it is asked again
    monkeypatch.setattr(opened, "requests", lambda *a, sampling, **k: (asked.append(sampling), real(*a, **k))[1])
    note = "greedy; the model recommends temperature 0.5, top_p 0.9: --sampling model takes it\n"
    for arguments, sampling, told in (
        ([], None, note),
        (["--top-k", "4"], specstep.SamplingParams(top_k=4), note),
        (["--temperature", "0"], specstep.SamplingParams(), ""),
        (["--sampling", "model"], opened.recommended, ""),
        (["--sampling", "model", "--seed", "1"], dataclasses.replace(opened.recommended, seed=1), ""),
    ):
        given = ["generate", str(engine_folder), "--prompt", "hi", "--max-new-tokens", "2"]
        assert main([*given, *arguments]) == 0
        assert (asked.pop(), capsys.readouterr().err) == (sampling, told)


def test_an_engine_keeps_what_its_model_recommends(engine_folder, tmp_path):
    shutil.copytree(engine_folder, tmp_path / "engine")
    manifest = tmp_path / "engine/manifest.json"
    told = json.loads(manifest.read_text())
    assert told["about"]["sampling"] == {} and specstep.load(engine_folder).recommended is None
    told["about"]["sampling"] = {"temperature": 0.6}
    manifest.write_text(json.dumps(told))
    assert specstep.load(tmp_path / "engine").recommended == specstep.SamplingParams(temperature=0.6)


def test_bad_lines_are_named_and_the_others_run(engine_folder, prompts, capsys):
    file = prompts(
        {"id": 1, "prompt": "hello"}, {"id": 2}, "nonsense", {"id": 4, "prompt": ""}, {"id": 5, "token_ids": [999]}, [1]
    )
    assert main(["generate", str(engine_folder), "--prompts", file, "--json", "--raw", "--max-new-tokens", "3"]) == 2
    out, err = capsys.readouterr()
    assert [result["id"] for result in lines_of(out)] == [1]
    for message in ("line 2", "line 3", "prompt 4", "prompt 5: token_ids", "line 6"):
        assert message in err
    assert "Traceback" not in err


def test_prompt_streams_text(engine_folder, capsys):
    assert main(["generate", str(engine_folder), "--prompt", "hi", "--max-new-tokens", "8", "--stats"]) == 0
    out, err = capsys.readouterr()
    assert out.endswith("\n") and "tokens/s" in err and "tokens per step" in err
    assert "drafted tokens verified per step" in err and "from first to last step |" in err


@pytest.mark.parametrize(("nodes", "shares"), [("0", "0: 100%"), ("2", "0: 33%, 2: 67%"), ("all", "0: 33%, 7: 67%")])
def test_the_number_of_nodes_can_be_fixed(nodes, shares, engine_folder, capsys):
    """But for a row's first step, for which nothing was drafted."""
    both = []
    for given in (nodes, "auto"):
        options = ["--prompt", "hi", "--max-new-tokens", "8", "--stats", "--nodes", given]
        assert main(["generate", str(engine_folder), *options]) == 0
        both.append(capsys.readouterr())
    assert both[0].out == both[1].out and f"share of steps: {shares}\n" in both[0].err


def test_a_wrong_number_of_nodes_is_refused(engine_folder, capsys):
    assert main(["generate", str(engine_folder), "--prompt", "hi", "--nodes", "99"]) == 2
    assert "nodes: expected auto, all, or 0 to the 7 that this engine drafts, got 99" in capsys.readouterr().err


def test_chat_is_the_default_where_there_is_a_template(engine_folder, capsys):
    both = []
    for style in ([], ["--chat"], ["--raw"]):
        main(["generate", str(engine_folder), "--prompt", "hi", "--json", "--max-new-tokens", "2", *style])
        both.append(lines_of(capsys.readouterr().out)[0]["prompt_token_ids"])
    assert both[0] == both[1] != both[2]


def test_inspect(engine_folder, tmp_path, capsys):
    assert main(["inspect", str(engine_folder)]) == 0
    page = capsys.readouterr().out
    assert "tools       listed in the system message, calls as hermes\n" in page
    for word in ("ngram", "7 nodes", "float32", "verify", "weights.safetensors", "history", "step"):
        assert word in page
    assert main(["inspect", str(engine_folder), "--svg", str(tmp_path / "step.svg")]) == 0
    capsys.readouterr()
    assert main(["inspect", str(engine_folder), "--json"]) == 0
    manifest = json.loads(capsys.readouterr().out)
    tree = manifest["about"]["tree"]
    drawing = ElementTree.parse(tmp_path / "step.svg").getroot()
    assert len(drawing.findall(".//{*}circle")) == 1 + tree["depth"] * tree["top_k"]
    assert manifest["spec"]["max_batch"] == 2


def test_profile(engine_folder, tmp_path, capsys):
    """The table, the figures and the picture say the same."""
    files = {name: str(tmp_path / f"profile.{name}") for name in ("json", "svg")}
    lengths = ["--prompt-tokens", "16,80", "--rows", "2", "--nodes", "3", "--steps", "2"]
    assert main(["profile", str(engine_folder), *lengths, "--json", files["json"], "--svg", files["svg"]]) == 0
    page = capsys.readouterr().out
    assert "model, float32, drafter ngram, 3 drafted nodes; 2 rows, 1 thread\n16 tokens in the cache: " in page
    table = {line.split("  ")[0]: line for line in page.splitlines()[5:] if line and not line.startswith(" ")}
    told = json.loads((tmp_path / "profile.json").read_text())["profiles"]
    assert [profile["tokens"] for profile in told] == [16, 80]
    for column, profile in enumerate(told):
        for stage, seconds in profile["stages"].items():
            assert table[stage].split()[1 + 2 * column] == f"{seconds * 1e3:.2f}"
        linear = [part for part in profile["parts"] if part["op"] == "packed_linear"]
        seconds, read = (sum(part[field] for part in linear) for field in ("seconds", "read"))
        calls, *cells = table["packed_linear"].split()[1:]
        assert int(calls) == sum(part["calls"] for part in linear)
        assert cells[3 * column] == f"{seconds * 1e3:.2f}" and cells[3 * column + 2] == f"{read / seconds / 1e9:.1f}"
    drawing = "".join(ElementTree.parse(files["svg"]).getroot().itertext())
    assert all(f"{name} × {line.split()[1]}" in drawing for name, line in table.items() if name == "packed_linear")
    assert all(line in drawing for line in page.splitlines()[1:3])


def test_profile_of_another_backend(engine_folder, tmp_path, capsys):
    manifest = json.loads((engine_folder / "manifest.json").read_text())
    manifest["spec"]["config"]["backend"] = "onnx"
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    assert main(["profile", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "expected an engine of backend inductor on cpu" in error and "got onnx on cpu" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["build", "nowhere/at/all", "-o", "{tmp}/e"],
        ["build", "{model}", "-o", "{tmp}/e", "--dtype", "int4"],
        ["build", "{model}", "-o", "{tmp}/e", "--drafter", "magic"],
        ["build", "{model}", "-o", "/proc/nothing/e"],
        ["build", "{model}", "-o", "{tmp}/e", "--device", "cuda"],
        ["generate", "{tmp}", "--prompt", "x"],
        ["generate", "{engine}", "--prompt", ""],
        ["generate", "{engine}", "--prompt", "x" * 500],
        ["generate", "{engine}", "--prompt", "x", "--max-new-tokens", "0"],
        ["generate", "{engine}", "--prompts", "{tmp}/nofile"],
        ["generate", "{engine}", "--prompt", "x", "--prediction", "{tmp}/nofile"],
        ["generate", "{engine}", "--prompts", "{tmp}/nofile", "--prediction", "{tmp}/nofile"],
        ["inspect", "{tmp}"],
        ["profile", "{tmp}"],
        ["profile", "{engine}", "--rows", "3"],
        ["profile", "{engine}", "--nodes", "8"],
        ["profile", "{engine}", "--steps", "0"],
        ["profile", "{engine}", "--prompt-tokens", "191"],
        ["profile", "{engine}", "--prompt-tokens", "16,"],
    ],
)
def test_mistakes_end_in_one_line_and_status_2(arguments, engine_folder, model_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    names = {"tmp": str(tmp_path), "model": str(model_folder), "engine": str(engine_folder)}
    assert main([argument.format(**names) for argument in arguments]) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len([line for line in error if " loading " not in line]) == 1
    assert ("expected" in error[-1] and "got" in error[-1]) or "could not" in error[-1]
    assert not (tmp_path / "e").exists()


ENDS = """
import atexit, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from specstep import cli

futures = []

class Held:
    def __del__(self):
        print("taken apart")

def work():
    time.sleep(0.2)
    print("thread done")

def main():
    global held
    held = Held()
    threading.Thread(target=work).start()
    futures.append(ThreadPoolExecutor(1))
    futures[0].submit(int).result()
    atexit.register(print, "last function")
    print("output", end="\\n")
    print("complaint", file=sys.stderr)
    return 7

cli.main = main
cli.run_command()
"""


def test_the_command_ends_at_once_and_loses_nothing():
    """Threads and functions of `atexit` end first, and what was written arrives."""
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (7, "complaint\n")
    assert done.stdout.splitlines() == ["output", "thread done", "last function"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
def test_output_that_is_lost_is_an_error():
    program = "from specstep.cli import run_command; run_command()"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", program, "cache"], stdout=full, stderr=subprocess.PIPE, check=False
        )
    assert done.returncode in (1, 120)


def test_a_reader_that_went_away_is_no_error():
    program = "from specstep.cli import run_command; run_command()"
    with subprocess.Popen(
        [sys.executable, "-c", program, "cache"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        process.stdout.close()
        assert (process.wait(), process.stderr.read()) == (0, "")
