"""Token positions: a learned vector added to the embedding, or rotary positions for queries and keys.

Rotary positions rotate the pair (x_i, x_{i + width/2}) of a head by the angle position * frequency_i, with
frequency_i = base^(-2i / width). A model that is stretched to a longer context has lower frequencies:

`linear`: every frequency is divided by the factor.
`llama3`: depends on the number of turns of a pair within the original context. Up to `rope_low` turns its frequency is
divided by the factor, from `rope_high` turns on it is unchanged, and in between it is a blend, linear in the turns.
`yarn`: the same two limits, blended linearly in the pair's index; cosines and sines times 0.1 ln(factor) + 1.
"""

import math

import torch
from torch import Tensor, nn

from tokendepth.config import ModelConfig
from tokendepth.layers.exact_buffers import ExactBuffers
from tokendepth.ops.launch import compiles_inference
from tokendepth.ops.sparse_block import Rotation


class LearnedPositions(nn.Embedding):
    def __init__(self, model: ModelConfig) -> None:
        super().__init__(model.context, model.d_model)

    def added_to(self, embedded: Tensor, positions: Tensor) -> Tensor:
        return embedded + self(positions)

    def rotation(self, positions: Tensor) -> None:
        return None


class RotaryPositions(ExactBuffers):
    frequencies: Tensor

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.register_buffer("frequencies", rotary_frequencies(model), persistent=False)
        self.magnitude = 0.1 * math.log(model.rope_factor) + 1.0 if model.rope_scaling == "yarn" else 1.0

    def added_to(self, embedded: Tensor, positions: Tensor) -> Tensor:
        return embedded

    def rotation(self, positions: Tensor) -> Rotation:
        """For positions `[time]` or `[batch, time]`."""
        turn = torch.ops.tokendepth.rotation if compiles_inference() else _rotation
        return turn(torch.atleast_2d(positions), self.frequencies, self.magnitude)


def _rotation(positions: Tensor, frequencies: Tensor, magnitude: float) -> Rotation:
    angles = positions[..., None].float() * frequencies
    return angles.cos() * magnitude, angles.sin() * magnitude


# Opaque to torch.compile, which would otherwise recompute cosines and sines in every block, for every head.
_library = torch.library.Library("tokendepth", "FRAGMENT")
_library.define("rotation(Tensor positions, Tensor frequencies, float magnitude) -> (Tensor, Tensor)")
_library.impl("rotation", _rotation, "CompositeExplicitAutograd")


@torch.library.register_fake("tokendepth::rotation", lib=_library)
def _(positions, frequencies, magnitude):
    shape = *positions.shape, len(frequencies)
    return frequencies.new_empty(shape), frequencies.new_empty(shape)


def make_positions(model: ModelConfig) -> LearnedPositions | RotaryPositions:
    return LearnedPositions(model) if model.positions == "learned" else RotaryPositions(model)


def rotated(x: Tensor, rotation: Rotation | None) -> Tensor:
    """`x` `[..., head, width]`, rotated by the cosines and sines of its tokens, `[..., width / 2]`."""
    if rotation is None:
        return x
    cos, sin = (part[..., None, :] for part in rotation)
    first, second = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def rotary_frequencies(model: ModelConfig) -> Tensor:
    """`[width / 2]`, in radians per position."""
    width, factor = model.width, model.rope_factor
    frequencies = 1.0 / model.rope_base ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    if model.rope_scaling == "none":
        return frequencies
    if model.rope_scaling == "linear":
        return frequencies / factor
    low, original = model.rope_low, model.rope_original_context
    if model.rope_scaling == "llama3":
        high = model.rope_high or 4.0
        turns = original * frequencies / (2 * math.pi)
        alone = ((turns - low) / (high - low)).clamp(0, 1)
    else:
        first, last = (_pair_that_turns(times, model) for times in (model.rope_high or 32.0, low))
        first, last = max(math.floor(first), 0), min(math.ceil(last), width - 1)
        index = torch.arange(width // 2, dtype=torch.float32)
        alone = 1 - ((index - first) / max(last - first, 0.001)).clamp(0, 1)
    return alone * frequencies + (1 - alone) * frequencies / factor


def _pair_that_turns(times: float, model: ModelConfig) -> float:
    """The index of the pair that makes this many turns within the original context."""
    turns = model.rope_original_context / (times * 2 * math.pi)
    return model.width * math.log(turns) / (2 * math.log(model.rope_base))
