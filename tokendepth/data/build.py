"""From a source to a stream of token ids, in two passes over the text (three where a BPE is trained on it).

The first pass finds what has to be known beforehand: how long the text is, which fixes where its splits end, and which
characters it has. The last one yields the ids. Each holds a few megabytes of the text at a time.

A text is split by its characters, or by its bytes where those are the tokens: train and val end where the corpus was
published to end, else after eight and nine tenths. BPE encodes every split on its own, so that no token reaches from
one into the next, and all kinds of tokens share the characters of each split.
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
"""The number of a split, some ids of it, and the bytes of text that they stand for. In the order of the text."""


@dataclass(frozen=True)
class TokenStream:
    """The ids of a corpus, to be written down as they come."""

    name: str
    """The corpus as the user named it."""
    fingerprint: str
    tokenizer: Tokenizer
    pieces: Callable[[], TokenPieces]
    """Begins anew with each call."""
    tokens: int | None = None
    """How many there will be, where that is known."""


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
    """With the text's own characters, or with those of a tokenizer, which has to have them all."""
    # A table over all of Unicode finds the vocabulary in one pass, without sorting the text.
    present, length = np.zeros(0x110000, bool), 0
    with reading(source, f"reading {source.name}") as pieces:
        # Strict for enwik8 too: all of it is valid UTF-8, so the replacement in its definition never happens.
        for text in texts(pieces, source.name):
            present[_code_points(text)] = True
            length += len(text)
    chars = "".join(map(chr, np.flatnonzero(present)))
    if tokenizer is not None:
        if other := sorted(set(chars) - set(tokenizer.chars)):
            raise UserError(
                f"{source.name} has the character {other[0]!r}, which is none of the tokenizer's "
                f"{tokenizer.vocab_size}; leave it out, or take other text"
            )
        fingerprint = hashlib.sha256(f"{fingerprint} {tokenizer.chars}".encode()).hexdigest()
        present[:] = False
        present[_code_points(tokenizer.chars)] = True
    tokenizer = tokenizer or CharTokenizer(chars)
    id_of = (np.cumsum(present, dtype=np.int32) - 1).astype(tokenizer.dtype)
    ends = train_and_val or _tenths(length)

    def ids() -> TokenPieces:
        with reading(source, f"storing {source.name}") as pieces:
            for split, part in cut(texts(pieces, source.name), ends):
                yield split, id_of[_code_points(part)], len(part.encode())

    return TokenStream(source.name, fingerprint, tokenizer, ids, length)


def bpe_stream(source: Source, sha256: str, bpe: BPETokenizer | int, train_and_val: Ends | None = None) -> TokenStream:
    """With a tokenizer, or with one of so many tokens that is trained on the training split."""
    with reading(source, f"reading {source.name}") as pieces:
        length = sum(map(len, texts(pieces, source.name)))
    ends = train_and_val or _tenths(length)
    tokenizer = _trained(source, bpe, ends) if isinstance(bpe, int) else bpe

    def ids() -> TokenPieces:
        with reading(source, f"tokenizing {source.name}", bar_from=SLOW_BAR_FROM) as pieces:
            for split, parts in itertools.groupby(cut(texts(pieces, source.name), ends), operator.itemgetter(0)):
                for found, size in tokenizer.encode_pieces(part for _, part in parts):
                    yield split, found, size

    # The same text with another tokenizer is other data: a model of the one would read nonsense in the other.
    fingerprint = hashlib.sha256(f"{sha256} {tokenizer.sha256}".encode()).hexdigest()
    return TokenStream(source.name, fingerprint, tokenizer, ids)


def _trained(source: Source, size: int, ends: Ends) -> BPETokenizer:
    doing = f"training bpe:{size} on {source.name}"
    with reading(source, doing, most=TRAINING_BYTES, bar_from=SLOW_BAR_FROM) as pieces:
        parts = itertools.takewhile(lambda part: part[0] == 0, cut(texts(pieces, source.name), ends))
        tokenizer = train_bpe((text for _, text in parts), size)
    if tokenizer.vocab_size < size:
        found = f"tokendepth: bpe:{size} found only {tokenizer.vocab_size} tokens in {source.name!r}"
        print(f"{found}: no other pair of tokens occurs twice; the vocabulary is as large as that", file=sys.stderr)
    return tokenizer


def _tenths(length: int) -> Ends:
    return length * 8 // 10, length * 9 // 10


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le"), "<u4")
