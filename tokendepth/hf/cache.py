"""DepthCache: the native cache with the interface that `generate()` expects.

The caches of transformers hold keys and values of every token in every layer. Here a layer may hold only some tokens,
and methods store more than keys and values, so those caches cannot be used.

For transformers, a cache's length counts columns of the batch including padding, but the native cache does not store
padding. This class counts the columns and keeps track of which were padding.
"""

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from tokendepth.cache import KVCache
from tokendepth.errors import UserError
from tokendepth.model import LanguageModel
from tokendepth.trace import DepthTotals, DepthTrace, add_up

SMALLEST = 64
"""Initial capacity of a growing cache, in tokens."""


class DepthCache(Cache):
    def __init__(self, model: LanguageModel, capacity: int | None = None, *, croppable: bool = False) -> None:
        """`capacity`: fixed size in tokens, for a static cache; None: the cache grows.

        `croppable`: keep the states that `crop` may have to restore, for assisted decoding.
        """
        super().__init__(layers=[])
        self.capacity, self.croppable = capacity, croppable
        self.native: KVCache | None = None
        """Created with the first batch, which gives the number of sequences."""
        self._like, self._layers = model.norm.weight.detach(), model.method.cache_layers
        self._config = model.config
        self._columns = 0
        self._padding: list[tuple[int, Tensor]] = []
        """For each pass with padding: its first column, and a mask `[batch, time]`, True at padding."""
        self.traces: list[DepthTrace] = []
        """Traces of the passes called with `output_depth`."""

    def room_for(self, batch: int, new: int) -> KVCache:
        """The native cache, with room for `new` more tokens in each of `batch` sequences, up to the context."""
        context, wanted = self._config.context, (0 if self.native is None else self.native.longest) + new
        if self.native is None:
            capacity = self.capacity or min(context, max(SMALLEST, wanted))
            self.native = KVCache(
                self._config, batch, capacity, layers=self._layers, like=self._like,
                fixed=self.capacity is not None, croppable=self.croppable,
            )  # fmt: skip
        if self.native.batch != batch:
            raise UserError(f"the cache holds {self.native.batch} sequences, {batch} were given; begin a new cache")
        if self.capacity is None and wanted > self.native.capacity:
            self.native.reserve(min(context, max(2 * self.native.capacity, wanted)))
        return self.native

    def advance(self, time: int, valid: Tensor | None) -> None:
        """Call after each pass of `time` columns. `valid`: mask of columns that are not padding; None: all."""
        if valid is not None:
            self._padding.append((self._columns, ~valid))
        self._columns += time

    def spent(self) -> DepthTotals:
        """Total cost of the passes called with `output_depth`."""
        if not self.traces:
            raise UserError("no pass recorded its depth; call the model with output_depth=True")
        return add_up([trace.totals() for trace in self.traces])

    # -- interface of transformers

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1 if self.capacity is None else self.capacity

    get_max_cache_shape = get_max_length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self._columns + query_length, 0

    def reset(self) -> None:
        if self.native is not None:
            self.native.free(range(self.native.batch))
        self._padding, self._columns, self.traces = [], 0, []

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.native is not None:
            self.native.select(indices.tolist())
        self._padding = [(start, padding[indices.to(padding.device)]) for start, padding in self._padding]

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.native is not None:
            self.batch_select_indices(torch.arange(self.native.batch).repeat_interleave(repeats))

    def activate_past_recording(self) -> None:
        if self.native is None:
            self.croppable = True

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last columns; negative as in transformers: -2 removes two."""
        tokens_to_remove = int(tokens_to_remove)  # some versions pass a tensor
        if tokens_to_remove > 0:
            raise UserError(f"crop was given {tokens_to_remove}; expected minus the number of tokens to forget")
        if tokens_to_remove == 0 or self.native is None:
            return
        left = max(0, self._columns + tokens_to_remove)
        gone: int | Tensor = self._columns - left
        for start, padding in self._padding:
            gone = gone - padding[:, max(0, left - start) :].sum(1)
        self.native.crop(gone)
        self._padding = [(start, padding[:, : left - start]) for start, padding in self._padding if start < left]
        self._columns = left

    @property
    def batch_size(self) -> int:
        return -1 if self.native is None else self.native.batch

    max_batch_size = batch_size

    @property
    def is_compileable(self) -> bool:
        """No: the native cache tracks lengths on the host, so `generate()` must not compile."""
        return False

    @property
    def is_initialized(self) -> bool:
        return self.native is not None

    @property
    def is_croppable(self) -> bool:
        return self.croppable

    @property
    def is_sliding(self) -> list[bool]:
        return [False]

    def __len__(self) -> int:
        return self._layers
