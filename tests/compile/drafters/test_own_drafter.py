"""A drafter that is not of this package: the page that shows one, the command line, and what is refused and how."""

import importlib
import re
import sys
from pathlib import Path

import numpy
import pytest
import specstep
import torch
from models import greedy, save_model, tiny_model
from specstep.cli import main
from specstep.graphs.drafters.merged import Merged
from specstep.graphs.drafters.ngram import Ngram

PAGE = Path(__file__).parents[3] / "docs" / "your-own-drafter.md"
PROMPTS = [[5], [40, 41, 42] * 5, list(range(30, 60))]


@pytest.fixture
def bigrams(tmp_path, monkeypatch):
    """The module of the page in the current directory, beside a corpus."""
    (source,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(source.splitlines()) < 40
    (tmp_path / "bigrams.py").write_text(source)
    (tmp_path / "corpus.txt").write_text("the cat sat on the mat and the cat sat on the hat")
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("bigrams", None)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["onnx", "inductor"])
def test_the_page(backend, bigrams, model_folder, tmp_path, capsys):
    """Built from the command line, where its module is in the current directory; the manifest names it."""
    target = ["build", str(model_folder), "-o", str(tmp_path / "engine"), "--dtype", "float32", "--backend", backend]
    tree = ["--tree", "dynamic", "--depth", "2", "--top-k", "2", "--nodes", "3", "--max-seq-len", "96"]
    assert main([*target, "--drafter", "bigrams:from_corpus", *tree]) == 0, capsys.readouterr()
    engine = specstep.load(tmp_path / "engine")
    assert engine.spec.config["drafter"] == "bigrams:from_corpus"
    for prompt in PROMPTS:
        assert engine.generate(prompt, 20, ignore_eos=True).token_ids == greedy(tiny_model("Llama"), prompt, 20)


def test_the_page_drafts_what_it_counted(bigrams, model_folder, monkeypatch, tmp_path):
    """Counted in the target's own answer, it is nearly always right; mixed with others, too."""
    monkeypatch.syspath_prepend(tmp_path)
    answer = greedy(tiny_model("Llama"), PROMPTS[1], 20)
    scorer = importlib.import_module("bigrams").Bigrams([*PROMPTS[1], *answer], 320)
    engine = specstep.eager(str(model_folder), drafter=scorer, dtype="float32", max_seq_len=96)
    result = engine.generate(PROMPTS[1], 20, ignore_eos=True)
    assert result.token_ids == answer and result.stats["steps"] < 12
    config = engine.spec.config
    assert (config["drafter"], config["depth"], config["nodes"]) == ("bigrams.Bigrams", 7, 7)
    mixed = specstep.eager(str(model_folder), drafter="ngram,bigrams:from_corpus", dtype="float32", max_seq_len=96)
    assert mixed.generate(PROMPTS[1], 20, ignore_eos=True).token_ids == answer


class Neural(specstep.Scorer):
    """Attends to nothing, but declares and uses all that a scorer may have: a cache layer, state, features, weights."""

    feature_layers = (1, 3)

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.project = torch.nn.Linear(96, 320)
        self.register_buffer("bias", torch.zeros(320))

    def cache_layers(self):
        return [specstep.CacheLayer(2, 3, 5)]

    def state(self, shape):
        return {"last": specstep.StateTensor((96,), torch.float32), "steps": specstep.StateTensor((), torch.int64)}

    def prefill(self, tokens, count, where, state, keys, values, features):
        keys[0][:, :, : tokens.shape[1]] = 1.0
        last = features.gather(1, (count - 1)[:, None, None].expand(-1, 1, 96))[:, 0]
        return {"last": last.float(), "steps": torch.zeros_like(count)}

    def begin(self, state, keys, values, shape):
        def expand(tokens, parents):
            logits = self.project(state["last"].to(self.project.weight.dtype)).float() + self.bias
            best = logits.log_softmax(-1).topk(shape.top_k)
            return specstep.Candidates(*(part[:, None].expand(-1, tokens.shape[1], -1) for part in best[::-1]))

        root = state["lengths"][:, None]
        return expand(root, root), expand, {"steps": state["steps"] + 1}

    def commit(self, state, path, features):
        return {"last": features[:, 0].float()}


@pytest.mark.parametrize("tree", [{}, {"tree": "static", "nodes": 5}, {"tree": "dynamic", "nodes": 6, "top_k": 3}])
def test_a_scorer_with_weights_state_caches_and_features(tree, model_folder):
    options = {"drafter": Neural(), "dtype": "float32", "max_batch": 2, "max_seq_len": 96} | tree
    engine = specstep.eager(str(model_folder), **options)
    expected = [greedy(tiny_model("Llama"), prompt, 12) for prompt in PROMPTS]
    assert [result.token_ids for result in engine.generate(PROMPTS, 12, ignore_eos=True)] == expected
    if not tree:
        assert (engine.spec.config["depth"], engine.spec.config["nodes"]) == (4, 4)  # a chain


def test_what_is_handed_to_begin_alone_is_not_kept(model_folder):
    widths = set()

    class Handing(Neural):
        def begin(self, state, keys, values, shape):
            widths.add(tuple(state["handed"].shape[1:]))
            return Neural.begin(self, state, keys, values, shape)

        def commit(self, state, path, features):
            return Neural.commit(self, state, path, features) | {"handed": features.gather(1, path[:, :, None])}

    engine = specstep.eager(str(model_folder), drafter=Handing(), dtype="float32", max_seq_len=96)
    expected = greedy(tiny_model("Llama"), PROMPTS[0], 12)
    assert engine.generate(PROMPTS[0], 12, ignore_eos=True).token_ids == expected
    assert widths >= {(5, 1)}
    assert {"last", "steps"} < set(engine.session.state) and "handed" not in engine.session.state


def test_parameters_take_the_dtype_and_buffers_keep_theirs(model_folder):
    scorer = Neural()
    specstep.eager(str(model_folder), drafter=scorer, dtype="bfloat16", max_seq_len=96)
    assert scorer.project.weight.dtype == torch.bfloat16 and scorer.bias.dtype == torch.float32


def changed(**methods):
    return type("Odd", (Neural,), methods)()


def candidates(make):
    def begin(self, state, keys, values, shape):
        def expand(tokens, parents):
            good = torch.zeros(*tokens.shape, shape.top_k)
            return make(good.long(), good)

        root = state["lengths"][:, None]
        return expand(root, root), expand, {"steps": state["steps"]}

    return {"begin": begin}


def late(self, state, keys, values, shape):
    """Right for the root, wrong afterwards."""
    children, _, own = Neural.begin(self, state, keys, values, shape)
    return children, lambda tokens, parents: specstep.Candidates(children.tokens[:, 0], children.log_probs), own


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        (
            candidates(lambda t, p: specstep.Candidates(t[:, 0], p)),
            r"begin: tokens: expected \[2, 1, 1\] int64, got \[2, 1\]",
        ),
        (candidates(lambda t, p: specstep.Candidates(t.int(), p)), r"begin: tokens: expected .* int64, got .* int32"),
        (candidates(lambda t, p: specstep.Candidates(t, p.double())), r"begin: log_probs: .* float32, got .* float64"),
        (
            candidates(lambda t, p: specstep.Candidates(t + 320, p)),
            "begin: tokens: expected ids from 0 to 319, got 320",
        ),
        (candidates(lambda t, p: (t, p)), "begin: expected Candidates, got tuple"),
        ({"begin": late}, r"expand: tokens: expected \[2, 1, 1\] int64, got \[2, 1\]"),
        (
            {"commit": lambda *_: {}},
            r"begin and commit: expected the state that it declares \(last, steps\), got steps",
        ),
        ({"prefill": lambda *_: {}}, r"prefill: expected the state that it declares \(last, steps\), got none"),
        ({"commit": lambda *_: {"more": torch.zeros(2)}}, r"declares \(last, steps\), got steps"),
        (
            {"commit": lambda *_: {"last": torch.zeros(2, 96), "history": torch.zeros(2)}},
            "commit: expected names that the step does not use itself, got history",
        ),
        (
            {"commit": lambda *_: {"last": torch.zeros(2, 96), "more": 3}},
            "commit: more: expected a tensor whose first size is 2, got int",
        ),
        (
            {"prefill": lambda self, *given: Neural.prefill(self, *given) | {"more": torch.zeros(1)}},
            r"prefill: expected the state that it declares \(last, steps\), got last, more, steps",
        ),
        ({"commit": lambda *_: {"last": torch.zeros(2, 5)}}, r"state last: expected \[2, 96\] float32, got \[2, 5\]"),
        ({"state": lambda *_: {"lengths": specstep.StateTensor((), torch.int64)}}, "state: .* itself, got lengths"),
        ({"state": lambda *_: {"last": (96,)}}, "state: expected a dict of StateTensor by name, got dict"),
        ({"cache_layers": lambda self: [(2, 0, 5)]}, r"cache_layers: expected a list of CacheLayer .*got \[\(2, 0, 5"),
        ({"cache_layers": lambda self: []}, r"prefill: .* IndexError: .*, at .*test_own_drafter.py:\d+: `keys\[0\]"),
        (
            {"feature_layers": (1, 5)},
            r"feature_layers: expected indices of the target's hidden states, 0 to 4, got \(1",
        ),
        ({"most_depth": 0}, "most_depth: expected None or a number from 1 on, got 0"),
        ({"feature_layers": 3}, "feature_layers: expected indices of the target's hidden states, 0 to 4, got 3"),
        ({"feature_layers": None}, "feature_layers: expected indices of the target's hidden states, 0 to 4, got None"),
        (
            {"__init__": lambda self: None},
            r"expected an __init__ that calls super\(\).__init__\(\) first, got one without",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_field(methods, message, model_folder):
    with pytest.raises(specstep.BuildError, match=f"^drafter: Odd: .*{message}") as caught:
        specstep.eager(str(model_folder), drafter=changed(**methods), dtype="float32", max_seq_len=96)
    assert "\n" not in str(caught.value)


def test_scorers_in_a_mixture_in_a_mixture_are_tried_too(model_folder):
    wrong = changed(**candidates(lambda t, p: (t, p)))
    for scorer in (Merged([Ngram(), wrong]), Merged([Merged([Ngram(), wrong]), Ngram()])):
        with pytest.raises(specstep.BuildError, match=r"^drafter: Odd: begin: expected Candidates, got tuple"):
            specstep.eager(str(model_folder), drafter=scorer, dtype="float32", max_seq_len=96)


def test_the_scorers_own_line_is_named_for_an_error_in_a_package_that_it_calls(model_folder):
    def begin(self, state, keys, values, shape):
        numpy.testing.assert_array_equal([1], [2])

    with pytest.raises(specstep.BuildError, match=r"at test_own_drafter.py:\d+: `numpy.testing.assert"):
        specstep.eager(str(model_folder), drafter=changed(begin=begin), dtype="float32", max_seq_len=96)


def reads(state):
    return int(state["steps"].max().item())


def branches(state):
    return 1 if state["steps"].max() > 0 else 0


def counts(state):
    return state["steps"].nonzero().shape[0]


def leaves(state):
    return int(state["steps"].numpy().max())


@pytest.mark.parametrize("lower", [specstep.build, specstep.jit])
@pytest.mark.parametrize("function", [reads, branches, counts])
def test_the_line_that_reads_data_is_named(function, lower, model_folder, tmp_path):
    def begin(self, state, keys, values, shape):
        return Neural.begin(self, state | {"steps": state["steps"] + function(state)}, keys, values, shape)

    options = {"drafter": changed(begin=begin), "dtype": "float32", "max_seq_len": 96}
    output = (tmp_path / "engine",) if lower is specstep.build else ()
    number = function.__code__.co_firstlineno + 1
    with pytest.raises(
        specstep.BuildError, match=rf"test_own_drafter.py:{number}: `return .*state.*`: expected"
    ) as got:
        lower(str(model_folder), *output, **options)
    assert "\n" not in str(got.value)
    specstep.eager(str(model_folder), **options)  # where prints and breakpoints work


def test_the_line_that_cannot_be_traced_is_named(model_folder, tmp_path):
    def begin(self, state, keys, values, shape):
        return Neural.begin(self, state | {"steps": state["steps"] + leaves(state)}, keys, values, shape)

    number = leaves.__code__.co_firstlineno + 1
    with pytest.raises(specstep.BuildError, match=rf"test_own_drafter.py:{number}: `return int\(state.*`: .*numpy"):
        specstep.build(
            str(model_folder), tmp_path / "engine", drafter=changed(begin=begin), dtype="float32", max_seq_len=96
        )


def bounded(keys):
    assert keys[0].shape[2] < 150


def fixed(keys):
    torch.zeros(int(keys[0].shape[2])) + keys[0][0, 0, :, 0]


@pytest.mark.parametrize("function", [bounded, fixed])
def test_a_graph_that_holds_for_some_sizes_alone_is_refused(function, model_folder, tmp_path):
    """No line of the scorer raises while it is traced with two steps of slots."""

    def begin(self, state, keys, values, shape):
        function(keys)
        return Neural.begin(self, state, keys, values, shape)

    with pytest.raises(
        specstep.BuildError, match=r"^drafter: .*; expected code .*for any number of rows and cache slots$"
    ):
        specstep.build(
            str(model_folder), tmp_path / "engine", drafter=changed(begin=begin), dtype="float32", max_seq_len=300
        )


FACTORIES = """
def number(target): return 7
def broken(target):
    return target.nonsense
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("factories:number", "expected a specstep.Scorer, got int"),
        ("factories:broken", r"factories.py:4: `return target.nonsense`: AttributeError"),
        ("factories:nowhere", "expected a factory that can be imported, got .*nowhere"),
        ("nomodule.here:make", "expected a factory that can be imported, got No module named 'nomodule'"),
    ],
)
def test_factories_that_fail_are_refused(name, message, model_folder, tmp_path, monkeypatch):
    (tmp_path / "factories.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(specstep.BuildError, match=f"drafter: {name}: {message}"):
        specstep.eager(str(model_folder), drafter=name, dtype="float32")
    sys.modules.pop("factories", None)


def test_a_class_is_no_scorer(model_folder):
    with pytest.raises(specstep.BuildError, match="drafter: expected a string or a Scorer, got <class"):
        specstep.eager(str(model_folder), drafter=Neural)


def test_models_elsewhere(tmp_path):
    """Two targets, one scorer: what it holds is not tied to the first."""
    scorer = Neural()
    for seed in (0, 1):
        folder = save_model(tmp_path / str(seed), seed=seed)
        engine = specstep.eager(str(folder), drafter=scorer, dtype="float32", max_seq_len=64)
        assert engine.generate([5, 6], 8, ignore_eos=True).token_ids == greedy(tiny_model("Llama", seed), [5, 6], 8)
