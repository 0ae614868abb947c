"""`specstep cache`."""

import argparse
import json
from contextlib import suppress
from pathlib import Path

from ..errors import EngineError, InputError
from ..user_cache import PROGRAMS, cache_path
from .terminal import say

HELP = "list the engines that were built for models, and remove them, with the compiled code that builds keep"
EXAMPLES = """examples:
  specstep cache
  specstep cache --remove smollm2-135m-0a1b2c3d4e5f
  specstep cache --clear"""
MIB = 2**20


def add_options(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--remove", metavar="NAME", nargs="+", help="remove these, by the names that the list has")
    which.add_argument("--clear", action="store_true", help="remove all of them, the compiled code, and what killed "
        "builds left")  # fmt: skip


def run(options: argparse.Namespace) -> int:
    from ..kept_engines import FOLDER, MOST_BYTES, kept_engines, remove_engine

    kept = {engine.directory.name: engine for engine in kept_engines()}
    unknown = [name for name in options.remove or () if name not in kept]
    if unknown:
        raise InputError(f"remove: expected names of the list of `specstep cache`, got {', '.join(unknown)}")
    gone = [*kept] if options.clear else options.remove or []
    for name in gone:
        remove_engine(kept[name].directory)
    for name, engine in kept.items():
        size = f"{engine.size / MIB:,.0f} MiB"
        if name in gone:
            say(f"removed {name}, {size}")
        else:
            say(f"{name}  {size}  used {engine.said_use}  {_made_of(engine.directory)}")
    left = sum(engine.size for name, engine in kept.items() if name not in gone)
    say(f"{len(kept) - len(gone)} engines, {left / MIB:,.0f} of {MOST_BYTES / MIB:,.0f} MiB, in {cache_path(FOLDER)}")
    _compiled("compiled programs", cache_path(PROGRAMS), "*.pt2", options.clear)
    _compiled("interfaces of programs", cache_path(PROGRAMS), "*.o", options.clear)
    _compiled("lowered engines", cache_path(PROGRAMS), "*.lowering", options.clear)
    _compiled("libraries of kernels", cache_path(), "native-*/*.so", options.clear)
    if options.clear:
        _remove_left(cache_path(FOLDER))
    return 0


def _compiled(what: str, folder: Path, pattern: str, clear: bool) -> None:
    """Say what compiled code there is, and remove it; whoever has loaded it goes on with it."""
    kept = {path: path.stat().st_size for path in folder.glob(pattern)}
    for path in kept if clear else ():
        path.unlink(missing_ok=True)
    removed = ", removed" if clear and kept else ""
    say(f"{len(kept)} {what}, {sum(kept.values()) / MIB:,.0f} MiB{removed}, in {folder}")


def _remove_left(folder: Path) -> None:
    """Remove the work folders of builds that were killed; one that runs keeps its own."""
    from ..compile.swap import place_of, recover

    for place in filter(None, {place_of(work) for work in folder.glob(".*")}):
        with suppress(OSError):
            recover(place)


def _made_of(directory: Path) -> str:
    """Model and options of an engine, as they were given."""
    from ..runtime.engine_file import read_manifest

    try:
        manifest = read_manifest(directory)
    except EngineError:
        return "damaged"
    config, model = manifest.spec.config, json.dumps(manifest.about.get("model", {}).get("name", "?"))
    rows, slots = manifest.spec.max_batch, manifest.spec.max_seq_len
    return f"{model}, drafter {config.get('drafter')}, {rows} rows of {slots} tokens"
