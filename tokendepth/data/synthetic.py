"""SyntheticDataset: copy and sort, `[BOS] source [SEP] target [EOS]`, with a loss only on the target and EOS."""

import hashlib
import itertools
import json
from collections.abc import Iterator

import numpy as np

from tokendepth.config import DEFAULT_SOURCE_LENGTH
from tokendepth.data.dataset import NO_LOSS, SPLITS, Batch, Dataset, Split, draw
from tokendepth.data.tokenizer import BOS, EOS, SEP, SPECIALS, SYMBOLS, SymbolTokenizer
from tokendepth.errors import UserError

EXAMPLES = {"train": 10_000, "val": 1_000, "test": 1_000}
"""All distinct, so sources need a length of at least 3: 28 symbols make 784 of length 2, 21,952 of length 3."""

_STREAM = 20  # fixed, since the data must not depend on a run's seed


class SyntheticDataset(Dataset):
    def __init__(self, corpus: str, source_length: int = DEFAULT_SOURCE_LENGTH) -> None:
        assert corpus in ("copy", "sort")
        assert source_length >= 3, "fewer symbols do not make enough different sources; the config says so"
        self.name = corpus
        self.tokenizer = SymbolTokenizer()
        self.source_length = source_length
        recipe = {"corpus": corpus, "source_length": source_length, "examples": EXAMPLES, "stream": _STREAM}
        self.fingerprint = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()

        source = _distinct_sources(source_length, sum(EXAMPLES.values()))
        target = source if corpus == "copy" else np.sort(source, axis=1)
        bos, sep, eos = (np.full((len(source), 1), token, np.uint8) for token in (BOS, SEP, EOS))
        examples = np.hstack([bos, source, sep, target, eos])
        parts = np.split(examples, np.cumsum(list(EXAMPLES.values()))[:-1])
        self._examples = dict(zip(SPLITS, parts, strict=True))

    def _train_choices(self, context: int) -> int:
        return EXAMPLES["train"]

    def _train_examples(self, picks: np.ndarray, context: int) -> Batch:
        return self._masked(self._examples["train"][picks])

    def windows(self, split: Split, context: int, batch_size: int) -> Iterator[Batch]:
        self.check_context(context)
        for first in range(0, EXAMPLES[split], batch_size):
            yield self._masked(self._examples[split][first : first + batch_size])

    def _masked(self, examples: np.ndarray) -> Batch:
        inputs, targets = examples[:, :-1].astype(np.int64), examples[:, 1:].astype(np.int64)
        targets[:, : self.source_length + 1] = NO_LOSS  # the source and SEP
        return inputs, targets

    def bytes_per_token(self, split: Split, tokens: int | None = None) -> float:
        return 1.0

    def passage(self, split: Split, length: int) -> np.ndarray:
        return self._examples[split][0, :-1][:length].astype(np.int64)

    def check_context(self, context: int) -> None:
        needed = 2 * self.source_length + 2
        if context < needed:
            raise UserError(
                f"model.context is {context}; expected at least {needed}, the length of one {self.name} example; "
                "set it with --model.context"
            )


def _distinct_sources(length: int, count: int) -> np.ndarray:
    """`count` different sources, always the same ones, as token ids."""
    sources: dict[bytes, None] = {}  # an ordered set
    for block in itertools.count():
        if len(sources) >= count:
            break
        drawn = draw((_STREAM, length, block), 1000 * length, len(SYMBOLS)).astype(np.uint8) + len(SPECIALS)
        sources.update(dict.fromkeys(row.tobytes() for row in drawn.reshape(1000, length)))
    return np.frombuffer(b"".join(itertools.islice(sources, count)), np.uint8).reshape(count, length)
