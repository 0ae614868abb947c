"""The engine as a user sees it: load a directory, generate text."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..backends import BACKENDS
from ..errors import EngineError, InputError
from .engine_file import REBUILD, EngineSpec, Manifest, check_files, check_machine, read_manifest
from .generate import Request, run
from .session import Session
from .text import Text, TextStream

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Generation:
    """What became of one prompt. token_ids are the new ones only, a final stop token included; text leaves special
    tokens out."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    stats: dict[str, Any]


class Engine:
    """A step and a prefill behind one session. `load` makes one from an engine directory, `specstep.jit` from a
    model."""

    def __init__(self, session: Session, text: Text | None):
        self.session, self.text = session, text

    @property
    def spec(self) -> EngineSpec:
        """Limits, programs and state layout."""
        return self.session.spec

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        max_new_tokens: int | None = None,
        *,
        chat: bool = False,
        ignore_eos: bool = False,
        stop_ids: Sequence[int] = (),
    ) -> Any:
        """Generate greedily for one prompt or a list -> `Generation`, or a list of them in the same order.

        A prompt is text or token ids. `max_new_tokens` None means up to the engine's limit. Raises InputError
        before anything runs if any prompt or number is unusable.
        """
        single = isinstance(prompts, str) or (len(prompts) > 0 and not hasattr(prompts[0], "__iter__"))
        many: list[Prompt] = [prompts] if single else list(prompts)  # type: ignore[list-item,arg-type]
        requests = [
            self.request(
                prompt, max_new_tokens, chat=chat, ignore_eos=ignore_eos, stop_ids=stop_ids, name=f"prompt {index}"
            )
            for index, prompt in enumerate(many)
        ]
        for _ in run(self.session, requests):
            pass
        results = [self.result(request) for request in requests]
        return results[0] if single else results

    def stream(
        self, prompt: Prompt, max_new_tokens: int | None = None, *, chat: bool = False, ignore_eos: bool = False
    ) -> Generator[str, None, Generation]:
        """Generate for one prompt -> pieces of text as they become final, each valid UTF-8. The generator returns the
        `Generation` (its `StopIteration.value`)."""
        request = self.request(prompt, max_new_tokens, chat=chat, ignore_eos=ignore_eos)
        pieces = TextStream(self.tokenizer)
        for _, tokens in run(self.session, [request]):
            piece = pieces.push(tokens, last=request.finish_reason is not None)
            if piece:
                yield piece
        return self.result(request)

    def request(
        self,
        prompt: Prompt,
        max_new_tokens: int | None = None,
        *,
        chat: bool = False,
        ignore_eos: bool = False,
        stop_ids: Sequence[int] = (),
        name: str = "prompt",
    ) -> Request:
        """Check one prompt against the engine's limits -> a request for `generate.run`. Raises InputError."""
        tokens: list[int] = []
        if prompt:  # an empty text stays empty, whatever a chat template would put around it
            tokens = self.tokenizer.encode(prompt, chat) if isinstance(prompt, str) else list(prompt)
        longest = self.spec.max_seq_len - 1
        if not tokens:
            raise InputError(f"{name}: expected at least one token, got an empty prompt")
        if len(tokens) > longest:
            raise InputError(
                f"{name}: expected at most {longest} tokens (max_seq_len {self.spec.max_seq_len}), got {len(tokens)}; "
                "shorten it or build with a larger --max-seq-len"
            )
        wrong = [t for t in tokens if not isinstance(t, int) or not 0 <= t < self.spec.vocab_size]
        if wrong:
            raise InputError(
                f"{name}: token_ids: expected integers from 0 to {self.spec.vocab_size - 1}, got {wrong[0]!r}"
            )
        if max_new_tokens is not None and (not isinstance(max_new_tokens, int) or max_new_tokens < 1):
            raise InputError(f"max_new_tokens: expected an integer of at least 1, got {max_new_tokens!r}")
        limit = min(self.spec.max_seq_len, len(tokens) + (max_new_tokens or self.spec.max_seq_len))
        stops = [*(() if ignore_eos else self.spec.stop_ids), *stop_ids]
        most = next(tensor.shape[1] for tensor in self.spec.state if tensor.name == "stop_ids")
        if len(stops) > most:
            raise InputError(f"stop_ids: expected at most {most} stop tokens, got {len(stops)}")
        return Request(tokens, limit, stops)

    def result(self, request: Request) -> Generation:
        """The outcome of a request that `generate.run` has finished."""
        text = self.text.decode(request.tokens) if self.text else ""
        return Generation(request.prompt, request.tokens, text, request.finish_reason or "", request.stats)

    @property
    def tokenizer(self) -> Text:
        """Text in and out. Raises InputError for an engine that was built without a tokenizer."""
        if self.text is None:
            raise InputError("prompt: expected token ids, got text for an engine without a tokenizer")
        return self.text


def load(directory: str | Path, deep_check: bool = False) -> Engine:
    """Load an engine directory. Everything that could stop it from running here is found now and raised as EngineError.

    `deep_check` also hashes the weights file.
    """
    directory = Path(directory)
    manifest = read_manifest(directory)
    check_files(directory, manifest, deep_check)
    backend = _backend(manifest)
    check_machine(manifest, backend.machine())
    session = backend.open_session(directory, manifest)
    special = manifest.about.get("special_tokens", {})
    return Engine(session, Text.load(directory, special) if "tokenizer.json" in manifest.files else None)


def _backend(manifest: Manifest) -> Any:
    """The module that runs an engine, imported when an engine needs it. Raises EngineError."""
    name = manifest.spec.config.get("backend")
    if name not in BACKENDS:
        raise EngineError(f"engine: backend: expected one of {', '.join(BACKENDS)}, got {name!r}; {REBUILD}")
    return BACKENDS[name].load_runner()
