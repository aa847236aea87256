"""A captured decoding step equals the step itself. Without a GPU the function is called again instead of replayed;
static inputs and the bookkeeping of lengths are tested all the same."""

import pytest
import torch

from tests.test_contract import TIME, lively, tokens
from tokendepth.cache import KVCache
from tokendepth.infer.capture import CapturedPass
from tokendepth.infer.engine import Pass, decode_one, prefill
from tokendepth.model import LanguageModel

PROMPTS = [row.tolist()[:length] for row, length in zip(tokens(3, seed=4), (7, 2, 5), strict=True)]


def slots(model: LanguageModel) -> KVCache:
    cache = KVCache(model.config, 3, TIME, layers=model.method.cache_layers, like=model.norm.weight, fixed=True)
    prefill(model, cache, PROMPTS, "sparse")
    return cache


@pytest.mark.parametrize("case", ["dense", "tsa", "budget modern", "span"])
@torch.no_grad()
def test_it_is_the_step(case):
    model = lively(case)
    plain, own = slots(model), slots(model)

    def decode(last: torch.Tensor, running: torch.Tensor | None, thresholds: torch.Tensor | None) -> Pass:
        return decode_one(model, own, last, "sparse", running, thresholds)

    captured = CapturedPass(decode, own)
    live = model.method.live_thresholds()
    for step in range(6):
        last = tokens(3, seed=5)[:, step]
        running = torch.tensor([True, step != 3, True]) if step > 1 else None
        thresholds = None
        if live is not None and step > 3:
            thresholds = (live + 0.1 * step)[:, None, None].expand(-1, 3, 1)
        wanted = decode_one(model, plain, last, "sparse", running, thresholds)
        found = captured(last, running, thresholds)
        assert torch.equal(found.logits, wanted.logits)
        assert torch.equal(found.trace.work, wanted.trace.work)
        assert torch.equal(own.lengths, plain.lengths)
        assert all(bound >= length for bound, length in zip(own.bounds, own.lengths.tolist(), strict=True))
    for part in ("keys", "values", "valid"):
        assert torch.equal(getattr(own, part)[..., :TIME], getattr(plain, part)[..., :TIME])


def test_a_graph_is_of_all_slots_of_fixed_shape():
    cache = slots(lively("dense"))
    with pytest.raises(AssertionError, match="all slots"):
        CapturedPass(lambda *_: None, cache.of([0, 1]))
