"""One prompt on its way through an engine: what was asked, and what came of it so far."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ...controls import Sampling
from ...report import REASONS, STOPPED, AcceptedPath, RowReport, TokenLogprobs
from ..text.stop_text import StopText
from .allowed_tokens import AllowedTokens
from .fitted_tree import FitTree
from .prediction import FollowedPrediction


class Event(NamedTuple):
    """What one step did for a request, and when. Times are seconds of a monotonic clock."""

    report: RowReport  # what the step did to the row
    admitted: float  # when the request got a row, and its prefill began
    prefilled: float  # when its prefill was done
    at: float  # when the step was done
    cached: int  # tokens of the prompt that needed no prefill
    nodes: int  # drafted tokens that the step verified
    output: "Output"  # what of its tokens is the request's


class Output(NamedTuple):
    """What of a step's tokens is a request's output."""

    kept: int  # how many of them, up to the one that completes a stop string
    finish: int  # a finish code of `report.py`
    text: str = ""  # of a request with stop strings: what is final now
    open: str = ""  # and what may still become a stop string


@dataclass
class Request:
    """A checked prompt, and its output as far as it was read. `engine.Engine.request` makes one."""

    prompt: list[int]  # token ids, at least one
    limit: int  # most tokens, prompt included
    stop_ids: Sequence[int]  # tokens that end the output, and are its last
    controls: Mapping[str, Any] = field(default_factory=dict)  # what else the step is told, see `Session.admit`
    stop_text: StopText | None = None  # looks for stop strings, where there are some; the worker's alone
    allowed_tokens: AllowedTokens | None = None  # says before each step what may follow
    fit_tree: FitTree | None = None  # makes of each drafted tree one that is worth its step
    prefix_scope: str = ""  # whose kept prefixes it may start from, and adds to
    tokens: list[int] = field(default_factory=list)  # new ones so far
    texts: list[str] = field(default_factory=list)  # with stop strings: the text of each step that is final
    open: str = ""  # with stop strings: what follows that, and may become one
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of the tokens, where they were asked for
    finish_reason: str | None = None  # "stop", "length", "cancelled", "failed": the engine raised; None while it runs
    path: AcceptedPath = ()  # what the last step accepted
    paths: Counter[AcceptedPath] = field(default_factory=Counter)  # such a path -> how many steps did
    nodes: list[int] = field(default_factory=list)  # how many drafted tokens each of its steps verified
    cached_tokens: int = 0  # of the prompt, those that needed no prefill
    predicted: FollowedPrediction | None = field(init=False)  # what its answer has of its prediction, if it has one
    submitted: float = 0.0  # when, in seconds of a monotonic clock
    queue_s: float = 0.0  # from submission to a row of its own
    prefill_s: float = 0.0  # from there to the end of prefill
    first_token_s: float = 0.0  # from submission to the first tokens
    decode_s: float = 0.0  # from the end of prefill to the last token

    def __post_init__(self) -> None:
        likely = self.controls.get("prediction")
        self.predicted = None if likely is None else FollowedPrediction(likely)

    def output(self, report: RowReport) -> Output:
        """What of a step's tokens is output. Called by the worker, once for each step in turn, so that a stop string
        ends the row whether or not anybody reads."""
        if self.stop_text is None:
            return Output(len(report.tokens), report.finish)
        kept = self.stop_text.push(report.tokens, last=report.finish in REASONS)
        finish = STOPPED if self.stop_text.found else report.finish
        return Output(kept, finish, self.stop_text.take(), self.stop_text.open)

    def advance(self, event: Event) -> list[int]:
        """Take in what one step did -> its tokens, up to the one that completes a stop string."""
        report, (kept, finish, text, self.open) = event.report, event.output
        if not self.tokens:
            self.queue_s = event.admitted - self.submitted
            self.prefill_s = event.prefilled - event.admitted
            self.first_token_s = event.at - self.submitted
            self.cached_tokens = event.cached
        self.decode_s = event.at - event.prefilled
        self.tokens += report.tokens[:kept]
        if self.stop_text is not None:
            self.texts.append(text)
        self.logprobs += report.logprobs[:kept]
        self.path = report.path
        self.paths[report.path] += 1
        if self.predicted is not None:
            self.predicted.push(report.tokens[:kept])
        self.nodes.append(event.nodes)
        self.finish_reason = self.finish_reason or REASONS.get(finish)  # a signal's handler may have cancelled it
        return report.tokens[:kept]

    @property
    def seed(self) -> int | None:
        """The seed that its tokens are drawn with, None for a greedy request."""
        return self.controls.get("seeds")

    @property
    def temperature(self) -> float:
        """What its tokens are drawn at, 0 for a greedy request."""
        return float(Sampling(*self.controls["sampling"]).temperature) if "sampling" in self.controls else 0.0

    @property
    def steps(self) -> int:
        """Steps the request took part in."""
        return self.paths.total()

    @property
    def accepted(self) -> Counter[int]:
        """Accepted depth -> steps."""
        depths: Counter[int] = Counter()
        for path, steps in self.paths.items():
            depths[len(path)] += steps
        return depths

    @property
    def stats(self) -> dict[str, Any]:
        """steps, new_tokens, tokens_per_step; accepted and verified, the steps by number of drafted tokens that were;
        cached_tokens, and seconds as above: queue_s, prefill_s, decode_s, time_to_first_token_s. With a prediction, how
        many of its tokens the answer has, accepted_prediction_tokens, and has not, rejected_prediction_tokens."""
        return {
            "steps": self.steps,
            "accepted": {str(depth): steps for depth, steps in sorted(self.accepted.items())},
            "verified": {str(nodes): steps for nodes, steps in sorted(Counter(self.nodes).items())},
            "new_tokens": len(self.tokens),
            "tokens_per_step": round(len(self.tokens) / max(self.steps, 1), 3),
            "cached_tokens": self.cached_tokens,
            "queue_s": round(self.queue_s, 6),
            "prefill_s": round(self.prefill_s, 6),
            "decode_s": round(self.decode_s, 6),
            "time_to_first_token_s": round(self.first_token_s, 6),
        } | self.prediction_counts

    @property
    def prediction_counts(self) -> dict[str, int]:
        """Tokens of the prediction, as OpenAI's API names them; nothing without one."""
        if self.predicted is None:
            return {}
        accepted, rejected = self.predicted.accepted, self.predicted.rejected
        return {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
