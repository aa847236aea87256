"""What a token that skips a span takes instead: one linear map, in a retrofit at first the one that fits it best."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from tokendepth.config import ModelConfig
from tokendepth.layers.ffn import initialise_residual
from tokendepth.layers.linear import Linear

RIDGE = 1e-3
"""Added to the mean square of what a bypass reads when it is fitted."""


class Bypass(nn.Module):
    """What a token that skips gets instead of the span: its normalised state, mapped, as large as the state was."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.map = Linear(model.d_model, model.d_model, bias=False)
        initialise_residual(self.map, model.n_layer)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        """`x` is `hidden`, normalised."""
        return self.map(x) * rms(hidden).to(x.dtype)

    @torch.no_grad()
    def fit(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Least squares over tokens, each `[tokens, d]`: what was read, and the update, as a share of the state."""
        weight, width = self.map.weight, self.map.in_features
        squares, products = (weight.new_zeros(width, width, dtype=torch.float64) for _ in range(2))
        for x, update in pairs:
            squares += x.double().T @ x.double()
            products += x.double().T @ update.double()
        squares += RIDGE * squares.trace() / width * torch.eye(width, dtype=torch.float64, device=squares.device)
        weight.copy_(torch.linalg.solve(squares, products).T)

    @property
    def flops(self) -> int:
        return 2 * self.map.weight.numel()


def rms(hidden: Tensor) -> Tensor:
    """`[..., d] -> [..., 1]`"""
    return hidden.float().square().mean(-1, keepdim=True).sqrt()
