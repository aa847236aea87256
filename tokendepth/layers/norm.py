"""LayerNorm (mean 0 and variance 1, scaled and shifted) and RMSNorm (mean square 1, scaled)."""

import torch
from torch import Tensor, nn

from tokendepth.config import ModelConfig
from tokendepth.ops.block_inputs import NormWeights
from tokendepth.ops.block_inputs.eager import normalised


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        return normalised(x, self.weight, None, self.eps, rms=True)


Norm = nn.LayerNorm | RMSNorm


def make_norm(model: ModelConfig) -> Norm:
    return (nn.LayerNorm if model.norm == "layer" else RMSNorm)(model.d_model, eps=model.norm_eps)


def norm_weights(norm: Norm) -> NormWeights:
    return NormWeights(norm.weight, norm.bias if isinstance(norm, nn.LayerNorm) else None, norm.eps)


def without_scale(norm: Norm, h: Tensor) -> Tensor:
    """The norm of `h` before scale and shift."""
    return normalised(h, None, None, norm.eps, rms=isinstance(norm, RMSNorm))
