from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokendepth.config import DataConfig
from tokendepth.data import load
from tokendepth.data.build import byte_stream, char_stream
from tokendepth.data.dataset import NO_LOSS
from tokendepth.data.source import Source
from tokendepth.data.store import in_memory
from tokendepth.data.text import SHORTEST_CORPUS
from tokendepth.data.tokenizer import ByteTokenizer
from tokendepth.errors import UserError


def dataset(content, tokens="byte", **kwargs):
    stream = {"byte": byte_stream, "char": char_stream}[tokens]
    return in_memory(stream(Source.of_bytes("text:novel.txt", content), "0" * 64, **kwargs))


def counting(length):
    """A corpus in which a token's value is its position."""
    assert length <= 256
    return dataset(bytes(range(length)))


class Beginning(ByteTokenizer):
    """A tokenizer that begins every text with two special tokens."""

    begins = (7, 9)


@given(st.binary(min_size=SHORTEST_CORPUS, max_size=300), st.integers(3, 40), st.integers(1, 5))
def test_every_window_begins_as_texts_do_and_every_token_is_a_target_once(content, context, batch):
    data = replace(dataset(content), tokenizer=Beginning())
    ids, wanted = data.split_ids("train"), []
    for inputs, targets in data.windows("train", context, batch):
        assert inputs.shape == targets.shape
        assert inputs.shape[0] <= batch
        assert inputs.shape[1] <= context
        assert (inputs[:, :2] == [7, 9]).all()
        assert (targets[:, :2] == NO_LOSS).all()
        np.testing.assert_array_equal(inputs[:, 3:], targets[:, 2:-1])
        wanted += targets[:, 2:].flatten().tolist()
    assert wanted == ids[1:].tolist()


# --- splits -----------------------------------------------------------------------------------------------------------


@given(st.binary(min_size=SHORTEST_CORPUS, max_size=300))
def test_splits_are_eight_one_and_one_tenth_and_together_the_whole(content):
    data = dataset(content)
    parts = [data.split_ids(split) for split in ("train", "val", "test")]
    assert np.concatenate(parts).tobytes() == content
    assert len(parts[0]) == len(content) * 8 // 10
    assert abs(len(parts[1]) - len(content) / 10) < 1
    assert min(map(len, parts)) >= 2


def test_one_token_less_than_the_shortest_corpus_is_refused():
    with pytest.raises(UserError, match=r"novel.txt' is too short: 15 tokens; expected at least 16"):
        dataset(bytes(SHORTEST_CORPUS - 1))


def test_given_split_ends_are_used():
    data = dataset(bytes(range(100)), train_and_val=(90, 95))
    assert [len(data.split_ids(split)) for split in ("train", "val", "test")] == [90, 5, 5]


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=SHORTEST_CORPUS, max_size=200))
def test_characters_decode_to_the_text_and_count_their_bytes(text):
    data = dataset(text.encode(), "char")
    assert data.tokenizer.decode(data.ids) == text
    assert data.tokenizer.chars == "".join(sorted(set(text)))
    assert data.tokenizer.encode(text) == data.ids.tolist()
    val = text[len(text) * 8 // 10 : len(text) * 9 // 10]
    assert data.bytes_per_token("val") == len(val.encode()) / len(val)


@pytest.mark.parametrize(("vocabulary", "dtype"), [(256, np.uint8), (257, np.uint16), (65_537, np.uint32)])
def test_ids_have_the_smallest_type_that_holds_the_vocabulary(vocabulary, dtype):
    text = "".join(map(chr, range(0x10000, 0x10000 + vocabulary)))
    assert dataset(text.encode(), "char").ids.dtype == dtype


def test_bytes_are_one_byte_a_token():
    assert dataset("é".encode() * 20).bytes_per_token("val") == 1.0


def test_text_that_is_not_utf8_is_refused_with_the_offset_and_the_option():
    with pytest.raises(UserError, match=r"not UTF-8: byte 20 is 0xff; .*--data.tokens byte"):
        dataset(b"a" * 20 + b"\xff" + b"b" * 20, "char")


# --- training batches -------------------------------------------------------------------------------------------------


def batch(data, **kwargs):
    return data.train_batch(**{"seed": 3, "step": 5, "batch_size": 8, "context": 7, **kwargs})


@given(st.integers(0, 2**31 - 1), st.integers(0, 10**9))
def test_a_batch_is_a_function_of_seed_and_step(seed, step):
    data = counting(200)
    first = batch(data, seed=seed, step=step)
    batch(data, seed=seed + 1, step=step)
    again = batch(counting(200), seed=seed, step=step)
    np.testing.assert_array_equal(first, again)


def test_seed_and_step_both_change_the_batch():
    data = counting(200)
    seen = {batch(data, seed=seed, step=step)[0].tobytes() for seed in range(5) for step in range(5)}
    assert len(seen) == 25


def test_batches_stay_the_same_between_versions():
    """The raw bits of PCG64 never change; a change here would change every run's data."""
    inputs, _ = batch(counting(200), batch_size=4)
    assert inputs[:, 0].tolist() == [147, 55, 2, 96]


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_ranks_share_out_one_global_batch(world):
    data = counting(200)
    shares = [batch(data, rank=rank, world=world) for rank in range(world)]
    assert all(inputs.shape == (8 // world, 7) for inputs, _ in shares)
    for whole, parts in zip(batch(data), zip(*shares, strict=True), strict=True):
        np.testing.assert_array_equal(whole, np.concatenate(parts))


def test_targets_are_the_next_tokens_and_never_leave_the_train_split():
    data = counting(200)
    for step in range(50):
        inputs, targets = batch(data, step=step)
        assert inputs.dtype == targets.dtype == np.int64
        np.testing.assert_array_equal(targets, inputs + 1)
        np.testing.assert_array_equal(np.diff(inputs, axis=1), 1)
        assert targets.max() < 160


def test_every_start_can_be_drawn_the_last_one_too():
    data = counting(80)  # 64 training tokens: starts 0 to 56 for a context of 7 and one target
    starts = {int(start) for step in range(200) for start in batch(data, step=step)[0][:, 0]}
    assert starts == set(range(57))


def test_a_batch_that_the_processes_cannot_share_is_refused():
    with pytest.raises(UserError, match=r"train.batch_size is 8; expected a multiple of the 3 processes"):
        batch(counting(200), world=3)


def test_a_context_longer_than_the_corpus_is_refused():
    data = counting(200)
    data.check_context(19)
    with pytest.raises(UserError, match=r"model.context is 20, longer than the corpus: the val split .* has 20 tokens"):
        data.check_context(20)
    with pytest.raises(UserError, match=r"set --model.context to 19 or less"):
        batch(data, context=160)
    long_val = dataset(bytes(100), train_and_val=(10, 90))
    with pytest.raises(UserError, match=r"the train split .* has 10 tokens; set --model.context to 9 or less"):
        long_val.check_context(10)


# --- windows ----------------------------------------------------------------------------------------------------------


@given(
    length=st.integers(SHORTEST_CORPUS, 256),
    context=st.integers(1, 60),
    batch_size=st.integers(1, 9),
    split=st.sampled_from(["train", "val", "test"]),
)
def test_windows_hold_every_target_of_a_split_once_and_in_order(length, context, batch_size, split):
    data = counting(length)
    ids = data.split_ids(split).astype(int)
    batches = list(data.windows(split, context, batch_size))
    assert np.concatenate([targets.ravel() for _, targets in batches]).tolist() == ids[1:].tolist()
    assert np.concatenate([inputs.ravel() for inputs, _ in batches]).tolist() == ids[:-1].tolist()
    rest = (len(ids) - 1) % context
    full = batches[:-1] if rest else batches
    if rest:
        assert batches[-1][0].shape == batches[-1][1].shape == (1, rest)
    assert all(inputs.shape[1] == context and 1 <= len(inputs) <= batch_size for inputs, _ in full)
    assert all(len(inputs) == batch_size for inputs, _ in full[:-1])


def test_a_passage_is_the_start_of_a_split():
    data = counting(200)
    assert data.passage("val", 5).tolist() == [160, 161, 162, 163, 164]
    assert data.passage("val", 5).dtype == np.int64
    assert len(data.passage("test", 1000)) == 20


def test_bytes_per_token_of_a_part_are_those_of_its_tokens(tmp_path):
    """Otherwise bits per byte of the first tokens would use the bytes of other text."""
    path = tmp_path / "text.txt"
    path.write_text("a" * 725 + "\u2013" * 40 + "a" * 135, encoding="utf-8")  # val: 5 of 1 byte, 40 of 3, 45 of 1
    dataset = load(DataConfig(f"text:{path}"))
    ids = dataset.split_ids("val").tolist()
    lengths = [len(dataset.tokenizer.decode([token]).encode()) for token in ids]
    assert len(set(lengths)) == 2
    assert dataset.bytes_per_token("val") == sum(lengths) / len(ids)
    for tokens in (1, 10, 60):
        assert dataset.bytes_per_token("val", tokens) == sum(lengths[1 : tokens + 1]) / tokens
    assert dataset.bytes_per_token("val", len(ids) - 1) == dataset.bytes_per_token("val")
