"""How many nodes a step verifies: what is chosen, and that it follows the rows and the machine."""

import json
import random
import time

import numpy as np
import pytest
from fake_session import FakeSession, alone
from specstep.backends import BACKENDS
from specstep.errors import InputError
from specstep.report import CHEAP, NOTHING, SCORE_STEPS, WHOLE, AcceptedNode, RowReport
from specstep.runtime.engine import Engine
from specstep.runtime.ladder.ladder import Ladder, make_ladder, rungs_up_to
from specstep.runtime.ladder.measure_steps import _fitted, kept_or_measured, measure, times_path
from specstep.runtime.ladder.step_times import StepTimes

NODES = 7
SEEDS = 6  # of runs whose mean counts: a single one may be unlucky
RUNGS = rungs_up_to(NODES)


def seconds(rows, nodes):
    """A machine on which a step costs what it multiplies."""
    return 12.5 + 0.45 * rows * (1 + nodes) + 0.3 * rows


def times(wrong=1.0):
    """That machine's, the largest rung taken for so many times as dear as it is."""
    table = {rows: [seconds(rows, n) * (wrong if n == NODES else 1) for n in RUNGS] for rows in (1, 2, 4, 8, 16)}
    return StepTimes(RUNGS, table, (0.0, 0.0), {})


def drafted(choice, hit):
    """The path that the target takes through a whole tree, whose node n has the children 2n + 1 and 2n + 2."""
    path, node = [], 0
    while True:
        children = [child for child in (2 * node + 1, 2 * node + 2) if child <= NODES]
        taken = [child for place, child in enumerate(children) if choice.random() < hit * 0.3**place]
        if not taken:
            return path
        node = taken[0]
        path.append(node)


def reported(path, rung, scores=()):
    """What a step that verifies so many nodes reports of a path, and of the scores of the next tree."""
    kept = [node for node in path if node <= rung]
    missed = path[len(kept)] if len(kept) < len(path) else 0
    return RowReport([0] * (1 + len(kept)), 0, tuple(AcceptedNode(node, 0) for node in kept), missed, [*scores], [])


def run(ladder, hits, steps, fixed=None, seed=0):
    """Tokens per second of rows whose drafts hit with these probabilities, and the rungs chosen."""
    choice, rows, tokens, spent, chosen = random.Random(seed), [ladder.row() for _ in hits], 0, 0.0, []
    for step in range(steps):
        rung = ladder.choose(len(rows), rows, 100).nodes if fixed is None else fixed
        chosen.append(rung)
        took = seconds(len(rows), rung) * choice.uniform(0.9, 1.1)
        spent += took
        ladder.timed(len(rows), rung, WHOLE, 100, took)
        for row, hit in zip(rows, hits, strict=True):
            report = reported(drafted(choice, hit(step)), rung)
            ladder.learn(row, report, WHOLE)
            tokens += len(report.tokens)
    return tokens / spent, chosen


def run_paused(ladder, hits, steps, saved, share, fixed=None, seed=0):
    """Tokens per second as in `run`, on a machine on which a step is so many seconds faster where less drafts, and
    trees hit so much more rarely without the drafter that pauses; and what drafted. fixed: the same always."""
    choice, rows, tokens, spent, kinds = random.Random(seed), [ladder.row() for _ in hits], 0, 0.0, []
    for step in range(steps):
        rung, draft = ladder.choose(len(rows), rows, 100)
        draft = draft if fixed is None else fixed
        kinds.append(draft)
        took = (seconds(len(rows), rung) - saved.get(draft, 0.0)) * choice.uniform(0.95, 1.05)
        spent += took
        ladder.timed(len(rows), rung, draft, 100, took)
        for row, hit in zip(rows, hits, strict=True):
            likely = hit(step) * {WHOLE: 1, CHEAP: share, NOTHING: 0}[row.drafted]
            report = reported(drafted(choice, likely), rung)
            ladder.learn(row, report, draft)
            tokens += len(report.tokens)
    return tokens / spent, kinds


def run_scored(ladder, rows, steps, told, ahead=False):
    """Tokens per second of rows of which each tree hits or misses, as chance will have it, and the drafter knows it but
    is too careful. told: whether reports say what it knows."""
    choice, drafts, tokens, spent = random.Random(1), [ladder.row() for _ in range(rows)], 0, 0.0
    hits = [0.0] * rows
    for _ in range(steps):
        rung = ladder.choose(rows, drafts, 100, ahead).nodes
        took = seconds(rows, rung) * choice.uniform(0.95, 1.05)
        spent += took
        ladder.timed(rows, rung, WHOLE, 100, took)
        for place, row in enumerate(drafts):
            path, hits[place] = drafted(choice, hits[place]), choice.choice((0.1, 0.9))
            scores = [round(SCORE_STEPS * 0.5 * hits[place] * 0.8**node) for node in range(NODES)]
            report = reported(path, rung, scores if told else ())
            ladder.learn(row, report, WHOLE)
            tokens += len(report.tokens)
    return tokens / spent


def always(hit):
    return lambda step: hit


class Timed(FakeSession):
    """Rows whose caches may be filled with anything, as those that are timed are."""

    def resume(self, row, count, runs):
        super().resume(row, count, runs)
        self._fill_caches(row, 0)


@pytest.mark.parametrize("rows", [1, 2, 8, 16])
@pytest.mark.parametrize("hits", [(0.8,), (0.5,), (0.02,), (0.8, 0.02)])
def test_the_choice_is_near_the_best_fixed_one(rows, hits):
    each = [always(hits[row % len(hits)]) for row in range(rows)]
    fixed = {rung: run(Ladder(RUNGS, times()), each, 400, rung)[0] for rung in RUNGS}
    chosen, _ = run(Ladder(RUNGS, times()), each, 400)
    assert chosen > 0.96 * max(fixed.values())
    assert chosen > 0.97 * fixed[0]


def test_a_new_row_begins_with_what_rows_of_its_temperature_accepted():
    ladder, choice = Ladder(RUNGS, times()), random.Random(0)
    for _ in range(10):
        for temperature, hit in ((0.0, 0.9), (2.0, 0.02)):
            row = ladder.row(temperature)
            for _ in range(40):
                rung = ladder.choose(1, [row], 100).nodes
                ladder.learn(row, reported(drafted(choice, hit), rung), WHOLE)
    first = {temperature: ladder.row(temperature).expected[WHOLE][0] for temperature in (0.0, 0.2, 1.9, 2.0, 50.0)}
    assert first[0.0] == first[0.2] > 0.7
    assert first[1.9] == first[2.0] == first[50.0] < 0.1


@pytest.mark.parametrize("rows", [1, 2])
def test_what_a_drafter_is_sure_of_is_verified(rows):
    without = run_scored(Ladder(RUNGS, times()), rows, 1000, told=False)
    assert run_scored(Ladder(RUNGS, times()), rows, 1000, told=True) > 1.04 * without
    # The report of a step under way has the scores of the tree that comes next: those at hand are of another tree.
    assert run_scored(Ladder(RUNGS, times()), rows, 1000, told=True, ahead=True) == without


def test_what_scores_mean_is_learned_by_temperature():
    ladder, high, low = Ladder(RUNGS, times()), [round(0.9 * SCORE_STEPS)] * NODES, [0] * NODES
    rows = {temperature: ladder.row(temperature) for temperature in (0.0, 2.0)}
    for _ in range(100):
        for temperature, row in rows.items():
            ladder.learn(row, reported([1, 3, 7] if temperature == 0 else [], NODES, high), WHOLE)
    for temperature, likely in ((0.0, 3 / 7), (2.0, 0.0)):
        assert rows[temperature].likely() == ladder.row(temperature).sureness[WHOLE].of(high)
        assert rows[temperature].likely()[0] == pytest.approx(likely, abs=0.05)
    rows[0.0].scores = [-(2**63), 2**63 - 1, *low[2:]]  # of a head whose weights are not finite
    assert rows[0.0].likely() == ladder.row().sureness[WHOLE].of([0, SCORE_STEPS, *low[2:]])
    rows[0.0].scores = low
    assert max(rows[0.0].likely()) < 0.1, "learned of other scores alone"


@pytest.mark.parametrize("rows", [1, 8])
def test_hopeless_rows_go_down_to_plain_decoding_and_come_back(rows):
    hits = [lambda step: 0.0 if 100 <= step < 300 else 0.8] * rows
    _, chosen = run(Ladder(RUNGS, times()), hits, 400)
    assert np.mean(chosen[50:100]) > 0.9
    assert sum(chosen[200:300]) <= 4  # the steps that time the next rung
    assert np.mean(chosen[340:]) > 0.9  # though no step between verified a draft


def saving(saved):
    known = times()
    return StepTimes(
        RUNGS, known.table, (0.0, 0.0), {draft: dict.fromkeys(known.table, less) for draft, less in saved.items()}
    )


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize(("hit", "share", "best"), [(0.8, 0.5, WHOLE), (0.02, 0.5, NOTHING), (0.6, 0.97, CHEAP)])
def test_what_does_not_pay_drafts_nothing(rows, hit, share, best):
    each, saved = [always(hit)] * rows, {CHEAP: 2.0, NOTHING: 3.0}
    fixed = {
        kind: run_paused(Ladder(RUNGS, saving(saved)), each, 600, saved, share, kind)[0]
        for kind in (WHOLE, CHEAP, NOTHING)
    }
    runs = [run_paused(Ladder(RUNGS, saving(saved)), each, 600, saved, share, seed=seed) for seed in range(SEEDS)]
    assert np.mean([speed for speed, _ in runs]) > 0.97 * max(fixed.values())
    assert np.mean([kinds[200:].count(best) for _, kinds in runs]) > 0.75 * 400


@pytest.mark.parametrize("saved", [{CHEAP: 2.0}, {NOTHING: 2.0}, {CHEAP: 2.0, NOTHING: 3.0}])
def test_what_paused_comes_back(saved):
    hits = [lambda step: 0.02 if 100 <= step < 400 else 0.8]
    runs = [run_paused(Ladder(RUNGS, saving(saved)), hits, 800, saved, 0.5, seed=seed)[1] for seed in range(SEEDS)]
    assert np.mean([kinds[200:400].count(WHOLE) for kinds in runs]) < 0.2 * 200
    assert np.mean([kinds[500:].count(WHOLE) for kinds in runs]) > 0.7 * 300


def test_a_new_row_ends_a_rest_at_once():
    ladder = Ladder(RUNGS, saving({NOTHING: 3.0}))
    run_paused(ladder, [always(0.0)], 60, {NOTHING: 3.0}, 0.0)
    hopeless, hopeful = ladder.row(), ladder.row()
    for row in (hopeless, hopeful):
        row.expected[WHOLE][:] = [0.0] * NODES
    hopeless.skip()
    assert ladder.choose(1, [hopeless], 100) == (0, NOTHING) == ladder.choose(1, [hopeless], 100)
    hopeful.expected[WHOLE][:] = [0.9] * NODES
    assert ladder.choose(2, [hopeless, hopeful], 100) == (0, WHOLE)


def test_a_pause_that_saves_nothing_is_not_tried():
    saved = {CHEAP: 0.0, NOTHING: 0.0}
    assert set(run_paused(Ladder(RUNGS, saving(saved)), [always(0.02)] * 2, 200, saved, 1.0)[1]) == {WHOLE}


def test_what_a_busy_moment_hid_is_found_out():
    saved = {CHEAP: 2.0, NOTHING: 3.0}
    _, kinds = run_paused(Ladder(RUNGS, saving(dict.fromkeys(saved, 0.0))), [always(0.02)] * 2, 6000, saved, 0.5)
    assert kinds[:1000].count(NOTHING) == 0 and kinds[-1000:].count(NOTHING) > 900


def test_full_batches_verify_less():
    means = [np.mean(run(Ladder(RUNGS, times()), [always(0.7)] * rows, 200)[1][50:]) for rows in (1, 4, 16)]
    assert means == sorted(means, reverse=True) and means[0] > 3 * means[-1]


def test_a_step_that_takes_longer_than_kept_is_found_out():
    ladder = Ladder(RUNGS, times(wrong=0.6))
    _, chosen = run(ladder, [always(0.5)] * 8, 600)
    assert chosen[1] == NODES and np.mean([rung == NODES for rung in chosen[300:]]) < 0.1


def test_never_a_rung_that_is_expected_to_be_slower_than_none():
    choice = random.Random(3)
    for _ in range(200):
        table = {rows: [choice.uniform(1, 20) for _ in RUNGS] for rows in (1, 2, 4)}
        known, rows = StepTimes(RUNGS, table, (0.0, 0.0), {}), choice.choice((1, 2, 4))
        ladder = Ladder(RUNGS, known)
        drafts = [ladder.row() for _ in range(rows)]
        for each in drafts:
            each.expected[WHOLE][:] = [choice.random() for _ in range(NODES)]
        rung = ladder.choose(rows, drafts, 50).nodes
        tokens = rows + sum(sum(each.expected[WHOLE][:rung]) for each in drafts)
        spent = known.seconds(rows, 50)
        assert tokens / spent[RUNGS.index(rung)] >= rows / spent[0]


def test_few_rungs():
    assert rungs_up_to(0) == (0,) and rungs_up_to(1) == (0, 1) and rungs_up_to(6) == (0, 1, 2, 3, 5, 6)
    assert rungs_up_to(64)[-2:] == (63, 64)


def test_measures_once_and_keeps_it(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    session, said = Timed(3), []
    found, path = kept_or_measured(session, (0, 1, 2), "engine", said.append)
    assert list(found.table) == [1, 2, 3] and len(said) == 1 and session.free_rows == 3
    steps = session.steps
    again, _ = kept_or_measured(session, (0, 1, 2), "engine", said.append)
    assert session.steps == steps and len(said) == 1 and again.to_dict() == found.to_dict()
    assert times_path("another", session) != path == times_path("engine", session)
    session.conditions = lambda: ["another GPU"]
    assert times_path("engine", session) != path
    del session.conditions
    for damaged in ("", "[]", "{}", json.dumps(found.to_dict() | {"table": {"1": [1, 2]}})):
        path.write_text(damaged)
        kept_or_measured(session, (0, 1, 2), "engine", said.append)
    assert len(said) == 5 and StepTimes.from_dict(json.loads(path.read_text())).rungs == (0, 1, 2)


def test_a_rung_is_not_taken_for_slower_than_its_neighbours_say():
    found = {(1, 0, 32): 10.0, (1, 1, 32): 12.0, (1, 2, 32): 18.0, (1, 3, 32): 16.0, (1, 3, 90): 22.0, (1, 0, 90): 12.0}
    times = _fitted(found, (0, 1, 2, 3), (1, 2), 90, {CHEAP: {1: 1.5}})
    assert times.seconds(1, 32) == [10, 12, 14, 16]
    assert times.seconds(1, 90) == pytest.approx([12, 12 + 2 + 4 / 3, 14 + 2 + 8 / 3, 22])
    assert all(two > one for two, one in zip(times.seconds(2, 32), times.seconds(1, 32), strict=True))
    assert times.seconds(1, 32, CHEAP) == [8.5, 10.5, 12.5, 14.5] and times.saved == {CHEAP: {1: 1.5, 2: 1.5}}


def test_what_there_was_no_time_for_goes_on_as_it_went():
    times = _fitted({(1, 0, 32): 10.0, (1, 2, 32): 14.0}, (0, 1, 2, 3), (1,), 32, {})
    assert times.seconds(1, 32) == [10, 12, 14, 16]


def test_the_first_step_of_a_size_is_not_timed_where_it_is_recorded(monkeypatch):
    """Neither when steps are measured, nor as they run."""
    session, sizes, slow = Timed(2), set(), 0.05

    def replay(rows, slots, nodes, catch_up, replay=session.replay):
        if (rows, nodes) not in sizes:
            sizes.add((rows, nodes))
            session.captured += 1
            time.sleep(slow)
        return replay(rows, slots, nodes, catch_up)

    session.replay = replay
    found = measure(session, (0, 1, 2), budget=1.0)
    assert len(sizes) == 6 and all(max(times) < slow for times in found.table.values())
    sizes.clear()
    ladder = Ladder((0, 1, 2), found)
    told = []
    monkeypatch.setattr(ladder, "timed", lambda *step: told.append(step))
    with Engine(session, None, ladder=ladder) as engine:
        engine.generate([[5], [6]], 30)
    assert told and max(seconds for *_, seconds in told) < slow < found.to_dict()["table"][1][0] + slow


def test_a_measurement_is_bounded():
    session = Timed(8, pause=0.01)
    found = measure(session, (0, 1, 2), budget=0.05)
    assert session.steps < 12
    assert all(len(times) == 3 and min(times) > 0 for times in found.table.values()) and max(found.table) == 8


@pytest.mark.parametrize("nodes", [0, 1, 2, "all", "auto"])
def test_what_a_step_verifies(nodes, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    session = Timed(2)
    ladder = make_ladder(session, nodes, "engine", lambda message: None)
    prompts = [[3, 4], [5], [6, 7, 8]]
    with Engine(session, None, ladder=ladder) as engine:
        results = engine.generate(prompts, 30)
    assert [result.token_ids for result in results] == [alone(prompt, len(prompt) + 30) for prompt in prompts]
    for result in results:
        verified = {int(rung): steps for rung, steps in result.stats["verified"].items()}
        assert sum(verified.values()) == result.stats["steps"]
        if nodes != "auto":  # but for first steps, for which nothing was drafted
            fixed = 2 if nodes == "all" else nodes
            assert set(verified) <= {0, fixed} and verified[fixed] >= result.stats["steps"] - 2


@pytest.mark.parametrize("nodes", [-1, 3, "some", 1.0, True, None])
def test_wrong_numbers_of_nodes(nodes):
    with pytest.raises(InputError, match="nodes: expected auto, all, or 0 to the 2 that this engine drafts, got"):
        make_ladder(FakeSession(1), nodes, "engine", lambda message: None)


def test_backends_that_verify_all(monkeypatch):
    monkeypatch.setitem(BACKENDS, "inductor", BACKENDS["inductor"]._replace(any_nodes=False))
    for nodes in ("auto", "all", 2):
        assert make_ladder(FakeSession(1), nodes, "engine", lambda message: None).rungs == (2,)
    with pytest.raises(InputError, match="nodes: expected auto, all, or 2, as an engine of this backend"):
        make_ladder(FakeSession(1), 1, "engine", lambda message: None)


def test_a_rung_that_runs_on_still_tells_that_the_machine_slows():
    """Its time is looked at more seldom; a rung that comes after it is not taken for the slow one."""
    times = StepTimes((0, 3), {1: [1.0, 2.0]}, (0.0, 0.0), {})
    for step in range(60):
        times.observe(1, 3, WHOLE, 32, 2.0 if step < 12 else 4.0)
    before = times.seconds(1, 32)[0]
    times.observe(1, 0, WHOLE, 32, 2.0)
    assert times.seconds(1, 32)[0] == pytest.approx(before, rel=0.01)


def test_what_drafting_less_saves_is_found_out():
    times, true = (
        StepTimes((0, 3), {1: [1.0, 2.0]}, (0.0, 0.0), {CHEAP: {1: 0.05}, NOTHING: {1: 0.1}}),
        {CHEAP: 0.3, NOTHING: 0.1},
    )
    for step in range(800):
        draft = (WHOLE, CHEAP, WHOLE, NOTHING)[step // 4 % 4]
        rung = 0 if draft == NOTHING else 3
        times.observe(1, rung, draft, 32, (1.0 if rung == 0 else 2.0) - true.get(draft, 0.0))
    assert {draft: of[1] for draft, of in times.saved.items()} == pytest.approx(true, abs=0.05)
    assert times.seconds(1, 32) == pytest.approx([1.0, 2.0], rel=0.1)
