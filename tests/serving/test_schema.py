"""Schemathesis reads the schema and calls what it describes: every answer is one that the schema has."""

import logging

import pytest
import schemathesis
import schemathesis.specs.openapi.schemas  # not later: Python 3.11 may stop at parsing while garbage is collected
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    ignored_auth,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)
from served import user
from specstep.serving.app import create_app
from specstep.serving.options import ServeOptions

KEY = {"Authorization": "Bearer the-key"}
CHECKS = [
    not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance,
    negative_data_rejection, ignored_auth,
]  # fmt: skip


@pytest.fixture(scope="module")
def described(tiny):
    app = create_app({"tiny": tiny}, ServeOptions(api_keys=("the-key",), max_queue=200))
    logger = logging.getLogger("specstep")
    before = logger.level
    logger.setLevel(logging.WARNING)
    yield schemathesis.openapi.from_asgi("/openapi.json", app)
    logger.setLevel(before)


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_answers_are_those_of_the_schema(described, mode):
    """Calls that the schema allows, and calls that it forbids."""
    called = set()
    for operation in described.get_all_operations():
        if mode is GenerationMode.NEGATIVE and operation.ok().method != "post":
            continue  # without a body there is nothing to forbid
        called.add(operation.ok().path)

        @settings(
            max_examples=10, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
        )
        @given(case=operation.ok().as_strategy(generation_mode=mode))
        def check(case):
            case.call_and_validate(headers=KEY, checks=CHECKS)

        check()
    assert {"/v1/chat/completions", "/v1/completions", "/tokenize"} <= called


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_streams_are_those_of_the_schema(described, path):
    asked = {"messages": user("hello")} if "chat" in path else {"prompt": "hello"}
    asked |= {"stream": True, "max_tokens": 8, "temperature": 0}  # Schemathesis cuts long streams short
    case = described[path]["POST"].Case(body=asked, media_type="application/json")
    assert case.call_and_validate(headers=KEY, checks=CHECKS).text.endswith("data: [DONE]\n\n")
