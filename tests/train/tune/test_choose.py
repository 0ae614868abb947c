"""What is chosen of times and paths made by hand, which engines are built, and what is said of it."""

import dataclasses
import json
from collections import Counter

import pytest
from specstep.commands.tune_page import describe
from specstep.errors import InputError
from specstep.graphs.drafters.merged import Merged
from specstep.graphs.drafters.ngram import Ngram
from specstep.graphs.drafters.none import NoDraft
from specstep.graphs.tree import DynamicTree
from specstep.report import AcceptedNode
from specstep.runtime.acceptance import Acceptance
from specstep.runtime.ladder.step_times import StepTimes
from specstep.train.tune import measure, run
from specstep.train.tune.choose import DEPTH, PLAIN, TOP_K, Drafted, Steps, best_tree, choose, expect, shapes
from specstep.train.tune.run import Bench, candidates, limit, summary

RUNGS = (0, 1, 3, 7, 15, 31)
CHAIN = tuple((depth, 0) for depth in range(1, DEPTH + 1))  # always right at the first choice


def drafted(*paths, name="a", depth=DEPTH, levels=DEPTH, easy=None, draft_s=0.002):
    """A drafter whose steps accepted these paths of (node, rank), each as often."""

    def acceptance(paths):
        counts = Counter(tuple(AcceptedNode(*node) for node in path) for path in paths)
        return Acceptance(1, sum(1 + len(path) for path in paths), counts)

    return Drafted(name, depth, min(levels, depth), acceptance(paths), acceptance(easy or paths), 100.0, draft_s)


def steps(base=10.0, token=0.1, draft=0.0, rows=(1, 2, 4, 8), saved=0.0):
    """A machine on which a step takes `base`, what it drafts, of which a pause saves some, and so much for each
    token."""
    seconds = {n: [base + draft + token * n * (1 + nodes) for nodes in RUNGS] for n in rows}
    return Steps(RUNGS, seconds, dict.fromkeys(rows, draft), dict.fromkeys(rows, saved))


def test_speed_is_tokens_per_step_over_the_time_of_plain_steps():
    expected = expect(drafted(CHAIN, ()), steps(10.0, 5.0, draft=2.0, rows=(1, 8)), DEPTH, TOP_K)
    assert expected.nodes == {1: 7, 8: 0}
    assert expected.speed[1] == pytest.approx(4.5 * 15 / (12 + 5 * 8))
    assert expected.speed[8] == pytest.approx(50 / 52)
    assert expected.mean == pytest.approx((expected.speed[1] * expected.speed[8]) ** 0.5)


def test_a_drafter_that_does_not_pay_pauses():
    never = drafted(())
    assert expect(never, steps(draft=2.0), DEPTH, TOP_K).speed[1] == pytest.approx(10.1 / 12.1)
    paused = expect(never, steps(draft=2.0, saved=1.5), DEPTH, TOP_K)
    assert paused.speed[1] == pytest.approx(10.1 / 10.6) and paused.nodes[1] == 0


def test_a_drafter_that_is_always_right_at_the_first_choice_gets_a_chain():
    choice, _ = choose([(drafted(CHAIN), steps(token=0.01))], 8)
    assert (choice.drafter, choice.nodes, choice.depth, choice.top_k) == ("a", DEPTH, DEPTH, 1)


def test_nodes_are_as_many_as_ever_pay():
    """The four children of the root, each as often: what a token costs says how many are verified."""
    any_child = drafted(*[((node, node - 1),) for node in range(1, 5)])
    cheap, _ = choose([(any_child, steps(token=0.001))], 1)
    assert (cheap.nodes, cheap.depth, cheap.top_k) == (4, 1, 4)
    dear, _ = choose([(any_child, steps(token=5.0))], 1)
    assert dear == PLAIN
    mostly_first = drafted(*[((1, 0),)] * 9, ((3, 2),))
    best_third = dataclasses.replace(mostly_first, easy=any_child.acceptance)
    few, more = (best_tree(each, steps(token=0.5, rows=(1,))).choice for each in (mostly_first, best_third))
    assert few.nodes == 1 < more.nodes, "where drafts hit best, more nodes pay"


def test_changed_times_change_the_choice():
    """A drafter that is right more often is taken when its drafts are cheap, and left when they are dear."""
    poor, good = drafted(((1, 0),), (), name="poor"), drafted(((1, 0),), name="good", levels=1)
    cheap = choose([(poor, steps()), (good, steps(draft=1.0))], 1)[0]
    dear = choose([(poor, steps()), (good, steps(draft=9.0))], 1)[0]
    assert (cheap.drafter, dear.drafter) == ("good", "poor")


def test_the_choice_depends_on_the_rows():
    """Of engines for one row only steps of one row count."""
    first, second = drafted(((1, 0),), name="first"), drafted(((1, 0),), name="second")
    fast, slow = steps(token=0.01), steps(token=1.0)
    mixed = dataclasses.replace(slow, seconds=slow.seconds | {1: [5.0] * len(RUNGS)})
    both = [(first, fast), (second, mixed)]
    assert choose(both, 1)[0].drafter == "second" != choose(both, 8)[0].drafter


def test_levels_that_cost_nothing_are_not_saved():
    """A drafter that is right three times in a row: a tree of depth 3 saves the rest of its draft, or nothing."""
    path = CHAIN[:3]
    all_levels = expect(drafted(path), steps(draft=7.0), 3, 1).speed[1]
    two_levels = expect(drafted(path, levels=2), steps(draft=7.0), 3, 1).speed[1]
    whole = expect(drafted(path), steps(draft=7.0), DEPTH, 1).speed[1]
    assert all_levels > two_levels == whole
    assert best_tree(drafted(path), steps(draft=7.0)).choice.depth == 3


def test_a_model_that_never_gains_is_told_so():
    never, here = drafted((), (), (), ((1, 0),)), steps(token=4.0, draft=0.2)
    assert choose([(never, here)], 8)[0] == PLAIN
    result = summary([never], {"a": here})
    assert all(choice["drafter"] == "none" for choice in result["choices"])
    said = describe(result)
    assert "no drafts: this model does not gain from them on this machine" in said and said.count("no drafts") == 1
    assert "no drafts" not in describe(summary([drafted(CHAIN)], {"a": here}))


def test_every_tree_that_is_judged_can_be_built():
    for depth, top_k in shapes(DEPTH):
        for rows in (1, 8):
            choice = best_tree(drafted(CHAIN), steps(token=0.01 * rows)).choice
            DynamicTree(choice.depth, choice.top_k, choice.nodes)
            most = expect(drafted(CHAIN), steps(), depth, top_k).choice
            DynamicTree(most.depth, most.top_k, most.nodes)


def test_engines_are_built_for_drafters_that_could_be_faster(monkeypatch):
    """The best first; another only if it could be faster, by the times of plain modules."""
    best, close = drafted(CHAIN, (), name="best"), drafted(CHAIN, (), (), name="close", draft_s=0.0002)
    hopeless = drafted((), name="hopeless", draft_s=0.0001)

    def build(draft, *tried):
        built, lines = [], []

        def one(bench, each):
            built.append(each.drafter)
            return steps(draft=draft)

        monkeypatch.setattr(Bench, "_steps", one)
        found = Bench("model", {}, None, lines.append).measure(tried)
        assert list(found) == built
        return built, lines

    assert build(0.1, hopeless, close, best) == (["best"], ["no engine for hopeless, close: none could be faster"])
    assert build(9.0, hopeless, close, best) == (["best", "close"], []), "two engines are the most"
    slower = dataclasses.replace(close, draft_s=0.01)
    assert build(9.0, slower, best)[0] == ["best"], "its own drafts are dearer still"
    assert build(0.1, best) == (["best"], [])
    bound = limit(close, [(best, steps(draft=9.0))])
    assert bound.mean == best_tree(close, steps(draft=9.0).with_drafts_of(0.08)).mean


def test_a_table_says_what_is_measured_and_what_is_a_limit():
    built, other = drafted(CHAIN, name="/some/where/tables"), drafted((), name="ngram")
    result = json.loads(json.dumps(summary([built, other], {built.drafter: steps(0.010, 0.0001, 0.001)})))
    page = describe(result)
    assert "tables" in page and "/some" not in page.split("tuned for")[0]
    assert [line.startswith("ngram ") for line in page.splitlines() if "estimated, no engine" in line] == [True]
    assert result["plain"][0]["tokens_per_s"] == pytest.approx(1 / 0.0101)
    first = result["drafters"][0]["by_rows"][0]
    assert first["tokens_per_s"] == pytest.approx(8 / (0.011 + 8 * 0.0001)) and first["nodes"] == 7


def test_levels_of_mixtures():
    neural, block = NoDraft(), NoDraft()
    neural.neural = block.neural = block.all_at_once = True
    neural.all_at_once = False
    assert measure.costly_levels(Ngram(), DEPTH) == DEPTH
    assert measure.costly_levels(Merged([Ngram(), neural]), DEPTH) == 2
    assert measure.costly_levels(Merged([neural, neural]), DEPTH) == DEPTH
    assert measure.costly_levels(block, DEPTH) == measure.costly_levels(Merged([Ngram(), block]), DEPTH) == 1


@pytest.mark.parametrize(("deepest", "tree"), [(None, (31, 7)), (15, (31, 7)), (3, (31, 3)), (2, (20, 2)), (1, (4, 1))])
def test_a_drafter_that_scores_few_levels_is_measured_and_judged_at_these(deepest, tree):
    found = measure.largest("a", deepest)
    assert (found.nodes, found.depth) == tree
    DynamicTree(found.depth, found.top_k, found.nodes)
    shallow = drafted(CHAIN[: found.depth], depth=found.depth)
    assert best_tree(shallow, steps(token=0.01)).choice.depth == found.depth


def test_a_table_of_drafters_with_different_trees():
    deep, shallow = drafted(CHAIN, name="deep"), drafted(CHAIN[:2], name="shallow", depth=2)
    fewer = steps()
    fewer = dataclasses.replace(fewer, rungs=(0, 1, 3, 7, 15, 20))
    result = summary([deep, shallow], {"deep": steps(), "shallow": fewer})
    page = describe(result).splitlines()
    assert [line.count(".") for line in page if line.startswith(("deep ", "shallow "))][:2] == [5, 4]
    assert describe(summary([shallow, deep], {"shallow": fewer, "deep": steps()}))


def test_picture(tmp_path):
    pytest.importorskip("matplotlib")
    from specstep.commands.tune_plot import draw

    result = summary([drafted(CHAIN), drafted((), name="b")], {"a": steps()})
    draw(str(tmp_path / "t.png"), result, "model")
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(InputError, match="png: expected a path that can be written"):
        draw(str(tmp_path / "no" / "t.png"), result, "model")


def test_candidates_have_the_mixture_first(monkeypatch):
    source = None
    for shipped, fitting, expected in (
        (["tables", "head"], ["tables", "head"], ["default", "tables", "head", "ngram"]),
        (["tables"], ["tables"], ["tables", "ngram"]),
        (["ngram"], ["ngram"], ["ngram"]),
        (["ngram"], ["ngram", "/head"], ["ngram,/head", "ngram", "/head"]),
    ):
        monkeypatch.setattr(run, "default_drafters", lambda source, found=shipped: found)
        monkeypatch.setattr(run, "fitting_drafters", lambda source, found=fitting: found)
        assert candidates(source) == expected


@pytest.mark.parametrize(("others", "warned"), [(0.0, False), (0.6, True)])
def test_a_busy_machine_is_warned_of(others, warned, monkeypatch):
    """Seconds of wall time, of this process and of all: one processor, on which others take a share."""

    class Session:
        class spec:
            nodes = 31

    class Engine:
        session, spec = Session, Session.spec

    clock = {"wall": 0.0}

    def timed(session, rungs, budget):
        clock["wall"] += 10
        return StepTimes(rungs, {1: [0.01] * len(rungs)}, (0.0, 0.0), {"nothing": {1: 0.001}})

    monkeypatch.setattr(measure, "measure", timed)
    monkeypatch.setattr(measure.os, "cpu_count", lambda: 1)
    monkeypatch.setattr(measure.time, "perf_counter", lambda: clock["wall"])
    monkeypatch.setattr(measure.time, "process_time", lambda: (1 - others) * clock["wall"])
    monkeypatch.setattr(measure, "busy_seconds", lambda: clock["wall"])
    lines = []
    steps = measure.time_steps(Engine, 100.0, lines.append)
    assert steps.seconds[1] == [0.01] * 10 and steps.saved == {1: 0.001}
    assert any(line.startswith("warning: other programs took 60%") for line in lines) == warned


def test_busy_seconds_grow():
    assert 0 <= measure.busy_seconds() <= measure.busy_seconds()
