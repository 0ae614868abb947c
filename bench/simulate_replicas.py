"""What 1, 10 and 1,000 replicas serve, and what binds first: a simulation over measured step times.

    python bench/simulate_replicas.py                       # minutes; writes results/replicas.json
    python bench/simulate_replicas.py --replicas 1,10 --out replicas.json

A replica is the scheduler's turns with the step times of results/steps.json and the prefill and acceptance of
results/engines.json (replicas/speed.py); beside it stands what results/serve.json measured of a real server.
Conversations begin at random; a router sends each question to a replica. "Serves" is the most answers a second at which
99% of the calls have their first tokens within a second.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from script import run_script, write_json

ROWS = 16
TOKEN_BYTES = 30 * 2 * 3 * 64 * 2  # keys and values of a token of SmolLM2-135M in bfloat16
TARGET_S = 1.0  # to the first tokens, for 99% of calls
GRAIN = 0.05  # answers a second and replica
MOST = 6.0


def closed_loop(speed: Any, clients: int, prompt: int, answer: int) -> float:
    """Tokens a second of one replica without a prefix cache, whose clients each ask again once they are answered."""
    from replicas.replica import Call, Replica

    replica, now, done = Replica(speed, ROWS, 0), 0.0, 0
    for client in range(clients):
        replica.submit(Call(client, prompt, answer, 0.0), 0.0)
    while done < 40 * clients:
        now = replica.until
        for _ in replica.advance():
            done += 1
            replica.submit(Call(clients + done, prompt, answer, now), now)
    return done * answer / now


def most_served(speed: Any, replicas: int, policy: str, mebibytes: int, seconds: float) -> dict[str, Any]:
    """The greatest load at which first tokens come in time, and what happens there."""
    from replicas.run import POLICIES, Load, simulate

    kept, low, high, best = mebibytes * 2**20 / TOKEN_BYTES, 0, round(MOST / GRAIN), {}
    while high - low > 1:
        middle = (low + high) // 2
        got = simulate(speed, Load(middle * GRAIN), replicas, POLICIES[policy], kept, ROWS, seconds)
        waits = sorted(got.first_s)
        late = waits[int(len(waits) * 0.99)] if waits else 0.0
        if late > TARGET_S:
            high = middle
            continue
        low = middle
        best = {
            "first_s": [waits[len(waits) // 2], late],
            **{key: each for key, each in asdict(got).items() if key != "first_s"},
        }
    return {
        "replicas": replicas,
        "policy": policy,
        "prefix_cache_mib": mebibytes,
        "answers_s": low * GRAIN * replicas,
        "each": best,
    }


def around(each: dict[str, float], replicas: int, costs: dict[str, float]) -> dict[str, float]:
    """Cores that are busy around so many replicas at their most: one process that hands on all streams, one that reads
    all KV events, one's looks at all metrics; and in each replica for its page of metrics."""
    from replicas.costs import CHUNK_S, SCRAPE_S

    blocks = (each["written"] + each["prefilled"]) / 32
    return {
        "streams": replicas * each["chunks"] * CHUNK_S,
        "events_read": replicas * blocks * costs["read_block_s"],
        "events_told_each": blocks * costs["told_block_s"],
        "metrics_each": costs["metrics_page_s"] / SCRAPE_S,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate and write -> exit status, see `run_script`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", default="1,10,1000")
    parser.add_argument("--prefix-cache", default="256,1024", help="MiB, as of `specstep serve`")
    parser.add_argument("--seconds", type=float, default=20_000, help="of all replicas together, 60 of each at least")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "replicas.json")
    given = parser.parse_args(arguments)

    def run(progress: Callable[[str], None]) -> None:
        from replicas import costs, speed
        from replicas.run import POLICIES, Load

        engine, load = speed.measured(), Load(0.0)
        result: dict[str, Any] = {
            "from": ["results/steps.json", "results/engines.json", "results/serve.json"],
            "speed": asdict(engine), "rows": ROWS, "target_s": TARGET_S,
            "load": {key: value for key, value in asdict(load).items() if key != "answers_s"},
            "costs": costs.measured(), "server": [], "served": [],
        }  # fmt: skip
        for clients, tokens_s in speed.served().items():
            simulated = closed_loop(engine, clients, load.first, load.answer)
            result["server"].append(
                {"clients": clients, "measured_tokens_s": tokens_s, "simulated_tokens_s": simulated}
            )
            print(f"{clients:3} clients: {simulated:4.0f} tokens/s simulated, {tokens_s:4.0f} measured", flush=True)
        for replicas in map(int, given.replicas.split(",")):
            for mebibytes in map(int, given.prefix_cache.split(",")):
                for policy in POLICIES if replicas > 1 else ["by prefix"]:
                    progress(f"{replicas} replicas, {policy}, {mebibytes} MiB")
                    seconds = max(given.seconds / replicas, 60.0)
                    found = most_served(engine, replicas, policy, mebibytes, seconds)
                    found["cores"] = around(found["each"], replicas, result["costs"]) if found["each"] else {}
                    result["served"].append(found)
                    print(line(found), flush=True)
                    write_json(given.out, result)

    return run_script("simulate_replicas", 1, run)


def line(found: dict[str, Any]) -> str:
    """What one row of the table says."""
    each, cores = found["each"], found["cores"]
    head = f"{found['replicas']:5} {found['policy']:13} {found['prefix_cache_mib']:5} MiB"
    head += f" {found['answers_s']:8.2f} answers/s"
    if not each:
        return head
    again = each["prefilled"] / each["asked"]
    first = " and ".join(f"{seconds:.2f}" for seconds in each["first_s"])
    told = f"first tokens after {first} s, {again:.0%} of prompts prefilled, {each['written']:.0f} tokens/s each"
    busy = (
        f"streams {cores['streams']:.3f}, events {cores['events_read']:.3f}, metrics {cores['metrics_each']:.3f} each"
    )
    return f"{head}, {told}; cores: {busy}"


if __name__ == "__main__":
    raise SystemExit(main())
