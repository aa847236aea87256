import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokendepth.data import ByteTokenizer, CharTokenizer, SymbolTokenizer, TextStream, tokenizer_from_dict
from tokendepth.errors import UserError

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
TOKENIZERS = [CharTokenizer("\n abc\u00e9\U0001d11e"), ByteTokenizer(), SymbolTokenizer()]


@given(TEXT)
def test_characters_round_trip(text):
    tokenizer = CharTokenizer("".join(sorted(set(text))))
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == tokenizer.decode(np.array(ids, np.uint32)) == text


@given(TEXT)
def test_bytes_round_trip(text):
    ids = ByteTokenizer().encode(text)
    assert bytes(ids) == text.encode()
    assert ByteTokenizer().decode(np.array(ids)) == text


@given(st.lists(st.integers(0, 31)))
def test_symbols_round_trip(ids):
    tokenizer = SymbolTokenizer()
    assert tokenizer.encode(tokenizer.decode(ids)) == ids


@given(st.binary())
def test_a_stream_of_bytes_is_the_text_and_no_character_comes_in_halves(content):
    stream = TextStream(ByteTokenizer())
    parts = [stream.add(byte) for byte in content]
    assert "".join([*parts, stream.end()]) == content.decode("utf-8", "replace")
    assert stream.add(ord("a")) == "a", "nothing waits after the end"


@given(TEXT)
def test_a_stream_of_characters_waits_for_nothing(text):
    tokenizer = CharTokenizer("".join(sorted(set(text))))
    stream = TextStream(tokenizer)
    assert [stream.add(token) for token in tokenizer.encode(text)] == list(text)
    assert stream.end() == ""


def test_bytes_of_half_a_character_decode_to_the_replacement_character():
    assert ByteTokenizer().decode("\u00e9".encode()[:1]) == "\ufffd"


def test_bytes_that_a_command_line_could_not_decode_come_back_as_they_were():
    assert ByteTokenizer().encode(b"a\xff".decode("utf-8", "surrogateescape")) == [0x61, 0xFF]


@pytest.mark.parametrize(
    ("tokenizer", "text", "char", "position"),
    [
        (CharTokenizer("ab"), "abxax", "'x'", 2),
        (ByteTokenizer(), "ab\ud800", r"'\ud800'", 2),
        (SymbolTokenizer(), "<bos>0az", "'z'", 7),
        (SymbolTokenizer(), "01<bus>", "'<'", 2),
    ],
)
def test_a_character_without_a_token_is_named_with_its_position(tokenizer, text, char, position):
    with pytest.raises(UserError) as error:
        tokenizer.encode(text)
    assert f"character {char} at position {position}" in str(error.value)
    assert "leave it out" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=lambda t: t.kind)
def test_pieces_are_printable_and_one_for_each_token(tokenizer):
    ids = range(tokenizer.vocab_size)
    pieces = tokenizer.pieces(ids)
    assert len(pieces) == tokenizer.vocab_size
    assert all(piece and piece.isprintable() for piece in pieces)
    assert len(set(pieces)) == len(pieces)


def test_pieces_by_hand():
    assert CharTokenizer("\t\n a").pieces([3, 1, 0, 2]) == ["a", "↵", "\\t", " "]
    assert ByteTokenizer().pieces("a\u00e9\n".encode()) == ["a", "\\xc3", "\\xa9", "↵"]
    assert SymbolTokenizer().pieces([1, 4, 31, 3]) == ["<bos>", "0", "r", "<eos>"]


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=lambda t: t.kind)
def test_json_round_trip(tokenizer):
    again = tokenizer_from_dict(json.loads(json.dumps(tokenizer.to_dict(), allow_nan=False)))
    assert again == tokenizer
    assert type(again) is type(tokenizer)


@pytest.mark.parametrize(
    "tree",
    [
        None,
        [],
        "char",
        {},
        {"kind": None},
        {"kind": ["char"]},
        {"kind": "chars", "chars": "ab"},
        {"kind": "char"},
        {"kind": "char", "chars": ""},
        {"kind": "char", "chars": ["a", "b"]},
        {"kind": "char", "chars": "ba"},
        {"kind": "char", "chars": "aab"},
        {"kind": "char", "chars": "a\ud800"},
        {"kind": "char", "chars": "ab", "extra": 1},
        {"kind": "byte", "chars": "ab"},
        {"kind": "symbol", 1: 2},
    ],
)
def test_a_malformed_tree_is_a_users_error(tree):
    with pytest.raises(UserError) as error:
        tokenizer_from_dict(tree)
    assert "tokenizer" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_vocabulary_of_one_character_is_right():
    assert tokenizer_from_dict({"kind": "char", "chars": "a"}).vocab_size == 1


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=lambda t: t.kind)
@pytest.mark.parametrize("out", [-1, 256])
def test_ids_outside_the_vocabulary_are_never_decoded(tokenizer, out):
    with pytest.raises((AssertionError, ValueError)):
        tokenizer.decode([out])
