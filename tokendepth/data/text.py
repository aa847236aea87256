"""TextDataset: one long array of token ids, split into train, val and test."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tokendepth.data.dataset import NO_LOSS, SPLITS, Batch, Dataset, Split
from tokendepth.data.tokenizer import Tokenizer
from tokendepth.errors import UserError

SHORTEST_SPLIT = 2  # tokens: one to read and one to predict
SHORTEST_CORPUS = 16  # the fewest characters or bytes that make every split that long


@dataclass(frozen=True, eq=False)
class TextDataset(Dataset):
    name: str
    """The corpus as the user named it."""
    fingerprint: str
    tokenizer: Tokenizer
    ids: np.ndarray
    """The whole corpus, in the smallest unsigned integers that hold the vocabulary; memory-mapped if possible."""
    ends: tuple[int, ...]
    """Where train, val and test end."""
    split_bytes: tuple[int, ...]
    """UTF-8 bytes of each split."""

    def split_ids(self, split: Split) -> np.ndarray:
        which = SPLITS.index(split)
        return self.ids[(0, *self.ends)[which] : self.ends[which]]

    def _train_choices(self, context: int) -> int:
        return self.ends[0] - context

    def _train_examples(self, picks: np.ndarray, context: int) -> Batch:
        length = self._length(context)
        return self._begun(self.split_ids("train")[picks[:, None] + np.arange(length + 1)])

    def windows(self, split: Split, context: int, batch_size: int) -> Iterator[Batch]:
        ids, length = self.split_ids(split), self._length(context)
        full, rest = divmod(len(ids) - 1, length)
        for first in range(0, full, batch_size):
            starts = np.arange(first, min(first + batch_size, full)) * length
            yield self._begun(ids[starts[:, None] + np.arange(length + 1)])
        if rest:
            yield self._begun(ids[None, full * length :])

    def _length(self, context: int) -> int:
        """Tokens of the text per window; a window may have to begin with special tokens."""
        return context - len(self.tokenizer.begins)

    def _begun(self, sequences: np.ndarray) -> Batch:
        """Inputs and targets. The tokens that begin every text are put before the inputs and have no loss."""
        inputs, targets = sequences[:, :-1].astype(np.int64), sequences[:, 1:].astype(np.int64)
        if not (begins := self.tokenizer.begins):
            return inputs, targets
        before = np.broadcast_to(np.array(begins, np.int64), (len(inputs), len(begins)))
        return np.hstack([before, inputs]), np.hstack([np.full_like(before, NO_LOSS), targets])

    def bytes_per_token(self, split: Split, tokens: int | None = None) -> float:
        ids = self.split_ids(split)
        # The bytes of a whole split are known; for a part they are summed over its tokens.
        if tokens is None or tokens >= len(ids) - 1:  # the first token is never a target
            return self.split_bytes[SPLITS.index(split)] / len(ids)
        return float(self._byte_lengths[ids[1 : tokens + 1]].mean())

    @functools.cached_property
    def _byte_lengths(self) -> np.ndarray:
        return np.array([len(self.tokenizer.token_bytes(token)) for token in range(self.tokenizer.vocab_size)])

    def passage(self, split: Split, length: int) -> np.ndarray:
        text = self.split_ids(split)[: self._length(length)].astype(np.int64)
        return np.concatenate([np.array(self.tokenizer.begins, np.int64), text])

    def check_context(self, context: int) -> None:
        tokens, split = min((len(self.split_ids(split)), split) for split in ("train", "val"))
        if context >= tokens:
            raise UserError(
                f"model.context is {context}, longer than the corpus: the {split} split of {self.name!r} has "
                f"{tokens} tokens; set --model.context to {tokens - 1} or less, or take a longer text"
            )


def check_length(name: str, tokens: Sequence[int]) -> None:
    """Raise UserError if one of the splits is too short, given the number of tokens in each."""
    fewest, total = min(tokens), sum(tokens)
    if fewest >= SHORTEST_SPLIT:
        return
    found, expected = f"{total} tokens", SHORTEST_CORPUS
    if total >= SHORTEST_CORPUS:  # BPE tokens differ in length, so one split may get very few
        split = SPLITS[tokens.index(fewest)]
        found, expected = f"{fewest} token{'' if fewest == 1 else 's'} in its {split} split", SHORTEST_SPLIT
    raise UserError(f"data.corpus {name!r} is too short: {found}; expected at least {expected}; take a longer text")
