"""Attributes of tokens that need no model: kind, position in the word, frequency."""

from collections.abc import Sequence

import numpy as np

CHARACTER_KINDS = ("letter", "capital", "digit", "punctuation", "space", "line break", "other")
"""If a token is one character or one byte; "other" is a byte that is only part of a character."""
WORD_KINDS = ("begins a word", "continues a word", "number", "punctuation", "space", "line break", "other")
"""If tokens are longer, by their first character that is not a space."""
POSITIONS = ("first", "middle", "last", "outside words")
FREQUENCY_TOKENS = 2**20
"""Tokens of the training text from which frequencies are counted."""


def character_kind(text: str) -> str:
    if text in ("\n", "\r"):
        return "line break"
    if text.isspace():
        return "space"
    if text.isalpha():
        return "capital" if text.isupper() else "letter"
    if text.isdigit():
        return "digit"
    return "punctuation" if text.isprintable() and text else "other"


class Spelled:
    """A text as token ids, with the UTF-8 bytes of each token of the vocabulary."""

    def __init__(self, ids: np.ndarray, spellings: Sequence[bytes]) -> None:
        self.ids = ids
        self.texts = [_decoded(spelling) for spelling in spellings]
        self.by_character = all(len(text) <= 1 for text in self.texts)

    def kinds(self) -> np.ndarray:
        """One of `CHARACTER_KINDS` or of `WORD_KINDS` for every token."""
        if self.by_character:
            return np.array([character_kind(text) for text in self.texts])[self.ids]
        kinds = np.array([_longer_kind(text) for text in self.texts], dtype="<U16")[self.ids]
        inside, begins = self._words()
        kinds[inside & begins], kinds[inside & ~begins] = WORD_KINDS[:2]
        return kinds

    def positions(self) -> np.ndarray:
        """Position of a token in its word (letters without a gap): first, middle, or last, given the next token."""
        inside, begins = self._words()
        goes_on = np.append((inside & ~begins)[1:], False)
        names = np.full(len(self.ids), "outside words", dtype="<U16")
        names[inside & begins] = "first"
        names[inside & ~begins & goes_on] = "middle"
        names[inside & ~begins & ~goes_on] = "last"
        return names

    def _words(self) -> tuple[np.ndarray, np.ndarray]:
        """Which tokens belong to a word, and which of them begin one."""
        bodies = [text.lstrip() for text in self.texts]
        inside = np.array([body[:1].isalpha() for body in bodies])[self.ids]
        apart = np.array([text[:1].isspace() for text in self.texts])[self.ids]
        ends = np.array([text[-1:].isalpha() for text in self.texts])[self.ids]
        follows = np.insert(ends[:-1], 0, False)
        return inside, inside & (apart | ~follows)


def _decoded(spelling: bytes) -> str:
    """Empty for a part of a character and for a token without text."""
    try:
        return spelling.decode()
    except UnicodeDecodeError:
        return ""


def _longer_kind(text: str) -> str:
    body = text.lstrip()
    if not body:
        return "line break" if "\n" in text else "space" if text else "other"
    kind = character_kind(body[0])
    return "number" if kind == "digit" else kind


def frequencies(ids: np.ndarray, training: np.ndarray, vocab_size: int) -> np.ndarray:
    """Share of each token's type in the training text."""
    counts = np.bincount(training[:FREQUENCY_TOKENS], minlength=vocab_size)
    return (counts / counts.sum())[ids]
