"""The engine as a user sees it: prompts in, text out."""

import dataclasses
import logging
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, Unpack, overload

from ..errors import InputError
from .asked.make_requests import make_requests, require_tokenizer
from .asked.prediction import predictions
from .asked.prompt import Array, Prompt, RequestOptions, one_each, split_prompts
from .asked.request import Request
from .asked.sampling_params import SamplingParams
from .calls.template import TemplateTools
from .engine_file import EngineSpec
from .kv_events import KVEvents
from .ladder.ladder import Ladder
from .learned import save_learned, start_learned
from .scheduler import CacheUse, Occupancy, Scheduler
from .session import Session
from .stream import Generation, Stream, outcome
from .submission import Submission
from .text.tokenizer import EngineTokenizer, Message

logger = logging.getLogger(__name__)


class Engine:
    """A step and a prefill behind one session. `load` makes one from an engine directory, `specstep.jit` from a model.

    Any number of threads may use an engine at once: their requests share its rows, and each gets what it would get
    alone. Use it in a `with` block, or call `close`, to give its caches back early.
    """

    def __init__(
        self,
        session: Session,
        text: EngineTokenizer | None,
        recommended: SamplingParams | None = None,
        tools: TemplateTools | None = None,
        *,
        prefix_cache_bytes: int = 0,
        prefill_per_step: int | None = None,
        learning: bool = True,
        learned: str | Path | None = None,
        ladder: Ladder | None = None,
        kv_events: bool = False,
    ):
        """recommended: what the model's generation_config recommends, None where that is greedy; tools: what its chat
        template knows of them, None without one; ladder: how many nodes a step verifies, all by default; others: see
        `load`. Raises InputError and EngineError."""
        self.text, self.recommended, self.learning = text, recommended, learning
        self._tools = tools
        self._learned = None if learned is None else Path(learned).expanduser()
        if self._learned is not None:
            start_learned(self._learned, session, text)
        self._scheduler = Scheduler(session, prefix_cache_bytes, prefill_per_step, ladder, kv_events)
        self._unsaid = recommended is not None  # whether to say what is recommended when nothing is asked for

    @property
    def session(self) -> Session:
        """The session, for those who replay steps themselves while nothing is submitted. Raises EngineError after
        `close`."""
        return self._scheduler.session

    @property
    def spec(self) -> EngineSpec:
        """Limits, programs and state layout."""
        return self.session.spec

    @property
    def occupancy(self) -> Occupancy:
        """How many requests wait, and how many have a row. Both are 0 when all are done."""
        return self._scheduler.occupancy

    @property
    def cache_use(self) -> CacheUse:
        """How full the rows' caches and the prefix cache are, from any thread."""
        return self._scheduler.cache_use

    @property
    def kv_events(self) -> KVEvents | None:
        """What the prefix cache keeps and lets go, for an engine that was loaded with it."""
        return self._scheduler.kv_events

    @property
    def broken(self) -> BaseException | None:
        """What ended the engine for good: every request fails from then on, and a new engine must be loaded. None where
        nothing did; `close` does not break an engine."""
        return self._scheduler.broken

    @property
    def tokenizer(self) -> EngineTokenizer:
        """Text in and out. Raises InputError for an engine that was built without a tokenizer."""
        return require_tokenizer(self.text)

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be rendered."""
        return self.text is not None and self.text.chat_template is not None

    @property
    def tools(self) -> TemplateTools:
        """How the model is told of tools, and writes calls. Raises InputError for a model without a chat template."""
        if self._tools is None:
            raise InputError("tools: expected a model with a chat template, got one without")
        return self._tools

    @overload  # text is a sequence of texts too: the first overload takes it
    def generate(  # type: ignore[overload-overlap]
        self,
        prompts: str | Sequence[int] | Sequence[Message],
        max_new_tokens: int | None = None,
        **options: Unpack[RequestOptions],
    ) -> Generation: ...

    @overload
    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]] | Sequence[Sequence[Message]] | Sequence[Prompt],
        max_new_tokens: int | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[Generation]: ...

    @overload
    def generate(
        self,
        prompts: Array,
        max_new_tokens: int | None = None,
        **options: Unpack[RequestOptions],
    ) -> Any: ...

    def generate(self, prompts: Any, max_new_tokens: int | None = None, **options: Unpack[RequestOptions]) -> Any:
        """Generate for one prompt or a list of them.

        Args:
            prompts: text, token ids, or a conversation, a list of messages as {"role": "user", "content": "..."}; or a
                list of any of these. A numpy or torch vector is token ids, a matrix a list of them.
            max_new_tokens: most new tokens of each; None means up to the engine's limit.
            options: sampling, chat, ignore_eos, stop_ids, chat_template_kwargs, allowed_tokens, prefix_scope,
                prediction, learning, parse_special, see `RequestOptions`.

        Returns:
            A `Generation`, or a list of them in the order of the prompts.

        Raises:
            InputError: a prompt or a number is unusable. Nothing has run then.
            EngineError: the engine was closed.
        """
        single, many = split_prompts(prompts)
        names = ["prompt"] if single else [f"prompt {index}" for index in range(len(many))]
        asked = []
        samplings = one_each(options.get("sampling"), len(many), "sampling")
        likely = predictions(options.get("prediction"), len(many), single)
        for name, prompt, sampling, prediction in zip(names, many, samplings, likely, strict=True):
            own: RequestOptions = {**options, "sampling": sampling, "prediction": prediction}
            asked.append(self.requests(prompt, max_new_tokens, name=name, **own))
        with self.run([request for choices in asked for request in choices]) as running:
            for _ in running:  # an interrupt must not keep the rows for as long as its traceback lives
                pass
        results = [self.result(*choices) for choices in asked]
        return results[0] if single else results

    def stream(
        self,
        prompt: Prompt,
        max_new_tokens: int | None = None,
        **options: Unpack[RequestOptions],
    ) -> Generator[str, None, Generation]:
        """Generate for one prompt, with the arguments and errors of `generate`.

        Returns:
            A generator of text as it becomes final, whole characters only. It returns the `Generation` (the value of
            its StopIteration). Closing it ends the request.
        """
        tokenizer = self.tokenizer
        request = self.request(prompt, max_new_tokens, **options)
        return self._texts(request, tokenizer)

    def submit(self, request: Request) -> Stream:
        """Queue a request of `Engine.request`, from any thread -> its pieces. Raises EngineError after `close`."""
        return Stream(request, self._scheduler.submit([request]), self.text)

    def run(self, requests: Sequence[Request]) -> Submission:
        """Queue requests -> an iterator of each request with its new tokens, as they come; a request is up to date with
        what was read. Raises EngineError after `close`."""
        return self._scheduler.submit(requests)

    def request(
        self,
        prompt: Prompt,
        max_new_tokens: int | None = None,
        *,
        name: str = "prompt",
        **options: Unpack[RequestOptions],
    ) -> Request:
        """Check one prompt against the engine's limits -> a request for `submit` or `run`. Arguments as for `generate`;
        name: what errors call the prompt. Raises InputError."""
        requests = self.requests(prompt, max_new_tokens, name=name, **options)
        if len(requests) > 1:
            raise InputError(f"{name}: n: expected 1 for one request, got {len(requests)}; `generate` takes more")
        return requests[0]

    def requests(
        self,
        prompt: Prompt,
        max_new_tokens: int | None = None,
        *,
        name: str = "prompt",
        **options: Unpack[RequestOptions],
    ) -> list[Request]:
        """As `request`, for any n -> a request for each choice."""
        if options.get("sampling") is None and self._unsaid:
            logger.info('greedy; the model recommends %s: sampling="model" takes it', self.recommended)
            self._unsaid = False
        options["learning"] = self.learning and options.get("learning", True)
        return make_requests(self.spec, self.text, self.recommended, prompt, max_new_tokens, name=name, **options)

    def result(self, request: Request, *more: Request) -> Generation:
        """The outcome of a request, and of further choices of its prompt, as far as they were read."""
        return dataclasses.replace(outcome(request, self.text), more=tuple(outcome(each, self.text) for each in more))

    def close(self) -> None:
        """End all requests, write the file of `load(learned=)`, and give the caches back; a closed engine cannot be
        used again. Weights that were mapped from a file are memory that the system takes back by itself when it is
        short. Raises EngineError where the file cannot be written."""
        session = self._scheduler.close()
        if session is None:
            return
        try:
            if self._learned is not None and self.learning:
                save_learned(self._learned, session, self.text)
        finally:
            session.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _texts(self, request: Request, tokenizer: EngineTokenizer) -> Generator[str, None, Generation]:
        with self.submit(request) as stream:
            for piece in stream:
                if piece.text:
                    yield piece.text
        return outcome(request, tokenizer)
