"""Mixture-of-Depths (Raposo et al. 2024): every other block processes a fixed number of tokens.

    x_i <- x_i + r_i f_i(X~)   if r_i > P_beta(R), the threshold that C of the S tokens exceed;   else x_i     (eq. 1)

`r_i = w^T x_i` is the router's weight, `X~` are the selected tokens in their original order and at their original
positions, and `f` is what a block adds to its input: the weight scales only the update, and the residual is added once,
unscaled. Selected tokens attend only to tokens that the same block selected, and only those have keys and values.

The top C of a whole sequence are not known before it ends, so top-k is used in training only. In evaluation a token is
selected if a logit is above 0 (probability 0.5). `decides` names the paper's two ways to train that logit by binary
cross-entropy, with "was among the top k" as the target: `router` uses r itself, which affects what the language model
learns; `predictor` is a small network on the state, from which no gradient flows back. The share of tokens selected in
evaluation is therefore learned, not fixed; the trace reports it.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokendepth.config import MoDConfig, ModelConfig
from tokendepth.context import Context, Rows
from tokendepth.layers.routers import LinearRouter, Router
from tokendepth.methods.base import Method, blocks_of, everyone
from tokendepth.model import Block, MethodOutput
from tokendepth.ops.gated_add import gated_add
from tokendepth.trace import Site


class Selector(nn.Module):
    """The router and, unless it decides itself, a predictor of which tokens will be among the top k."""

    def __init__(self, d_model: int, decides: str) -> None:
        super().__init__()
        self.router = LinearRouter(d_model)
        self.predictor = Router(d_model) if decides == "predictor" else None

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """`[batch, time]` each: the weight, and the logit, which selects a token if it is above 0."""
        weight = self.router(h)
        return weight, weight if self.predictor is None else self.predictor(h.detach())

    @property
    def decider(self) -> nn.Module:
        return self.predictor or self.router

    @property
    def flops(self) -> int:
        return self.router.flops + (self.predictor.flops if self.predictor else 0)


class MoDBlock(Block):
    """A block and its selector."""

    def __init__(self, model: ModelConfig, layer: int, config: MoDConfig) -> None:
        super().__init__(model, layer)
        self.selector = Selector(model.d_model, config.decides)


class MoD(Method):
    has_soft = False
    skips_on_device = True

    def __init__(self, model: ModelConfig, config: MoDConfig) -> None:
        super().__init__(model, config)
        self.capacity, self.decision_loss = config.capacity, config.decision_loss
        self.blocks = nn.ModuleList(
            MoDBlock(model, layer, config) if layer % config.every == config.every - 1 else Block(model, layer)
            for layer in range(model.n_layer)
        )

    def forward(self, hidden: Tensor, ctx: Context) -> MethodOutput:
        thresholds = iter(ctx.thresholds([0.0] * len(self.blocks)))
        work, losses = [], []
        for block in self.blocks:
            if not isinstance(block, MoDBlock):
                hidden = block(hidden, ctx)
                work.append(everyone(hidden))
                continue
            weight, logit = block.selector(hidden)
            if self.training:
                chosen = top_k(weight, self.capacity, ctx)
                active = chosen.as_mask(weight)
                losses.append(decision_loss(logit, active, ctx))
                rows = chosen.take(hidden)
                update = block(rows, chosen.context(ctx)) - rows
                hidden = chosen.add(hidden, weight.gather(1, chosen.places)[..., None] * update)
            else:
                active = ctx.real(logit > next(thresholds))
                update = block(ctx.spare(hidden), ctx, Rows(active), keys="active") - hidden
                hidden = gated_add(hidden, update, gate=weight * active)
            work.append(active)
        losses = {"decision": self.decision_loss * torch.stack(losses).mean()} if losses else {}
        return MethodOutput(hidden, self.traced(work, ctx), losses)

    def sites(self, keys: int) -> tuple[Site, ...]:
        return tuple(
            among_site(block, f"block {n}", keys, router=block.selector.flops)
            if isinstance(block, MoDBlock)
            else block.site(f"block {n}", keys, routed=False)
            for n, block in enumerate(blocks_of(self.blocks))
        )

    def routers(self) -> list[nn.Module]:
        return [block.selector.decider for block in self.blocks if isinstance(block, MoDBlock)]


# --- selected tokens, for the methods that build on this one ----------------------------------------------------------


def among_site(block: Block, name: str, keys: int, *, router: float = 0.0) -> Site:
    """A site for selected tokens only: the others cost only the decision, not even key and value.

    Keys of the others are masked, not removed, so a selected token attends over all columns.
    """
    site = block.site(name, keys, routed=True)
    return Site(name, True, always=0.0, active=site.always + site.active, router=router)


def decision_loss(logit: Tensor, active: Tensor, ctx: Context) -> Tensor:
    """Binary cross-entropy of the decision with "was among the top k" as the target."""
    if ctx.valid is None and ctx.counted is None:
        return F.binary_cross_entropy_with_logits(logit, active)
    return ctx.mean(F.binary_cross_entropy_with_logits(logit, active, reduction="none"))


@dataclass(frozen=True)
class Selected:
    """A fixed number of tokens from every sequence, gathered into a shorter sequence."""

    places: Tensor
    """`[batch, k]`: the selected tokens, in their original order, and filler."""
    there: Tensor | None
    """`[batch, k]`: True for selected tokens, False for filler. None: all are selected."""

    @classmethod
    def above(cls, ranked: Tensor, threshold: Tensor | float, share: float, valid: Tensor | None) -> "Selected":
        """The tokens above the threshold, first and in order, followed by filler.

        share: rows per sequence, as a share of its real tokens. If there are too few, the lowest scores are left out.
        """
        time = ranked.shape[1]
        if valid is not None:
            ranked = torch.where(valid, ranked, -torch.inf)
        room = min(time, math.ceil(share * time))
        best = ranked.argsort(dim=1, descending=True, stable=True)[:, :room]  # on ties, the earlier
        there = ranked.gather(1, best) > threshold
        if valid is not None:  # padding neither takes up rows nor adds any
            real = valid.sum(1, keepdim=True)
            there = there & (torch.arange(room, device=best.device) < (share * real.double()).ceil())
        order = torch.where(there, best, best + time).sort(dim=1).values
        return cls(order % time, order < time)

    def take(self, hidden: Tensor) -> Tensor:
        """Their rows, `[batch, k, d]`."""
        return hidden.gather(1, self.places[..., None].expand(-1, -1, hidden.shape[-1]))

    def add(self, hidden: Tensor, update: Tensor) -> Tensor:
        """`hidden` with `update` `[batch, k, d]` added to them."""
        if self.there is not None:
            update = update * self.there[..., None]
        return hidden.scatter_add(1, self.places[..., None].expand_as(update), update.to(hidden.dtype))

    def put(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """`hidden` with `rows` `[batch, k, d]` written to their places."""
        if self.there is not None:
            rows = torch.where(self.there[..., None], rows, self.take(hidden))
        return hidden.scatter(1, self.places[..., None].expand_as(rows), rows.to(hidden.dtype))

    def as_mask(self, like: Tensor) -> Tensor:
        """`[batch, time]`, 1 at the selected tokens and 0 at the others."""
        nobody = torch.zeros_like(like)
        if self.there is None:
            return nobody.scatter(1, self.places, 1.0)
        return nobody.scatter(1, self.places, self.there.to(like.dtype))

    def context(self, ctx: Context) -> Context:
        return ctx.packed(self.places, self.there)

    def among(self, chosen: "Selected") -> "Selected":
        """The subset that `chosen` selects, by index among these tokens."""
        return Selected(self.places.gather(1, chosen.places), chosen.there)


def share_of(capacity: float, time: int) -> int:
    """The number of tokens for a capacity; depends only on shapes, which avoids a host synchronisation."""
    return max(1, round(capacity * time))


def top_k(scores: Tensor, capacity: float, ctx: Context, of: tuple[int, Tensor | None] | None = None) -> Selected:
    """The highest of each row of `scores` `[batch, n]`, as many as the share `capacity` of the sequence's tokens.

    `of`: length and valid mask of the whole sequences, if they are longer than `scores`. Padding is never selected, and
    the share is that of the real tokens.
    """
    scores, (time, valid) = scores.detach(), of or (scores.shape[1], ctx.valid)
    k = share_of(capacity, time)
    if ctx.valid is None or valid is None:
        return Selected(scores.topk(k, dim=1).indices.sort(dim=1).values, None)
    real = valid.sum(1, keepdim=True)
    wanted = (capacity * real.double()).round().clamp(min=1).minimum(real)
    best = torch.where(ctx.valid, scores, -torch.inf).topk(k, dim=1).indices
    there = torch.arange(k, device=best.device) < wanted
    places, order = best.sort(dim=1)
    return Selected(places, there.gather(1, order))
