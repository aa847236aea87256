"""Feed-forward networks: two layers with GELU, or gated (SwiGLU, GeGLU): down(act(gate x) * up x)."""

import math

import torch.nn.functional as F
from torch import Tensor, nn

from tokendepth.config import ModelConfig
from tokendepth.layers.linear import Linear
from tokendepth.ops.sparse_block import Activation


def initialise_residual(projection: nn.Linear, n_layer: int) -> None:
    """N(0, 0.02 / sqrt(2 L)) for projections into the residual stream, so that it does not grow with depth."""
    nn.init.normal_(projection.weight, std=0.02 / math.sqrt(2 * n_layer))


class FeedForward(nn.Module):
    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.up = Linear(model.d_model, model.d_ff, bias=model.ffn_bias)
        self.down = Linear(model.d_ff, model.d_model, bias=model.ffn_bias)
        initialise_residual(self.down, model.n_layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))

    def kernel_weights(self) -> tuple[nn.Linear, nn.Linear, Activation]:
        return self.up, self.down, "gelu"

    @property
    def flops(self) -> int:
        """Per token."""
        return 2 * (self.up.weight.numel() + self.down.weight.numel())


class GatedFeedForward(nn.Module):
    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.by_gelu = model.ffn == "geglu"
        self.gate_up = Linear(model.d_model, 2 * model.d_ff, bias=model.ffn_bias)
        """The rows of the gate, then those of `up`, so that one product computes both."""
        self.down = Linear(model.d_ff, model.d_model, bias=model.ffn_bias)
        initialise_residual(self.down, model.n_layer)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down((F.gelu(gate, approximate="tanh") if self.by_gelu else F.silu(gate)) * up)

    def kernel_weights(self) -> tuple[nn.Linear, nn.Linear, Activation]:
        return self.gate_up, self.down, "geglu" if self.by_gelu else "swiglu"

    @property
    def flops(self) -> int:
        """Per token."""
        return 2 * (self.gate_up.weight.numel() + self.down.weight.numel())


def make_ffn(model: ModelConfig) -> FeedForward | GatedFeedForward:
    return FeedForward(model) if model.ffn == "gelu" else GatedFeedForward(model)
