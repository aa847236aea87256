"""A fast dense decoding baseline: a cache of fixed shape, compiled, on a GPU in a CUDA graph.

Written like small inference engines, without our own cache and blocks, so that none of their features slows it down:
one buffer per layer, one position for the whole batch, a mask over all columns. A block is compiled once and run with
each layer's weights. Its update is added to the state by the next block, where the norm reads it anyway.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tokendepth.layers.positions import rotated
from tokendepth.model import Block, LanguageModel

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]


class StaticDense:
    """A dense model with a cache of `context` columns, all but the last filled with noise."""

    def __init__(self, model: LanguageModel, batch: int, context: int, compile: Compile = lambda function: function):
        self.model = model
        self.blocks = [module for module in model.method.modules() if isinstance(module, Block)]
        like, config = model.norm.weight, model.config
        shape = (batch, config.kv_heads, context, config.width)
        self.keys, self.values = (
            [torch.randn(shape, device=like.device, dtype=like.dtype) for _ in self.blocks] for _ in range(2)
        )
        self.at = torch.tensor([context - 1], device=like.device)
        self.run_block, self.read = compile(_block), compile(_read)
        self.enter = compile(_enter)

    def step(self, tokens: Tensor) -> Tensor:
        """The logits after one more token `[batch]` for each sequence, at the last column."""
        h, rotation, mask = self.enter(self.model, tokens, self.at, self.keys[0].shape[2])
        update = torch.zeros_like(h)
        for block, keys, values in zip(self.blocks, self.keys, self.values, strict=True):
            h, update = self.run_block(block, h, update, keys, values, self.at, rotation, mask)
        return self.read(self.model, h, update)


def _enter(model: LanguageModel, tokens: Tensor, at: Tensor, context: int) -> tuple[Tensor, Any, Tensor]:
    h, rotation = model.embedded(tokens[:, None], at), model.positions.rotation(at)
    return h, rotation, (torch.arange(context, device=at.device) <= at)[None, None, None]


def _block(
    block: Block, h: Tensor, update: Tensor, keys: Tensor, values: Tensor, at: Tensor, rotation: Any, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """The state after attention, and the update of the feed-forward network."""
    attention, h = block.attention, h + update
    parts = attention.qkv(block.norm_attention(h)).unflatten(-1, (-1, attention.width))
    q, k, v = parts.split([attention.n_head, attention.kv_heads, attention.kv_heads], dim=2)
    if attention.norm_q is not None and attention.norm_k is not None:
        q, k = attention.norm_q(q), attention.norm_k(k)
    q, k = rotated(q, rotation), rotated(k, rotation)
    keys.index_copy_(2, at, k.transpose(1, 2))
    values.index_copy_(2, at, v.transpose(1, 2))
    grouped = attention.kv_heads != attention.n_head
    y = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, mask, enable_gqa=grouped)
    h = h + attention.out(y.transpose(1, 2).flatten(2))
    return h, block.ffn(block.norm_ffn(h))


def _read(model: LanguageModel, h: Tensor, update: Tensor) -> Tensor:
    return model.readout(h + update)[:, -1]
