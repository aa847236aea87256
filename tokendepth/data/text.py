"""TextDataset: one long row of token ids, cut into train, val and test."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tokendepth.data.dataset import SPLITS, Batch, Dataset, Split
from tokendepth.data.tokenizer import ByteTokenizer, CharTokenizer, Tokenizer
from tokendepth.errors import UserError

SHORTEST_SPLIT = 2  # tokens: one to read and one to predict
SHORTEST_CORPUS = 16  # the fewest tokens whose tenths leave every split that long


@dataclass(frozen=True, eq=False)
class TextDataset(Dataset):
    name: str
    """The corpus as the user named it."""
    fingerprint: str
    tokenizer: Tokenizer
    ids: np.ndarray
    """The whole corpus, in the smallest unsigned integers that hold the vocabulary; memory-mapped where it can be."""
    ends: tuple[int, ...]
    """Where train, val and test end."""
    split_bytes: tuple[int, ...]
    """UTF-8 bytes of each."""

    def split_ids(self, split: Split) -> np.ndarray:
        which = SPLITS.index(split)
        return self.ids[(0, *self.ends)[which] : self.ends[which]]

    def _train_choices(self, context: int) -> int:
        return self.ends[0] - context

    def _train_examples(self, picks: np.ndarray, context: int) -> Batch:
        return _shifted(self.split_ids("train")[picks[:, None] + np.arange(context + 1)])

    def windows(self, split: Split, context: int, batch_size: int) -> Iterator[Batch]:
        ids = self.split_ids(split)
        full, rest = divmod(len(ids) - 1, context)
        for first in range(0, full, batch_size):
            starts = np.arange(first, min(first + batch_size, full)) * context
            yield _shifted(ids[starts[:, None] + np.arange(context + 1)])
        if rest:
            yield _shifted(ids[None, full * context :])

    def bytes_per_token(self, split: Split) -> float:
        return self.split_bytes[SPLITS.index(split)] / len(self.split_ids(split))

    def passage(self, split: Split, length: int) -> np.ndarray:
        return self.split_ids(split)[:length].astype(np.int64)

    def check_context(self, context: int) -> None:
        tokens, split = min((len(self.split_ids(split)), split) for split in ("train", "val"))
        if context >= tokens:
            raise UserError(
                f"model.context is {context}, longer than the corpus: the {split} split of {self.name!r} has "
                f"{tokens} tokens; set --model.context to {tokens - 1} or less, or take a longer text"
            )


def _shifted(sequences: np.ndarray) -> Batch:
    """Each token's target is the one that follows it."""
    return sequences[:, :-1].astype(np.int64), sequences[:, 1:].astype(np.int64)


def build(
    name: str, fingerprint: str, content: bytes, tokens: str, train_and_val: tuple[int, int] | None = None
) -> TextDataset:
    """Tokenize `content`. Train and val end where `train_and_val` says, else after eight and nine tenths."""
    tokenizer, ids = _tokenize(name, content, tokens)
    ends = (*(train_and_val or (len(ids) * 8 // 10, len(ids) * 9 // 10)), len(ids))
    if min(np.diff((0, *ends))) < SHORTEST_SPLIT:
        raise UserError(
            f"data.corpus {name!r} is too short: {len(ids)} tokens; expected at least {SHORTEST_CORPUS}; "
            "take a longer text"
        )
    widths = _byte_widths(tokenizer)
    split_bytes = tuple(int(widths[part].sum(dtype=np.int64)) for part in np.split(ids, ends[:2]))
    return TextDataset(name, fingerprint, tokenizer, ids, ends, split_bytes)


def _tokenize(name: str, content: bytes, tokens: str) -> tuple[Tokenizer, np.ndarray]:
    if tokens == "byte":
        return ByteTokenizer(), np.frombuffer(content, np.uint8)
    try:
        # Strict for enwik8 too: all of it is valid UTF-8, so the replacement in its definition never happens.
        code_points = np.frombuffer(content.decode().encode("utf-32-le"), "<u4")
    except UnicodeDecodeError as error:
        raise UserError(
            f"data.corpus {name!r} is not UTF-8: byte {error.start} is {content[error.start]:#04x}; "
            "save it as UTF-8, or read it as bytes with --data.tokens byte"
        ) from None
    # A table over all of Unicode finds the vocabulary in one pass, without sorting the text.
    present = np.zeros(0x110000, bool)
    present[code_points] = True
    vocabulary = np.flatnonzero(present)
    id_of = (np.cumsum(present) - 1).astype(np.min_scalar_type(len(vocabulary) - 1))
    return CharTokenizer("".join(map(chr, vocabulary))), id_of[code_points]


def _byte_widths(tokenizer: Tokenizer) -> np.ndarray:
    if isinstance(tokenizer, CharTokenizer):
        return np.array([len(char.encode()) for char in tokenizer.chars], np.uint8)
    return np.ones(tokenizer.vocab_size, np.uint8)
