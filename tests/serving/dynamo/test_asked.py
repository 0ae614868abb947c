"""What Dynamo's frontend asks, as requests: what is known is taken, what is not is refused by its name."""

import pytest
from fake_session import FakeSession
from specstep.errors import InputError
from specstep.runtime.asked.sampling_params import SamplingParams
from specstep.runtime.engine import Engine
from specstep.serving.dynamo.asked import request_of


def asked(**parts):
    """As the frontend of ai-dynamo-runtime 1.6.1 sends it, all fields there."""
    return {
        "model": "tiny",
        "token_ids": [5, 6, 7],
        "stop_conditions": {
            "max_tokens": 7, "stop": ["zz"], "stop_token_ids": None, "stop_token_ids_visible": None,
            "stop_token_ids_hidden": [1], "min_tokens": None, "ignore_eos": None, "max_thinking_tokens": None,
            **parts.get("stop_conditions", {}),
        },
        "sampling_options": {
            "n": None, "best_of": None, "presence_penalty": None, "frequency_penalty": None, "temperature": None,
            "repetition_penalty": None, "top_p": None, "top_k": None, "min_p": None, "use_beam_search": None,
            "length_penalty": None, "seed": None, "include_stop_str_in_output": None, "guided_decoding": None,
            **parts.get("sampling_options", {}),
        },
        "output_options": {
            "logprobs": None, "prompt_logprobs": None, "skip_special_tokens": None, "formatted_prompt": None,
            "return_tokens_as_token_ids": None, **parts.get("output_options", {}),
        },
        "eos_token_ids": [1], "mdc_sum": "c0817f", "annotations": [], "routing": {}, "router_config_override": None,
        **{name: value for name, value in parts.items() if "_options" not in name and name != "stop_conditions"},
    }  # fmt: skip


def made(recommended=None, **parts):
    with Engine(FakeSession(1, stops=(1,)), None, recommended) as engine:
        return request_of(engine, asked(**parts))


def test_what_is_asked_is_what_the_engine_does():
    request = made(sampling_options={"temperature": 0.0}, stop_conditions={"stop_token_ids": [9], "min_tokens": 3})
    assert (request.prompt, request.limit, sorted(request.stop_ids)) == ([5, 6, 7], 10, [1, 9])
    assert request.temperature == 0 and made().temperature == 1.0, "OpenAI's, where nothing is asked"
    assert made(SamplingParams(temperature=0.5)).temperature == 0.5
    assert made(stop_conditions={"ignore_eos": True, "stop_token_ids": [9]}).stop_ids == [9]
    assert made(stop_conditions={"max_tokens": None}).limit == 100


@pytest.mark.parametrize(
    ("parts", "field"),
    [
        ({"sampling_options": {"n": 2}}, "n"),
        ({"sampling_options": {"guided_decoding": {"json": {}}}}, "guided_decoding"),
        ({"sampling_options": {"use_beam_search": True}}, "use_beam_search"),
        ({"sampling_options": {"temperature": -1}}, "temperature"),
        ({"output_options": {"logprobs": 0}}, "logprobs"),
        ({"stop_conditions": {"max_thinking_tokens": 5}}, "max_thinking_tokens"),
        ({"stop_conditions": {"max_tokens": 0}}, "max_new_tokens"),
        ({"prefill_result": {"of": "another worker"}}, "prefill_result"),
        ({"token_ids": [500]}, "token_ids"),
    ],
)
def test_what_is_not_known_is_refused_by_name(parts, field):
    with pytest.raises(InputError, match=f"{field}: expected"):
        made(**parts)
