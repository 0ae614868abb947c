"""What Dynamo's frontend asks of a worker, as a request of the engine."""

from collections.abc import Mapping
from typing import Any

from ...errors import InputError
from ...runtime.asked.request import Request
from ...runtime.asked.sampling_params import SamplingParams
from ...runtime.engine import Engine

SAME = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed")
STOPS = ("stop_token_ids", "stop_token_ids_visible", "stop_token_ids_hidden")
# Fields that this side has no part in: texts and routes are the frontend's. It ends the call at a stop string, too.
THEIRS = {
    "": {"model", "eos_token_ids", "mdc_sum", "annotations", "routing", "router_config_override"},
    "stop_conditions": {"stop"},
    "sampling_options": set(),
    "output_options": {"skip_special_tokens", "formatted_prompt", "return_tokens_as_token_ids"},
}  # fmt: skip
TAKEN = {
    "": {"token_ids", "stop_conditions", "sampling_options", "output_options"},
    "stop_conditions": {"max_tokens", "min_tokens", "ignore_eos", *STOPS},
    "sampling_options": {"n", "best_of", *SAME},
    "output_options": set[str](),
}


def request_of(engine: Engine, asked: Mapping[str, Any]) -> Request:
    """A request for what a frontend asks. Raises InputError for what the engine cannot take, and for what this adapter
    does not know, by its name."""
    parts = {part: asked if not part else asked.get(part) or {} for part in TAKEN}
    for part, fields in parts.items():
        for name, value in fields.items():
            if (
                name not in TAKEN[part] | THEIRS[part]
                and value is not None
                and value is not False
                and value != []
                and value != {}
            ):
                raise InputError(f"{name}: expected none, which this engine does not support, got {value!r:.60}")
    sampling, stops = parts["sampling_options"], parts["stop_conditions"]
    for name in ("n", "best_of"):
        if sampling.get(name) not in (None, 1):
            raise InputError(f"{name}: expected 1, got {sampling[name]}")
    fields = {"temperature": 1.0} if engine.recommended is None else dict(engine.recommended.changed)
    fields |= {name: sampling[name] for name in SAME if sampling.get(name) is not None}
    if stops.get("min_tokens"):
        fields["min_new_tokens"] = stops["min_tokens"]
    ignored = bool(stops.get("ignore_eos"))
    ends = {each for name in STOPS[: 2 if ignored else 3] for each in stops.get(name) or ()}
    return engine.request(
        asked["token_ids"],
        stops.get("max_tokens"),
        sampling=SamplingParams.of(fields),
        chat=True,
        ignore_eos=ignored,
        stop_ids=sorted(ends),
    )
