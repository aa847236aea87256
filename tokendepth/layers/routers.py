"""Routers: small networks on a token's state, with logits in float32 regardless of the surrounding precision.

Linear routers are computed in float32, too; for the precision of `Router`'s first product see `halting_logits`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokendepth.ops.block_inputs import RouterWeights
from tokendepth.ops.router import halting_logits


class Router(nn.Module):
    """r_l in eq. 2 of the TSA paper, before the sigmoid: a two-layer MLP from a token's state to its halting logit."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(d_model, max(16, d_model // 4))
        self.logit = nn.Linear(self.hidden.out_features, 1)
        nn.init.constant_(self.logit.bias, -1.0)  # sigmoid(-1) = 0.27, so nothing halts at first

    def forward(self, h: Tensor) -> Tensor:
        """`[batch, time, d] -> [batch, time]`"""
        return halting_logits(h, *self.weights()[:4], low_precision=torch.is_autocast_enabled(h.device.type))

    def weights(self, *, normed: bool = False) -> RouterWeights:
        return RouterWeights(self.hidden.weight, self.hidden.bias, self.logit.weight, self.logit.bias, normed)

    @property
    def flops(self) -> int:
        return 2 * (self.hidden.weight.numel() + self.logit.weight.numel())


class LinearRouter(nn.Linear):
    """A token's state to `out` numbers; with `out=1` the last dimension is dropped."""

    def __init__(self, d_model: int, out: int = 1) -> None:
        super().__init__(d_model, out, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        return _exact_linear(input, self)

    @property
    def flops(self) -> int:
        return 2 * self.weight.numel()


class HaltingUnit(nn.Module):
    """W h + b, the halting logit."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.logit = nn.Linear(d_model, 1)

    def forward(self, h: Tensor) -> Tensor:
        """`[..., d] -> [...]`"""
        return _exact_linear(h, self.logit)

    @property
    def flops(self) -> int:
        return 2 * self.logit.weight.numel()


def _exact_linear(x: Tensor, linear: nn.Linear) -> Tensor:
    exact = torch.promote_types(linear.weight.dtype, torch.float32)
    bias = None if linear.bias is None else linear.bias.to(exact)
    with torch.autocast(x.device.type, enabled=False):
        y = F.linear(x.to(exact), linear.weight.to(exact), bias)
    return y.squeeze(-1) if linear.out_features == 1 else y
