"""A GGUF file of each architecture is the model that it was written from."""

import pytest
import torch
from gguf_case import case_model, save_case
from gguf_cases import CASES
from specstep.compile.gguf.load import load_gguf

TOKENS = torch.randint(2, 300, (1, 40), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_model_that_was_written(name, tmp_path):
    case = CASES[name]
    model = case_model(case)
    loaded, tokenizer = load_gguf(save_case(tmp_path / "tiny.gguf", case, model), torch.float32)
    with torch.no_grad():
        expected, got = model(TOKENS).logits, loaded.eval()(TOKENS).logits
    assert torch.allclose(got, expected, rtol=0, atol=1e-4 * float(expected.std())), (got - expected).abs().max()
    assert tokenizer("ab").input_ids == [258]
