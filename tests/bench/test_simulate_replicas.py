"""The simulation of replicas: a stretch of steps is what single steps would be, and figures are those measured."""

import json
import random
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))

import simulate_replicas  # noqa: E402
from replicas.replica import PER_STEP, Call, Replica  # noqa: E402
from replicas.run import POLICIES, Load, simulate  # noqa: E402
from replicas.speed import NODES, Speed, measured, served  # noqa: E402

EVEN = Speed(fixed_ms=4.0, verified_ms=1.0, kept_ms=0.0, drafted=2.5, prompt_s=1000.0, error=0.0)


def step_by_step(speed, rows, asked):
    """What the scheduler does, one turn after the other -> when each call had its first tokens, and its end."""
    now, waiting, running, filling, told = 0.0, list(asked), [], None, {}
    while waiting or running or filling:
        if not running and not filling and waiting[0].asked > now:
            now = waiting[0].asked
        if not filling and len(running) < rows and waiting and waiting[0].asked <= now:
            call = waiting.pop(0)
            filling = [call, call.prompt - 1]
        stepping = list(running)
        if filling:
            part = min(filling[1], PER_STEP if running else 4 * PER_STEP)
            filling[1] -= part
            now += part / speed.prompt_s
        if stepping:
            seconds, brings = speed.step(len(stepping), 0)
            now += seconds
            for each in stepping:
                each[1] -= brings
                told.setdefault(each[0].conversation, [now])
                if each[1] <= 1e-9:
                    told[each[0].conversation].append(now)
                    running.remove(each)
        if filling and filling[1] <= 0:
            running.append([filling[0], filling[0].answer])
            filling = None
    return told


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("every", [0.05, 0.5, 3.0])
def test_a_stretch_is_as_many_steps(rows, every):
    chance, now, asked = random.Random(rows), 0.0, []
    for number in range(60):
        now += chance.expovariate(1 / every)
        asked.append(Call(number, chance.randrange(2, 400), chance.randrange(1, 90), now))
    expected = step_by_step(EVEN, rows, asked)
    replica, told, coming = Replica(EVEN, rows, 0), {}, list(asked)
    while coming or replica.outstanding:
        if coming and coming[0].asked <= replica.until:
            replica.submit(coming[0], coming[0].asked)
            coming.pop(0)
            continue
        now = replica.until
        told.update({call.conversation: [call.first, now] for call in replica.advance()})
    assert told.keys() == expected.keys()
    for number, times in told.items():
        assert times == pytest.approx(expected[number], abs=1e-6), number


def test_step_times_are_those_that_were_measured():
    speed = measured()
    assert speed.error < 0.1 and min(speed.fixed_ms, speed.verified_ms, speed.kept_ms) > 0
    steps = json.loads((BENCH / "results" / "steps.json").read_text())["steps"]
    one = next(step for step in steps if (step["weights"], step["nodes"], step["tokens"]) == ("auto", NODES, 256))
    seconds, tokens = speed.step(1, 256)
    assert tokens == speed.drafted and seconds * 1e3 == pytest.approx(one["step_ms"], rel=0.1)
    assert speed.step(16, 4096)[1] == 1.0, "with many rows no drafts pay"
    for clients, tokens_s in served().items():
        assert simulate_replicas.closed_loop(speed, clients, 120, 128) == pytest.approx(tokens_s, rel=0.2)


def test_a_router_by_prefix_prefills_little_again():
    load, shares = Load(answers_s=0.8), {}
    for name, choose in POLICIES.items():
        got = simulate(measured(), load, 5, choose, 1e6, 16, seconds=200)
        assert got.answers == pytest.approx(0.8, rel=0.15) and got.written == pytest.approx(128 * got.answers, rel=0.05)
        shares[name] = got.prefilled / got.asked
    assert shares["by prefix"] < 0.3 and min(shares["at random"], shares["fewer of two"]) > 0.7
    forgetful = simulate(measured(), load, 5, POLICIES["by prefix"], 0, 16, seconds=200)
    assert forgetful.prefilled / forgetful.asked > 0.95, "a cache that holds nothing"


def test_the_table(tmp_path, capsys):
    out = tmp_path / "replicas.json"
    arguments = ["--replicas", "1,2", "--prefix-cache", "256", "--seconds", "40", "--out", str(out)]
    assert simulate_replicas.main(arguments) == 0
    found = json.loads(out.read_text())
    assert [(one["replicas"], one["policy"]) for one in found["served"]] == [
        (1, "by prefix"), (2, "at random"), (2, "fewer of two"), (2, "by prefix")
    ]  # fmt: skip
    assert all(one["answers_s"] > 0 and one["each"]["first_s"][1] <= found["target_s"] for one in found["served"])
    assert "answers/s" in capsys.readouterr().out
