"""Damages engines and drafters, kills writers and builds, and fills the disk, and counts what comes of it.

    python -m campaign ENGINE... --model DIR --drafter DIR --loads 10000 --kills 200        (in bench/)

Every engine and drafter must end in the same text or in one line, every kill and full disk in the old or the new,
whole. A file learned.safetensors in an engine's directory is loaded as what it learned, and is damaged, too.
Parts of which there are to be 0 are left as the result file has them.
"""

import argparse
import collections
import json
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from script import run_script, write_json

RESULT = Path(__file__).parents[1] / "results" / "campaign.json"
EVERY = 100  # loads until the result is written anew
DISK, LEFT = 2**26, (0, 4096, 20_000, 2**20)  # bytes of a small disk, and those that are left of it
Say = Callable[[str], None]


def counted(outcomes: Iterable[Any], say: Say) -> Iterable[dict[str, Any]]:
    """Ends by kind of damage, and defects, after every 100 and at the end."""
    from campaign.loads import is_defect

    ends: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    found: dict[str, Any] = {"loads": 0, "ends": ends, "defects": []}
    for number, outcome in enumerate(outcomes, 1):
        name, kind, *_ = [*outcome.damage.split(": ", 1)[1].split(), ""]
        ends[f"{name} {kind}" if name in ("manifest", "json", "weights", "learned") else name][outcome.end] += 1
        found["loads"] = number
        if is_defect(outcome):
            found["defects"].append(outcome._asdict())
        if number % EVERY == 0:
            say(f"{number} loaded, {len(found['defects'])} defects")
            yield found
    yield found


def limits(engine: Path, folder: Path) -> dict[str, dict[str, str]]:
    """For each kind of write and each limit of a file's size, what was wrong."""
    from campaign.full_disk import sizes, write_limited
    from campaign.kills import writers

    found: dict[str, dict[str, str]] = {}
    for name, task in writers(engine).items():
        place = folder / f"limited-{name}" / "it"
        place.parent.mkdir()
        task.write(place, 0)
        files = [place] if place.is_file() else list(place.iterdir())
        tried = sorted({size for file in files for size in sizes(file.stat().st_size, 8)})
        found[name] = {str(limit): write_limited(task, place, limit) for limit in tried if limit >= 0}
    return found


def full_disks(engine: Path) -> dict[str, dict[str, str]]:
    """For each kind of write, and so many bytes that are left of a small disk, what was wrong."""
    from campaign.full_disk import small_disk, write_on_full
    from campaign.kills import writers

    found: dict[str, dict[str, str]] = {}
    for name, task in writers(engine).items():
        try:
            with small_disk(DISK) as disk:
                place = disk / name / "it"
                place.parent.mkdir()
                task.write(place, 0)
                found[name] = {str(left): write_on_full(task, place, left) for left in LEFT}
        except OSError as error:
            found[name] = {"not tried": str(error)}
    return found


def run(options: argparse.Namespace, say: Say) -> None:
    from campaign.builds import damaged_drafters, kill_builds
    from campaign.kills import campaign
    from campaign.loads import campaign as damaged_engines

    result: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    engine = options.engines[0]
    with tempfile.TemporaryDirectory(prefix="campaign-", dir=engine.parent) as work:
        if options.kills:
            result["kills"] = campaign(engine, Path(work), options.kills)
            say(f"kills: {result['kills']}")
            result["limits of file size"] = limits(engine, Path(work))
            result["full disk"] = full_disks(engine)
            say(f"full disk: {result['full disk']}")
        if options.model and options.builds:
            result["killed builds"] = kill_builds(options.model, Path(work), options.builds)
            say(f"killed builds: {result['killed builds']}")
    write_json(options.out, result)
    if options.drafter and options.drafters:
        seeds = range(options.first, options.first + options.drafters)
        for result["drafters"] in counted(damaged_drafters(options.model, options.drafter, seeds), say):
            write_json(options.out, result)
    if not options.loads:
        return
    seeds = range(options.first, options.first + options.loads)
    for result["engines"] in counted(damaged_engines(options.engines, seeds), say):
        write_json(options.out, result)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engines", nargs="+", type=Path)
    parser.add_argument("--model", type=Path, help="a tiny model, whose builds are killed")
    parser.add_argument("--drafter", type=Path, help="a drafter of that model, which is damaged")
    parser.add_argument("--loads", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--builds", type=int, default=20, help="builds that are killed")
    parser.add_argument("--drafters", type=int, default=100, help="damaged drafters")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    if options.drafter and not options.model:
        parser.error("--drafter: expected --model beside it")
    return run_script("campaign", 1, lambda say: run(options, say))


if __name__ == "__main__":
    sys.exit(main())
