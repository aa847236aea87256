"""Passes that pack a span into room for more rows than it needs, on a CPU: as the same pass without spare room."""

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from tests.methods.test_span import MODERN, given, method_of, some, span, tokens
from tokendepth.config import DenseConfig, RunConfig
from tokendepth.infer import packed
from tokendepth.infer.packed import PackedPass
from tokendepth.methods import build
from tokendepth.model import LanguageModel, Output

CASES = {
    "score": {"budget": 0.4},
    "dice": {"budget": 0.4, "decide": "dice", "carry": "none"},
    "smooth": {"decide": "boundary", "carry": "smooth"},
    "own width": {"budget": 0.4, "width": 48},
}


def made(case: str) -> LanguageModel:
    return span(MODERN, **CASES[case]).eval()


def assert_same(found: Output, expected: Output) -> None:
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-5, atol=1e-5)
    assert found.trace.work.equal(expected.trace.work)
    assert found.trace.totals() == expected.trace.totals()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("steps", "tile"), [(32, 1), (32, 128), (1, 5)])
@torch.no_grad()
def test_spare_room_changes_nothing(case, steps, tile, monkeypatch):
    """Up to twice as many rows as there are tokens."""
    monkeypatch.setattr(packed, "STEPS", steps)
    monkeypatch.setattr(packed, "TILE", tile)
    model = made(case)
    pass_ = PackedPass(model, tokens(), model)
    for seed in (0, 1):
        ids = tokens(seed=seed)
        expected = model(ids, execution="sparse")
        assert_same(pass_(ids), expected)
        assert_same(pass_(), expected)
    assert not method_of(model).room, "other passes are as they were"


@pytest.mark.parametrize("decided", [torch.ones_like, torch.zeros_like, some], ids=["all", "nobody", "some"])
@torch.no_grad()
def test_whoever_is_told_to_take_the_span_takes_it(decided):
    model, ids = made("score"), tokens()
    forced: dict[str, Tensor] = model.forcing(given(decided(ids).bool()))
    assert_same(PackedPass(model, ids, model, **forced)(), model(ids, execution="sparse", **forced))


@torch.no_grad()
def test_a_pass_with_too_little_room_is_repeated_with_more(monkeypatch):
    monkeypatch.setattr(packed, "TILE", 1)
    model, made_room = made("score"), []
    ids = tokens()
    few, many = (model.forcing(given(torch.arange(ids.numel()).view_as(ids) % n == 0)) for n in (8, 2))
    thresholds = few["thresholds"].clone()
    forward = lambda *args, **how: made_room.append(model.method.room) or model(*args, **how)  # noqa: E731
    pass_ = PackedPass(model, ids, forward, thresholds=thresholds)
    for told, runs in ((few, 1), (many, 2), (many, 1), (few, 1)):
        made_room.clear()
        thresholds.copy_(told["thresholds"])
        assert_same(pass_(), model(ids, execution="sparse", **told))
        assert len(made_room) == runs
    assert made_room[-1] >= ids.numel() // 2, "room once made is kept"


@torch.no_grad()
def test_a_compiler_tells_packed_passes_from_others():
    """The same compiled model serves both, in any order, and compiles nothing again."""
    model, ids = made("score"), tokens()
    torch.compiler.reset()
    fast = torch.compile(model, dynamic=False, backend="eager")
    expected, pass_ = model(ids, execution="sparse"), PackedPass(model, ids, fast)
    for _ in range(2):
        assert_same(fast(ids, execution="sparse"), expected)
        assert_same(pass_(), expected)
    graphs = counters["stats"]["unique_graphs"]
    for _ in range(2):
        assert_same(pass_(), expected)
        assert_same(fast(ids, execution="sparse"), expected)
    assert counters["stats"]["unique_graphs"] == graphs > 3, "in pieces, and as a whole"


def test_room_grows_in_steps():
    model = made("score")
    large, small = (PackedPass(model, torch.zeros(batch, 256, dtype=torch.long), model) for batch in (64, 1))
    assert [large.room_for(count) for count in (0, 1, 512, 513, 4000)] == [512, 512, 512, 1024, 4096]
    assert [small.room_for(count) for count in (0, 64, 129)] == [128, 128, 256]


def test_only_spans_of_their_own_keys_are_packed():
    assert made("score").method.packs
    assert not span(keys="all").method.packs
    assert not span(decide="dice", carry="none", bypass=True, budget=0.0).method.packs
    assert not build(RunConfig(model=MODERN, method=DenseConfig())).method.packs
