"""Which blocks of a dense model matter least, so that routing or dropping them costs the least quality.

There are two ways to find a span of adjacent blocks. `alike`: the span whose input and output states are most alike, by
mean cosine over tokens; takes one forward pass. `loss`: start with the one block whose removal raises the loss least,
and grow towards the side on which it then rises less; takes a few forward passes per block.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tokendepth.data import Dataset
from tokendepth.model import Block, LanguageModel
from tokendepth.progress import Progress

SAMPLE_TOKENS, SAMPLE_SEED = 2**14, 2**31 + 1
"""Sample of the training text; no training run can have this seed."""
AT_ONCE = 2**12
"""Tokens per forward pass, since the states of all blocks are kept."""


def sample(dataset: Dataset, context: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets from the training text, the same for the same corpus."""
    count = max(1, SAMPLE_TOKENS // context)
    batch = dataset.train_batch(seed=SAMPLE_SEED, step=0, batch_size=count, context=context)
    inputs, targets = map(torch.from_numpy, batch)
    return inputs, targets


def choose_span(
    model: LanguageModel, batch: tuple[Tensor, Tensor], length: int, by: Literal["alike", "loss"], *, show: bool = False
) -> range:
    """The adjacent blocks of a dense model that a token can best do without; if possible, not the first or last block.

    batch: inputs and targets.
    """
    blocks = model.config.n_layer
    assert 0 < length <= blocks
    inside = range(1, blocks - 1) if length <= blocks - 2 else range(blocks)
    if by == "loss":
        return _grown(model, batch, length, inside, show=show)
    begins = range(inside.start, inside.stop - length + 1)
    with Progress("comparing the states between blocks", show=show):
        begin = max(begins, key=likeness(model, batch[0], length).__getitem__)
    return range(begin, begin + length)


@torch.no_grad()
def likeness(model: LanguageModel, ids: Tensor, length: int) -> list[float]:
    """For each first block: the mean cosine between the input of the block and the output of `length` blocks."""
    sums, tokens = torch.zeros(model.config.n_layer - length + 1, dtype=torch.float64), 0
    for states in _states(model, ids):
        for begin in range(len(sums)):
            cosine = F.cosine_similarity(states[begin].float(), states[begin + length].float(), dim=-1)
            sums[begin] += cosine.double().sum().cpu()
        tokens += states[0].shape[0] * states[0].shape[1]
    return (sums / tokens).tolist()


@torch.no_grad()
def relative_updates(model: LanguageModel, ids: Tensor) -> list[Tensor]:
    """For each block `[tokens]`: the norm of its update relative to the norm of its input."""
    found: list[list[Tensor]] = [[] for _ in range(model.config.n_layer)]
    for states in _states(model, ids):
        for sizes, (before, after) in zip(found, pairwise(states), strict=True):
            change = (after.float() - before.float()).norm(dim=-1) / before.float().norm(dim=-1)
            sizes.append(change.flatten().cpu())
    return [torch.cat(sizes) for sizes in found]


def shares_by_update(model: LanguageModel, ids: Tensor, budget: float) -> list[float]:
    """The share of tokens for each block except the first, with mean `budget`: one common limit on relative updates."""
    sizes = torch.stack(relative_updates(model, ids)[1:])
    limit = sizes.flatten().sort().values[round((1 - budget) * (sizes.numel() - 1))]
    return (sizes >= limit).float().mean(1).clamp(0.02, 1.0).tolist()


def _states(model: LanguageModel, ids: Tensor) -> Iterator[list[Tensor]]:
    """For each part of `ids`: the input of every block, and the output of the last one."""
    device, seen = model.norm.weight.device, []
    modules = [*_blocks(model), model.norm]
    hooks = [module.register_forward_pre_hook(lambda _, args: seen.append(args[0])) for module in modules]
    try:
        for part in ids.split(max(1, AT_ONCE // ids.shape[1])):
            seen.clear()
            model(part.to(device))
            yield list(seen)
    finally:
        for hook in hooks:
            hook.remove()


def _blocks(model: LanguageModel) -> list[Block]:
    return [module for module in model.method.modules() if isinstance(module, Block)]


# --- by loss ----------------------------------------------------------------------------------------------------------


def _grown(
    model: LanguageModel, batch: tuple[Tensor, Tensor], length: int, inside: range, *, show: bool = False
) -> range:
    passes = len(inside) + 2 * (length - 1)
    with Progress("trying the model without some blocks", passes, unit="passes", show=show) as progress:

        def loss(span: range) -> float:
            progress.advance()
            return loss_without(model, batch, span)

        span = min((range(n, n + 1) for n in inside), key=loss)
        while len(span) < length:
            left, right = range(span.start - 1, span.stop), range(span.start, span.stop + 1)
            span = min((one for one in (left, right) if one.start in inside and one.stop - 1 in inside), key=loss)
    return span


@torch.no_grad()
def loss_without(model: LanguageModel, batch: tuple[Tensor, Tensor], span: range) -> float:
    """The model's loss without the blocks of `span`."""
    device, nats, count = model.norm.weight.device, 0.0, 0
    with _skipping(model, span):
        for ids, targets in zip(*(part.split(max(1, AT_ONCE // part.shape[1])) for part in batch), strict=True):
            flat = targets.flatten().to(device)
            nats += F.cross_entropy(model(ids.to(device)).logits.flatten(0, 1).float(), flat, reduction="sum").item()
            count += int((flat >= 0).sum())
    return nats / count


@contextmanager
def _skipping(model: LanguageModel, span: range) -> Iterator[None]:
    """Replace the outputs of these blocks by their inputs; valid only without a cache."""
    blocks = _blocks(model)
    hooks = [blocks[n].register_forward_hook(lambda _, args, out: args[0]) for n in span]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
