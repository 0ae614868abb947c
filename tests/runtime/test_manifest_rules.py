"""A manifest that no build writes is refused in one line, which names the field: nothing is allocated, nothing runs."""

import json

import pytest
from specstep.errors import EngineError
from specstep.graphs.state import row_state
from specstep.runtime.engine_file import MANIFEST, read_manifest
from specstep.runtime.manifest_rules import rows_of_state

ALTERED = {  # where in the manifest -> value, and what the line names
    ("files", "../x"): ({"bytes": 1, "sha256": "0" * 64}, "files: name"),
    ("files", "/etc/hostname"): ({"bytes": 1, "sha256": "0" * 64}, "files: name"),
    ("files", "a\nb"): ({"bytes": 1, "sha256": "0" * 64}, "files: name"),
    ("files", "step.pt2", "bytes"): (-1, "bytes"),
    ("files", "step.pt2", "sha256"): (None, "sha256"),
    ("files", "step.pt2"): ([], "step.pt2"),
    ("spec", "step", "file"): ("../step.pt2", "step.file"),
    ("spec", "plain", "file"): ("other.pt2", "plain.file"),
    ("spec", "step", "inputs", 0): ("nothing", "step.inputs"),
    ("spec", "step", "inputs"): (["nodes"], "step.inputs"),
    ("spec", "prefill", "outputs"): (["lengths"], "step.outputs"),
    ("spec", "step", "outputs", 0): ("lengths", "step.outputs"),
    ("spec", "max_batch"): (10**30, "max_batch"),
    ("spec", "max_seq_len"): (193, "max_seq_len"),
    ("spec", "capacity"): (256, "capacity"),
    ("spec", "slot_step"): (0, "slot_step"),
    ("spec", "scratch"): (1, "scratch"),
    ("spec", "catch_up"): (-1, "catch_up"),
    ("spec", "vocab_size"): (2.5, "vocab_size"),
    ("spec", "state", 0, "shape", 1): (319, "history.shape"),
    ("spec", "state", 0, "dtype"): ("int8", "history.dtype"),
    ("spec", "state", 1, "name"): ("history", "each name once"),
    ("spec", "state", 1, "name "): (1, "no further fields"),
    ("spec", "state", 2, "fill"): (2**64, "fill"),
    ("spec", "state", 11, "fill"): (1, "sampling.fill"),
    ("spec", "caches", 1, "fill"): (1, "fill"),
    ("spec", "shared", 0, "shape", 0): (7, "learned.shape"),
    ("spec", "caches", 0, "shape", 2): (1, "keys.0.shape"),
    ("spec", "caches", 0, "dtype"): ("system", "dtype"),
    ("spec", "config", "nodes"): (8, "nodes"),
    ("spec", "config", "backend"): (["onnx"], "backend"),
    ("spec", "stop_ids"): ("1", "stop_ids"),
    ("requires", "torch"): ({}, "torch"),
    ("requires", "architecture"): ("a\nb", "architecture"),
    ("requires", "\ud800"): ("1", "requires: name"),
    ("about", "special_tokens"): (None, "special_tokens"),
    ("about", "weights"): ({"float32": "x"}, "weights"),
    ("about", "operators"): ({"a\nb": 1}, "operators: name"),
    ("about", "build_s"): ("long", "build_s"),
    ("about", "stage_s"): ({"loading": None}, "stage_s"),
    ("about", "widened"): ({"iq2_xs": "all"}, "widened"),
    ("about", "models"): ({"step": {"opset": 18, "tensors": {"nodes": True}}}, "tensors.'nodes': expected an object"),
    ("about", "plans"): (
        {"step": {"layers": 1, "plugins": {}, "profiles": [{"rows": [1, 2]}], "tensors": {}}},
        "the least, the best and the most",
    ),
    ("about", "tree", "paths"): ([[]], "a path of at least one node"),
}


def altered(folder, target, path, value):
    data = json.loads((folder / MANIFEST).read_text())
    inner = data
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    (target / MANIFEST).write_text(json.dumps(data))
    return target


@pytest.mark.parametrize("path", ALTERED, ids=lambda path: ".".join(map(repr, path)))
def test_the_line_names_the_field(engine_folder, tmp_path, path):
    value, named = ALTERED[path]
    with pytest.raises(EngineError) as refused:
        read_manifest(altered(engine_folder, tmp_path, path, value))
    assert named in str(refused.value) and str(refused.value).isprintable()


def test_tensorrt_s_own_fields_are_required(engine_folder, tmp_path):
    with pytest.raises(EngineError, match="compute_capability: expected a list"):
        read_manifest(altered(engine_folder, tmp_path, ("spec", "config", "backend"), "tensorrt"))


@pytest.mark.parametrize("name", ["aten::sum.dim_IntList", "_quantized::linear", "specstep::packed_linear"])
def test_operators_of_any_namespace_are_taken(engine_folder, tmp_path, name):
    read_manifest(altered(engine_folder, tmp_path, ("about", "operators"), {name: 1}))


@pytest.mark.parametrize("text", ["[" * 5000 + "]" * 5000, '{"format_version": NaN}', "9" * 10_000, "null", "[]"])
def test_what_is_no_manifest_is_refused(tmp_path, text):
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(EngineError, match="does not parse"):
        read_manifest(tmp_path)


def test_the_known_shapes_are_those_of_the_graphs():
    declared = row_state(320, 7, 1001)
    assert rows_of_state(320, 7, 1001) == {
        name: (list(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.fill)
        for name, tensor in declared.items()
    }
