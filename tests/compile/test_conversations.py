"""Which chat template goes into an engine, and what it says of tools."""

import json
import shutil

import pytest
import specstep
from models import tiny_tokenizer
from specstep.compile import build
from specstep.compile.conversations import tools_of
from specstep.compile.source import Source, load_tokenizer
from specstep.compile.writer import write_tokenizer
from specstep.runtime.calls.template import TemplateTools
from specstep.runtime.text.tokenizer import EngineTokenizer

USER = [{"role": "user", "content": "hi"}]


def written(folder, templates):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = templates
    write_tokenizer(folder, Source("tiny", None, tokenizer))
    return EngineTokenizer.load(folder, {"bos_token": "<s>"})


@pytest.mark.parametrize(
    "templates",
    [
        {"tool_use": "tools", "default": "größer {{ bos_token }}"},
        [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "größer {{ bos_token }}"}],
        "größer {{ bos_token }}",
    ],
)
def test_of_several_templates_that_for_tools_is_taken_where_there_are_some(tmp_path, templates):
    text = written(tmp_path, templates)
    assert text.render(USER) == text.render(USER, {"tools": []}) == "größer <s>"
    assert text.render(USER, {"tools": [{}]}) == ("größer <s>" if isinstance(templates, str) else "tools")


@pytest.mark.parametrize("end", ["", "\n", "\n\n", "{% if x %}\n{% endif %}\n", " {#- #}\n"])
def test_a_template_of_two_ends_as_each_alone(tmp_path, end):
    alone = [written(tmp_path, part + end).render(USER, {"tools": [{}]}) for part in ("a", "b")]
    both = written(tmp_path, {"tool_use": "a" + end, "default": "b" + end})
    assert [both.render(USER, {"tools": tools}) for tools in ([{}], None)] == alone
    assert written(tmp_path, {"tool_use": "a" + end, "rag": "c"}).render(USER) == alone[0]


@pytest.mark.parametrize("templates", [None, ""])
def test_no_template_is_none(tmp_path, templates):
    assert written(tmp_path, templates).chat_template is None


def test_named_templates_without_a_default_are_refused_before_the_compile(model_folder, tmp_path, monkeypatch):
    folder = shutil.copytree(model_folder, tmp_path / "model")
    for file in folder.glob("chat_template*"):
        file.unlink()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = [{"name": "rag", "template": "x"}, {"name": "plan", "template": "y"}]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    monkeypatch.setattr(build, "assemble", lambda *_: pytest.fail("the compile began"))
    with pytest.raises(
        specstep.BuildError,
        match="chat_template: expected one template or one named default or tool_use, got plan, rag",
    ):
        specstep.build(str(folder), tmp_path / "engine")
    assert not (tmp_path / "engine").exists()


@pytest.mark.parametrize(
    "templates",
    [7, ["x"], [{"name": "default"}], [{"name": 1, "template": "x"}], {"default": None}, {"default": ["x"]}],
)
def test_what_is_no_template_is_refused(tmp_path, templates):
    with pytest.raises(specstep.BuildError, match="tiny: chat_template: expected text, or an object with name and "):
        written(tmp_path, templates)


@pytest.mark.parametrize("text", ['{"chat_template": "hi"', "[1]", "[" * 100_000])
def test_a_damaged_file_of_a_template_is_refused(model_folder, tmp_path, text):
    folder = shutil.copytree(model_folder, tmp_path / "model")
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text(text)
    with pytest.raises(specstep.BuildError, match=r"chat_template.json: expected (JSON|an object), got ") as error:
        load_tokenizer(str(folder))
    assert "\n" not in str(error.value)


def source(template):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return Source("tiny", None, tokenizer)


@pytest.mark.parametrize(
    ("template", "named", "error"),
    [
        (None, "hermes", "tool_format: expected None for tiny, which has no chat template, got hermes"),
        ("{{ messages[0].content }}", "harmony", "tools: expected harmony for a chat template with channels"),
        ("<|channel|> <|message|>", "hermes", "tools: expected harmony for .*, got hermes"),
    ],
)
def test_a_form_of_calls_that_cannot_be_the_models_is_refused(template, named, error):
    with pytest.raises(specstep.BuildError, match=error):
        tools_of(source(template), named)
    known = tools_of(source(template), None)
    assert known is None if template is None else isinstance(known, TemplateTools)


def test_the_form_that_the_user_names_is_the_engines(model_folder):
    options = {"dtype": "float32", "drafter": "none", "max_seq_len": 96, "tool_format": "llama3"}
    with specstep.eager(str(model_folder), **options) as engine:
        assert engine.tools == TemplateTools("llama3", False, False, False)


def test_an_unknown_form_of_calls_is_refused_before_the_compile(model_folder, tmp_path):
    with pytest.raises(specstep.BuildError, match=r"tool_format: expected one of deepseek-v3, .*, got xml"):
        specstep.build(str(model_folder), tmp_path / "engine", tool_format="xml")
