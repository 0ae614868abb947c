"""Forced acceptance: as many drafts as were asked for, whatever the target says; never taken for a real engine."""

import pytest
import specstep
from models import save_eagle3

OPTIONS = {"dtype": "float32", "max_batch": 2, "max_seq_len": 160, "prefill_chunk": 16}
TREES = {"chain": {"tree": "chain", "nodes": 3}, "static": {"tree": "static", "nodes": 7}, "dynamic": {"nodes": 7}}


def steps(engine):
    """New tokens of both rows, step after step."""
    session = engine.session
    for prompt in ([5, 6, 7], list(range(9, 40))):
        session.admit(prompt, 120, [])
    return [[len(report.tokens) for report in session.step().values()] for _ in range(6)]


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("count", [0, 1, 2])
def test_every_step_accepts_that_many_drafts(count, tree, model_folder, tmp_path):
    head = save_eagle3(tmp_path / "head")
    engine = specstep.eager(str(model_folder), drafter=str(head), forced_acceptance=count, **TREES[tree], **OPTIONS)
    assert steps(engine) == [[1, 1]] + [[count + 1, count + 1]] * 5, "the first step has no drafts"


def test_a_tree_that_is_less_deep_gives_what_it_has(model_folder, tmp_path):
    head = save_eagle3(tmp_path / "head")
    engine = specstep.eager(str(model_folder), drafter=str(head), forced_acceptance=9, **TREES["chain"], **OPTIONS)
    assert steps(engine) == [[1, 1]] + [[4, 4]] * 5


def test_generate_refuses_it_unless_asked_for_by_name(model_folder):
    engine = specstep.eager(str(model_folder), drafter="ngram", forced_acceptance=1, **OPTIONS)
    with pytest.raises(specstep.InputError, match="--forced-acceptance 1, which accepts drafts right or wrong"):
        engine.generate([5, 6], 4)
    assert len(engine.generate([5, 6], 4, ignore_eos=True, forced_acceptance=True).token_ids) == 4


def test_a_count_out_of_range_is_refused(model_folder):
    with pytest.raises(specstep.BuildError, match="forced_acceptance: expected 0 to 64, got -1"):
        specstep.eager(str(model_folder), forced_acceptance=-1, **OPTIONS)
