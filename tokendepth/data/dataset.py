"""The interface of every corpus: training batches that depend only on seed and step, and whole splits."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

from tokendepth.data.tokenizer import Tokenizer
from tokendepth.errors import UserError

Split = Literal["train", "val", "test"]
HeldOut = Literal["val", "test"]
"""Splits on which losses are measured."""
SPLITS: tuple[Split, ...] = ("train", "val", "test")

NO_LOSS = -100
"""The target of a position without a loss."""

Batch = tuple[np.ndarray, np.ndarray]


def draw(entropy: Sequence[int], count: int, below: int) -> np.ndarray:
    """`count` integers in [0, below), always the same for the same `entropy`.

    Made from raw bits, the only output of NumPy's generators that is stable between versions.
    """
    return (np.random.PCG64(entropy).random_raw(count) % np.uint64(below)).astype(np.int64)


class Dataset(ABC):
    tokenizer: Tokenizer
    fingerprint: str
    """SHA-256 of the data."""

    def train_batch(
        self, *, seed: int, step: int, batch_size: int, context: int, rank: int = 0, world: int = 1
    ) -> Batch:
        """Inputs and targets of one step, each int64 [batch_size // world, time].

        Every rank draws the whole batch and keeps its own slice, so the data does not depend on the number of ranks.
        """
        assert 0 <= rank < world
        if batch_size % world:
            raise UserError(
                f"train.batch_size is {batch_size}; expected a multiple of the {world} processes; "
                "set it with --train.batch-size"
            )
        self.check_context(context)
        share = batch_size // world
        picks = self.batch_ids(seed=seed, step=step, batch_size=batch_size, context=context)
        return self._train_examples(picks[rank * share : (rank + 1) * share], context)

    def batch_ids(self, *, seed: int, step: int, batch_size: int, context: int) -> np.ndarray:
        """The examples of a step, over all ranks; for a text, the indices of their first tokens."""
        return draw((seed, step), batch_size, self._train_choices(context))

    @abstractmethod
    def _train_choices(self, context: int) -> int:
        """Number of different training examples to draw from."""

    @abstractmethod
    def _train_examples(self, picks: np.ndarray, context: int) -> Batch: ...

    @abstractmethod
    def windows(self, split: Split, context: int, batch_size: int) -> Iterator[Batch]:
        """The whole split in order, every target once. Windows do not overlap; a shorter last one is its own batch."""

    @abstractmethod
    def bytes_per_token(self, split: Split, tokens: int | None = None) -> float:
        """Mean number of UTF-8 bytes per token of the split, or of its first `tokens`."""

    @abstractmethod
    def passage(self, split: Split, length: int) -> np.ndarray:
        """The first `length` tokens of the split, or of its first example."""

    @abstractmethod
    def check_context(self, context: int) -> None:
        """Raise UserError if `context` does not suit the corpus."""
