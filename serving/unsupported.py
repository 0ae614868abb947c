"""Fields of OpenAI's and vLLM's APIs that are known and not supported: refused by name, unless they ask for nothing."""

from collections.abc import Container, Mapping
from typing import Any

# Field -> the values that ask for nothing, beside null.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (),
    "allowed_token_ids": (),
    "audio": (),
    "background": (False,),
    "best_of": (1,),
    "continue_final_message": (False,),
    "conversation": (),
    "detokenize": (True,),
    "documents": ([],),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1.0,),
    "modalities": (["text"],),
    "max_tool_calls": (),
    "previous_response_id": (),
    "priority": (0,),
    "prompt": (),
    "prompt_logprobs": (),
    "return_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}


def without_idle(fields: Any, known: Container[str], own: Mapping[str, Any]) -> Any:
    """A request's fields without those of UNSUPPORTED that ask for nothing. known: fields of this kind of request; own:
    what asks for nothing in this kind alone."""
    if not isinstance(fields, Mapping):
        return fields
    idle = {name for name, value in fields.items() if _idle(name, value) or own.get(name, ...) is value}
    return {name: value for name, value in fields.items() if name in known or name not in idle}


def reason(path: str) -> str:
    """Why a field that is no field of ours is refused."""
    if path in UNSUPPORTED:
        return "not supported; leave it out"
    return "expected a field that this server knows, got one that it does not; /docs lists them"


def _idle(name: str, value: Any) -> bool:
    if name not in UNSUPPORTED:
        return False
    return value is None or any(value == idle and type(value) is type(idle) for idle in UNSUPPORTED[name])
