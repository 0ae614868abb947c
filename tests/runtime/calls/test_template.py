"""What a chat template knows of tools, found by rendering it."""

from pathlib import Path

import pytest
from specstep.errors import InputError
from specstep.runtime.calls.formats import FORMATS, HERMES
from specstep.runtime.calls.template import TemplateTools, template_tools
from specstep.runtime.text.chat_template import ChatTemplate

CALLS = "{% for m in messages %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}CALL{% endfor %}{% endfor %}"
TEMPLATES = {
    "harmony": "{{ '<|start|>assistant<|channel|>commentary to=functions.' + c.function.name + '<|message|>' }}"
    "{{ c.function.arguments | tojson }}",
    "hermes": '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}',
    "qwen3-coder": "<tool_call>\n<function={{ c.function.name }}>\n{% for k, v in c.function.arguments.items() %}"
    "<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}</function>\n</tool_call>",
    "glm-4.5": "<tool_call>{{ c.function.name }}\n{% for k, v in c.function.arguments.items() %}"
    "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>\n{% endfor %}</tool_call>",
    "glm-4.7": "<tool_call>{{ c.function.name }}{% for k, v in c.function.arguments.items() %}"
    "<arg_key>{{ k }}</arg_key><arg_value>{{ v }}</arg_value>{% endfor %}</tool_call>",
    "llama3": '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}',
    "mistral": '[TOOL_CALLS] [{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}]',
    "mistral-id": "[TOOL_CALLS]{{ c.function.name }}[CALL_ID]{{ c.id }}[ARGS]{{ c.function.arguments | tojson }}",
    "mistral-args": "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}",
    "deepseek-v3": "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + c.type + '<｜tool▁sep｜>' + c.function.name + "
    "'\n```json\n' + c.function.arguments + '\n```<｜tool▁call▁end｜>' }}",
    "deepseek-v3.1": "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + c.function.name + '<｜tool▁sep｜>' + "
    "c.function.arguments }}",
    "nemotron": '<TOOLCALL>[{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}]',
    "phi-4": '<|tool_call|>[{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}]',
    "lfm2-json": '<|tool_call_start|>[{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}]",
    "lfm2": "<|tool_call_start|>[{{ c.function.name }}({% for k, v in c.function.arguments.items() %}"
    '{{ k }}="{{ v }}"{% if not loop.last %}, {% endif %}{% endfor %})]',
    "pythonic": "[{{ c.function.name }}({% for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson }}"
    "{% if not loop.last %}, {% endif %}{% endfor %})]",
}
FAMILIES = Path(__file__).parents[2] / "data/chat_templates"


def found(template):
    return template_tools(ChatTemplate(template, {"bos_token": "<s>"}))


@pytest.mark.parametrize("name", FORMATS)
def test_the_form_is_found_in_the_template(name):
    template = CALLS.replace("CALL", TEMPLATES[name])
    known = found(template)
    assert known == TemplateTools(name, False, True, name == "harmony") and known.form is FORMATS[name]
    assert found("{{ tools | tojson }}" + template).lists
    assert TemplateTools.of(known.to_json()) == known


@pytest.mark.parametrize(
    ("file", "name", "lists", "keeps"),
    [
        ("gpt_oss", "harmony", True, True),
        ("llama3", "llama3", True, True),
        ("qwen2", "hermes", True, True),
        ("smollm2", "hermes", False, False),
    ],
)
def test_templates_of_families(file, name, lists, keeps):
    known = found((FAMILIES / f"{file}.jinja").read_text())
    assert (known.name, known.lists, known.keeps) == (name, lists, keeps)


def test_a_template_of_another_form_is_refused_unless_the_user_says_which():
    other = found(CALLS.replace("CALL", "@{{ c.function.name }}"))
    assert other.name == "" and other.over(None) is other
    with pytest.raises(
        InputError, match=r"tools: expected a chat template that writes calls as one of.*@specstep_probe.*tool-format"
    ):
        _ = other.form
    assert other.over("hermes").form is HERMES
    with pytest.raises(InputError, match=r"tool-format: expected one of deepseek-v3, .* got nonsense"):
        other.over("nonsense")
    with pytest.raises(InputError, match=r"expected harmony for .* with channels, and for no other, got harmony"):
        other.over("harmony")
    channels = found(CALLS.replace("CALL", TEMPLATES["harmony"]))
    with pytest.raises(InputError, match=r"tools: expected harmony .* got hermes; leave tool-format out"):
        channels.over("hermes")


def test_a_template_that_knows_no_calls():
    assert found("{{ messages[0].content }}") == TemplateTools("hermes", False, False, False)


@pytest.mark.parametrize("shown", ["tools", "messages[-1].role == 'tool'"])
def test_a_call_may_be_shown_beside_tools_alone_or_ahead_of_its_result(shown):
    calls = CALLS.replace("CALL", TEMPLATES["nemotron"])
    known = found(f"{{% if {shown} %}}{calls}{{% endif %}}")
    assert (known.name, known.keeps) == ("nemotron", True)


def test_a_form_that_nobody_knows_is_none():
    """A model that is told of tools and shown no call has a form that it was taught."""
    assert found("{{ tools }}") == TemplateTools("", True, False, False)
    assert found("{{ '<|tool_list_start|>' }}{{ tools }}") == TemplateTools("lfm2", True, False, False)
    glued = TEMPLATES["glm-4.5"].replace("\n{% endfor %}", "{% if loop.last %}\n{% endif %}{% endfor %}")
    assert found(CALLS.replace("CALL", glued)).name == "", "no blank between two arguments"
