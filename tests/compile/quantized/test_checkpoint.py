"""Quantised checkpoints are the numbers that their publishers mean; integers are kept where kernels have them."""

import json
from pathlib import Path

import pytest
import torch
from models import save_model
from quantized_files import CASES, E2M1, SIZES, compressed, nvfp4, of_method, save_quantized
from safetensors.torch import load_file, save_file
from specstep.compile.config import make_config
from specstep.compile.precision import choose_precision
from specstep.compile.quantized.checkpoint import Quantized
from specstep.compile.quantized.readers import _of_groups, float8, int8_rows
from specstep.compile.source import load_source, quantized_file, widened_tensors
from specstep.errors import BuildError
from specstep.kernels.linear.groups import Groups, unpack_groups


@pytest.mark.parametrize("name", CASES)
def test_weights_are_those_that_were_meant(name, tmp_path):
    config, write, kind = CASES[name]
    torch.manual_seed(0)
    expected = save_quantized(tmp_path, config, write)
    exact = load_source(str(tmp_path), "float32", "cpu").model.state_dict()
    rounded = load_source(str(tmp_path), "bfloat16", "cpu").model
    precision = choose_precision(make_config({}), [quantized_file(str(tmp_path))], 320, {})
    for key, values in expected.items():
        # A least value is kept in float16.
        torch.testing.assert_close(exact[key], values.float(), rtol=1e-6, atol=7e-4 if kind == "int4_least" else 1e-6)
        if "proj" in key:
            weight = rounded.get_parameter(key)
            form = precision(weight)
            assert form.kind == (kind or "bfloat16"), key
            if kind:
                groups = unpack_groups(form.make(weight), len(weight))
                kept = groups.values(weight.shape[1])
                assert torch.equal(kept.bfloat16(), weight)
                # Scales of four-bit floats may be rounded to float16.
                torch.testing.assert_close(kept, exact[key], rtol=2**-11 if kind == "nvfp4" else 0, atol=0)


@pytest.mark.parametrize(("scale", "kept"), [(2.0**-6, True), (2.0**-20, True), (2.0**-24, False), (3e-7, False)])
def test_four_bit_floats_are_kept_where_float16_holds_their_scales(scale, kept, tmp_path):
    config, write = CASES["modelopt nvfp4"][0], nvfp4("weight", "weight_scale_2", divides=False, scale=scale)
    torch.manual_seed(0)
    expected = save_quantized(tmp_path, config, write)
    model = load_source(str(tmp_path), "bfloat16", "cpu").model
    precision = choose_precision(make_config({}), [quantized_file(str(tmp_path))], 320, {})
    names = sorted(name for name in expected if "proj" in name)
    assert widened_tensors(tmp_path) == ({} if kept else {"modelopt": names})
    for name in names:
        weight = model.get_parameter(name)
        form = precision(weight)
        assert form.kind == ("nvfp4" if kept else "bfloat16")
        if kept:
            groups = unpack_groups(form.make(weight), len(weight))
            assert torch.equal(groups.values(weight.shape[1]), expected[name])
        assert torch.equal(weight, expected[name].bfloat16())


@pytest.mark.parametrize(
    ("least", "most", "zeros", "kept"),
    [(104, 143, False, True), (103, 127, False, False), (120, 144, False, False), (0, 127, True, True)],
)
def test_blocks_of_experts_are_kept_where_float16_holds_their_scales(least, most, zeros, kept, tmp_path):
    """zeros: of the blocks whose scales it does not hold."""
    folder = save_model(tmp_path / "model", "GptOss", hidden_size=64, intermediate_size=96)
    path = folder / "model.safetensors"
    state, expected = load_file(path), {}
    torch.manual_seed(0)
    for name in [name for name in state if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, depth, outputs = state.pop(name).shape
        codes = torch.randint(0, 16, (experts, outputs, depth // 32, 32), dtype=torch.uint8)
        scales = torch.randint(least, most + 1, codes.shape[:-1], dtype=torch.uint8)
        scales.view(-1)[:2] = torch.tensor([least, most], dtype=torch.uint8)
        codes = torch.where(zeros & (scales < 104).unsqueeze(-1), codes & 8, codes)
        state |= {f"{name}_blocks": codes[..., ::2] | codes[..., 1::2] << 4, f"{name}_scales": scales}
        expected[name] = (E2M1[codes.long()] * torch.exp2(scales.float() - 127).unsqueeze(-1)).flatten(-2)
    save_file(state, path, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | of_method("mxfp4")))
    model = load_source(str(folder), "bfloat16", "cpu").model
    precision = choose_precision(make_config({}), [quantized_file(str(folder))], 320, {})
    assert widened_tensors(folder) == ({} if kept else {"mxfp4": sorted(expected)})
    for name, values in expected.items():
        weight = model.get_parameter(name).transpose(1, 2)
        assert torch.equal(weight, values.bfloat16()) and torch.equal(values.bfloat16().float(), values)
        form = precision(weight)
        assert form.kind == ("mxfp4" if kept else "bfloat16")
        if kept:
            groups = unpack_groups(form.make(weight), weight.shape[1])
            assert torch.equal(groups.values(weight.shape[2]), values)


def test_a_part_of_the_layers_may_be_quantised(tmp_path):
    config, write, _ = CASES["gptq"]
    save_quantized(tmp_path, config, write)
    plain = save_model(tmp_path / "plain", **SIZES)
    path, whole = tmp_path / "model.safetensors", load_file(plain / "model.safetensors")
    state = {name: tensor for name, tensor in load_file(path).items() if "down_proj" not in name}
    save_file(state | {name: tensor for name, tensor in whole.items() if "down_proj" in name}, path, {"format": "pt"})
    model = load_source(str(tmp_path), "float32", "cpu").model
    assert torch.equal(model.model.layers[1].mlp.down_proj.weight, whole["model.layers.1.mlp.down_proj.weight"])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (of_method("aqlm"), "expected one of awq, .*modelopt, mxfp4, or none, got aqlm; give the model"),
        (of_method("modelopt", quant_algo="W4A8"), "got modelopt W4A8"),
        ({"quantization_config": {"bits": 4}}, "got one without quant_method"),
        (of_method("awq", version="gemv"), "q_proj|proj: awq: expected version gemm of 4 bits, got gemv of None"),
        (
            of_method("gptq", bits=4, checkpoint_format="marlin"),
            "expected checkpoint_format gptq or gptq_v2, got marlin",
        ),
        (of_method("compressed-tensors", format="mxfp8-quantized"), "got compressed-tensors mxfp8-quantized"),
        (of_method("compressed-tensors", sparsity_config={"format": "sparse-24"}), "compressed-tensors sparse-24"),
        (
            of_method("gptq", bits=4, rotation="hadamard"),
            "expected no rotation of what layers read, got hadamard",
        ),
        (
            compressed(num_bits=8, type="int", strategy="group"),
            "2, 4 or 8 bits in a row, got 12 words of 8",
        ),
        (
            compressed(num_bits=3, type="int", strategy="group"),
            "2, 4 or 8 bits in a row, got 12 words of 3",
        ),
        (of_method("gptq", bits=3), "gptq: expected 2, 4 or 8 bits, got 3"),
        (compressed(num_bits=4) | {"x": 1}, "compressed-tensors"),
        ({"quantization_config": ["awq"]}, r"quantization_config: expected an object, got \['awq'\]"),
        ({"quantization_config": "awq"}, "quantization_config: expected an object, got 'awq'"),
        (of_method("compressed-tensors", config_groups=[1]), r"expected an object, got \[1\]"),
        (of_method("compressed-tensors", config_groups={"group_0": 1}), "expected an object, got 1"),
        (of_method("compressed-tensors", sparsity_config=True), "expected an object, got True"),
        (of_method(["awq"]), r"got \['awq'\]"),
    ],
)
def test_what_is_not_read_is_named(config, message, tmp_path):
    write = CASES["gptq"][1] if "compressed" not in json.dumps(config) else CASES["compressed int4"][1]
    save_quantized(tmp_path, config, write)
    with pytest.raises(BuildError, match=message) as error:
        load_source(str(tmp_path), "float32", "cpu")
    assert "\n" not in str(error.value)


def test_blocks_of_float8_are_known_by_the_shape_of_their_scales():
    """As many blocks as outputs are no scale of each output."""
    torch.manual_seed(0)
    weight, scales = torch.randn(4, 8).to(torch.float8_e4m3fn), torch.rand(2, 2)
    wide = scales.repeat_interleave(2, 0).repeat_interleave(4, 1)
    assert torch.equal(float8({"weight": weight, "weight_scale": scales}, {}), weight.float() * wide)
    for of_outputs in (torch.rand(4), torch.rand(4, 1)):
        expected = weight.float() * of_outputs.reshape(-1, 1)
        assert torch.equal(float8({"weight": weight, "weight_scale": of_outputs}, {}), expected)


def test_the_name_of_a_layer_comes_ahead_of_its_class():
    groups = {
        "group_0": {"targets": ["Linear"], "weights": {"num_bits": 4}},
        "group_1": {"targets": ["re:.*down_proj"], "weights": {"num_bits": 8}},
        "group_2": {"targets": ["model.layers.1.mlp.down_proj"], "weights": {"num_bits": 2}},
    }
    found = Quantized(Path(), "compressed-tensors", {"config_groups": groups})
    layers = ("model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj")
    assert [found._settings(layer)["num_bits"] for layer in layers] == [4, 8, 2]


def test_rows_of_eight_bits_in_another_order_are_refused():
    parts = {"weight": torch.ones(2, 2, dtype=torch.int8), "SCB": torch.ones(2), "weight_format": torch.tensor(1)}
    with pytest.raises(ValueError, match="weight_format 0, row after row, got 1"):
        int8_rows(parts, {})


@pytest.mark.parametrize(("index", "kept"), [(-1, True), (2, False), (-2, False)])
def test_groups_of_inputs_are_unset_or_there(index, kept):
    """compressed-tensors writes -1 for all inputs where it has no act-order."""
    quants = torch.randint(0, 16, (3, 64), dtype=torch.uint8)
    scales, zeros = torch.rand(3, 2).half().float(), torch.full((3, 2), 8)
    group_of = torch.arange(64) // 32
    group_of[5 if index != -1 else slice(None)] = index
    if not kept:
        with pytest.raises(ValueError, match=r"groups below 2 for each input, got \["):
            _of_groups(quants, scales, zeros, 4, group_of)
        return
    unordered, ordered = (_of_groups(quants, scales, zeros, 4, given) for given in (group_of, None))
    assert isinstance(unordered, Groups) and isinstance(ordered, Groups)
    assert torch.equal(unordered.values(64), ordered.values(64))


def test_a_missing_part_is_named(tmp_path):
    config, write, _ = CASES["gptq"]
    save_quantized(tmp_path, config, lambda weight: ({"qweight": write(weight)[0]["qweight"]}, weight))
    with pytest.raises(BuildError, match=r"layers\.0\.mlp\.down_proj: gptq: expected qzeros, got none"):
        load_source(str(tmp_path), "float32", "cpu")


def test_a_modelopt_directory_is_known_by_its_file(tmp_path):
    write = CASES["modelopt fp8"][1]
    expected = save_quantized(tmp_path, {}, write)
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    got = load_source(str(tmp_path), "float32", "cpu").model.state_dict()
    assert all(torch.allclose(got[name], values.float()) for name, values in expected.items())


@pytest.mark.parametrize(
    ("data", "got"),
    [(b"", "expected JSON"), (b"{", "expected JSON"), (b"[1]", "expected an object"), (b"\x80", "expected JSON")],
)
def test_a_config_that_is_no_json_is_refused(data, got, tmp_path):
    save_model(tmp_path)
    (tmp_path / "config.json").write_bytes(data)
    with pytest.raises(BuildError) as error:
        load_source(str(tmp_path), "float32", "cpu")
    assert f"config.json: {got}" in str(error.value) and "\n" not in str(error.value)
