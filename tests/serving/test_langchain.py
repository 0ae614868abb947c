"""LangChain's own tests of chat models, as far as they do not hang on a model's wits.

    pip install '.[clients]' && pytest tests/serving/test_langchain.py

in an environment of its own, as test_clients.py.
"""

import inspect

import numpy as np
import pytest
from fake_session import FakeSession
from models import tiny_tokenizer, token_of
from served import running
from specstep.runtime.calls.template import TemplateTools
from specstep.runtime.engine import Engine
from specstep.runtime.text.tokenizer import EngineTokenizer
from specstep.serving.app import create_app

WHY = "needs pip install 'specstep[clients]'"
suite = pytest.importorskip("langchain_tests.integration_tests", reason=WHY)
langchain_openai = pytest.importorskip("langchain_openai", reason=WHY)

EOS, A, B, QUOTE = 1, token_of("a"), token_of("b"), token_of('"')
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{% for m in messages %}{{ m.role }}: "
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ c.function.name }} {{ c.function.arguments | tojson }}"
    "{% endfor %}\n{% endfor %}bot:"
)


def next_token(tokens):
    """What the model would say, whatever the question: ab."""
    return {A: B, B: EOS}.get(tokens[-1], A)


class Brief(FakeSession):
    """A model that is done as soon as its grammar lets it be, and whose texts in it are "ab", its numbers 3."""

    def _choice(self, row, tokens, node):
        if not self.state["masked"][row]:
            return super()._choice(row, tokens, node)
        bits = self.state["allowed"][row, node].view(np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()
        wanted = [EOS, {A: B, B: QUOTE}.get(tokens[-1], A), *map(token_of, "}]3"), allowed[0]]
        return next(token for token in wanted if token in allowed)


@pytest.fixture(scope="module")
def url():
    """The API of a model that says the same always, but for what holds it."""
    text = EngineTokenizer(tiny_tokenizer().backend_tokenizer, TEMPLATE, {})
    session = Brief(2, follow=next_token, vocabulary=258, stops=(EOS,), longest=2000)
    engine = Engine(session, text, None, TemplateTools("hermes", True, True, False))
    with engine, running(create_app({"tiny": engine})) as address:
        yield f"{address}/v1"


class Chats(suite.ChatModelIntegrationTests):
    """The server by langchain-openai."""

    @pytest.fixture(autouse=True)
    def _address(self, url):
        type(self).url = url

    @property
    def chat_model_class(self):
        return langchain_openai.ChatOpenAI

    @property
    def chat_model_params(self):
        asked = {"temperature": 0, "max_tokens": 600, "max_retries": 0, "stream_usage": True}
        return {"model": "tiny", "base_url": self.url, "api_key": "none", **asked}


LEFT_OUT = {
    "test_agent_loop",  # wants a call that the model chooses to make
    "test_unicode_tool_call_integration",  # wants a word of the question
    "test_no_overrides_DO_NOT_OVERRIDE",  # wants nothing left out
    # What is awaited asks for the same.
    *(name for name, test in vars(suite.ChatModelIntegrationTests).items() if inspect.iscoroutinefunction(test)),
}
for name in LEFT_OUT:
    setattr(Chats, name, None)


class TestJsonSchema(Chats):
    @property
    def structured_output_kwargs(self):
        return {"method": "json_schema"}


class TestFunctionCalling(Chats):
    @property
    def structured_output_kwargs(self):
        return {"method": "function_calling"}
