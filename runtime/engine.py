"""The engine as a user sees it: load a directory, generate text."""

from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Unpack, overload

from ..backends import BACKENDS
from ..errors import EngineError, InputError
from .engine_file import REBUILD, EngineSpec, Manifest, check_files, check_machine, read_manifest
from .prompt import Array, Prompt, RequestOptions, at_least_one, encode, is_conversation, split_prompts, token_ids
from .request import Request
from .scheduler import Scheduler, Submission
from .session import Session
from .stream import Generation, Stream, outcome
from .text import TOKENIZER, EngineTokenizer, Message


class Engine:
    """A step and a prefill behind one session. `load` makes one from an engine directory, `specstep.jit` from a model.

    Any number of threads may use an engine at once: their requests share its rows, and each gets what it would get
    alone. Use it in a `with` block, or call `close`, to give its caches back early.
    """

    def __init__(self, session: Session, text: EngineTokenizer | None):
        self.text = text
        self._scheduler = Scheduler(session)

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
    def tokenizer(self) -> EngineTokenizer:
        """Text in and out. Raises InputError for an engine that was built without a tokenizer."""
        if self.text is None:
            raise InputError(
                "engine: expected one with a tokenizer for text and messages, got one without; give token ids"
            )
        return self.text

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be rendered."""
        return self.text is not None and self.text.chat_template is not None

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
        """Generate greedily for one prompt or a list of them.

        Args:
            prompts: text, token ids, or a conversation, a list of messages as {"role": "user", "content": "..."}; or a
                list of any of these. A numpy or torch vector is token ids, a matrix a list of them.
            max_new_tokens: most new tokens of each; None means up to the engine's limit.
            options: chat, ignore_eos, stop_ids and chat_template_kwargs, see `RequestOptions`.

        Returns:
            A `Generation`, or a list of them in the order of the prompts.

        Raises:
            InputError: a prompt or a number is unusable. Nothing has run then.
            EngineError: the engine was closed.
        """
        single, many = split_prompts(prompts)
        names = ["prompt"] if single else [f"prompt {index}" for index in range(len(many))]
        requests = [
            self.request(prompt, max_new_tokens, name=name, **options) for name, prompt in zip(names, many, strict=True)
        ]
        with self.run(requests) as running:  # an interrupt must not keep the rows for as long as its traceback lives
            for _ in running:
                pass
        results = [self.result(request) for request in requests]
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
        chat: bool = False,
        ignore_eos: bool = False,
        stop_ids: Sequence[int] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
        name: str = "prompt",
    ) -> Request:
        """Check one prompt against the engine's limits -> a request for `submit` or `run`. Arguments as for `generate`;
        name: what errors call the prompt. Raises InputError."""
        spec = self.spec
        if isinstance(prompt, str) or is_conversation(prompt):
            tokens = encode(self.tokenizer, prompt, chat, chat_template_kwargs, name)
        else:
            tokens = token_ids(prompt, spec.vocab_size, f"{name}: token_ids")
        longest = spec.max_seq_len - 1
        if not tokens:
            raise InputError(f"{name}: expected at least one token, got an empty prompt")
        if len(tokens) > longest:
            raise InputError(
                f"{name}: expected at most {longest} tokens (max_seq_len {spec.max_seq_len}), got {len(tokens)}; "
                "shorten it or build with a larger --max-seq-len"
            )
        limit = min(spec.max_seq_len, len(tokens) + at_least_one(max_new_tokens, spec.max_seq_len, "max_new_tokens"))
        given = token_ids(stop_ids, spec.vocab_size, "stop_ids")
        stops = list(dict.fromkeys([*(() if ignore_eos else spec.stop_ids), *given]))
        most = next(tensor.shape[1] for tensor in spec.state if tensor.name == "stop_ids")
        if len(stops) > most:
            raise InputError(f"stop_ids: expected at most {most} stop tokens, got {len(stops)}")
        return Request(tokens, limit, stops)

    def result(self, request: Request) -> Generation:
        """The outcome of a request, as far as it was read."""
        return outcome(request, self.text)

    def close(self) -> None:
        """End all requests and give the caches back; a closed engine cannot be used again. Weights that were mapped
        from a file are memory that the system takes back by itself when it is short."""
        self._scheduler.close()

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


def load(directory: str | Path, deep_check: bool = False) -> Engine:
    """Load an engine directory.

    Args:
        directory: what `build` wrote.
        deep_check: hash the weights file too.

    Returns:
        The engine, ready to generate.

    Raises:
        EngineError: anything that could stop the engine from running here: what was expected, what was found, and what
            to do.
    """
    directory = Path(directory)
    while True:
        before = _identity(directory)
        try:
            engine = _open(directory, deep_check)
        except EngineError:
            if _identity(directory) == before:
                raise
        else:
            if _identity(directory) == before:
                return engine
            engine.close()
        # Another engine has taken its place in the meantime: what was read is of both.


def _identity(directory: Path) -> tuple[int, int] | None:
    """What tells a directory from another one that takes its name."""
    try:
        found = directory.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _open(directory: Path, deep_check: bool) -> Engine:
    """Read, check and open what is there now. Raises EngineError."""
    manifest = read_manifest(directory)
    check_files(directory, manifest, deep_check)
    runner = _runner(manifest)
    check_machine(manifest, runner.machine())
    session = runner.open_session(directory, manifest)
    special = manifest.about.get("special_tokens", {})
    return Engine(session, EngineTokenizer.load(directory, special) if TOKENIZER in manifest.files else None)


def _runner(manifest: Manifest) -> ModuleType:
    """The module that runs an engine, imported when an engine needs it. Raises EngineError."""
    name = manifest.spec.config.get("backend")
    if name not in BACKENDS:
        raise EngineError(f"engine: backend: expected one of {', '.join(BACKENDS)}, got {name!r}; {REBUILD}")
    return BACKENDS[name].load_runner()
