"""Names of special tokens in what users write: text, whatever the template does with it, and nothing else changes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import tiny_tokenizer
from specstep.errors import InputError
from specstep.runtime.text.special_text import FIRST, LAST
from specstep.runtime.text.tokenizer import EngineTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

NAMES = ["<|im_start|>", "<|im_end|>", "<s>", "</s>", "[INST]", "<｜end｜>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content.strip() }}"
    "{% else %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}"
    "{% for call in m.tool_calls %}<{{ call.function.name }}>{{ call.function.arguments | tojson }}{% endfor %}"
    "<|im_end|>\n{% endfor %}{{ note }}<|im_start|>assistant\n"
)


def tokenizer_of(template=TEMPLATE, names=NAMES):
    tokenizer = Tokenizer.from_str(tiny_tokenizer().backend_tokenizer.to_str())
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in names])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    return EngineTokenizer(tokenizer, template, {"bos_token": "<s>"})


TEXT = tokenizer_of()
SPECIAL = TEXT.special_ids
pieces = st.sampled_from([*NAMES, "<|", "im_end|>", "<", ">", "|", "[", "INST]", "</", "s>", "<think>", " ", "\n", "é",
                          "\U0010fffd", "\U000f0000", "user", "a"])  # fmt: skip
texts = st.lists(pieces, max_size=8).map("".join)


def whole(tokens):
    return TEXT.tokenizer.decode(tokens, skip_special_tokens=False)


def special(tokens):
    return [token for token in tokens if token in SPECIAL]


@settings(max_examples=150, deadline=None)
@given(texts)
def test_a_text_is_its_text(text):
    tokens = TEXT.encode_part(text, parse_special=False)
    assert not special(tokens) and whole(tokens) == text
    if not any(name in text for name in NAMES):
        assert tokens == TEXT.encode_part(text)
    around = TEXT.encode(text, parse_special=False)
    assert special(around) == special(TEXT.encode("")) and set(tokens) <= set(around)


@settings(max_examples=150, deadline=None)
@given(texts, st.lists(texts, max_size=3), texts, texts)
def test_a_conversation_has_the_template_s_own_alone(text, parts, name, note):
    """Parts are joined without anything between them, and a name is put between brackets."""
    call = {"function": {"name": name, "arguments": {name: text}}}
    messages = [
        {"role": "user", "content": text},
        {"role": "user", "content": [{"type": "text", "text": part} for part in parts]},
        {"role": "assistant", "content": "x", "tool_calls": [call]},
    ]
    arguments = {"note": note}
    tokens = TEXT.encode_messages(messages, arguments)
    assert [TEXT.tokenizer.id_to_token(token) for token in special(tokens)] == ["<|im_start|>", "<|im_end|>"] * 3 + [
        "<|im_start|>"
    ]
    assert whole(tokens) == TEXT.render(messages, arguments)
    if not any(each in "".join([text, *parts, name, note, "<" + name + ">"]) for each in NAMES):
        assert tokens == TEXT.encode_messages(messages, arguments, parse_special=True)


def test_marks_of_turns_that_are_not_called_special_are_text():
    """As in DeepSeek's tokenizers. Others that are not called special stay tokens: <think>, or those of a task."""
    tokenizer = Tokenizer.from_str(tiny_tokenizer().backend_tokenizer.to_str())
    plain = ["<｜User｜>", "<｜Assistant｜>", "<think>", "<|fim_prefix|>"]
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in plain])
    template = "{% for m in messages %}<｜User｜>{{ m.content }}{% endfor %}<｜Assistant｜><think>"
    text = EngineTokenizer(tokenizer, template, {})
    user, assistant, think, task = (tokenizer.token_to_id(name) for name in plain)
    written = "a<｜Assistant｜>b<think><|fim_prefix|><｜User｜>c"
    tokens = text.encode_messages([{"role": "user", "content": written}])
    assert [token for token in tokens if token in (user, assistant)] == [user, assistant]
    assert tokens[0] == user and tokens[-2:] == [assistant, think] and {think, task} <= set(tokens[1:-2])
    assert tokenizer.decode(tokens, skip_special_tokens=False) == text.render([{"role": "user", "content": written}])
    assert not {user, assistant} & set(text.encode(written, parse_special=False))
    assert len({user, assistant} & set(text.encode(written))) == 2


def test_whoever_asks_for_tokens_gets_them():
    asked = [{"role": "user", "content": "a<|im_end|>b"}]
    assert len(special(TEXT.encode_messages(asked, parse_special=True))) == 4
    assert len(special(TEXT.encode("a<|im_end|>b"))) == len(special(TEXT.encode("ab"))) + 1
    assert TEXT.encode_messages([{"role": "user", "content": "x"}], {"bos_token": "<s>"})


def test_a_model_that_has_the_names_among_its_pieces():
    """A unigram model takes "</s>" for a piece like any other."""
    vocabulary = [("<unk>", 0.0), ("</s>", 0.0), *((char, -5.0) for char in "</s>ab ▁")]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    text = EngineTokenizer(tokenizer, None, {})
    tokens = text.encode_part("a</s>b", parse_special=False)
    assert not set(tokens) & text.special_ids and text.decode(tokens) == "a</s>b"


def test_a_conversation_that_leaves_no_mark_is_refused():
    every = "".join(map(chr, range(LAST + 1, FIRST + 1)))
    with pytest.raises(InputError, match="expected a character of private use that stands in none of them"):
        TEXT.encode_messages([{"role": "user", "content": every + "<|im_end|>"}])
    assert TEXT.encode_messages([{"role": "user", "content": every[1:] + "<|im_end|>"}])


def test_a_name_that_cannot_be_written_as_text_is_refused():
    text = tokenizer_of(names=["|"])
    with pytest.raises(InputError, match="cannot write as text, got '\\|'; parse_special takes it"):
        text.encode_part("a|b", parse_special=False)
    assert len(text.encode_part("a|b", parse_special=True)) == 3
