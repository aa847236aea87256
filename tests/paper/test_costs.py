"""The contents of the cache after reading a text: the keys of every token, or of processed tokens only."""

import pytest
import torch

from paper.costs import cached
from tokendepth.config import METHOD_CONFIGS, ModelConfig, RunConfig
from tokendepth.methods import build

MODEL = ModelConfig(d_model=32, n_layer=6, n_head=4, d_ff=64, context=16, vocab_size=23)
LAYER = 2 * 4 * 32
SKIPPED_LEAVE_NOTHING = {"mod", "mor", "itt"}


@pytest.mark.parametrize("method", METHOD_CONFIGS)
def test_the_cache_holds_what_the_method_leaves(method):
    model = build(RunConfig(model=MODEL, method=METHOD_CONFIGS[method]())).eval()
    ids = torch.randint(23, (3, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        trace = model(ids, execution="sparse").trace
    found, blocks = cached(model, ids), torch.tensor([site.blocks for site in trace.sites])
    assert found["kv_bytes_reserved_per_token"] == LAYER * blocks.sum()
    worked = (trace.work.mean((1, 2)) * blocks).sum().item()
    expected = worked if method in SKIPPED_LEAVE_NOTHING else blocks.sum().item()
    assert found["kv_bytes_per_token"] == pytest.approx(LAYER * expected)
    if method in SKIPPED_LEAVE_NOTHING:
        assert worked < blocks.sum(), "some token must be skipped, else this shows nothing"
