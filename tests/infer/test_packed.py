"""Packed passes with more rows of room than needed equal the same pass without spare room (on a CPU)."""

import copy
import math
import weakref
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from tests.methods.test_span import MODERN, given, some, span, tokens
from tokendepth.cache import KVCache
from tokendepth.config import DenseConfig, RunConfig, SpanConfig
from tokendepth.errors import UserError
from tokendepth.infer import auto, packed
from tokendepth.infer.packed import PackedPass, PackedPasses, by_itself, packs_on_device
from tokendepth.methods import build
from tokendepth.model import LanguageModel, Output

CASES = {
    "score": {"budget": 0.4},
    "dice": {"budget": 0.4, "decide": "dice", "carry": "none"},
    "smooth": {"decide": "boundary", "carry": "smooth"},
    "own width": {"budget": 0.4, "width": 48},
    "rule": {"decide": "rule"},
    "bypass": {"budget": 0.4, "carry": "none", "bypass": True},
    "at once": {"begin": 0, "length": 2},
}


def made(case: str) -> LanguageModel:
    model = span(MODERN, **CASES[case]).eval()
    model.method.read_vocabulary([b"a" if n % 3 else b" " for n in range(MODERN.vocab_size)])
    return model


def assert_same(found: Output, expected: Output) -> None:
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-5, atol=1e-5)
    assert found.trace.work.equal(expected.trace.work)
    assert found.trace.totals() == expected.trace.totals()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("steps", "tile"), [(32, 1), (32, 128), (1, 5)])
@torch.no_grad()
def test_spare_room_changes_nothing(case, steps, tile, monkeypatch):
    """Up to twice as many rows as tokens."""
    monkeypatch.setattr(packed, "STEPS", steps)
    monkeypatch.setattr(packed, "TILE", tile)
    model = made(case)
    pass_ = PackedPass(model, tokens())
    for seed in (0, 1):
        ids = tokens(seed=seed)
        expected = model(ids, execution="sparse")
        assert_same(pass_(ids), expected)
        assert_same(pass_(), expected)


@pytest.mark.parametrize("decided", [torch.ones_like, torch.zeros_like, some], ids=["all", "nobody", "some"])
@torch.no_grad()
def test_whoever_is_told_to_take_the_span_takes_it(decided):
    model, ids = made("score"), tokens()
    forced: dict[str, Tensor] = model.forcing(given(decided(ids).bool()))
    assert_same(PackedPass(model, ids, **forced)(), model(ids, execution="sparse", **forced))


@pytest.mark.parametrize("case", ["score", "rule"])
@torch.no_grad()
def test_a_pass_has_room_for_as_many_as_take_the_span_and_runs_each_block_once(case, monkeypatch):
    monkeypatch.setattr(packed, "TILE", 1)
    model, made_room, ids = made(case), [], tokens()
    few, many = (model.forcing(given(torch.arange(ids.numel()).view_as(ids) % n == 0)) for n in (8, 2))
    forward = lambda *args, **how: made_room.append(how["room"]) or model(*args, **how)  # noqa: E731
    pass_ = PackedPass(model, ids, forward=forward, **few)
    ran = [block.register_forward_hook(lambda *_, n=n: order.append(n)) for n, block in enumerate(model.method.blocks)]
    for told, taking in ((few, 8), (many, 2), (few, 8)):
        order: list[int] = []
        found = pass_(**told)
        assert order == list(range(len(ran)))
        assert made_room[-1] == pass_.room_for(ids.numel() // taking)
        assert_same(found, model(ids, execution="sparse", **told))
    assert len(made_room) == 3


@torch.no_grad()
def test_what_the_text_decides_is_told_before_the_first_block_runs():
    model, ids = made("rule"), tokens()
    pass_ = PackedPass(model, ids)
    told = []
    model.method.blocks[0].register_forward_hook(lambda *_: told.append(int(pass_._host_count)))
    found = pass_()
    assert told == [found.trace.work[span_begin(model)].sum()]


@pytest.mark.parametrize("case", ["score", "rule"])
@torch.no_grad()
def test_the_device_tells_how_many_take_the_span(case, monkeypatch):
    """An interrupted pass is waited for, since it might still write its count into the next one's."""
    model, ids, waited = made(case), tokens(), []
    pass_ = PackedPass(model, ids)
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    for seed in range(3):
        found = pass_(tokens(seed=seed))
        assert pass_._host_count == found.trace.work[span_begin(model)].sum()
    assert waited == []
    pass_._host_count.fill_(-1)
    assert_same(pass_(ids), model(ids, execution="sparse"))
    assert len(waited) == 1


@torch.no_grad()
def test_a_pass_that_nobody_has_is_freed_at_once():
    model = made("score")
    pass_ = PackedPass(model, tokens())
    pass_()
    left = weakref.ref(pass_)
    del pass_
    assert left() is None, "without the collector of cycles"


def span_begin(model: LanguageModel) -> int:
    return next(n for n, site in enumerate(model.method.sites(1)) if site.routed)


def test_no_more_graphs_are_kept_than_a_few(monkeypatch):
    monkeypatch.setattr(packed, "TILE", 1)
    monkeypatch.setattr(packed, "GRAPHS", 3)
    model, ids = made("score"), tokens()
    told = [model.forcing(given(torch.arange(ids.numel()).view_as(ids) % n == 0)) for n in range(1, 9)]
    pass_ = PackedPass(model, ids, **told[0])
    for one in told:
        assert_same(pass_(**one), model(ids, execution="sparse", **one))
        assert len(pass_._graphs) <= packed.GRAPHS
    assert list(pass_._graphs) == [pass_.room_for(math.ceil(ids.numel() / n)) for n in (6, 7, 8)], "the last used"


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_a_text_that_is_too_long_is_refused_before_anything_runs(positions):
    model = build(RunConfig(model=replace(MODERN, positions=positions), method=SpanConfig(decide="rule"))).eval()
    ran = []
    model.method.blocks[0].register_forward_hook(lambda *_: ran.append(1))
    with torch.no_grad(), pytest.raises(UserError, match="do not fit this model's context"):
        PackedPasses(model, model)(torch.zeros(1, MODERN.context + 1, dtype=torch.long), execution="sparse")
    assert ran == []


@torch.no_grad()
def test_a_pass_that_forgot_its_graphs_makes_them_anew():
    model, ids = made("rule"), tokens()
    pass_ = PackedPass(model, ids)
    pass_()
    pass_.forget()
    assert_same(pass_(), model(ids, execution="sparse"))


# --- as a model -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_packed_passes_are_the_model():
    model = made("score")
    fast = PackedPasses(model, model)
    assert (fast.method, fast.config) == (model.method, model.config)
    found = [fast(tokens(seed=seed), execution="sparse") for seed in range(3)]
    for seed, one in enumerate(found):  # no pass overwrites an earlier result
        assert_same(one, model(tokens(seed=seed), execution="sparse"))
    shorter = tokens()[:, :5]
    assert_same(fast(shorter, execution="sparse"), model(shorter, execution="sparse"))
    for share in (some, torch.ones_like):
        forced = model.forcing(given(share(tokens()).bool()))
        assert_same(fast(tokens(), execution="sparse", **forced), model(tokens(), execution="sparse", **forced))


def test_a_model_whose_weights_were_moved_is_captured_again():
    model, ids = made("score"), tokens()
    fast = PackedPasses(model, model)
    with torch.no_grad():
        fast(ids, execution="sparse")
        (before,) = fast._passes.values()
        model.load_state_dict({name: 2 * weight for name, weight in model.state_dict().items()}, assign=True)
        assert_same(fast(ids, execution="sparse"), model(ids, execution="sparse"))
        (after,) = fast._passes.values()
        assert after is not before
        assert not before._graphs, "its memory is free"
        twin = copy.deepcopy(fast)
        twin.original.norm.weight.mul_(2)
        assert not torch.allclose(twin(ids, execution="sparse").logits, fast(ids, execution="sparse").logits)


def test_however_gradients_are_turned_off_and_in_whatever_precision_thresholds_come():
    model, ids = made("score"), tokens()
    fast = PackedPasses(model, model)
    forced = model.forcing(given(some(ids)))
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with mode():
            for dtype in (torch.bfloat16, torch.float32):
                told = {name: part.to(dtype) for name, part in forced.items()}
                assert_same(fast(ids, execution="sparse", **told), model(ids, execution="sparse", **told))
    assert len(fast._passes) == 2


def test_no_more_shapes_are_kept_than_a_few(monkeypatch):
    monkeypatch.setattr(packed, "SHAPES", 2)
    model = made("score")
    fast = PackedPasses(model, model)
    with torch.no_grad():
        for time in (3, 4, 3, 5):
            assert_same(fast(tokens()[:, :time], execution="sparse"), model(tokens()[:, :time], execution="sparse"))
    assert [dict(enumerate(kind))[0][1][1] for kind in fast._passes] == [3, 5], "the last used"


def test_only_sparse_passes_over_whole_sequences_are_packed(monkeypatch):
    model, ids = made("score"), tokens()
    fast = PackedPasses(model, model)
    monkeypatch.setattr(packed, "PackedPass", None)
    valid = torch.ones_like(ids, dtype=torch.bool)
    with torch.no_grad():
        assert fast(ids, execution="hard").logits.equal(model(ids, execution="hard").logits)
        assert fast(ids, execution="sparse", valid=valid).logits.shape == (*ids.shape, model.config.vocab_size)
        cache = KVCache(model.config, *ids.shape, layers=model.method.cache_layers, like=model.norm.weight)
        assert fast(ids, execution="sparse", cache=cache).logits.shape == (*ids.shape, model.config.vocab_size)
    assert fast(ids, execution="sparse").logits.requires_grad


def test_passes_that_are_timed_in_turns_have_graphs_of_their_own():
    model = made("score")
    fast = PackedPasses(model, model)
    other = by_itself(fast)  # pyright: ignore[reportArgumentType]
    assert other is not fast
    assert isinstance(other, PackedPasses)
    assert by_itself(model) is model
    assert not packs_on_device(model), "on a CPU nobody has to be asked"
    profile = auto._measured(fast, 2, 16)  # pyright: ignore[reportArgumentType]
    assert min(profile["sparse_ms"]) > 0 < profile["hard_ms"]


@torch.no_grad()
def test_a_compiler_tells_packed_passes_from_others():
    """The same compiled model serves packed and other passes in any order without recompiling."""
    model, ids = made("score"), tokens()
    torch.compiler.reset()
    fast = torch.compile(model, dynamic=False, backend="eager")
    counters.clear()
    first = torch.compile(LanguageModel.until_decided, dynamic=False, backend="eager")
    expected, pass_ = model(ids, execution="sparse"), PackedPass(model, ids, first, fast)
    assert_same(pass_(), expected)
    assert counters["stats"]["unique_graphs"] == 2, "both parts as a whole"
    for _ in range(2):
        assert_same(fast(ids, execution="sparse"), expected)
        assert_same(pass_(), expected)
    graphs = counters["stats"]["unique_graphs"]
    for _ in range(2):
        assert_same(pass_(), expected)
        assert_same(fast(ids, execution="sparse"), expected)
    assert counters["stats"]["unique_graphs"] == graphs > 1


def test_room_grows_in_steps():
    model = made("score")
    large, small = (PackedPass(model, torch.zeros(batch, 256, dtype=torch.long)) for batch in (64, 1))
    assert [large.room_for(count) for count in (0, 1, 512, 513, 4000)] == [512, 512, 512, 1024, 4096]
    assert [small.room_for(count) for count in (0, 64, 129)] == [128, 128, 256]


def test_only_spans_of_their_own_keys_are_packed():
    assert made("score").method.packs
    assert not span(keys="all").method.packs
    assert not span(decide="dice", carry="none", bypass=True, budget=0.0).method.packs
    assert not build(RunConfig(model=MODERN, method=DenseConfig())).method.packs
