"""The pre-norm decoder-only transformer block that every method is built from, and the language model around it.

The default `ModelConfig` matches the TSA paper exactly: attention projections without bias, feed-forward with bias,
GELU, LayerNorm, learned positions, output head tied to the token embedding. Residual projections are initialised from
N(0, 0.02 / sqrt(2 L)), embeddings from N(0, 0.02), everything else with PyTorch's defaults.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from tokendepth.cache import KVCache
from tokendepth.config import ModelConfig
from tokendepth.context import Context, Rows, forced
from tokendepth.errors import UserError
from tokendepth.layers.attention import Attention, Keys
from tokendepth.layers.ffn import make_ffn
from tokendepth.layers.head import head_flops
from tokendepth.layers.linear import is_plain
from tokendepth.layers.norm import make_norm, norm_weights, without_scale
from tokendepth.layers.positions import make_positions
from tokendepth.layers.routers import Router
from tokendepth.ops.block_inputs import BlockInputs, RouterWeights, Threshold, block_inputs
from tokendepth.ops.decide import decide
from tokendepth.ops.decode_block import decode_block
from tokendepth.ops.decode_block import runs_eager as decodes_alone
from tokendepth.ops.decode_block import runs_kernel as decodes_by_kernel
from tokendepth.ops.decode_inputs import decode_inputs
from tokendepth.ops.few_rows.eager import linear
from tokendepth.ops.gated_add import gated_add
from tokendepth.ops.launch import LOW_PRECISION
from tokendepth.ops.rows import ChosenRows, product_of_rows
from tokendepth.ops.sparse_block import BlockParts, BlockWeights, has_kernel, launch_bound, runs_kernel, sparse_block
from tokendepth.trace import DepthTrace, Execution, Site

if TYPE_CHECKING:
    from tokendepth.methods.base import Method


@dataclass(frozen=True)
class MethodOutput:
    """What a method returns: hidden states, the trace of where depth was spent, and losses to add to the task loss."""

    hidden: Tensor
    trace: DepthTrace
    losses: dict[str, Tensor]
    logits: Tensor | None = None
    """Logits of `hidden`, if the method has already computed them."""


class Block(nn.Module):
    recompute: Callable[..., Tensor] | None = None
    """Runs the forward with activation checkpointing, like `torch.utils.checkpoint.checkpoint`; None: off."""

    def __init__(self, model: ModelConfig, layer: int) -> None:
        super().__init__()
        self.rotary = model.positions == "rotary"
        self.norm_attention = make_norm(model)
        self.attention = Attention(model, layer)
        self.norm_ffn = make_norm(model)
        self.ffn = make_ffn(model)
        self.dropout = nn.Dropout(model.dropout)

    def forward(
        self,
        h: Tensor,
        ctx: Context,
        rows: Rows | None = None,
        keys: Literal["all", "active"] | Keys = "all",
        gate: Tensor | None = None,
    ) -> Tensor:
        """Run the tokens of `rows` (None: all) through the block. h: `[batch, time, d]`, or `[n, d]` with `ctx.varlen`.

        keys: which keys and values they attend to: those of all tokens, those of the active tokens, or the given ones
        (then no new ones are computed). gate: `[batch, time]`, scales both residual updates (eq. 3 and 4).
        For the other tokens, sparse execution computes at most keys and values. Without a gradient it may overwrite h.
        """
        if self.recompute is not None and self.training:
            return self.recompute(self._forward, h, ctx, rows, keys, gate)
        return self._forward(h, ctx, rows, keys, gate)

    def _forward(self, h: Tensor, ctx: Context, rows: Rows | None, keys: str | Keys, gate: Tensor | None) -> Tensor:
        if rows is not None and rows.chosen is not None:
            return self._train_chosen(h, ctx, rows.chosen, gate)
        if ctx.execution == "sparse" and self._decodes(h, ctx) and not isinstance(keys, Keys):
            return self._decode(h, ctx, rows, keys, gate)
        if ctx.execution == "sparse" and (rows is not None or (ctx.varlen is None and self.launch_bound(h))):
            return self._skip(h, ctx, rows, keys, gate)
        given = keys if isinstance(keys, Keys) else None
        leaving = rows.active if rows is not None and keys == "active" else None
        add = Tensor.add if gate is None else partial(gated_add, gate=gate)
        new = add(h, self.dropout(self.attention(self.norm_attention(h), ctx, given, leaving)))
        new = add(new, self.dropout(self.ffn(self.norm_ffn(new))))
        return new if rows is None else torch.where(rows.active[..., None], new, h)

    def _skip(self, h: Tensor, ctx: Context, rows: Rows | None, keys: str | Keys, gate: Tensor | None) -> Tensor:
        attention, inputs, made = self.attention, rows and rows.inputs, rows and rows.decision and rows.decision.listed
        columns = ctx.columns if ctx.cache else None
        if isinstance(keys, Keys):
            x, columns = self.norm_attention(h), ctx.columns
        elif keys == "active" and rows is not None:
            made, x = rows.listed(h), self.norm_attention(h)
            kv = product_of_rows(x, *attention.kv_weights(), rows.active, made)
            keys = attention.leave_keys(kv, ctx, leaving=rows.active)
        else:
            inputs = inputs or block_inputs(h, norm_weights(self.norm_attention), *attention.kv_weights())
            assert inputs.kv is not None
            x, keys = inputs.x, attention.leave_keys(inputs.kv, ctx)
        active = None if rows is None else rows.active
        return sparse_block(h, x, keys.k, keys.v, active, self.parts(), gate, keys.seen, columns, made, ctx.rotation)

    def _decodes(self, h: Tensor, ctx: Context) -> bool:
        """Whether this is a decoding step, one token per cache slot, that `decode_block` supports."""
        if ctx.cache is None or ctx.cache.slots is not None or ctx.varlen is not None:
            return False
        if decodes_alone(h):
            return h.dtype == ctx.cache.keys.dtype and self._is_plain()
        return decodes_by_kernel(h, self.kernel_weights())

    def _decode(self, h: Tensor, ctx: Context, rows: Rows | None, keys: str, gate: Tensor | None) -> Tensor:
        inputs, active = (None, None) if rows is None else (rows.inputs, rows.active)
        inputs = inputs or self._decode_inputs(h, ctx, among=active if keys == "active" else None)
        weights, layer = self.kernel_weights(), self.attention.cached(ctx)
        assert weights is not None
        assert ctx.columns is not None
        rest = active, weights, gate, ctx.rotation, inputs.unwritten
        return decode_block(h, inputs.x, layer, ctx.columns, *rest)

    def _decode_inputs(
        self,
        h: Tensor,
        ctx: Context,
        router: RouterWeights | None = None,
        threshold: Threshold | None = None,
        among: Tensor | None = None,
    ) -> BlockInputs:
        """Writes keys and values to the cache, or defers them to `decode_block`. `among`: of these tokens only."""
        attention, leaving = self.attention, ctx.valid if among is None else among
        assert ctx.writes is not None
        parts = norm_weights(self.norm_attention), attention.key_weights(), attention.cached(ctx), ctx.writes
        return decode_inputs(h, *parts, ctx.rotation, leaving, among, router, threshold)

    def _train_chosen(self, h: Tensor, ctx: Context, rows: ChosenRows, gate: Tensor | None) -> Tensor:
        flat = h.flatten(0, 1)
        add = Tensor.add if gate is None else partial(gated_add, gate=rows.take(gate.flatten()))
        updates = self.dropout(self.attention.for_rows(self.norm_attention(h), ctx, rows))
        states = add(rows.take(flat), updates)
        states = add(states, self.dropout(self.ffn(self.norm_ffn(states))))
        return torch.where(rows.chosen.view(*h.shape[:2], 1), rows.spread(states).view_as(h), h)

    def decide(
        self,
        h: Tensor,
        ctx: Context,
        router: Router,
        threshold: Tensor | float,
        *,
        normed: bool = False,
        inclusive: bool = False,
    ) -> Rows:
        """The tokens whose score, the negated router logit, is above the threshold (`inclusive`: or equal to it).

        `normed`: the router reads the output of the block's first norm, before scale and shift.
        """
        limit = Threshold(threshold, ctx.valid, inclusive)
        if ctx.execution == "sparse":  # block inputs and router read the same states: one op computes both
            weights = router.weights(normed=normed)
            if self._decodes(h, ctx):
                inputs = self._decode_inputs(h, ctx, weights, limit)
            else:
                norm, projection = norm_weights(self.norm_attention), self.attention.kv_weights()
                inputs = block_inputs(h, norm, *projection, weights, limit)
            assert inputs.decision is not None
            return Rows(inputs.decision.active, inputs.decision, inputs)
        logit = router(without_scale(self.norm_attention, h) if normed else h)
        decision = decide(logit, threshold, ctx.valid, inclusive=inclusive)
        return Rows(decision.active, decision)

    def launch_bound(self, h: Tensor) -> bool:
        """Whether the block is so small that kernels beat library calls even with all tokens active."""
        return launch_bound(h, self.kernel_weights())

    def skips_by_kernel(self, h: Tensor) -> bool:
        """Whether kernels find the active rows on the device; otherwise library calls work on gathered rows."""
        return runs_kernel(h, self.kernel_weights())

    def parts(self) -> BlockParts:
        return BlockParts(self.attention.queries, self.attention.out, self.norm_ffn, self.ffn, self.kernel_weights())

    def kernel_weights(self) -> BlockWeights | None:
        """Weights in the form that the kernels take; None if they do not support this block."""
        attention, norm = self.attention, norm_weights(self.norm_ffn)
        up, down, activation = self.ffn.kernel_weights()
        if not self._is_plain():
            return None
        query, query_bias = attention.query_weights()
        by_head = (None, 0.0) if attention.norm_q is None else (attention.norm_q.weight, attention.norm_q.eps)
        return BlockWeights(
            attention.n_head, query, attention.out.weight, *norm, up.weight, up.bias, down.weight, down.bias,
            activation, query_bias, *by_head, attention.out.bias, self.rotary,
        )  # fmt: skip

    def _is_plain(self) -> bool:
        up, down, _ = self.ffn.kernel_weights()
        return is_plain(self.attention.qkv, self.attention.out, up, down)

    def site(self, name: str, keys: int, *, routed: bool, router: float = 0.0) -> Site:
        """The cost of one token in this block when it attends to `keys` keys."""
        rest = self.attention.row_flops(keys) + self.ffn.flops
        return Site(name, routed, always=self.attention.kv_flops, active=rest, router=router)


@dataclass(frozen=True)
class Output:
    """What a forward pass returns."""

    logits: Tensor
    """`[batch, time, vocabulary]`."""
    trace: DepthTrace
    """Which tokens were processed where, a `DepthTrace`."""
    losses: dict[str, Tensor]
    """Auxiliary losses of the method, by name; for training."""


class LanguageModel(nn.Module):
    """Embedding, the method (blocks and routing), final norm and head."""

    def __init__(self, model: ModelConfig, method: "Method") -> None:
        super().__init__()
        assert model.vocab_size > 0, "the vocabulary comes from the corpus; resolve it first"
        self.config = model
        self.embedding = nn.Embedding(model.vocab_size, model.d_model)
        self.positions = make_positions(model)
        for table in (self.embedding, self.positions):
            if isinstance(table, nn.Embedding):
                nn.init.normal_(table.weight, std=0.02)
        self.dropout = nn.Dropout(model.dropout)
        self.method: Method = method
        self.norm = make_norm(model)
        self.head = None if model.tie_head else nn.Linear(model.d_model, model.vocab_size, bias=False)
        if self.head is not None:
            nn.init.normal_(self.head.weight, std=0.02)

    def forward(
        self,
        ids: Tensor,
        *,
        execution: Execution = "soft",
        cache: KVCache | None = None,
        valid: Tensor | None = None,
        decisions: Tensor | None = None,
        targets: Tensor | None = None,
        counted: Tensor | None = None,
        thresholds: Tensor | None = None,
        teacher: Tensor | None = None,
        read: Tensor | None = None,
        room: int = 0,
        scored: tuple[Tensor, Tensor] | None = None,
    ) -> Output:
        """Next-token logits `[batch, time, vocabulary]` for `ids` `[batch, time]`. Other arguments are as in `Context`.

        read: `[batch]`, the one position in each sequence whose logits are needed; returns `[batch, 1, vocabulary]`.
        The logits of a whole long prompt would take gigabytes.
        """
        assert thresholds is None or self.method.decides_by_threshold
        assert cache is None or cache.batch == len(ids), f"{len(ids)} sequences for {cache.batch} slots of the cache"
        time = ids.shape[1]
        needed = self._needed(time, cache, valid)
        ctx, positions = self._context(time, ids.device, execution, cache, valid, needed)
        ctx = replace(ctx, ids=ids, decisions=decisions, given_thresholds=thresholds)
        ctx = replace(ctx, targets=targets, counted=counted, teacher=teacher, room=room, scored=scored)
        found = self.method(self.embedded(ids, positions), ctx)
        if cache is not None:
            cache.advance(time, valid, needed)
        states = found.hidden if found.logits is None else found.logits
        if read is not None:
            states = states[torch.arange(len(ids), device=ids.device), read][:, None]
        logits = self.readout(states) if found.logits is None else states
        read_alone = read is not None and found.logits is None
        trace = replace(found.trace, outside=self.head_flops, valid=valid, read_alone=read_alone)
        return Output(logits, trace, found.losses)

    def embedded(self, ids: Tensor, positions: Tensor) -> Tensor:
        tokens = self.embedding(ids)
        if self.config.embedding_scale != 1.0:
            tokens = tokens * self.config.embedding_scale
        return self.dropout(self.positions.added_to(tokens, positions))

    def readout(self, hidden: Tensor) -> Tensor:
        return linear(self.norm(hidden), self.embedding.weight if self.head is None else self.head.weight)

    def _needed(self, time: int, cache: KVCache | None, valid: Tensor | None) -> int:
        """Length of the longest sequence after this forward pass, without padding; raises if it does not fit."""
        if cache is not None:
            needed = cache.needed(time, valid, min(self.config.context, cache.capacity))
        else:
            needed = time if valid is None or time <= self.config.context else int(valid.sum(1).max())
        if needed > self.config.context:
            raise UserError(f"{needed} tokens do not fit this model's context of {self.config.context}; give fewer")
        if cache is not None and needed > cache.capacity:
            raise UserError(f"the cache holds {cache.capacity} tokens, {needed} were given; make it larger")
        return needed

    def _context(
        self,
        time: int,
        device: torch.device,
        execution: Execution,
        cache: KVCache | None = None,
        valid: Tensor | None = None,
        needed: int = 0,
    ) -> tuple[Context, Tensor]:
        """The context of this forward pass, and the positions of the tokens, `[time]` or `[batch, time]`."""
        positions = torch.arange(time, device=device)
        if valid is not None:
            positions = (valid.long().cumsum(1) - 1).clamp(min=0)
        ctx = Context(execution, cache, valid, readout=self.readout)
        if cache is not None:
            positions = positions + cache.seen()[:, None]
            window = cache.capacity if cache.fixed else max(needed, 1)
            if valid is not None:  # padding after a full sequence would be out of range
                positions = positions.clamp(max=min(self.config.context, window) - 1)
            writes = positions if valid is None else torch.where(valid, positions, cache.capacity)
            ctx = replace(ctx, columns=positions, writes=writes, window=window)
        return replace(ctx, positions=positions, rotation=self.positions.rotation(positions)), positions

    def entering(self, ids: Tensor, execution: Execution) -> tuple[Tensor, Context]:
        """The inputs of a method for whole sequences `ids` `[batch, time]`: embedded tokens and context."""
        ctx, positions = self._context(ids.shape[1], ids.device, execution)
        return self.embedded(ids, positions), replace(ctx, ids=ids)

    def until_decided(self, ids: Tensor, **given: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """The first part of a sparse pass, for methods that pack; `forward` with `scored` and `room` does the rest."""
        self._needed(ids.shape[1], cache=None, valid=None)
        hidden, ctx = self.entering(ids, "sparse")
        return self.method.until_decided(hidden, _with_given(ctx, given))

    def active_count_by_text(self, ids: Tensor, **given: Tensor) -> Tensor:
        """The number of tokens that such a forward pass packs, for methods whose decisions depend only on the text."""
        ctx, _ = self._context(ids.shape[1], ids.device, "sparse")
        return self.method.active_count_by_text(_with_given(replace(ctx, ids=ids), given))

    def forcing(self, decisions: Tensor) -> dict[str, Tensor]:
        """Arguments of `forward` that force these decisions, as thresholds if the method decides by threshold."""
        return {"thresholds": forced(decisions)} if self.method.decides_by_threshold else {"decisions": decisions}

    @property
    def can_be_captured(self) -> bool:
        """Whether a sparse forward pass on a GPU needs no host synchronisation, so that it can be one CUDA graph."""
        if not any(site.routed for site in self.method.sites(keys=1)):
            return True
        blocks = (module for module in self.method.modules() if isinstance(module, Block))
        fits = all(has_kernel(block.kernel_weights()) for block in blocks)
        return fits and self.method.skips_on_device and self.norm.weight.dtype in LOW_PRECISION

    @property
    def head_flops(self) -> int:
        """Per token."""
        return head_flops(self.config)


def _with_given(ctx: Context, given: dict[str, Tensor]) -> Context:
    return replace(ctx, given_thresholds=given.get("thresholds"), decisions=given.get("decisions"))
