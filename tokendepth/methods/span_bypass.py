"""A linear map for tokens that skip a span; a retrofit initialises it by least squares."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from tokendepth.config import ModelConfig
from tokendepth.layers.ffn import initialise_residual
from tokendepth.layers.linear import Linear

RIDGE = 1e-3
"""Ridge penalty of that fit, relative to the mean square of the inputs."""


class Bypass(nn.Module):
    """The update of a token that skips the span: a linear map of its normalised state, times the state's rms."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.map = Linear(model.d_model, model.d_model, bias=False)
        initialise_residual(self.map, model.n_layer)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        """`x` is `hidden`, normalised."""
        return self.map(x) * rms(hidden).to(x.dtype)

    @torch.no_grad()
    def fit(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Least squares over pairs of `[tokens, d]`: the bypass's input, and the update divided by the state's rms."""
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
