"""Mixture-of-Depths (Raposo et al. 2024): in every other block a fixed number of tokens is worked on.

    x_i <- x_i + r_i f_i(X~)   if r_i > P_beta(R), the threshold that C of the S tokens exceed;   else x_i     (eq. 1)

`r_i = w^T x_i` is the router's weight, `X~` are the selected tokens in their original order and at their original
positions, and `f` is what a block adds to its input: the weight scales the update alone, the residual passes once and
unscaled. Selected tokens attend only to tokens that the same block selected, and only those leave a key and a value.

The C highest of a whole sequence cannot be known before it ends, so the top-k is for training. In evaluation a token is
selected where a logit of its own is above 0 (probability 0.5). `decides` names the paper's two ways to train that logit
by binary cross-entropy, with "was among the top k" as the target: `router` takes r itself, which moves what the
language model learns; `predictor` is a small network on the state, from which no gradient flows back. The share of
tokens selected in evaluation is therefore learned, not held: the trace tells what it came to.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokendepth.config import MoDConfig, ModelConfig
from tokendepth.methods.base import Method
from tokendepth.methods.tsa import Router
from tokendepth.model import Block, Pass, Spent, block_site
from tokendepth.ops.gated_add import gated_add
from tokendepth.trace import DepthTrace, Site


class LinearRouter(nn.Linear):
    """A token's state to `out` numbers (a single one has no axis), in float32 whatever the precision around it."""

    def __init__(self, d_model: int, out: int = 1) -> None:
        super().__init__(d_model, out, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        with torch.autocast(input.device.type, enabled=False):
            logits = F.linear(input.float(), self.weight)
        return logits.squeeze(-1) if self.out_features == 1 else logits

    @property
    def flops(self) -> int:
        return 2 * self.weight.numel()


class Selector(nn.Module):
    """The router's weights and, where it does not decide itself, a predictor of who will be among the top k."""

    def __init__(self, d_model: int, decides: str) -> None:
        super().__init__()
        self.router = LinearRouter(d_model)
        self.predictor = Router(d_model) if decides == "predictor" else None

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """`[batch, time]` twice: the weight, and the logit by which a token is selected where it is above 0."""
        weight = self.router(h)
        return weight, weight if self.predictor is None else self.predictor(h.detach())

    @property
    def decider(self) -> nn.Module:
        return self.predictor or self.router

    @property
    def flops(self) -> int:
        return self.router.flops + (self.predictor.flops if self.predictor else 0)


class MoDBlock(Block):
    """A block and what selects its tokens."""

    def __init__(self, model: ModelConfig, layer: int, config: MoDConfig) -> None:
        super().__init__(model, layer)
        self.selector = Selector(model.d_model, config.decides)


class MoD(Method):
    has_soft = False

    def __init__(self, model: ModelConfig, config: MoDConfig) -> None:
        super().__init__(model, config)
        self.capacity, self.decision_loss = config.capacity, config.decision_loss
        self.blocks = nn.ModuleList(
            MoDBlock(model, layer, config) if layer % config.every == config.every - 1 else Block(model, layer)
            for layer in range(model.n_layer)
        )

    def forward(self, hidden: Tensor, run: Pass) -> Spent:
        sites = self.sites(run.keys(hidden.shape[1]))
        thresholds = iter(run.thresholds([0.0] * len(sites)))
        work, losses = [], []
        for block in self.blocks:
            if not isinstance(block, MoDBlock):
                hidden = block(hidden, run)
                work.append(torch.ones(hidden.shape[:2], device=hidden.device))
                continue
            weight, logit = block.selector(hidden)
            if self.training:
                chosen = top_k(weight, share_of(self.capacity, hidden.shape[1]))
                active = membership(chosen, weight)
                losses.append(F.binary_cross_entropy_with_logits(logit, active))
                hidden = self._train_block(block, hidden, run, weight, chosen)
            else:
                active = logit > next(thresholds)
                active = active if run.valid is None else active & run.valid
                update = block.forward_among(hidden, run, active) - hidden
                hidden = gated_add(hidden, update, gate=weight * active)
            work.append(active.float())
        trace = DepthTrace(torch.stack(work), sites, run.execution)
        return Spent(hidden, trace, {"decision": self.decision_loss * torch.stack(losses).mean()} if losses else {})

    def _train_block(self, block: Block, hidden: Tensor, run: Pass, weight: Tensor, chosen: Tensor) -> Tensor:
        """Eq. 1 on the chosen tokens alone: the others cost nothing in training either."""
        rows = take(hidden, chosen)
        return put_added(hidden, chosen, weight.gather(1, chosen)[..., None] * (block(rows, run) - rows))

    def sites(self, keys: int) -> tuple[Site, ...]:
        return tuple(
            among_site(self.model, f"block {n}", keys, router=block.selector.flops)
            if isinstance(block, MoDBlock)
            else block_site(self.model, f"block {n}", keys, routed=False)
            for n, block in enumerate(self.blocks)
        )

    def routers(self) -> list[nn.Module]:
        return [block.selector.decider for block in self.blocks if isinstance(block, MoDBlock)]


# --- selected tokens, for the methods that build on this one ----------------------------------------------------------


def among_site(model: ModelConfig, name: str, keys: int, *, router: float = 0.0) -> Site:
    """A block for selected tokens only: one that is not selected costs the decision, and not even key and value.

    Keys of the others are masked, not packed away, so that a selected token's attention row is as wide as ever.
    """
    block = block_site(model, name, keys, routed=True)
    return Site(name, True, always=0.0, active=block.always + block.active, router=router)


def share_of(capacity: float, time: int) -> int:
    """How many tokens a capacity is: known from the shape alone, so that nothing is asked of the device."""
    return max(1, round(capacity * time))


def top_k(scores: Tensor, k: int) -> Tensor:
    """`[batch, time] -> [batch, k]`: where the k highest of each sequence stand, in their original order."""
    return scores.detach().topk(k, dim=1).indices.sort(dim=1).values


def membership(chosen: Tensor, like: Tensor) -> Tensor:
    """`[batch, k]` places to `[batch, time]`, 1 at the chosen tokens and 0 at the others."""
    return torch.zeros_like(like).scatter(1, chosen, 1.0)


def take(hidden: Tensor, chosen: Tensor) -> Tensor:
    """The rows of the chosen tokens, `[batch, k, d]`."""
    return hidden.gather(1, chosen[..., None].expand(-1, -1, hidden.shape[-1]))


def put_added(hidden: Tensor, chosen: Tensor, update: Tensor) -> Tensor:
    """`hidden` with `update` `[batch, k, d]` added to the chosen tokens."""
    return hidden.scatter_add(1, chosen[..., None].expand_as(update), update.to(hidden.dtype))
