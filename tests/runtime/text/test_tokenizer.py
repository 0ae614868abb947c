"""Text in and out, what counts as a conversation, and streaming that never cuts a character."""

import copy

import pytest
import specstep
from hypothesis import given
from hypothesis import strategies as st
from models import tiny_tokenizer
from specstep.runtime.text import tokenizer as tokenizer_module
from specstep.runtime.text.messages import check_messages
from specstep.runtime.text.tokenizer import EngineTokenizer, TextStream
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

REFERENCE = tiny_tokenizer()
TEXT = EngineTokenizer(REFERENCE.backend_tokenizer, REFERENCE.chat_template, {"bos_token": "<s>"})
USER = {"role": "user", "content": "hi"}


@given(st.text(max_size=30), st.lists(st.integers(0, 5), max_size=40))
def test_pieces_are_whole_characters_and_add_up(text, sizes):
    tokens = TEXT.encode(text)
    stream, pieces, start = TextStream(TEXT), [], 0
    for size in sizes:
        pieces.append(stream.push(tokens[start : start + size]))
        start += size
    pieces.append(stream.push(tokens[start:], last=True))
    assert "".join(pieces) == text
    for piece in pieces:
        assert "\ufffd" not in piece or "\ufffd" in text


def test_broken_utf8_at_the_end_is_shown_not_lost():
    stream = TextStream(TEXT)
    euro = TEXT.encode("€")
    assert stream.push(euro[:2]) == ""
    assert stream.push([], last=True) == "\ufffd"


def test_half_a_character_holds_nothing_back_but_itself():
    stream, euro = TextStream(TEXT), TEXT.encode("€")
    pushes = [TEXT.encode("ab") + euro[:1], euro[1:2], [], euro[2:], TEXT.encode("c")]
    assert [stream.push(tokens) for tokens in pushes] == ["ab", "", "", "€", "c"]


def words():
    """A tokenizer in the manner of SentencePiece: it drops the space before the first word that it decodes."""
    vocabulary = {word: index for index, word in enumerate(["</s>", "▁the", "▁cat", "▁", "s"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.decoder = decoders.Metaspace()
    return EngineTokenizer(tokenizer, None, {})


@pytest.mark.parametrize("pushes", [[[1], [], [2]], [[1], [], [], [2]], [[1], [0], [2]], [[1, 0, 0], [0, 2]]])
def test_spaces_survive_empty_pushes_and_special_tokens(pushes):
    stream = TextStream(words())
    assert "".join(stream.push(tokens) for tokens in pushes) == "the cat"


@pytest.mark.parametrize(
    "tokens", [[1], TEXT.encode("€")[1:2], TEXT.encode("x"), []], ids=["stop", "broken", "x", "none"]
)
def test_a_push_costs_the_same_however_long_the_text_is(tokens):
    stream, longest = TextStream(TEXT), []
    stream._tokenizer = copy.copy(TEXT)
    stream._tokenizer.decode = lambda some: (longest.append(len(some)), TEXT.decode(some))[1]
    text = "".join(stream.push(tokens) for _ in range(2000)) + stream.push([], last=True)
    assert text == TEXT.decode(tokens * 2000)
    assert max(longest, default=0) <= 128


def byte_fallback():
    """A tokenizer in the manner of Llama 2: words, and bytes for what is no word."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁the": 256, "s": 257, "</s>": 258}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.add_special_tokens(["</s>"])
    parts = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence([*parts])
    return EngineTokenizer(tokenizer, None, {})


FALLBACK = byte_fallback()
BYTES = [*"a é€🙂".encode(), 0x84, 0xFF]
FALLBACK_TOKENS = st.lists(st.sampled_from([*BYTES, 256, 257, 258]), max_size=80)
LEVEL_TOKENS = st.lists(st.sampled_from([*TEXT.encode("a é€🙂�")]) | st.integers(2, 257), max_size=80)


@pytest.mark.parametrize("held", [4, 64])  # few, so that the bound is met
@pytest.mark.parametrize(
    ("text", "tokens"), [(FALLBACK, FALLBACK_TOKENS), (TEXT, LEVEL_TOKENS)], ids=["fallback", "level"]
)
@given(st.data())
def test_the_text_does_not_depend_on_how_many_tokens_come_at_once(text, tokens, held, data):
    tokens = data.draw(tokens)
    sizes = data.draw(st.lists(st.integers(0, 9), max_size=len(tokens)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer_module, "MOST_HELD", held)
        single, several, start = TextStream(text), TextStream(text), 0
        for size in sizes:
            part = tokens[start : start + size]
            assert several.push(part) == "".join(single.push([token]) for token in part)
            start += size
        rest = "".join(single.push([token]) for token in tokens[start:]) + single.push([], last=True)
        assert several.push(tokens[start:], last=True) == rest


@given(st.lists(st.sampled_from([b"a", " é".encode(), "€".encode(), "🙂".encode(), 256, 257]), max_size=40))
def test_bytes_that_are_text_are_decoded_as_such(parts):
    tokens = [token for part in parts for token in ([part] if isinstance(part, int) else part)]
    assert FALLBACK.text_of(tokens) == FALLBACK.decode(tokens)


def test_a_byte_that_is_no_text_spoils_none_before_it():
    stream = TextStream(FALLBACK)
    assert [stream.push(tokens) for tokens in ([*"€".encode()], [0x84], [257])] == ["€", "", "\ufffds"]
    assert FALLBACK.text_of([*"€".encode(), 0x84, 257]) == "€\ufffds"


def test_prompts_are_never_cut_or_padded():
    tokenizer = tiny_tokenizer().backend_tokenizer
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=16)
    assert len(EngineTokenizer(tokenizer, None, {}).encode("hello you")) == 9


def test_bos_is_there_once():
    """The tokenizer adds BOS to a text, the template writes its own."""
    tokenizer = tiny_tokenizer().backend_tokenizer
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    text = EngineTokenizer(tokenizer, REFERENCE.chat_template, {"bos_token": "<s>"})
    assert text.encode("hi")[0] == 0
    assert text.encode_messages([USER]).count(0) == 1
    assert text.encode_messages([USER]) == TEXT.encode_messages([USER])


def test_conversations_are_encoded_as_by_transformers():
    messages = [USER, {"role": "assistant", "content": "yes\n "}, {"role": "user", "content": "größer 🙂"}]
    expected = REFERENCE.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert TEXT.encode_messages(messages) == expected
    template = "{{ messages[0].content ~ shout }}"
    assert EngineTokenizer(REFERENCE.backend_tokenizer, template, {}).encode_messages(
        [USER], {"shout": "!"}
    ) == TEXT.encode("hi!")


def test_errors_name_the_prompt():
    bare = EngineTokenizer(REFERENCE.backend_tokenizer, None, {})
    with pytest.raises(
        specstep.InputError, match="prompt 3: chat: expected a model with a chat template, got one with"
    ):
        bare.encode_messages([USER], None, "prompt 3")
    picky = EngineTokenizer(REFERENCE.backend_tokenizer, "\n{{ raise_exception('no\nsystem') }}", {})
    with pytest.raises(specstep.InputError, match=r"^prompt 3: chat_template: line 2: no system$"):
        picky.encode_messages([USER], None, "prompt 3")


def test_half_a_surrogate_pair_is_refused():
    for encode in (lambda: TEXT.encode("ab\ud800"), lambda: TEXT.encode_messages([USER | {"content": "\ud800"}])):
        with pytest.raises(specstep.InputError, match="expected Unicode, got half a surrogate pair"):
            encode()


CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}


@pytest.mark.parametrize(
    "messages",
    [
        [USER],
        (USER,),
        [{"role": "system", "content": ""}, {"role": "developer", "content": "x"}, USER],
        [USER, CALL, {"role": "tool", "content": "1", "tool_call_id": "a"}],
        [USER, CALL | {"content": None}],
        [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
        [{"role": "user", "content": []}],
    ],
)
def test_conversations_are_accepted(messages):
    check_messages(messages, "prompt")
    TEXT.encode_messages(messages)


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ("hi", "messages: expected a list of mappings, got 'hi'"),
        (USER, "messages: expected a list of mappings, got {'role"),
        (None, "messages: expected a list of mappings, got None"),
        ([], "messages: expected at least one message, got an empty list"),
        ([USER, "hi"], r"messages\[1\]: expected a mapping with .role. and .content., got 'hi'"),
        (
            [{"content": "x"}],
            r"messages\[0\].role: expected one of system, developer, .*, got none beside \['content'\]",
        ),
        ([USER | {"role": "bot"}], r"messages\[0\].role: expected one of system, .*tool, got 'bot'"),
        ([USER | {"role": ["user"]}], r"messages\[0\].role: expected one of .*, got \['user'\]"),
        ([{"role": "user"}], r"messages\[0\].content: expected a text or a list .*, got no content"),
        ([USER | {"content": None}], r"messages\[0\].content: expected a text or .*, got None"),
        ([{"role": "assistant", "content": None}], r"messages\[0\].content: expected a text or .*, got None"),
        ([USER | {"content": 3}], r"messages\[0\].content: expected a text or .*, got 3"),
        ([USER | {"content": {"text": "x"}}], r"messages\[0\].content: expected"),
        ([USER | {"content": ["x"]}], r"messages\[0\].content\[0\]: expected {.type.: .text., .text.: ...}.*, got 'x'"),
        (
            [USER | {"content": [{"type": "image", "url": "x"}]}],
            r"messages\[0\].content\[0\]: expected .*, got {'type': 'image'",
        ),
        ([USER | {"content": [{"type": "text", "text": 1}]}], r"messages\[0\].content\[0\]: expected .*, got"),
    ],
)
def test_what_is_no_conversation_is_refused(messages, error):
    with pytest.raises(specstep.InputError, match="^question 7: " + error) as caught:
        check_messages(messages, "question 7")
    assert "\n" not in str(caught.value)


def test_a_byte_level_tokenizer_of_words_streams_what_it_decodes():
    tokenizer = Tokenizer(models.BPE(vocab={"<s>": 0, "a": 1, "Ġb": 2}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    stream = TextStream(EngineTokenizer(tokenizer, None, {}))
    assert [stream.push([token]) for token in (1, 2, 1)] == ["a", " b", "a"]
