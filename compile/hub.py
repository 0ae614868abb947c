"""Models and drafters on the Hugging Face hub: their files, brought to this machine once, into the hub's own cache.

Names are those that people know: `owner/name`, `owner/name@revision`, and of a GGUF repository `owner/name:Q4_K_M` or
`owner/name/file.gguf`. Imports nothing heavy.
"""

import glob
import io
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import BuildError
from ..progress import OnProgress, silent

WORD = r"[A-Za-z0-9][\w.-]*"
NAME = re.compile(
    rf"(?P<repository>{WORD}/{WORD})(@(?P<revision>[\w./-]*\w))?(:(?P<kind>[\w.-]+)|/(?P<file>[\w./-]+\.gguf))?"
)
CONFIGS = ("config.json", "adapter_config.json")
READ = ("*.json", "*.model", "*.txt", "*.jinja")  # beside the weights
TEMPLATES = "additional_chat_templates/*.jinja"  # by name, as tool_use
WEIGHTS = ("*.safetensors", "*.bin", "*.pt")  # the first kind that is there, as transformers takes them
OTHERS = ("consolidated*", "training_args.bin", "optimizer*", "scheduler*", "rng_state*")  # no weights to read
PART = re.compile(r"-(\d{5})-of-\d{5}(?=\.gguf$)")


class HubName(NamedTuple):
    """A repository; its branch, tag or commit, the main branch unless given; of GGUF files the kind as `Q4_K_M`, or the
    path of the file."""

    repository: str
    revision: str | None
    kind: str | None
    file: str | None


def hub_name(name: str) -> HubName | None:
    """What a name asks of the hub; None for one that has not the form of such a name."""
    found = NAME.fullmatch(name)
    return HubName(**found.groupdict()) if found else None


def on_hub(name: str) -> HubName | None:
    """`hub_name`; None for what is here."""
    return None if Path(name).expanduser().exists() else hub_name(name)


def here(name: str) -> str:
    """The name of something, as a path where it lay on the hub: other names stay. Raises BuildError."""
    asked = on_hub(name)
    return str(fetched(asked)) if asked else name


def download(names: Iterable[str], progress: OnProgress) -> None:
    """Bring what is on the hub of these names; others are left alone. Raises BuildError."""
    for asked in filter(None, map(on_hub, names)):
        fetched(asked, progress)


def fetched(name: HubName, progress: OnProgress = silent) -> Path:
    """The directory with the repository's files, or the GGUF file. Brought once a process, at its newest; without an
    answer of the hub, what an earlier time brought. Raises BuildError."""
    if name not in _fetched():
        _fetched()[name] = _fetch(name, progress)
    return _fetched()[name]


@cache
def _fetched() -> dict[HubName, Path]:
    return {}


def _fetch(name: HubName, progress: OnProgress) -> Path:
    from huggingface_hub import HfApi, snapshot_download

    try:
        found = HfApi().model_info(name.repository, revision=name.revision)
        files = wanted(name, [file.rfilename for file in found.siblings or ()])
        folder = snapshot_download(
            name.repository,
            revision=name.revision,
            allow_patterns=[glob.escape(file) for file in files],
            tqdm_class=_reporting(name.repository, progress),
        )
    except BuildError:
        raise
    except Exception as error:  # of the hub's client, of the network, of the disk
        return _brought_before(name, error)
    return _place(name, Path(folder), files)


def _place(name: HubName, folder: Path, files: Sequence[str]) -> Path:
    """What the name stands for: the first part of a GGUF file, or the directory."""
    of_gguf = [file for file in files if file.endswith(".gguf")]
    return folder / min(of_gguf) if of_gguf else folder


def _brought_before(name: HubName, error: Exception) -> Path:
    """What lies in the hub's cache of a name that cannot be asked for now. Raises BuildError."""
    folder = _cached(name)
    if folder is not None:
        files = [str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()]
        return _place(name, folder, wanted(name, files))
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    raise BuildError(
        f"model: {name.repository} is not a path here and could not be found on the hub "
        f"({type(error).__name__}: {lines[0][:300]}); check the name, log in where it is gated, or download it and "
        "give its directory"
    ) from error


def _cached(name: HubName) -> Path | None:
    """The snapshot that the hub's cache has of a revision, if any."""
    from huggingface_hub.constants import HF_HUB_CACHE

    home, revision = Path(HF_HUB_CACHE) / f"models--{name.repository.replace('/', '--')}", name.revision or "main"
    noted = home / "refs" / revision
    folder = home / "snapshots" / (noted.read_text().strip() if noted.is_file() else revision)
    return folder if folder.is_dir() else None


def wanted(name: HubName, files: Sequence[str]) -> list[str]:
    """Which of a repository's files a build reads. Raises BuildError."""
    ggufs = [file for file in files if file.lower().endswith(".gguf") and "mmproj" not in file.lower()]
    if name.kind is not None or name.file is not None or (ggufs and not set(CONFIGS) & set(files)):
        return _of_gguf(name, ggufs)
    top = [file for file in files if "/" not in file and not any(fnmatch(file, other) for other in OTHERS)]
    weights = ([file for file in top if fnmatch(file, kind)] for kind in WEIGHTS)
    templates = [file for file in files if fnmatch(file, TEMPLATES)]
    beside = [file for file in top if any(fnmatch(file, kind) for kind in READ)]
    return beside + templates + next(filter(None, weights), [])


def _of_gguf(name: HubName, files: Sequence[str]) -> list[str]:
    """The GGUF file that is asked for, all of its parts."""
    asked = name.file or name.kind
    models = {PART.sub("", file) for file in files}
    if name.file is not None:
        fits = models & {PART.sub("", name.file)}
    elif name.kind is not None:
        ends = re.compile(rf"(?:.*[-._/])?{re.escape(name.kind)}\.gguf", re.IGNORECASE)
        fits = {model for model in models if ends.fullmatch(model)}
    else:
        fits = models
    if len(fits) != 1:
        known = ", ".join(sorted(models)) or "none"
        raise BuildError(
            f"model: {name.repository}: expected one GGUF file {f'for {asked}' if asked else ''}, got "
            f"{len(fits)}; there are {known}; say which, as {name.repository}:Q4_K_M or {name.repository}/FILE.gguf"
        )
    return sorted(file for file in files if PART.sub("", file) in fits)


def _reporting(repository: str, progress: OnProgress) -> type[Any]:
    """The hub's progress bar, as lines of ours."""
    from tqdm import tqdm

    class Lines(tqdm):
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **{**kwargs, "file": io.StringIO(), "disable": False, "mininterval": 1.0})

        def display(self, *_: object, **__: object) -> None:
            if self.unit == "B" and self.total:
                progress(f"downloading {repository}: {self.n / 1e6:,.0f} of {self.total / 1e6:,.0f} MB")

    return Lines
