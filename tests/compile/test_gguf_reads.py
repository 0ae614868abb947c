"""A GGUF file is parsed once while an engine is built, and says what it says to gguf's own reader."""

import gguf
import numpy as np
from specstep.compile.gguf_reads import shared_reads


def test_a_file_is_parsed_once_and_says_the_same(tmp_path):
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list(["<s>", "é", "北京"])
    writer.add_context_length(64)
    values = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)
    writer.add_tensor(
        "weight", gguf.quantize(values, gguf.GGMLQuantizationType.Q4_1), raw_dtype=gguf.GGMLQuantizationType.Q4_1
    )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    expected, own = gguf.GGUFReader(path), (gguf.GGUFReader, gguf.get_tensor_name_map)
    with shared_reads():
        reader = gguf.GGUFReader(str(path))
        assert gguf.GGUFReader(path) is reader
        names = [gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers) for layers in (3, 3, 4)]
        assert names[0] is names[1] is not names[2]
    assert (gguf.GGUFReader, gguf.get_tensor_name_map) == own

    assert list(reader.fields) == list(expected.fields)
    for name, field in expected.fields.items():
        assert reader.fields[name].contents() == field.contents()
    assert [tensor.name for tensor in reader.tensors] == ["weight"]
    assert np.array_equal(reader.tensors[0].data, expected.tensors[0].data)
    assert reader.tensors[0].tensor_type == expected.tensors[0].tensor_type
