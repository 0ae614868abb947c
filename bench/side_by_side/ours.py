"""Our own engines, built once for each state of the sources."""

import hashlib
from collections.abc import Sequence
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

import specstep
import torch
from specstep.progress import OnProgress

from .engines import LEARNED, Answer, Contender, Settings, Skip

INSTALL = "make install"
PACKAGE = Path(specstep.__file__).parent
MAKE_AN_ENGINE = ("graphs", "kernels", "compile", "runtime")  # the folders that a built engine depends on


def version() -> str:
    """The package's."""
    return installed_version("specstep")


def sources_digest() -> str:
    """A digest of everything in the package that an engine is made of: another one makes another engine."""
    digest = hashlib.sha256(torch.__version__.encode())
    roots = [*PACKAGE.glob("*.py"), *(PACKAGE / folder for folder in MAKE_AN_ENGINE)]
    files = (file for root in roots for file in ([root] if root.is_file() else root.rglob("*")) if file.is_file())
    for file in sorted(file for file in files if file.suffix != ".pyc"):
        digest.update(str(file.relative_to(PACKAGE)).encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def prepare(contender: Contender, settings: Settings, progress: OnProgress) -> Path:
    """Build the engine, unless one of these sources and options is there. Raises Skip."""
    if contender.drafts == LEARNED and not settings.lessons:
        raise Skip("it has nothing to learn from: give --lessons N")
    options = {**contender.options, "max_seq_len": settings.slots, "max_batch": settings.rows}
    return built(settings, options, progress)


def built(settings: Settings, options: dict[str, Any], progress: OnProgress) -> Path:
    """The directory of an engine with these build options. Raises Skip for one that these sources do not build."""
    key = repr((sources_digest(), settings.model, sorted(options.items())))
    named = "-".join(f"{value}" for _, value in sorted(options.items()))
    folder = settings.folder / f"{Path(settings.model).stem}-{named}"
    made_of = folder.with_name(f"{folder.name}.key")
    if not folder.is_dir() or not made_of.is_file() or made_of.read_text() != key:
        made_of.unlink(missing_ok=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            specstep.build(
                settings.model, folder, progress=lambda message: progress(f"{folder.name}: {message}"), **options
            )
        except specstep.BuildError as error:
            raise Skip(str(error)) from None
        made_of.write_text(key)
    return folder


class Runner:
    """An engine, loaded."""

    def __init__(self, contender: Contender, path: Path, settings: Settings):
        torch.set_num_threads(settings.threads)
        self.engine = specstep.load(path, learning=contender.drafts == LEARNED)
        for prompt in settings.lessons if self.engine.learning else ():
            self.engine.generate(prompt, settings.new_tokens)

    def answer(self, prompt: list[int], new_tokens: int) -> Answer:
        """The first step reads the prompt's last token: its time and its tokens count as decoding."""
        request = self.engine.request(prompt, new_tokens, learning=False)  # questions are asked again
        with self.engine.run([request]) as running:
            for _ in running:
                pass
        return Answer(request.tokens, request.prefill_s, request.decode_s, len(request.tokens), request.steps)

    def answer_all(self, prompts: Sequence[list[int]], new_tokens: int) -> list[list[int]]:
        """All in one batch."""
        return [list(result.token_ids) for result in self.engine.generate(list(prompts), new_tokens, learning=False)]

    def close(self) -> None:
        """Give the caches back."""
        self.engine.close()
