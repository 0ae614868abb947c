"""The options of sampling, for the commands that generate."""

import argparse
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import InputError
from ..runtime.asked.sampling_params import SamplingParams
from .files import read
from .terminal import say

if TYPE_CHECKING:
    from ..runtime.engine import Engine

NUMBERS = {  # option -> its type and its help
    "temperature": (float, "0 is greedy, 1 the model's own distribution (default: 0)"),
    "top-k": (int, "sample from the K likeliest tokens"),
    "top-p": (float, "sample from the fewest likeliest tokens that have this probability together"),
    "min-p": (float, "sample from tokens that have at least this share of the likeliest one's probability"),
    "repetition-penalty": (float, "divide the logits of tokens that were there, prompt included; 1 is none"),
    "presence-penalty": (float, "subtract from the logits of tokens that were written"),
    "frequency-penalty": (float, "subtract for each time that a token was written"),
    "min-new-tokens": (int, "write at least so many tokens"),
    "seed": (int, "the same prompt, options and seed give the same text (default: drawn at random)"),
}
CHOICES = {
    "n": (int, "texts for each prompt; the i-th has the seed SEED + i"),
    "logprobs": (int, "with --json: log-probabilities, of each token and of so many of the likeliest in its place"),
}


class GivenSampling(NamedTuple):
    """What the options say: whether to start from what the model recommends, and the fields that they set."""

    model: bool = False
    fields: Mapping[str, Any] = {}

    def over(self, recommended: SamplingParams | None, own: Any) -> SamplingParams | None:
        """With a prompt's own fields, or its "model", on top; None where nothing was asked for. Raises InputError."""
        model = self.model or own == "model"
        fields = {**self.fields, **(own if isinstance(own, Mapping) else {})}
        if not model and not fields:
            return None
        return SamplingParams.of({**(recommended.changed if model and recommended else {}), **fields})

    def tell(self, engine: "Engine") -> None:
        """Say on standard error that the model recommends something else than what the options leave as it is."""
        if engine.recommended and not self.model and "temperature" not in self.fields:
            say(f"greedy; the model recommends {engine.recommended}: --sampling model takes it", file=sys.stderr)


NO_SAMPLING = GivenSampling()


def add_sampling_options(parser: argparse.ArgumentParser, choices: bool) -> None:
    """choices: with those of several outputs and of log-probabilities."""
    group = parser.add_argument_group("sampling (see docs/sampling.md)")
    group.add_argument("--sampling", choices=["model"], help="start from what the model recommends")
    for name, (kind, text) in (NUMBERS | CHOICES if choices else NUMBERS).items():
        group.add_argument(f"--{name}", type=kind, metavar=name.split("-")[-1].upper(), help=text)
    group.add_argument(
        "--logit-bias", metavar="ID=VALUE", action="append", help="add to the logit of a token; may be given again"
    )
    group.add_argument(
        "--stop", metavar="TEXT", action="append", help="end the output ahead of this text; may be given again"
    )
    one = parser.add_argument_group("structured output (the whole output; see docs/sampling.md)")
    one = one.add_mutually_exclusive_group()
    one.add_argument("--json-schema", metavar="FILE", help="a JSON document that this schema takes")
    one.add_argument("--json-object", action="store_true", help="any JSON object")
    one.add_argument("--regex", metavar="REGEX", help="what this expression matches")
    one.add_argument("--choice", metavar="TEXT", action="append", help="one of these texts; given once for each")
    one.add_argument("--grammar", metavar="FILE", help="what this grammar produces: GBNF, or Lark with a rule `start`")


def given_sampling(options: argparse.Namespace) -> GivenSampling:
    """What the options say, checked. Raises InputError."""
    names = [name.replace("-", "_") for name in (*NUMBERS, *CHOICES, "stop")]
    fields = {name: getattr(options, name) for name in names if getattr(options, name, None) is not None}
    if options.logit_bias:
        fields["logit_bias"] = dict(map(_bias, options.logit_bias))
    structured = _structured(options)
    if structured:
        fields["structured"] = structured
    SamplingParams.of(fields)
    return GivenSampling(options.sampling == "model", fields)


def _structured(options: argparse.Namespace) -> dict[str, Any]:
    """What the output must be. Raises InputError for a file that cannot be read."""
    if options.json_schema:
        return {"json": read("json-schema", options.json_schema)}
    if options.grammar:
        return {"grammar": read("grammar", options.grammar)}
    given = {"json_object": options.json_object, "regex": options.regex, "choice": options.choice}
    return {name: value for name, value in given.items() if value}


def check_own(own: Any) -> Any:
    """What a prompt brings along: nothing, fields, or "model". Raises InputError."""
    if own is not None and own != "model":
        SamplingParams.of(own)
    return own


def _bias(given: str) -> tuple[str, float]:
    token, _, value = given.partition("=")
    try:
        return token, float(value)
    except ValueError:
        raise InputError(f"logit-bias: expected ID=VALUE, got {given!r}") from None
