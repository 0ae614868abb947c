"""The C++ kernel and the ONNX nodes against the reference, which tests/graphs/drafters/test_ngram.py and
tests/graphs/test_prediction.py hold against a search."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ngram_case import VOCABULARY, agrees, random_learned, random_tables
from specstep.kernels.native import load_library
from specstep.kernels.ngram.op import ngram
from specstep.kernels.ngram.reference import ngram as reference

load_library()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    batch=st.integers(1, 3),
    width=st.integers(1, 4),
    slots=st.sampled_from([1, 2, 15, 16, 17, 64, 130]),
    predicted=st.sampled_from([0, 1, 2, 15, 16, 17, 64, 130]),
    longest=st.integers(2, 5),
    matches=st.integers(1, 6),
    with_tables=st.booleans(),
    with_learned=st.booleans(),
    top_k=st.integers(1, 9),
)
def test_kernel_equals_the_reference(
    seed, batch, width, slots, predicted, longest, matches, with_tables, with_learned, top_k
):
    generator = torch.Generator().manual_seed(seed)
    history = torch.randint(0, VOCABULARY, (batch, slots + 3), generator=generator)[:, :slots]  # a view
    lengths = torch.randint(0, slots, (batch,), generator=generator)
    context = torch.randint(0, VOCABULARY, (batch, width, longest), generator=generator)
    context[0, 0, : longest - 1] = -2  # nothing before
    concentrations = torch.rand(longest, generator=generator) * 9 + 0.1
    concentrations[1] = 0  # left out
    tables = random_tables(generator) if with_tables else (None,) * 4
    learned = random_learned(generator) if with_learned else None
    prediction = torch.randint(0, VOCABULARY, (batch, predicted + 3), generator=generator)
    counts = torch.randint(0, predicted + 4, (batch,), generator=generator)
    prediction = prediction[:, : max(predicted, 1)]  # fewer slots than the prediction has tokens
    expected = torch.randint(0, 2 * predicted + 3, (batch, width), generator=generator)
    given = history, lengths, context, prediction, counts, expected
    trust = torch.rand(longest + 1, generator=generator)
    arguments = (*given, concentrations, trust, *tables, learned, matches, top_k)
    agrees(ngram(*arguments), reference(*arguments))


class Level(torch.nn.Module):
    def __init__(self, concentrations, tables, learned):
        super().__init__()
        self.concentrations, self.trust = concentrations, torch.tensor([0.1, 0.2, 0.5, 0.6, 0.9])
        self.tables, self.learned = tables, learned

    def forward(self, *given):
        return ngram(*given, self.concentrations, self.trust, *self.tables, self.learned, 3, 4)


@pytest.mark.parametrize(("with_tables", "with_learned"), [(True, True), (True, False), (False, True), (False, False)])
def test_onnx_nodes_equal_the_reference(with_tables, with_learned):
    onnxruntime = pytest.importorskip("onnxruntime")
    ops = pytest.importorskip("specstep.compile.onnx.ops")
    generator = torch.Generator().manual_seed(3)
    tables = random_tables(generator) if with_tables else (None,) * 4
    learned = random_learned(generator) if with_learned else None
    module = Level(torch.tensor([9.0, 2.0, 0.0, 0.5]), tables, learned)

    def inputs(batch, slots):
        history = torch.randint(0, VOCABULARY, (batch, slots), generator=generator)
        lengths = torch.randint(0, slots, (batch,), generator=generator)
        context = torch.randint(0, VOCABULARY, (batch, 2, 4), generator=generator)
        prediction = torch.randint(0, VOCABULARY, (batch, slots), generator=generator)
        predicted = torch.randint(0, slots + 2, (batch,), generator=generator)
        expected = torch.randint(0, 2 * slots, (batch, 2), generator=generator)
        return history, lengths, context, prediction, predicted, expected

    rows, slots = torch.export.Dim("rows", min=1, max=8), torch.export.Dim("slots", min=2, max=99)
    names = ["history", "lengths", "context", "prediction", "predicted", "expected"]
    shapes = tuple({0: rows} | ({1: slots} if name in ("history", "prediction") else {}) for name in names)
    exported = torch.export.export(module, inputs(3, 20), dynamic_shapes=(shapes,), strict=False)
    written = torch.onnx.export(
        exported, dynamo=True, verbose=False, optimize=False, opset_version=18, input_names=names,
        custom_translation_table=ops.translations(),
    )  # fmt: skip
    model = written.model_proto
    ops.add_functions(model)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    for batch, size in ((1, 5), (3, 20), (5, 64)):
        given = inputs(batch, size)
        feeds = {name: tensor.numpy() for name, tensor in zip(names, given, strict=True)}
        got = [torch.from_numpy(array) for array in session.run(None, feeds)]
        agrees(got, reference(*given, module.concentrations, module.trust, *tables, learned, 3, 4))
