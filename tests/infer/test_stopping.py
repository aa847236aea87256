"""Stop strings are found across tokens, however the text is tokenised, and never shown in part."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokendepth.data import ByteTokenizer, CharTokenizer
from tokendepth.errors import UserError
from tokendepth.infer.stopping import ShownText

LETTERS = CharTokenizer("abc")


def pieces(text: str, stop: list[str], tokenizer=LETTERS) -> tuple[list[str], bool]:
    shown = ShownText(tokenizer, stop)
    found = []
    for token in tokenizer.encode(text):
        found.append(shown.add(token))
        if shown.stopped:
            break
    return [*found, shown.end()], shown.stopped


@pytest.mark.parametrize(
    ("text", "stop", "expected", "stopped"),
    [
        ("abcabc", [], ["a", "b", "c", "a", "b", "c", ""], False),
        ("abcabc", ["ca"], ["a", "b", "", "", ""], True),
        ("aabab", ["aba"], ["", "a", "", "", ""], True),  # a second beginning inside the first
        ("abab", ["abc"], ["", "", "ab", "", "ab"], False),  # text held back is shown at the end
        ("abc", ["abc", "b"], ["", "a", ""], True),  # the one that is complete first
        ("cab", ["ab", "b"], ["c", "", "", ""], True),  # of two that end together, the longer
        ("abc", ["c"], ["a", "b", "", ""], True),
        ("abc", ["a"], ["", ""], True),
    ],
)
def test_by_hand(text, stop, expected, stopped):
    assert pieces(text, stop) == (expected, stopped)


def test_bytes_of_one_character_are_put_together_first():
    text, stopped = pieces("né à côté", ["ô"], ByteTokenizer())
    assert ("".join(text), stopped) == ("né à c", True)


def test_a_character_that_never_becomes_whole_is_replaced():
    shown = ShownText(ByteTokenizer(), ["x"])
    assert shown.add(0xC3) == ""
    assert shown.end() == "\N{REPLACEMENT CHARACTER}"


@given(
    text=st.text("abc", max_size=20),
    stop=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(1, 5), max_size=20),
)
def test_however_the_text_is_cut_what_is_shown_is_the_same(text, stop, cuts):
    """As for single characters: up to the stop string that is complete first, or everything if there is none."""

    class Cut(CharTokenizer):
        def token_bytes(self, token: int) -> bytes:
            return parts[token].encode()

    parts, rest = [], text
    for cut in [*cuts, len(text) or 1]:
        parts, rest = [*parts, rest[:cut]], rest[cut:]
    shown = ShownText(Cut("abc"), stop)
    found = []
    for token in range(len(parts)):
        found.append(shown.add(token))
        so_far = "".join(found)
        assert not any(string in so_far for string in stop)
        if shown.stopped:
            break
    found.append(shown.end())
    one_by_one, stopped = pieces(text, stop)
    assert ("".join(found), shown.stopped) == ("".join(one_by_one), stopped)
    ends = [text.find(string) + len(string) for string in stop if string in text]
    assert stopped == bool(ends)
    if ends:
        first = min(ends)
        longest = max(len(s) for s in stop if text[:first].endswith(s))
        assert "".join(one_by_one) == text[: first - longest]


def test_an_empty_stop_string_is_refused():
    with pytest.raises(UserError, match="a stop string is empty"):
        ShownText(LETTERS, ["a", ""])
