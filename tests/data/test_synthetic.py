import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokendepth.config import DataConfig
from tokendepth.data import SyntheticDataset, load, vocab_size
from tokendepth.errors import UserError

BOS, SEP, EOS = 1, 2, 3
SIZES = {"train": 10_000, "val": 1_000, "test": 1_000}


def whole(data, split):
    inputs, targets = zip(*data.windows(split, 64, 300), strict=True)
    return np.concatenate(inputs), np.concatenate(targets)


@pytest.mark.parametrize("corpus", ["copy", "sort"])
def test_every_example_by_hand(corpus):
    data = load(DataConfig(corpus=corpus))
    for split, size in SIZES.items():
        inputs, targets = whole(data, split)
        assert inputs.shape == targets.shape == (size, 42)
        for row, aims in zip(inputs[:100].tolist(), targets[:100].tolist(), strict=True):
            source = row[1:21]
            answer = source if corpus == "copy" else sorted(source)
            assert all(4 <= symbol < 32 for symbol in source)
            assert row == [BOS, *source, SEP, *answer]
            assert aims == [-100] * 21 + answer + [EOS]


def test_all_symbols_occur_about_equally_often():
    inputs, _ = whole(SyntheticDataset("copy"), "train")
    counts = np.bincount(inputs[:, 1:21].ravel(), minlength=32)[4:]
    assert len(counts) == 28
    assert abs(counts / counts.mean() - 1).max() < 0.06


@pytest.mark.parametrize("length", [3, 20])
def test_no_source_occurs_twice(length):
    data = SyntheticDataset("sort", length)
    sources = np.concatenate([whole(data, split)[0][:, 1 : length + 1] for split in SIZES])
    assert len(np.unique(sources, axis=0)) == len(sources) == 12_000


@settings(max_examples=10, deadline=None)
@given(st.integers(3, 40))
def test_any_length_fits_its_context(length):
    data = SyntheticDataset("copy", length)
    inputs, targets = data.train_batch(seed=0, step=0, batch_size=4, context=2 * length + 2)
    assert inputs.shape == targets.shape == (4, 2 * length + 2)
    assert (targets == -100).sum() == 4 * (length + 1)
    with pytest.raises(UserError, match=f"model.context is {2 * length + 1}; expected at least {2 * length + 2}"):
        data.train_batch(seed=0, step=0, batch_size=4, context=2 * length + 1)


def test_batches_are_training_examples_and_depend_on_seed_and_step_only():
    data = SyntheticDataset("copy")
    examples = {row.tobytes() for row in whole(data, "train")[0]}
    batches = {}
    for seed in (0, 1):
        for step in (0, 1):
            inputs, targets = data.train_batch(seed=seed, step=step, batch_size=64, context=64)
            assert inputs.dtype == targets.dtype == np.int64
            assert all(row.tobytes() in examples for row in inputs)
            batches[seed, step] = inputs.tobytes()
            again = SyntheticDataset("copy").train_batch(seed=seed, step=step, batch_size=64, context=42)
            np.testing.assert_array_equal((inputs, targets), again)
    assert len(set(batches.values())) == 4


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_share_out_one_batch(world):
    data = SyntheticDataset("sort")
    shares = [
        data.train_batch(seed=0, step=7, batch_size=8, context=42, rank=rank, world=world) for rank in range(world)
    ]
    for one, parts in zip(
        data.train_batch(seed=0, step=7, batch_size=8, context=42), zip(*shares, strict=True), strict=True
    ):
        np.testing.assert_array_equal(one, np.concatenate(parts))


def test_the_fingerprint_tells_corpora_and_lengths_apart():
    prints = {SyntheticDataset(*args).fingerprint for args in [("copy", 20), ("sort", 20), ("copy", 10)]}
    assert len(prints) == 3
    assert SyntheticDataset("copy").fingerprint in prints


def test_passage_bytes_and_vocabulary():
    data = SyntheticDataset("sort")
    assert data.passage("val", 100).tolist() == whole(data, "val")[0][0].tolist()
    assert data.passage("val", 5).tolist() == whole(data, "val")[0][0, :5].tolist()
    assert data.bytes_per_token("val") == 1.0
    assert data.tokenizer.vocab_size == vocab_size(DataConfig(corpus="sort")) == 32


@pytest.mark.parametrize("length", [1, 2])
def test_a_source_too_short_for_different_examples_is_refused(length):
    with pytest.raises(UserError, match=f"data.source_length is {length}; expected a number from 3"):
        DataConfig(corpus="copy", source_length=length)
