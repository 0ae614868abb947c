"""Which chat template goes into an engine."""

import json
import shutil

import pytest
import specstep
from models import tiny_tokenizer
from specstep.compile import build
from specstep.compile.source import Source
from specstep.compile.writer import write_tokenizer
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
def test_the_default_of_several_templates_is_written(tmp_path, templates):
    assert written(tmp_path, templates).render(USER) == "größer <s>"


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
        specstep.BuildError, match="chat_template: expected one template or one named default, got plan, rag"
    ):
        specstep.build(str(folder), tmp_path / "engine")
    assert not (tmp_path / "engine").exists()
