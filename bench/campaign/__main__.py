"""Damages engines, kills writers and fills the disk, and counts what comes of it.

    python -m campaign ENGINE... --loads 10000 --kills 200        (in bench/)

Every engine must end in the same text or in one line, every kill and full disk in the old or the new, whole.
"""

import argparse
import collections
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from script import run_script, write_json

RESULT = Path(__file__).parents[1] / "results" / "campaign.json"
EVERY = 100  # loads until the result is written anew


def loads(engines: list[Path], seeds: range, result: dict[str, Any], out: Path, report: Any) -> None:
    """Load damaged engines; the result counts ends by kind of damage, and lists defects."""
    from campaign.loads import campaign, is_defect

    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    result |= {"seeds": [seeds.start, seeds.start], "loads": counts, "defects": []}
    for number, outcome in enumerate(campaign(engines, seeds), 1):
        name, kind, *_ = [*outcome.damage.split(": ", 1)[1].split(), ""]
        counts[f"{name} {kind}" if name in ("manifest", "json", "weights") else name][outcome.end] += 1
        result["seeds"][1] = outcome.seed + 1
        if is_defect(outcome):
            result["defects"].append(outcome._asdict())
        if number % EVERY == 0 or number == len(seeds):
            write_json(out, result)
            report(f"{number} of {len(seeds)} engines, {len(result['defects'])} defects")


def disks(engine: Path, folder: Path) -> dict[str, dict[str, str]]:
    """For each kind of write and each limit, what was wrong."""
    from campaign.full_disk import sizes, write_limited
    from campaign.kills import collected_writes, engine_writes, learned_writes

    found: dict[str, dict[str, str]] = {}
    for name, task in {
        "engine": engine_writes(engine),
        "learned": learned_writes(),
        "collected": collected_writes(),
    }.items():
        place = folder / f"full-{name}" / "it"
        place.parent.mkdir()
        task.write(place, 0)
        files = [place] if place.is_file() else list(place.iterdir())
        limits = sorted({size for file in files for size in sizes(file.stat().st_size, 8)})
        found[name] = {str(limit): write_limited(task, place, limit) for limit in limits if limit >= 0}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engines", nargs="+", type=Path)
    parser.add_argument("--loads", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()

    def run(report: Any) -> None:
        from campaign.kills import campaign

        result: dict[str, Any] = {}
        engine = options.engines[0]
        with tempfile.TemporaryDirectory(prefix="campaign-", dir=engine.parent) as work:
            result["kills"] = campaign(engine, Path(work), options.kills)
            report(f"kills: {result['kills']}")
            result["full disk"] = disks(engine, Path(work))
            report(f"full disk: {result['full disk']}")
        seeds = range(options.first, options.first + options.loads)
        loads(options.engines, seeds, result, options.out, report)

    return run_script("campaign", 1, run)


if __name__ == "__main__":
    sys.exit(main())
