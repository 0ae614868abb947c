"""Tuning: what is chosen of times and paths made by hand, which engines are built, what is kept and when `build` takes
it."""

import dataclasses
import json
from collections import Counter

import pytest
import specstep
from models import save_model
from specstep.cli import main
from specstep.commands.tune_page import describe
from specstep.compile import tuned
from specstep.compile.config import EngineConfig
from specstep.compile.source import load_source
from specstep.errors import BuildError, InputError
from specstep.graphs.drafters.merged import Merged
from specstep.graphs.drafters.ngram import Ngram
from specstep.graphs.drafters.none import NoDraft
from specstep.graphs.tree import DynamicTree
from specstep.report import AcceptedNode
from specstep.runtime.acceptance import Acceptance
from specstep.train.tune import measure, run
from specstep.train.tune.choose import DEPTH, PLAIN, TOP_K, Drafted, Steps, best_tree, choose, expect, shapes
from specstep.train.tune.run import Bench, candidates, limit, summary

RUNGS = (0, 1, 3, 7, 15, 31)
CHAIN = tuple((depth, 0) for depth in range(1, DEPTH + 1))  # always right at the first choice


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def source(model_folder):
    return load_source(str(model_folder), "float32", "cpu")


def drafted(*paths, name="a", levels=DEPTH, easy=None, draft_s=0.002):
    """A drafter whose steps accepted these paths of (node, rank), each as often."""

    def acceptance(paths):
        counts = Counter(tuple(AcceptedNode(*node) for node in path) for path in paths)
        return Acceptance(1, sum(1 + len(path) for path in paths), counts)

    return Drafted(name, levels, acceptance(paths), acceptance(easy or paths), 100.0, draft_s)


def steps(base=10.0, token=0.1, draft=0.0, rows=(1, 2, 4, 8)):
    """A machine on which a step takes `base`, what it drafts, and so much for each token."""
    seconds = {n: [base + draft + token * n * (1 + nodes) for nodes in RUNGS] for n in rows}
    return Steps(RUNGS, seconds, dict.fromkeys(rows, draft))


def test_speed_is_tokens_per_step_over_the_time_of_plain_steps():
    expected = expect(drafted(CHAIN, ()), steps(10.0, 5.0, draft=2.0, rows=(1, 8)), DEPTH, TOP_K)
    assert expected.nodes == {1: 7, 8: 0}
    assert expected.speed[1] == pytest.approx(4.5 * 15 / (12 + 5 * 8))
    assert expected.speed[8] == pytest.approx(50 / 52)
    assert expected.mean == pytest.approx((expected.speed[1] * expected.speed[8]) ** 0.5)


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
    for depth, top_k in shapes():
        for rows in (1, 8):
            choice = best_tree(drafted(CHAIN), steps(token=0.01 * rows)).choice
            DynamicTree(choice.depth, choice.top_k, choice.nodes)
            most = expect(drafted(CHAIN), steps(), depth, top_k).choice
            DynamicTree(most.depth, most.top_k, most.nodes)


def test_engines_are_built_for_drafters_that_could_be_faster(monkeypatch):
    """The best first; another only if it could be faster, as fast as plain modules draft."""
    best, close = drafted(CHAIN, (), name="best"), drafted(CHAIN, (), (), name="close", draft_s=0.001)
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
    assert bound.mean == best_tree(close, steps(draft=9.0).with_drafts_of(0.25)).mean


def test_a_table_says_what_is_measured_and_what_is_a_limit():
    built, other = drafted(CHAIN, name="/some/where/tables"), drafted((), name="ngram")
    result = json.loads(json.dumps(summary([built, other], {built.drafter: steps(0.010, 0.0001, 0.001)})))
    page = describe(result)
    assert "tables" in page and "/some" not in page.split("tuned for")[0]
    assert [line.startswith("ngram ") for line in page.splitlines() if "at most (no engine" in line] == [True]
    assert result["plain"][0]["tokens_per_s"] == pytest.approx(1 / 0.0101)
    first = result["drafters"][0]["by_rows"][0]
    assert first["tokens_per_s"] == pytest.approx(8 / (0.011 + 8 * 0.0001)) and first["nodes"] == 7


def test_levels_of_mixtures():
    neural = NoDraft()
    neural.neural = True
    assert measure.costly_levels(Ngram()) == DEPTH
    assert measure.costly_levels(Merged([Ngram(), neural])) == 2
    assert measure.costly_levels(Merged([neural, neural])) == DEPTH


def test_build_takes_what_was_kept_unless_the_user_chooses(source):
    config = EngineConfig(dtype="float32")
    choice = {"drafter": "ngram", "nodes": 3, "depth": 2, "top_k": 2, "tree": "dynamic"}
    four = choice | {"nodes": 2, "max_batch": 4, "because": "for four"}
    lines = []
    assert tuned.with_tuned(source, config, {}, lines.append) == config and not lines
    tuned.save_tuned(source, config, [choice | {"max_batch": 1, "because": "ngram, the fastest"}, four], [])
    assert tuned.with_tuned(source, config, {}, lines.append) == dataclasses.replace(config, **choice)
    assert lines == ["tuned: ngram, the fastest"]
    for rows in (2, 4):
        batch = dataclasses.replace(config, max_batch=rows)
        assert tuned.with_tuned(source, batch, {}, lines.append).nodes == 2 and lines[-1] == "tuned: for four"
    lines.clear()
    for given in ({"drafter": "none"}, {"nodes": 5}, {"tree_choices": "x"}):
        assert tuned.with_tuned(source, config, given, lines.append) == config
    assert tuned.with_tuned(source, EngineConfig(), {}, lines.append) == EngineConfig() and not lines
    many = dataclasses.replace(config, max_batch=5)
    assert tuned.with_tuned(source, many, {}, lines.append) == many and "specstep tune --max-batch 5" in lines[0]


def test_a_choice_that_cannot_be_used_is_left_out(source, tmp_path):
    config, lines = EngineConfig(dtype="float32"), []
    choice = dataclasses.asdict(PLAIN) | {"drafter": f"default,{tmp_path}/gone", "max_batch": 1, "because": ""}
    tuned.save_tuned(source, config, [choice], [])
    assert tuned.with_tuned(source, config, {}, lines.append) == config and "gone is gone" in lines[0]
    odd = '{"choices": [{"max_batch": 1, "because": "", "drafter": "x", "tree": "odd", "nodes": 1}]}'
    former = '{"choice": {"drafter": "ngram"}}'
    for broken in ("{", "[]", '{"choices": []}', odd, former):
        tuned.tuned_path(source, config).write_text(broken)
        assert tuned.with_tuned(source, config, {}, lines.append) == config
    assert all("cannot be read" in line for line in lines[1:]) and len(lines) == 6


def test_drafter_auto_is_what_was_tuned_else_what_fits(source):
    config, lines = EngineConfig(dtype="float32", drafter="auto"), []
    given = {"drafter": "auto"}
    assert tuned.with_tuned(source, config, given, lines.append).drafter == "ngram"
    assert lines[0].startswith("drafter auto: ngram")
    choice = {"drafter": "none", "nodes": 0, "depth": 0, "top_k": 1, "tree": None, "max_batch": 1, "because": "none"}
    tuned.save_tuned(source, config, [choice], [])
    assert tuned.with_tuned(source, config, given, lines.append).nodes == 0
    shaped = dataclasses.replace(config, nodes=5)
    assert tuned.with_tuned(source, shaped, given | {"nodes": 5}, lines.append) == dataclasses.replace(
        shaped, drafter="none"
    ), "the user's tree stays"


def test_models_are_told_apart(source, drafter_folder, model_folder):
    other = load_source(str(drafter_folder), "float32", "cpu")
    again = load_source(str(model_folder), "float32", "cpu")
    assert tuned.model_hash(source) == tuned.model_hash(again) != tuned.model_hash(other)


def test_backends_of_fixed_trees_and_no_prompts_are_refused(model_folder):
    with pytest.raises(BuildError, match=r"backend: expected inductor or onnx, .* got tensorrt"):
        run.tune(str(model_folder), backend="tensorrt")
    with pytest.raises(InputError, match="prompts: expected at least one"):
        run.tune(str(model_folder), [])


@pytest.fixture
def uncompiled(tmp_path, monkeypatch):
    """Plain modules in place of compiled engines -> the model, and the options of each build."""
    model_folder = save_model(tmp_path / "model", tokenizer=True, num_hidden_layers=1)
    built = []

    def build(model, folder, report, **options):
        folder.mkdir()
        built.append(options)

    def load(folder, nodes, **_):
        assert nodes == "all"
        return specstep.eager(str(model_folder), **built[-1])

    monkeypatch.setattr(run, "build", build)
    monkeypatch.setattr(run, "load", load)
    monkeypatch.setattr(measure, "STEPS_S", 0.1)
    return model_folder, built


def test_command_measures_keeps_and_explains(uncompiled, tmp_path, capsys):
    """The whole way. Plain modules cannot be taken apart: plain steps are those of an engine without a drafter."""
    model_folder, built = uncompiled
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "hello hello hello"}\n{"token_ids": [5, 6, 5, 6]}\n')
    command = ["tune", str(model_folder), "--dtype", "float32", "--max-seq-len", "64", "--max-new-tokens", "6"]
    command += ["--max-batch", "2", "--prompts", str(tmp_path / "prompts.jsonl"), "-o", str(tmp_path / "t.json")]
    assert main(command) == 0
    out, err = capsys.readouterr()
    assert [options["drafter"] for options in built] == ["ngram", "none"]
    assert "tuned for engines of 1 " in out and "tokens per step with the first n nodes" in out
    assert "drafter ngram: putting it together" in err and "timing steps" in err and "kept in" in err
    result = json.loads((tmp_path / "t.json").read_text())
    assert [at["rows"] for at in result["plain"]] == [choice["max_batch"] for choice in result["choices"]] == [1, 2]
    assert result["rungs"][0] == 0 and result["drafters"][0]["built"]
    source = load_source(str(model_folder), "float32", "cpu")
    for choice in result["choices"]:
        config = EngineConfig(dtype="float32", max_batch=choice["max_batch"])
        taken = tuned.with_tuned(source, config, {}, lambda line: None)
        assert {name: getattr(taken, name) for name in tuned.CHOSEN} == {name: choice[name] for name in tuned.CHOSEN}


def test_picture(tmp_path):
    pytest.importorskip("matplotlib")
    from specstep.commands.tune_plot import draw

    result = summary([drafted(CHAIN), drafted((), name="b")], {"a": steps()})
    draw(str(tmp_path / "t.png"), result, "model")
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(InputError, match="png: expected a path that can be written"):
        draw(str(tmp_path / "no" / "t.png"), result, "model")


def test_candidates_have_the_mixture_first(source, monkeypatch):
    assert candidates(source) == ["ngram"]
    for shipped, fitting, expected in (
        (["tables", "head"], ["tables", "head"], ["default", "tables", "head", "ngram"]),
        (["tables"], ["tables"], ["tables", "ngram"]),
        (["ngram"], ["ngram", "/head"], ["ngram,/head", "ngram", "/head"]),
    ):
        monkeypatch.setattr(run, "default_drafters", lambda source, found=shipped: found)
        monkeypatch.setattr(run, "fitting_drafters", lambda source, found=fitting: found)
        assert candidates(source) == expected


@pytest.mark.parametrize("architecture", ["Llama", "Qwen3Moe"])
def test_a_loaded_model_takes_one_drafter_after_the_other(architecture, tmp_path):
    """What a drafter is given does not depend on those that were tried before."""
    folder = save_model(tmp_path, architecture, tokenizer=True)
    source, config = load_source(str(folder), "float32", "cpu"), EngineConfig(dtype="float32", max_seq_len=64)
    first, *others = (
        measure.try_drafter(source, config, name, ["hello hello hello"], 8, lambda line: None) for name in ["ngram"] * 3
    )
    assert first.length > 10 and first.draft_s > 0
    assert [dataclasses.replace(other, draft_s=first.draft_s) for other in others] == [first] * 2
