import hashlib
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokendepth.data import source as source_module
from tokendepth.data.source import Source, cut, read_pieces, reading, texts
from tokendepth.errors import UserError

NAME = "text:novel.txt"


def in_pieces(content, size):
    return [content[first : first + size] for first in range(0, len(content), size)]


@given(st.text(st.characters(exclude_categories=["Cs"])), st.integers(1, 9))
def test_text_is_decoded_whole_however_its_bytes_are_cut(text, size):
    found = list(texts(in_pieces(text.encode(), size), NAME))
    assert "".join(found) == text
    assert all(found)


def first_bad_byte(content):
    try:
        content.decode()
    except UnicodeDecodeError as error:
        return error.start
    return None


@given(st.text(max_size=9), st.binary(max_size=12), st.integers(1, 5))
def test_the_first_byte_that_is_not_utf8_is_named_however_the_bytes_are_cut(before, noise, size):
    content = before.encode("utf-8", "replace") + noise
    place = first_bad_byte(content)
    if place is None:
        assert "".join(texts(in_pieces(content, size), NAME)) == content.decode()
        return
    with pytest.raises(UserError) as caught:
        list(texts(in_pieces(content, size), NAME))
    said = str(caught.value)
    assert f"{NAME!r} is not UTF-8: byte {place} is {content[place]:#04x}; " in said
    assert "--data.tokens byte" in said
    assert "\n" not in said


def test_a_source_that_is_the_wrong_one_says_so_rather_than_that_it_is_not_utf8():
    def pieces():
        yield b"\xff"
        yield b"more"
        raise UserError("the wrong file")

    with pytest.raises(UserError, match="the wrong file"):
        list(texts(pieces(), NAME))


@given(
    st.one_of(st.text(max_size=60), st.binary(max_size=60)),
    st.integers(1, 70),
    st.tuples(st.integers(0, 70), st.integers(0, 70)).map(sorted).map(tuple),
)
def test_splits_are_cut_where_they_end_however_the_text_is_cut(text, size, ends):
    parts = [text[:0]] * 3
    for split, part in cut(in_pieces(text, size), ends):
        assert part
        parts[split] += part
    assert parts == [text[: ends[0]], text[ends[0] : ends[1]], text[ends[1] :]]


@given(st.binary(max_size=100), st.integers(0, 120), st.integers(1, 30))
def test_a_file_is_read_up_to_a_limit(content, most, size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source_module, "PIECE", size)
        pieces = list(read_pieces(io.BytesIO(content), most))
    assert b"".join(pieces) == content[:most]
    assert all(len(piece) <= size for piece in pieces)


def test_a_source_can_be_read_again_and_knows_its_checksum(monkeypatch):
    monkeypatch.setattr(source_module, "PIECE", 7)
    content = bytes(range(100))
    source = Source.of_bytes(NAME, content)
    for _ in range(2):
        with reading(source, "reading") as pieces:
            assert b"".join(pieces) == content
    assert source.sha256() == hashlib.sha256(content).hexdigest()


def test_bytes_that_change_between_two_passes_are_noticed():
    contents = iter([b"one", b"one", b"two"])

    def pieces():
        yield next(contents)

    source = Source(NAME, 3, pieces)
    expecting = source.expecting(source.sha256())
    assert list(expecting.pieces()) == [b"one"]
    with pytest.raises(UserError, match=r"'text:novel.txt' changed while it was being read; repeat the command"):
        list(expecting.pieces())


@pytest.mark.parametrize(("bar_from", "shown"), [(100, True), (101, False)])
def test_a_long_pass_shows_its_progress_and_a_short_one_nothing(capsys, bar_from, shown):
    with reading(Source.of_bytes("[b]text:novel", bytes(100)), "reading [b]text", bar_from=bar_from) as pieces:
        assert b"".join(pieces) == bytes(100)
    said = capsys.readouterr()
    assert ("reading [b]text" in said.err) == shown
    assert said.out == ""


def test_a_file_is_closed_when_its_reader_gives_up():
    closed = []

    def pieces():
        try:
            yield b"first"
            yield b"second"
        finally:
            closed.append(True)

    def give_up():
        with reading(Source(NAME, 10, pieces), "reading", bar_from=5) as found:
            next(found)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        give_up()
    assert closed
