"""KVCache: keys and values of the tokens seen so far, in buffers of fixed shape, with a validity mask per layer.

Validity is per layer because methods differ in who leaves a key behind: TSA keeps every token's, others only those of
the tokens that a block worked on. Padding is invalid everywhere.
"""

import torch
from torch import Tensor

from tokendepth.config import ModelConfig
from tokendepth.errors import UserError


class KVCache:
    def __init__(
        self, model: ModelConfig, batch: int, capacity: int, *, layers: int | None = None, like: Tensor
    ) -> None:
        """Room for `capacity` tokens in each of `layers` (those of the model, or `Method.cache_layers`)."""
        layers, width = layers or model.n_layer, model.d_model // model.n_head
        shape = (layers, batch, model.n_head, capacity, width)
        self.keys, self.values = like.new_zeros(shape), like.new_zeros(shape)
        self.valid = like.new_zeros((layers, batch, capacity), dtype=torch.bool)
        self.seen = like.new_zeros(batch, dtype=torch.long)
        """Real tokens so far, per sequence: the position of the next one."""
        self.longest = 0
        """The largest of `seen`, known without asking the device."""
        self.own: dict[int, Tensor] = {}
        """What a method has to remember of the tokens so far beside keys and values, by layer."""
        self.length = 0
        """Columns filled so far, padding included."""

    def append(self, layer: int, keys: Tensor, values: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Store `[batch, head, new, width]` after the columns seen so far; return all keys, values and validity."""
        new = slice(self.length, self.length + keys.shape[2])
        if new.stop > self.keys.shape[3]:
            raise UserError(f"the cache holds {self.keys.shape[3]} tokens, {new.stop} were given; make it larger")
        self.keys[layer, :, :, new], self.values[layer, :, :, new] = keys, values
        self.valid[layer, :, new] = True if valid is None else valid
        return (
            self.keys[layer, :, :, : new.stop],
            self.values[layer, :, :, : new.stop],
            self.valid[layer, :, : new.stop],
        )

    def advance(self, tokens: int, valid: Tensor | None) -> None:
        """Called once per pass, after every layer has appended."""
        self.length += tokens
        self.seen = self.seen + (tokens if valid is None else valid.sum(1))
        self.longest = self.longest + tokens if valid is None else int(self.seen.max())
