"""The examples of the documentation, run against a server of the tiny engine."""

import contextlib
import io
import re
from pathlib import Path

import httpx2 as httpx
import pytest
import specstep
from fastapi.testclient import TestClient
from served import PATIENCE
from specstep.serving.fields import ChatRequest, CompletionRequest
from specstep.serving.metrics import Metrics

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "docs" / "serving.md")
ADDRESS = "http://127.0.0.1:8000"


def blocks(pattern):
    found = [text for page in PAGES for text in re.findall(pattern, page.read_text(), re.DOTALL | re.MULTILINE)]
    assert found
    return found


@pytest.mark.parametrize("code", blocks(r"^```python\n(import openai.*?)^```"))
def test_the_official_client(code, address):
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(code.replace(ADDRESS, address).replace("smollm2-135m", "tiny"), {})
    assert said.getvalue().strip()


@pytest.mark.parametrize("body", blocks(r"^curl [^\n]*\\\n +-d '(.*?)'\n"))
def test_curl(body, address):
    headers = {"Content-Type": "application/json"}
    response = httpx.post(f"{address}/v1/chat/completions", content=body, headers=headers, timeout=PATIENCE)
    assert response.status_code == 200 and response.json()["choices"][0]["message"]["content"]


def test_an_application_of_one_s_own(tiny, monkeypatch):
    monkeypatch.setattr(specstep, "load", lambda directory: tiny)
    [code] = [text for text in blocks(r"^```python\n(.*?)^```") if "create_app" in text]
    names = {}
    exec(code, names)
    with TestClient(names["app"]) as client:
        assert client.get("/v1/models").status_code == 401
        models = client.get("/v1/models", headers={"Authorization": "Bearer secret"}).json()
    assert [model["id"] for model in models["data"]] == ["smol"]


def test_every_field_and_every_metric_is_described():
    page = (ROOT / "docs" / "serving.md").read_text()
    fields = {*ChatRequest.model_fields, *CompletionRequest.model_fields} - {"model", "messages", "prompt"}
    assert [name for name in sorted(fields) if f"`{name}" not in page] == []
    samples = re.findall(r"^# HELP ((?:specstep_|vllm:)\w+)", Metrics([]).page().decode(), re.MULTILINE)
    assert samples and [name for name in samples if name not in page and not name.endswith("_created")] == []
