"""The command line contract that other tools read."""

import json
from xml.etree import ElementTree

import pytest
from specstep.cli import main


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


def test_chat_is_the_default_where_there_is_a_template(engine_folder, capsys):
    both = []
    for style in ([], ["--chat"], ["--raw"]):
        main(["generate", str(engine_folder), "--prompt", "hi", "--json", "--max-new-tokens", "2", *style])
        both.append(lines_of(capsys.readouterr().out)[0]["prompt_token_ids"])
    assert both[0] == both[1] != both[2]


def test_inspect(engine_folder, tmp_path, capsys):
    assert main(["inspect", str(engine_folder)]) == 0
    page = capsys.readouterr().out
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
        ["inspect", "{tmp}"],
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
