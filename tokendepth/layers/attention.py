"""Causal attention with multi-head, grouped or single-head keys and values."""

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokendepth.config import ModelConfig
from tokendepth.layers.ffn import initialise_residual
from tokendepth.layers.linear import Linear, weights_of
from tokendepth.layers.norm import RMSNorm
from tokendepth.layers.positions import rotated
from tokendepth.ops import qkv_attention
from tokendepth.ops.decode_inputs import CacheLayer, KeyWeights
from tokendepth.ops.few_rows.eager import linear
from tokendepth.ops.rows import ChosenRows
from tokendepth.ops.sparse_block import Rotation
from tokendepth.ops.varlen_attention import Varlen, varlen_attention

if TYPE_CHECKING:
    from tokendepth.context import Context


class Keys(NamedTuple):
    """What queries attend to."""

    k: Tensor
    """`[batch, kv head, keys, width]`, like the values."""
    v: Tensor
    seen: Tensor | None
    """`[batch, keys]`, False for keys that must not be attended to; None: all may be."""


class Attention(nn.Module):
    def __init__(self, model: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.dropout = layer, model.dropout
        self.n_head, self.kv_heads, self.width = model.n_head, model.kv_heads, model.width
        self.q_out, self.kv_out = self.n_head * self.width, 2 * self.kv_heads * self.width
        self.qkv = Linear(model.d_model, self.q_out + self.kv_out, bias=model.attention_bias != "none")
        self.out = Linear(self.q_out, model.d_model, bias=model.attention_bias == "all")
        initialise_residual(self.out, model.n_layer)
        norms = [RMSNorm(self.width, model.norm_eps) if model.qk_norm else None for _ in range(2)]
        self.norm_q, self.norm_k = norms

    # -- cost per token

    @property
    def kv_flops(self) -> int:
        """Key and value projection."""
        return 2 * self.qkv.in_features * self.kv_out

    @property
    def key_flops(self) -> int:
        """Attention, for each key."""
        return 4 * self.q_out

    def row_flops(self, keys: int) -> int:
        """Query projection, attention to `keys` keys, and output projection."""
        return 2 * 2 * self.qkv.in_features * self.q_out + keys * self.key_flops

    # -- projections

    def query_weights(self) -> tuple[Tensor, Tensor | None]:
        weight, bias = weights_of(self.qkv)
        return weight[: self.q_out], None if bias is None else bias[: self.q_out]

    def kv_weights(self) -> tuple[Tensor, Tensor | None]:
        weight, bias = weights_of(self.qkv)
        return weight[self.q_out :], None if bias is None else bias[self.q_out :]

    def key_weights(self) -> KeyWeights:
        """For the decoding kernels."""
        norm = (None, 0.0) if self.norm_k is None else (self.norm_k.weight, self.norm_k.eps)
        return KeyWeights(self.kv_heads, *self.kv_weights(), *norm, weights_of(self.qkv)[0])

    def cached(self, ctx: "Context") -> CacheLayer:
        """This layer's part of the cache."""
        cache, layer = ctx.cache, self._cache_layer(ctx)
        assert cache is not None
        return CacheLayer(cache.keys[layer], cache.values[layer], cache.valid[layer], cache.capacity)

    def queries(self, x: Tensor, rotation: Rotation | None) -> Tensor:
        """`[..., d] -> [..., head, width]`"""
        return self._query(linear(x, *self.query_weights()), rotation)

    def _query(self, projected: Tensor, rotation: Rotation | None) -> Tensor:
        q = projected.unflatten(-1, (self.n_head, -1))
        return rotated(q if self.norm_q is None else self.norm_q(q), rotation)

    def leave_keys(self, kv: Tensor, ctx: "Context", leaving: Tensor | None = None) -> Keys:
        """What queries attend to, given the projected keys and values `[batch, time, 2 x kv heads x width]`.

        With a cache they are appended to it. leaving: `[batch, time]`, the tokens whose keys and values others may
        attend to; None: all valid tokens.
        """
        k, v = kv.chunk(2, dim=-1)
        return self._leave(k, v, ctx, leaving)

    def _leave(self, k: Tensor, v: Tensor, ctx: "Context", leaving: Tensor | None) -> Keys:
        k, v = (part.transpose(1, 2) for part in self._key_value(k, v, ctx.rotation))
        leaving = ctx.valid if leaving is None else leaving
        if ctx.cache is None:
            return Keys(k, v, leaving)
        assert ctx.writes is not None
        return Keys(*ctx.cache.append(self._cache_layer(ctx), k, v, ctx.writes, leaving, ctx.window))

    def _key_value(self, k: Tensor, v: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor]:
        """Projections to `[..., kv head, width]`."""
        k, v = (part.unflatten(-1, (self.kv_heads, -1)) for part in (k, v))
        return rotated(k if self.norm_k is None else self.norm_k(k), rotation), v

    def _cache_layer(self, ctx: "Context") -> int:
        return self.layer if ctx.layer is None else ctx.layer

    # -- attention

    def forward(self, x: Tensor, ctx: "Context", keys: Keys | None = None, leaving: Tensor | None = None) -> Tensor:
        """All tokens, `[batch, time, d] -> [batch, time, d]`: attend to `keys`; None: to each other and the cache."""
        if keys is None:
            qkv, packed = self.qkv(x), ctx.varlen
            if packed is not None and ctx.cache is None and qkv_attention.takes(x, self.width, packed.longest):
                return self.out(self._attended_at_once(qkv, ctx, packed))
            # One split into three: every further split would cost a copy in the backward pass.
            projected, k, v = qkv.split([self.q_out, self.kv_out // 2, self.kv_out // 2], dim=-1)
            if packed is not None:
                return self.out(self._attended_varlen(projected, k, v, ctx, packed))
            q, own = self._query(projected, ctx.rotation), self._leave(k, v, ctx, leaving)
            return self.out(self._attended(q, own, ctx.columns if ctx.cache else None))
        return self.out(self._attended(self.queries(x, ctx.rotation), keys, ctx.columns))

    def for_rows(self, x: Tensor, ctx: "Context", rows: ChosenRows) -> Tensor:
        """In training: attention for the chosen tokens of `x` `[batch, time, d]`, as rows `[n, d]`.

        Attention itself runs for all rows, with zero queries for the others, because the library has no differentiable
        attention for scattered rows.
        """
        queries = F.linear(rows.take(x.flatten(0, 1)), *self.query_weights())
        q = self._query(rows.spread(queries).view(*x.shape[:2], -1), ctx.rotation)
        attended = self._attended(q, self.leave_keys(F.linear(x, *self.kv_weights()), ctx), None)
        return self.out(rows.take(attended.flatten(0, 1)))

    def _attended(self, q: Tensor, keys: Keys, columns: Tensor | None) -> Tensor:
        """q: `[batch, time, head, width]` -> `[batch, time, head x width]`."""
        q = q.transpose(1, 2)
        plain = columns is None and keys.seen is None
        mask = None if plain else causal_mask(q.shape[2], keys.k.shape[2], keys.seen, columns)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(
            q, keys.k, keys.v, mask, dropout, is_causal=mask is None, enable_gqa=self.kv_heads != self.n_head
        )
        return y.transpose(1, 2).flatten(2)

    def _attended_at_once(self, qkv: Tensor, ctx: "Context", rows: Varlen) -> Tensor:
        """As `_attended_varlen`, in one kernel."""
        from tokendepth.ops.qkv_attention.kernel import qkv_attention as run

        norms = (None, None, 0.0)
        if self.norm_q is not None and self.norm_k is not None:
            norms = self.norm_q.weight, self.norm_k.weight, self.norm_q.eps
        rotation = (None, None) if ctx.rotation is None else ctx.rotation
        return run(qkv, self.n_head, self.kv_heads, rows.starts, rows.longest, *norms, *rotation)

    def _attended_varlen(self, q: Tensor, k: Tensor, v: Tensor, ctx: "Context", rows: Varlen) -> Tensor:
        """For concatenated sequences; q, k and v as projected, `[n, head x width]`."""
        q, (k, v) = self._query(q, ctx.rotation), self._key_value(k, v, ctx.rotation)
        if ctx.cache is not None:
            k, v = ctx.cache.append_rows(self._cache_layer(ctx), k, v, rows.sequence, rows.columns)
        return varlen_attention(q, k, v, rows.starts, rows.lengths, rows.longest).flatten(1)


def causal_mask(time: int, keys: int, seen: Tensor | None, columns: Tensor | None) -> Tensor:
    """`[batch, 1, time, keys]`: earlier keys that may be seen, and always a token's own, so that no row is empty.

    columns: `[batch, time]`, each token's index among the keys; None: the tokens are the last keys.
    """
    device = seen.device if columns is None and seen is not None else columns.device if columns is not None else None
    key = torch.arange(keys, device=device)
    own = key[keys - time :] if columns is None else columns[:, None]
    own = own[..., None]
    earlier = key <= own
    return earlier if seen is None else (earlier & seen[:, None, None, :]) | (key == own)
