"""The KV cache: sequences of different lengths together, with any padding, in slots that are freed and reused.

Both sides compute the same float32 sums with different shapes, so 1e-5 of the largest logit is rounding. A key that is
missing, shifted or seen wrongly changes logits by some percent (`test_the_tolerance_tells...`).
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.tiny import one_line
from tokendepth.cache import KVCache
from tokendepth.config import (
    METHOD_CONFIGS,
    DenseConfig,
    MoDConfig,
    ModelConfig,
    MoRConfig,
    RunConfig,
    SpanConfig,
    SwitchConfig,
    TrainConfig,
    TSAConfig,
)
from tokendepth.errors import UserError
from tokendepth.layers.routers import Router
from tokendepth.methods import build
from tokendepth.model import LanguageModel, Output

TIME, VOCABULARY = 12, 11
CLASSIC = ModelConfig(d_model=32, n_layer=3, n_head=4, d_ff=48, context=TIME, dropout=0.0, vocab_size=VOCABULARY)
MODERN = replace(
    CLASSIC, norm="rms", positions="rotary", n_kv_head=2, ffn="swiglu", ffn_bias=False, qk_norm=True, tie_head=False
)
SHAPES = {"classic": CLASSIC, "modern": MODERN}
METHODS = {
    "dense": DenseConfig(),
    "tsa": TSAConfig(),
    "mod": MoDConfig(every=1, capacity=0.5),
    "switch": SwitchConfig(capacity_factor=0.75),  # some tokens overflow
}

each_shape = pytest.mark.parametrize("shape", SHAPES)
each_method = pytest.mark.parametrize("method", METHODS)
each_execution = pytest.mark.parametrize("execution", ["hard", "sparse"])
each_side = pytest.mark.parametrize("side", ["left", "right", "middle"])


@cache
def lively(method: str, shape: str, context: int = TIME) -> LanguageModel:
    """Untrained, but every matrix matters and every routed site takes some tokens and skips others. Do not modify."""
    for seed in range(20):
        config = RunConfig(
            model=replace(SHAPES[shape], context=context), method=METHODS[method], train=TrainConfig(seed=seed)
        )
        model = enlivened(build(config).eval())
        work = full(model, tokens(16, context), "hard").trace.work
        routed = [n for n, site in enumerate(model.method.sites(keys=1)) if site.routed]
        if all(0.2 <= float(work[n].mean()) <= 0.9 for n in routed):
            return model
    raise AssertionError("no seed decides both ways")


@torch.no_grad()
def enlivened(model: LanguageModel) -> LanguageModel:
    for matrix in (p for p in model.parameters() if p.ndim == 2):
        matrix.mul_(0.2 / matrix.std())
    for router in (router for router in model.method.routers() if isinstance(router, Router)):
        logits: list[Tensor] = []
        hook = router.register_forward_hook(lambda _m, _i, out, logits=logits: logits.append(out))
        full(model, tokens(16, model.config.context), "hard")
        hook.remove()
        median = logits[0].median()
        # Midway to the next one, so that no token is exactly at the threshold.
        router.logit.bias -= (median + logits[0][logits[0] > median + 1e-3].min()) / 2
    return model


def tokens(batch: int, time: int = TIME, seed: int = 0) -> Tensor:
    return torch.randint(VOCABULARY, (batch, time), generator=torch.Generator().manual_seed(seed))


def new_cache(model: LanguageModel, slots: int, capacity: int | None = None, **options) -> KVCache:
    like, layers = model.norm.weight.detach(), model.method.cache_layers
    return KVCache(model.config, slots, capacity or model.config.context, layers=layers, like=like, **options)


@torch.no_grad()
def full(model: LanguageModel, ids: Tensor, execution: str = "hard", **options) -> Output:
    return model(ids, execution=execution, **options)


def padded(rows: Sequence[Sequence[int]], width: int, side: str) -> tuple[Tensor, Tensor]:
    """`[batch, width]` with rows right-aligned (padding left), left-aligned or split, and the mask of real columns."""
    ids, valid = torch.full((len(rows), width), 7), torch.zeros(len(rows), width, dtype=torch.bool)
    for b, row in enumerate(rows):
        columns = list(range(width))
        if side == "left":
            columns = columns[width - len(row) :]
        elif side == "middle":  # split in halves, the left one longer, with padding in between
            columns = [*columns[: (len(row) + 1) // 2], *columns[width - len(row) // 2 :]] if row else []
        for column, token in zip(columns, row, strict=False):
            ids[b, column], valid[b, column] = token, True
    return ids, valid


class Ragged:
    """Sequences that grow in a cache by chunks of different lengths, and their results."""

    def __init__(self, model: LanguageModel, kept: KVCache, batch: int, execution: str = "hard") -> None:
        self.model, self.kept, self.execution = model, kept, execution
        self.ids: list[list[int]] = [[] for _ in range(batch)]
        self.logits: list[list[Tensor]] = [[] for _ in range(batch)]
        self.work: list[list[Tensor]] = [[] for _ in range(batch)]

    def feed(self, rows: Sequence[Sequence[int]], width: int, side: str) -> Output:
        ids, valid = padded(rows, width, side)
        out = full(self.model, ids, self.execution, cache=self.kept, valid=valid)
        assert out.logits.isfinite().all(), "also at padding"
        for b, row in enumerate(rows):
            self.ids[b] += row
            self.logits[b].append(out.logits[b, valid[b]])
            self.work[b].append(out.trace.work[:, b, valid[b]])
        return out

    def check(self) -> None:
        """Every sequence gives the same result as alone and in one piece."""
        for ids, logits, work in zip(self.ids, self.logits, self.work, strict=True):
            if ids:
                alone = full(self.model, torch.tensor([ids]), self.execution)
                assert_close(torch.cat(logits), alone.logits[0])
                assert torch.equal(torch.cat(work, 1), alone.trace.work[:, 0])


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    assert float((actual - expected).abs().max()) <= 1e-5 * float(expected.abs().max())


@each_method
@each_shape
def test_the_tolerance_tells_an_error_from_rounding(method, shape):
    model, ids = lively(method, shape), tokens(4)
    other = ids.clone()
    other[:, 4] = (other[:, 4] + 1) % VOCABULARY
    before, after = full(model, ids).logits, full(model, other).logits
    assert float((after - before)[:, 5:].abs().max()) > 1e-2 * float(before.abs().max())


# --- sequences of different lengths -----------------------------------------------------------------------------------


@each_method
@each_shape
@each_execution
@each_side
def test_sequences_grow_each_at_its_own_pace(method, shape, execution, side):
    """Including empty chunks, and up to the end of the context while others have just begun."""
    model, rows = lively(method, shape), tokens(3, seed=1).tolist()
    ragged = Ragged(model, new_cache(model, 3), 3, execution)
    ragged.feed([rows[0][:5], rows[1][:4], rows[2][:1]], 7, side)
    assert ragged.kept.lengths.tolist() == [5, 4, 1]
    assert ragged.kept.longest == 5
    ragged.feed([[], rows[1][4:7], []], 4, side)
    ragged.feed([rows[0][5:], [], rows[2][1:2]], 8, side)
    ragged.feed([[], rows[1][7:8], rows[2][2:3]], 1, side)
    assert ragged.kept.lengths.tolist() == [TIME, 8, 3]
    assert ragged.kept.longest == TIME
    ragged.check()


@each_method
@each_shape
@each_execution
@each_side
def test_padding_takes_no_room_in_context_and_cache(method, shape, execution, side):
    """Five and four real tokens in seven columns, with context and capacity five; the full sequence then idles."""
    model, rows = lively(method, shape, context=5), tokens(2, 5, seed=2).tolist()
    ragged = Ragged(model, new_cache(model, 2), 2, execution)
    ragged.feed([rows[0], rows[1][:4]], 7, side)
    ragged.feed([[], []], 3, side)
    ragged.feed([[], rows[1][4:]], 2, side)
    ragged.feed([[], []], 1, side)
    assert ragged.kept.lengths.tolist() == [5, 5]
    ragged.check()


@each_method
@each_shape
def test_a_chunk_of_padding_before_anything_else(method, shape):
    model, rows = lively(method, shape), tokens(2, 4).tolist()
    ragged = Ragged(model, new_cache(model, 2), 2)
    ragged.feed([[], []], 3, "left")
    ragged.feed([[], rows[1]], 5, "left")
    ragged.feed([rows[0], []], 5, "right")
    assert ragged.kept.lengths.tolist() == [4, 4]
    ragged.check()


@each_method
@each_shape
@each_execution
def test_after_a_ragged_prompt_tokens_come_one_by_one_without_a_mask(method, shape, execution):
    model, rows = lively(method, shape), tokens(2, seed=3).tolist()
    ragged = Ragged(model, new_cache(model, 2), 2, execution)
    ragged.feed([rows[0][:6], rows[1][:2]], 6, "left")
    for step in range(3):
        new = torch.tensor([[rows[0][6 + step]], [rows[1][2 + step]]])
        out = full(model, new, execution, cache=ragged.kept)
        for b in range(2):
            ragged.ids[b].append(int(new[b]))
            ragged.logits[b].append(out.logits[b])
            ragged.work[b].append(out.trace.work[:, b])
    assert ragged.kept.lengths.tolist() == [9, 5]
    ragged.check()


@each_shape
def test_who_leaves_a_key_is_known_per_layer(shape):
    """Mixture-of-Depths: the selected tokens. TSA: all tokens."""
    for method, all_of_them in (("mod", False), ("tsa", True)):
        model, rows = lively(method, shape), tokens(2, seed=1).tolist()
        ragged = Ragged(model, new_cache(model, 2), 2)
        ragged.feed([rows[0][:8], rows[1][:3]], 9, "middle")
        for layer in range(3):
            for b, length in ((0, 8), (1, 3)):
                left = ragged.kept.valid[layer, b, :length]
                worked = ragged.work[b][0][layer].bool()
                assert torch.equal(left, torch.ones_like(left) if all_of_them else worked)
                assert not ragged.kept.valid[layer, b, length:TIME].any()


def test_a_cache_is_as_wide_as_keys_and_values_are():
    model = lively("dense", "modern")
    kept = new_cache(model, 2, 6)
    assert kept.keys.shape[:3] == kept.values.shape[:3] == (3, 2, 2), "layers, slots, heads of keys and values"
    assert kept.keys.shape[4] == 8
    wide = KVCache(replace(MODERN, head_width=6), 2, 6, layers=5, like=model.norm.weight)
    assert (wide.keys.shape[0], wide.keys.shape[4]) == (5, 6)
    assert KVCache(MODERN, 1, 1, like=torch.empty(0, dtype=torch.bfloat16)).keys.dtype == torch.bfloat16


@each_shape
@each_execution
def test_under_autocast_keys_and_values_go_into_a_cache_of_float32(shape, execution):
    model, ids = lively("tsa", shape), tokens(2, 5)
    kept = new_cache(model, 2)
    with torch.autocast("cpu", torch.bfloat16):
        parts = [full(model, part, execution, cache=kept) for part in ids.split([3, 2], dim=1)]
    assert kept.keys.dtype == torch.float32
    assert kept.lengths.tolist() == [5, 5]
    assert all(part.logits.isfinite().all() for part in parts)


# --- views ------------------------------------------------------------------------------------------------------------


@each_method
@each_shape
@each_execution
def test_views_of_slots_in_any_order_are_batches_of_their_own(method, shape, execution):
    model, rows = lively(method, shape), tokens(3, seed=4).tolist()
    kept = new_cache(model, 4)  # slot 0 stays empty
    one, two = Ragged(model, kept.of([2]), 1, execution), Ragged(model, kept.of([3, 1]), 2, execution)
    one.feed([rows[0][:7]], 7, "left")
    two.feed([rows[1][:2], rows[2][:4]], 5, "left")
    one.feed([rows[0][7:9]], 2, "left")
    two.feed([rows[1][2:], []], 10, "right")
    assert kept.lengths.tolist() == [0, 4, 9, TIME]
    assert kept.longest == TIME
    assert not kept.valid[:, 0, :TIME].any()
    assert (kept.of([3, 1]).seen().tolist(), kept.of([2]).seen().tolist()) == ([TIME, 4], [9])
    one.check()
    two.check()


@pytest.mark.parametrize(("slots", "copied"), [([0], False), ([1, 2], False), ([0, 2], True), ([2, 1], True)])
def test_keys_of_adjacent_slots_are_not_copied(slots, copied):
    kept = new_cache(lively("dense", "classic"), 3)
    new, columns = torch.randn(len(slots), 4, 1, 8), torch.zeros(len(slots), 1, dtype=torch.long)
    found, values, _ = kept.of(slots).append(0, new, 2 * new, columns, None, 1)
    assert torch.equal(found, new)
    assert torch.equal(values, 2 * new)
    shared = kept.keys.untyped_storage().data_ptr()
    assert (found.untyped_storage().data_ptr() != shared) == copied


def test_a_view_of_a_view_names_slots_of_the_whole():
    kept = new_cache(lively("dense", "classic"), 3)
    kept.lengths.copy_(torch.tensor([5, 6, 7]))
    assert kept.of([2, 0]).of([1]).seen().tolist() == [6]


def test_a_view_attends_over_its_own_columns_alone():
    """A long neighbour does not make a short sequence slower."""
    model = lively("dense", "classic")
    kept = new_cache(model, 2)
    full(model, tokens(1), cache=kept.of([1]))
    out = full(model, tokens(1, 3), cache=kept.of([0]))
    assert out.trace.sites == model.method.sites(keys=3)
    assert kept.lengths.tolist() == [3, TIME]
    assert kept.longest == TIME, "of all sequences, not of the view"


# --- free and reuse ---------------------------------------------------------------------------------------------------


@each_method
@each_shape
@each_execution
def test_a_reused_slot_is_as_a_fresh_one(method, shape, execution):
    """Bit for bit, and the neighbour is not affected."""
    model, rows = lively(method, shape), tokens(3, seed=5)
    kept, fresh = new_cache(model, 2), new_cache(model, 2)
    full(model, rows[:2, :8], execution, cache=kept)
    full(model, rows[:2, :8], execution, cache=fresh)
    kept.free([0])
    assert kept.lengths.tolist() == [0, 8]
    assert kept.longest == 8
    assert not kept.valid[:, 0].any()
    assert kept.valid[:, 1].any()
    full(model, rows[2:, :3], execution, cache=kept.of([0]))
    ids, valid = torch.stack([rows[2, 3:7], rows[1, 8:]]), torch.ones(2, 4, dtype=torch.bool)
    reused = full(model, ids, execution, cache=kept, valid=valid)
    alone = full(model, rows[2:, :7], execution)
    assert_close(reused.logits[0], alone.logits[0, 3:])
    assert torch.equal(reused.trace.work[:, 0], alone.trace.work[:, 0, 3:])
    neighbour = full(model, rows[:2, 8:], execution, cache=fresh)
    assert_close(reused.logits[1], neighbour.logits[1])
    kept.free([0, 1])
    again, first = (full(model, rows[:2], execution, cache=c) for c in (kept, new_cache(model, 2)))
    assert torch.equal(again.logits, first.logits)
    assert torch.equal(again.trace.work, first.trace.work)


def test_what_a_method_remembers_is_forgotten_with_its_slot():
    """Switch counts tokens per expert; if counts were kept, a new sequence would find its experts full."""
    model = lively("switch", "classic")
    kept = new_cache(model, 2)
    full(model, tokens(2), cache=kept)
    (layer,) = kept.states
    assert kept.states[layer].sum(1).tolist() == [TIME, TIME]
    kept.free([1])
    assert kept.states[layer].sum(1).tolist() == [TIME, 0]
    full(model, tokens(1, 5), cache=kept.of([1]))
    assert kept.states[layer].sum(1).tolist() == [TIME, 5]


def test_a_state_is_kept_by_slot():
    kept = new_cache(lively("dense", "classic"), 3)
    view = kept.of([2, 0])
    assert view.state(1, like=torch.zeros(2)).tolist() == [[0, 0], [0, 0]]
    view.remember(1, torch.tensor([[[9.0, 9.0], [1.0, 2.0]], [[8.0, 8.0], [3.0, 4.0]]]), torch.tensor([[0, 1], [0, 1]]))
    assert kept.state(1, like=torch.zeros(2)).tolist() == [[3, 4], [0, 0], [1, 2]]
    assert view.state(1, like=torch.zeros(2)).tolist() == [[1, 2], [3, 4]]


def test_freeing_nothing_is_no_error():
    kept = new_cache(lively("dense", "classic"), 2)
    full(lively("dense", "classic"), tokens(2, 3), cache=kept)
    kept.free([])
    assert kept.lengths.tolist() == [3, 3]


def test_a_slot_that_was_cropped_is_forgotten_as_far_as_it_ever_reached():
    model = lively("dense", "classic")
    kept = new_cache(model, 2, croppable=True)
    full(model, tokens(2, 8), cache=kept)
    kept.crop(5)
    kept.free([0])
    assert not kept.keys[:, 0].any()
    assert kept.keys[:, 1, :, 7].any()


@pytest.mark.parametrize("fixed", [True, False])
def test_a_sequence_that_went_wrong_is_forgotten_too(fixed):
    """Its keys and values are masked, but weight 0 times NaN is NaN."""
    model = lively("dense", "classic")
    kept, fresh = (new_cache(model, 2, fixed=fixed) for _ in range(2))
    full(model, tokens(2, 8), cache=kept)
    full(model, tokens(2, 8), cache=fresh)
    for buffer in (kept.keys, kept.values):
        buffer[:, 0, :, [*range(8), -1]] = torch.nan  # its columns, and the one for padding
    kept.free([0])
    fresh.free([0])
    for part in (kept.keys, kept.values, kept.valid):
        assert not part[:, 0].any(), "as new"
    new = tokens(2, 2, seed=1)
    assert torch.equal(full(model, new, cache=kept).logits, full(model, new, cache=fresh).logits)


# --- fixed shapes -----------------------------------------------------------------------------------------------------


@each_method
@each_shape
@each_execution
def test_fixed_reads_all_columns_and_computes_the_same(method, shape, execution):
    model, ids = lively(method, shape), tokens(2, seed=6)
    fixed, growing = new_cache(model, 2, fixed=True), new_cache(model, 2)
    for part in ids.split([5, 1, 1, 5], dim=1):
        a, b = (full(model, part, execution, cache=kept) for kept in (fixed, growing))
        assert_close(a.logits, b.logits)
        assert torch.equal(a.trace.work, b.trace.work)
        assert a.trace.sites == model.method.sites(keys=TIME)
    assert fixed.lengths.tolist() == growing.lengths.tolist() == [TIME, TIME]


@each_method
@each_shape
@each_side
def test_fixed_and_ragged(method, shape, side):
    model, rows = lively(method, shape), tokens(2, seed=7).tolist()
    ragged = Ragged(model, new_cache(model, 2, fixed=True), 2)
    out = ragged.feed([rows[0][:5], rows[1][:2]], 6, side)
    assert out.trace.sites == model.method.sites(keys=TIME)
    ragged.feed([rows[0][5:], []], 8, side)
    ragged.feed([[], rows[1][2:3]], 1, side)
    assert ragged.kept.lengths.tolist() == [TIME, 3]
    ragged.check()


class Questions(TorchDispatchMode):
    """Counts how often the host reads a value from the device."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.asked += func._overloadpacket is torch.ops.aten._local_scalar_dense
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("fixed", [True, False])
@each_shape
def test_only_a_fixed_cache_asks_nothing_of_the_device(shape, fixed):
    """Otherwise a step with a mask could not be a single graph."""
    model, valid = lively("tsa", shape), torch.tensor([[True], [False]])
    kept = new_cache(model, 2, fixed=fixed)
    with Questions() as questions:
        full(model, tokens(2, 1), cache=kept, valid=valid)
    assert (questions.asked == 0) == fixed
    with Questions() as questions:
        full(model, tokens(2, 1), cache=kept)
    assert questions.asked == 0
    assert kept.lengths.tolist() == [2, 1]


# --- what does not fit ------------------------------------------------------------------------------------------------


@each_shape
def test_more_than_the_capacity_is_refused_in_one_line_and_changes_nothing(shape):
    model, ids = lively("dense", shape), tokens(2)
    kept = new_cache(model, 2, 6)
    full(model, ids[:, :4], cache=kept)
    refused = {
        "whole": (kept, ids[:, 4:7], None),
        "masked": (kept, ids[:, 4:7], torch.tensor([[True, False, False], [True, True, True]])),
        "view": (kept.of([1]), ids[1:, 4:7], None),
    }
    for cache_, new, valid in refused.values():
        with pytest.raises(UserError) as error:
            full(model, new, cache=cache_, valid=valid)
        assert one_line(error.value) == "the cache holds 6 tokens, 7 were given; make it larger"
    assert kept.lengths.tolist() == [4, 4]
    assert_close(full(model, ids[:, 4:6], cache=kept).logits, full(model, ids[:, :6]).logits[:, 4:])


@each_shape
def test_more_than_the_context_is_refused_in_one_line(shape):
    model = lively("dense", shape)
    kept = new_cache(model, 2, 20)
    full(model, tokens(2, 10), cache=kept)
    kept.free([0])
    with pytest.raises(UserError) as error:
        full(model, tokens(2, 3), cache=kept)
    assert one_line(error.value) == f"13 tokens do not fit this model's context of {TIME}; give fewer"
    assert full(model, tokens(1, 3), cache=kept.of([0])).logits.shape[1] == 3, "the free slot has room"


@each_shape
def test_a_fixed_cache_that_was_fed_with_a_mask_still_refuses_what_does_not_fit(shape):
    model = lively("dense", shape)
    kept = new_cache(model, 1, 6, fixed=True)
    full(model, tokens(1, 6), cache=kept, valid=torch.ones(1, 6, dtype=torch.bool))
    with pytest.raises(UserError, match="the cache holds 6 tokens, 7 were given"):
        full(model, tokens(1, 1), cache=kept)


def test_a_batch_of_another_size_than_the_cache_is_an_error():
    """One sequence for three slots would be broadcast to all of them."""
    model = lively("dense", "classic")
    with pytest.raises((UserError, AssertionError)):
        full(model, tokens(1, 2), cache=new_cache(model, 3))


# --- crop, select, reserve --------------------------------------------------------------------------------------------

EVERY = {**{name: config() for name, config in METHOD_CONFIGS.items()}, **METHODS}
EVERY["span-all"] = SpanConfig(keys="all", carry="none")
EVERY["span-boundary"] = SpanConfig(decide="boundary", carry="smooth", ratio_loss=0.0)
EVERY["mor-shared"] = MoRConfig(kv="shared")
each_of_every = pytest.mark.parametrize("method", EVERY)


@cache
def any_method(method: str, shape: str) -> LanguageModel:
    """Untrained, with four layers; every matrix matters."""
    config = RunConfig(model=replace(SHAPES[shape], n_layer=4), method=EVERY[method])
    model = build(config).eval()
    with torch.no_grad():
        for matrix in (p for p in model.parameters() if p.ndim == 2):
            matrix.mul_(0.2 / matrix.std())
    return model


@each_of_every
@each_shape
@each_execution
def test_after_a_crop_it_is_as_if_the_tokens_had_never_been_read(method, shape, execution):
    """Also with sequences of different lengths, within a chunk, across chunks, and back to the beginning."""
    model, rows, other = any_method(method, shape), tokens(2, seed=8).tolist(), tokens(2, seed=9).tolist()
    kept = new_cache(model, 2, croppable=True)

    def feed(first: list[int], second: list[int], width: int) -> Output:
        ids, valid = padded([first, second], width, "left")
        return full(model, ids, execution, cache=kept, valid=valid)

    feed(rows[0][:5], rows[1][:2], 5)
    feed(other[0][:4], other[1][:4], 4)
    kept.crop(3)  # the first of the four remains
    feed(other[0][4:6], other[1][4:6], 2)
    kept.crop(torch.tensor([3, 2]))  # from the first sequence that one, too
    assert kept.lengths.tolist() == [5, 3]
    assert kept.longest == 5
    now = [rows[0][:5], [*rows[1][:2], other[1][0]]]
    out = feed(rows[0][5:8], rows[1][5:8], 3)
    for b in range(2):
        whole = full(model, torch.tensor([[*now[b], *rows[b][5:8]]]), execution)
        assert_close(out.logits[b], whole.logits[0, -3:])
        assert torch.equal(out.trace.work[:, b], whole.trace.work[:, 0, -3:])
    kept.crop(kept.lengths.clone())
    again = feed(other[0][:6], other[1][:6], 6)
    assert_close(again.logits, full(model, torch.tensor([row[:6] for row in other]), execution).logits)


@pytest.mark.parametrize("method", ["switch", "span", "tsa"])
@pytest.mark.parametrize("fixed", [False, True])
def test_a_rewind_is_a_crop_to_named_lengths(method, fixed):
    """For some slots, while the others stay unchanged, and without host synchronisation."""
    model, rows = any_method(method, "classic"), tokens(3, seed=8)
    kept, other = (new_cache(model, 3, croppable=True, fixed=fixed) for _ in range(2))
    for each in (kept, other):
        full(model, rows[:, :6], cache=each)
    kept.of([2, 0]).rewind([3, 5])
    other.crop(torch.tensor([1, 0, 3]))
    assert kept.lengths.tolist() == other.lengths.tolist() == [5, 6, 3]
    assert kept.bounds == other.bounds == [5, 6, 3]
    assert torch.equal(kept.valid, other.valid)
    new = tokens(3, 2, seed=9)
    assert torch.equal(full(model, new, cache=kept).logits, full(model, new, cache=other).logits)


@pytest.mark.parametrize("method", ["switch", "span"])
def test_a_cache_that_does_not_keep_what_a_method_remembers_refuses_to_crop(method):
    model = any_method(method, "classic")
    kept = new_cache(model, 1)
    full(model, tokens(1, 4), cache=kept)
    with pytest.raises(UserError) as error:
        kept.crop(1)
    assert "croppable=True" in one_line(error.value)
    assert kept.lengths.tolist() == [4]


@each_of_every
@each_execution
def test_selected_slots_go_on_as_copies(method, execution):
    model, rows = any_method(method, "modern"), tokens(3, seed=10)
    kept = new_cache(model, 3, croppable=True)
    full(model, rows[:, :6], execution, cache=kept)
    kept.select([2, 0, 2, 2])
    assert kept.lengths.tolist() == [6] * 4
    assert kept.batch == 4
    new = tokens(4, 3, seed=11)
    out = full(model, new, execution, cache=kept)
    assert_close(out.logits, full(model, torch.cat([rows[[2, 0, 2, 2], :6], new], 1), execution).logits[:, 6:])
    kept.crop(2)
    again = full(model, new[:, 1:], execution, cache=kept)
    assert_close(again.logits, out.logits[:, 1:])


@each_of_every
@each_execution
def test_a_cache_grows(method, execution):
    """Also if padding was written to the column that a token gets afterwards."""
    model, rows = any_method(method, "classic"), tokens(2, seed=12).tolist()
    kept = new_cache(model, 2, 4, croppable=True)
    ids, valid = padded([rows[0][:4], rows[1][:2]], 5, "left")
    full(model, ids, execution, cache=kept, valid=valid)
    kept.reserve(4)
    kept.reserve(7)
    ids, valid = padded([rows[0][4:7], rows[1][2:5]], 4, "left")
    out = full(model, ids, execution, cache=kept, valid=valid)
    assert kept.capacity == 7
    for b, length in ((0, 7), (1, 5)):
        alone = full(model, torch.tensor([rows[b][:length]]), execution)
        assert_close(out.logits[b, 1:], alone.logits[0, -3:])
