"""The flags of sampling, of structured output among them."""

import json

import pytest
from specstep.cli import main

SCHEMA = {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2}


@pytest.fixture
def files(tmp_path):
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    (tmp_path / "grammar.gbnf").write_text('root ::= "a" "b"+ "c"')
    (tmp_path / "broken.json").write_text("{")
    return tmp_path


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (
            ["--json-schema", "FILES/schema.json", "--temperature", "1"],
            lambda text: json.loads(text)[0] in (True, False),
        ),
        (["--json-object", "--temperature", "1"], lambda text: text.startswith("{")),
        (["--regex", "[0-9]{3}"], lambda text: len(text) == 3 and text.isdigit()),
        (["--choice", "yes", "--choice", "no"], lambda text: text in ("yes", "no")),
        (["--grammar", "FILES/grammar.gbnf", "--temperature", "1"], lambda text: text.startswith("ab")),
    ],
)
def test_each_flag_of_a_form(flags, expected, files, engine_folder, capsys):
    given = [flag.replace("FILES", str(files)) for flag in flags]
    assert main(["generate", str(engine_folder), "--prompt", "hello", "--seed", "3", *given]) == 0
    assert expected(capsys.readouterr().out.strip())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--json-schema", "FILES/missing"], "json-schema: expected a readable file of text, got"),
        (["--json-schema", "FILES/broken.json"], "structured: json: expected a JSON schema"),
        (["--regex", "(a"], "unclosed group"),
    ],
)
def test_what_cannot_be_taken_is_named(flags, message, files, engine_folder, capsys):
    given = [flag.replace("FILES", str(files)) for flag in flags]
    assert main(["generate", str(engine_folder), "--prompt", "hello", *given]) == 2
    assert message in capsys.readouterr().err


def test_one_form_at_a_time(engine_folder, capsys):
    with pytest.raises(SystemExit):
        main(["generate", str(engine_folder), "--prompt", "hello", "--regex", "a", "--choice", "b"])
    assert "not allowed with argument" in capsys.readouterr().err
