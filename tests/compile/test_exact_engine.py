"""Engines of a low-precision dtype say the same with drafts and without, alone and in a batch, bit for bit."""

import pytest
import specstep
import torch
from models import ARCHITECTURES, save_model

PROMPTS = [[40, 41, 42] * 9, [5], list(range(30, 83)), [9, 9, 9, 9], [7, 300, 7, 300, 7]]


@pytest.mark.parametrize(
    "architecture", [pytest.param(name, marks=() if name == "Llama" else pytest.mark.slow) for name in ARCHITECTURES]
)
def test_drafts_change_no_text_in_bfloat16(architecture, tmp_path):
    # Little variance: logits are close to each other, and a last bit that differs soon changes a token.
    sizes = {} if architecture in ("GPT2", "DeepseekV3") else {"intermediate_size": 61}  # no multiple of a vector
    model = str(save_model(tmp_path / "model", architecture, initializer_range=0.1, **sizes))
    options = {"dtype": "bfloat16", "max_seq_len": 160, "prefill_chunk": 32}
    plain = specstep.build(model, str(tmp_path / "plain"), drafter="none", **options)
    drafted = specstep.build(model, str(tmp_path / "drafted"), drafter="ngram", nodes=6, max_batch=3, **options)
    with specstep.load(plain) as engine:
        expected = [engine.generate(prompt, 90, ignore_eos=True) for prompt in PROMPTS]
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            with specstep.load(drafted) as engine:
                got = engine.generate(PROMPTS, 90, ignore_eos=True)
            assert [result.token_ids for result in got] == [result.token_ids for result in expected]
    finally:
        torch.set_num_threads(before)
    assert sum(result.stats["steps"] for result in got) < sum(len(result.token_ids) for result in got)
    assert len({token for result in got for token in result.token_ids}) > len(PROMPTS)
