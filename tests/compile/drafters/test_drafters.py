"""What a user may choose when building: the options and their types, and the drafters they name."""

import dataclasses
from typing import get_type_hints

import pytest
import specstep
from models import save_eagle3, save_model
from specstep.compile.config import BuildOptions, EngineConfig, make_config
from specstep.compile.drafters.choose import make_drafter
from specstep.compile.source import load_source
from specstep.graphs.drafters.ngram import Ngram


def test_options_are_the_fields_of_the_config():
    """One list for the type checker, one that validates: the same names and types."""
    options, fields = get_type_hints(BuildOptions), get_type_hints(EngineConfig)
    assert list(options) == [field.name for field in dataclasses.fields(EngineConfig)]
    assert options.pop("drafter") == fields.pop("drafter") | specstep.Scorer
    assert options == fields
    assert not BuildOptions.__required_keys__


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nodes": "7"}, "nodes: expected an integer or None, got '7'"),
        ({"nodes": True}, "nodes: expected an integer or None, got True"),
        ({"depth": 2.0}, "depth: expected an integer or None, got 2.0"),
        ({"tree": 3}, "tree: expected a string or None, got 3"),
        ({"drafter": None}, "drafter: expected a string or a Scorer, got None"),
        ({"plugins": 1}, "plugins: expected True or False, got 1"),
        ({"backend": ["onnx"]}, r"backend: expected a string, got \['onnx'\]"),
        ({"max_seq_len": None}, "max_seq_len: expected an integer, got None"),
        ({"compute_capability": "8.9"}, "compute_capability: expected a tuple of strings or None, got '8.9'"),
        ({"compute_capability": (8.9,)}, r"compute_capability: expected a tuple of strings or None, got \(8.9,\)"),
        ({"node": 7}, "options: expected some of .*nodes.*, got node"),
        ({"tree": "bush"}, "tree: expected one of chain, static, dynamic, got bush"),
    ],
)
@pytest.mark.parametrize("function", [specstep.build, specstep.jit, specstep.eager])
def test_bad_options_are_refused_in_one_line(function, options, message, tmp_path):
    """Before the model is even looked for."""
    output = (tmp_path / "engine",) if function is specstep.build else ()
    with pytest.raises(specstep.BuildError, match=f"^{message}$"):
        function("no/model", *output, **options)


def test_a_tree_without_depth_is_refused(model_folder):
    with pytest.raises(specstep.BuildError, match=r"^depth: expected at least 1, got 0; --nodes 0 or --drafter none"):
        specstep.eager(str(model_folder), drafter="ngram", depth=0, dtype="float32")


def test_what_files_and_objects_give_becomes_a_config():
    """A manifest and the command line give lists; a scorer is named by its class."""
    config = make_config({"backend": "tensorrt-rtx", "compute_capability": ["8.9"], "drafter": Ngram()})
    assert config.compute_capability == ("8.9",) and config.dtype == "bfloat16"
    assert config.drafter == "specstep.graphs.drafters.ngram.Ngram"
    assert make_config({"backend": "onnx"}).dtype == "float32"


def test_trees_of_more_nodes_grow_deeper(tmp_path):
    """Those of n-grams, whose levels cost little, more than those of a head; what is given counts."""
    source, head = load_source(str(save_model(tmp_path / "tiny")), "float32", "cpu"), save_eagle3(tmp_path / "head")

    def depth(drafter, **tree):
        return make_drafter(source, EngineConfig(drafter=drafter, tree="dynamic", dtype="float32", **tree)).depth

    ngram = {nodes: depth("ngram", nodes=nodes) for nodes in (1, 3, 7, 11, 15, 31, 63)}
    assert ngram == {1: 1, 3: 3, 7: 7, 11: 9, 15: 12, 31: 16, 63: 32}
    assert [depth(f"ngram,{head}", nodes=15), depth("ngram", nodes=15, depth=5)] == [12, 5]
    assert {nodes: depth(str(head), nodes=nodes) for nodes in (3, 12, 15, 31)} == {3: 3, 12: 4, 15: 8, 31: 16}
