"""A tokenizer for the forms of calls."""

import pytest
from llguidance import LLMatcher, LLTokenizer
from specstep.runtime.text.tokenizer import EngineTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tool_forms import SPECIAL


@pytest.fixture(scope="module")
def text():
    """A tokenizer of bytes, in which the marks of some forms are special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    return EngineTokenizer(tokenizer, None, {})


@pytest.fixture(scope="module")
def matcher(text):
    end = text.special_names["</s>"]
    tokens = LLTokenizer(text.tokenizer.to_str(), n_vocab=text.tokenizer.get_vocab_size(), eos_token=[end])
    return lambda grammar: LLMatcher(tokens, grammar, log_level=0)
