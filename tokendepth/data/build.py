"""From a source to a stream of token ids, in two passes over the text (three if a BPE is trained on it).

The first pass finds what must be known beforehand: the length of the text, which determines where its splits end, and
its characters. The last pass yields the ids. Each pass holds a few megabytes of the text at a time.

A text is split by characters, or by bytes if those are the tokens. The ends of train and val are those published with
the corpus, or else 80% and 90%. BPE encodes each split separately, so that no token crosses from one into the next; the
characters of each split are the same for every kind of token.
"""

import hashlib
import itertools
import operator
import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass

import numpy as np

from tokendepth.data.bpe import TRAINING_BYTES, BPETokenizer, train_bpe
from tokendepth.data.source import Source, cut, reading, texts
from tokendepth.data.tokenizer import ByteTokenizer, CharTokenizer, Tokenizer
from tokendepth.errors import UserError

SLOW_BAR_FROM = 2_000_000  # bytes; BPE takes about a second for them

TokenPieces = Generator[tuple[int, np.ndarray, int], None, None]
"""Split number, some of its ids, and how many bytes of text they encode; in the order of the text."""


@dataclass(frozen=True)
class TokenStream:
    """The ids of a corpus, as consecutive arrays."""

    name: str
    """The corpus as the user named it."""
    fingerprint: str
    tokenizer: Tokenizer
    pieces: Callable[[], TokenPieces]
    """Starts from the beginning at each call."""
    tokens: int | None = None
    """The number of ids, if it is known beforehand."""


Ends = tuple[int, int]
"""Where train and val end."""


def byte_stream(source: Source, fingerprint: str, train_and_val: Ends | None = None) -> TokenStream:
    with reading(source, f"reading {source.name}") as pieces:
        length = sum(map(len, pieces))
    ends = train_and_val or _tenths(length)

    def ids() -> TokenPieces:
        with reading(source, f"storing {source.name}") as pieces:
            for split, part in cut(pieces, ends):
                yield split, np.frombuffer(part, np.uint8), len(part)

    return TokenStream(source.name, fingerprint, ByteTokenizer(), ids, length)


def char_stream(
    source: Source, fingerprint: str, train_and_val: Ends | None = None, tokenizer: CharTokenizer | None = None
) -> TokenStream:
    """With the text's own characters as the vocabulary, or those of a tokenizer, which must include them all."""
    # A table over all of Unicode finds the vocabulary in one pass, without sorting the text.
    present, length = np.zeros(0x110000, bool), 0
    with reading(source, f"reading {source.name}") as pieces:
        # Strict also for enwik8: all of it is valid UTF-8, so decoding with replacement would give the same text.
        for text in texts(pieces, source.name):
            present[_code_points(text)] = True
            length += len(text)
    if tokenizer is not None:
        known = np.zeros_like(present)
        known[_code_points(tokenizer.chars)] = True
        for code in np.flatnonzero(present & ~known)[:1]:
            raise UserError(
                f"{source.name!r} has the character {chr(code)!r}, which is none of the run's {tokenizer.vocab_size}; "
                "name a text in the characters that it was trained on"
            )
        present = known
    tokenizer = tokenizer or CharTokenizer("".join(map(chr, np.flatnonzero(present))))
    id_of = (np.cumsum(present, dtype=np.int32) - 1).astype(tokenizer.dtype)
    ends = train_and_val or _tenths(length)

    def ids() -> TokenPieces:
        with reading(source, f"storing {source.name}") as pieces:
            for split, part in cut(texts(pieces, source.name), ends):
                yield split, id_of[_code_points(part)], len(part.encode())

    return TokenStream(source.name, fingerprint, tokenizer, ids, length)


def bpe_stream(source: Source, sha256: str, bpe: BPETokenizer | int, train_and_val: Ends | None = None) -> TokenStream:
    """`bpe` is a tokenizer, or the number of tokens of one to train on the training split."""
    with reading(source, f"reading {source.name}") as pieces:
        length = sum(map(len, texts(pieces, source.name)))
    ends = train_and_val or _tenths(length)
    tokenizer = _trained(source, bpe, ends) if isinstance(bpe, int) else bpe

    def ids() -> TokenPieces:
        with reading(source, f"tokenizing {source.name}", bar_from=SLOW_BAR_FROM) as pieces:
            for split, parts in itertools.groupby(cut(texts(pieces, source.name), ends), operator.itemgetter(0)):
                for found, size in tokenizer.encode_pieces(part for _, part in parts):
                    yield split, found, size

    # The same text with another tokenizer is different data, so the fingerprint covers both.
    fingerprint = hashlib.sha256(f"{sha256} {tokenizer.sha256}".encode()).hexdigest()
    return TokenStream(source.name, fingerprint, tokenizer, ids)


def _trained(source: Source, size: int, ends: Ends) -> BPETokenizer:
    doing = f"training bpe:{size} on {source.name}"
    with reading(source, doing, most=TRAINING_BYTES, bar_from=SLOW_BAR_FROM) as pieces:
        parts = itertools.takewhile(lambda part: part[0] == 0, cut(texts(pieces, source.name), ends))
        tokenizer = train_bpe((text for _, text in parts), size)
    if tokenizer.vocab_size < size:
        found = f"tokendepth: bpe:{size} found only {tokenizer.vocab_size} tokens in {source.name!r}"
        print(f"{found}: no other pair of tokens occurs twice; so the vocabulary has that size", file=sys.stderr)
    return tokenizer


def _tenths(length: int) -> Ends:
    return length * 8 // 10, length * 9 // 10


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le"), "<u4")
