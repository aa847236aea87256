"""KVCache: keys and values of the tokens so far, in slots of fixed shape, one sequence per slot.

Column p of a slot holds the token at position p, so padding takes no room and sequences of different lengths can be
decoded together. Which tokens may be attended to is stored per layer, because methods differ in which tokens provide
keys and values: in TSA every token does, in others only the tokens that a block processes.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tokendepth.config import ModelConfig
from tokendepth.errors import UserError


class KVCache:
    def __init__(
        self,
        model: ModelConfig,
        slots: int,
        capacity: int,
        *,
        layers: int | None = None,
        like: Tensor,
        fixed: bool = False,
        croppable: bool = False,
    ) -> None:
        """`slots` sequences of up to `capacity` tokens in each of `layers` (the model's, or `Method.cache_layers`).

        `fixed`: attention reads all columns at every step, so that no shape depends on the sequence lengths.
        `croppable`: a method's state is kept for every token, so that `crop` can go back to any of them.
        """
        shape = (layers or model.n_layer, slots, model.kv_heads, capacity + 1, model.width)
        # Padding is written to the last column, which is never read.
        self.keys, self.values = like.new_zeros(shape), like.new_zeros(shape)
        self.valid = like.new_zeros((shape[0], slots, capacity + 1), dtype=torch.bool)
        self.lengths = like.new_zeros(slots, dtype=torch.long)
        """Number of tokens in each sequence, which is the position of its next token."""
        self.bounds = [0] * slots
        """The same on the host, without synchronisation: exact, or in a `fixed` cache an upper bound."""
        self.capacity, self.fixed, self.croppable = capacity, fixed, croppable
        self.states: dict[int | str, Tensor] = {}
        """A method's state besides keys and values, `[slots, ...]`, by layer or by name."""
        self.histories: dict[int | str, Tensor] = {}
        """The same after every token, `[slots, capacity + 1, ...]`, if the cache is croppable."""
        self.slots: Tensor | None = None
        """The slots of this view; None: all of them, in order."""
        self._taken: slice | Tensor = slice(None)
        """The same for indexing: a slice if the slots are adjacent, so that reading them does not copy."""
        self._chosen = list(range(slots))
        self._whole = self

    def of(self, slots: Sequence[int]) -> "KVCache":
        """A view of some slots, in that order, as a batch of its own; writes to it go to this cache."""
        view = object.__new__(KVCache)
        vars(view).update(vars(self._whole))
        view.slots, view._chosen = self._index(slots), list(slots)
        first = min(slots, default=0)
        adjacent = view._chosen == list(range(first, first + len(view._chosen)))
        view._taken = slice(first, first + len(view._chosen)) if adjacent else view.slots
        return view

    def free(self, slots: Sequence[int]) -> None:
        """Clear these slots for new sequences."""
        whole, which = self._whole, self._index(slots)
        # Clear only what was written: with a long context a slot takes gigabytes. If cropped, it may have been longer.
        used = whole.capacity if whole.croppable else max((whole.bounds[slot] for slot in slots), default=0)
        whole.lengths[which] = 0
        for columns in (slice(used), slice(whole.capacity, None)):  # padding was written to the last column
            whole.valid[:, which, columns] = False
            for buffer in (whole.keys, whole.values):  # masked columns have weight 0, but 0 * NaN is NaN
                buffer[:, which, :, columns] = 0
        for state in (*whole.states.values(), *whole.histories.values()):
            state[which] = 0
        for slot in slots:
            whole.bounds[slot] = 0

    def crop(self, count: int | Tensor) -> None:
        """Remove the last `count` (a number or `[batch]`) tokens of every sequence, as if they had never been read."""
        counts = count.tolist() if isinstance(count, Tensor) else [count] * self.batch
        shorter = self.seen() - (count if isinstance(count, Tensor) else int(count))
        bounds = self._whole.bounds
        self._shorten(shorter, [bounds[slot] - gone for slot, gone in zip(self._chosen, counts, strict=True)])

    def rewind(self, lengths: Sequence[int]) -> None:
        """As `crop`, to the first `lengths` tokens of each sequence, without host synchronisation."""
        self._shorten(self._index(lengths), list(lengths))

    def _shorten(self, shorter: Tensor, bounds: list[int]) -> None:
        whole, row = self._whole, self._batch(self.batch)
        if whole.states and not whole.croppable:
            raise UserError("this method remembers more than keys and values; make the cache with croppable=True")
        whole.lengths[row] = shorter
        whole.valid[:, row] &= torch.arange(self.capacity + 1, device=row.device) < shorter[:, None]
        for layer, state in whole.states.items():
            there = (shorter > 0).view(-1, *[1] * (state.dim() - 1))
            before = whole.histories[layer][row, (shorter - 1).clamp(min=0)]
            state[row] = torch.where(there, before, torch.zeros_like(before))
        for slot, bound in zip(self._chosen, bounds, strict=True):
            whole.bounds[slot] = bound

    def select(self, slots: Sequence[int]) -> None:
        """Keep only copies of these slots, in this order. A slot may be named more than once, as in beam search."""
        assert self._whole is self, "a view has no slots of its own"
        which = self._index(slots)
        self.keys, self.values, self.valid = (part[:, which] for part in (self.keys, self.values, self.valid))
        self.lengths, self.bounds = self.lengths[which], [self.bounds[slot] for slot in slots]
        for table in (self.states, self.histories):
            for layer in table:
                table[layer] = table[layer][which]
        self._chosen = list(range(len(self.bounds)))

    def reserve(self, capacity: int) -> None:
        """Grow every slot to `capacity` tokens, if it has fewer."""
        assert self._whole is self, "a view has no room of its own"
        more = capacity - self.capacity
        if more <= 0:
            return
        self.keys, self.values = (F.pad(part, (0, 0, 0, more)) for part in (self.keys, self.values))
        self.valid = F.pad(self.valid, (0, more))
        self.valid[:, :, self.capacity] = False  # padding was written there
        for layer, history in self.histories.items():
            self.histories[layer] = F.pad(history, (*[0, 0] * (history.dim() - 2), 0, more))
        self.capacity = capacity

    @property
    def batch(self) -> int:
        return len(self.lengths if self.slots is None else self.slots)

    def seen(self) -> Tensor:
        """`[batch]`: number of tokens in each sequence so far."""
        return self._rows(self.lengths)

    @property
    def longest(self) -> int:
        """The largest of `bounds`."""
        return max((self.bounds[slot] for slot in self._chosen), default=0)

    def bound(self, lengths: Sequence[int]) -> None:
        """Set `bounds`, which may be too high, to the lengths that the caller knows."""
        for slot, length in zip(self._chosen, lengths, strict=True):
            self.bounds[slot] = length

    def needed(self, time: int, valid: Tensor | None, room: int) -> int:
        """Length of the longest sequence after `time` more columns, of which `valid` are real tokens.

        With a mask this synchronises with the device. A `fixed` cache does so only if an upper bound, which it returns
        otherwise, does not fit into `room`.
        """
        at_most = self.longest + time
        if at_most <= room if self.fixed else valid is None:
            return at_most
        return int((self.seen() + (time if valid is None else valid.sum(1))).max())

    def append(
        self, layer: int, keys: Tensor, values: Tensor, columns: Tensor, leaving: Tensor | None, window: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Store `[batch, kv head, new, width]` at `columns`; return the first `window` columns and which may be seen.

        leaving: `[batch, new]`, the tokens that others may attend to; None: all.
        """
        row = self._batch(len(keys))[:, None]
        # Indexed assignment does not convert dtypes, and under autocast keys have a different one.
        self.keys[layer][row, :, columns] = keys.transpose(1, 2).to(self.keys.dtype)
        self.values[layer][row, :, columns] = values.transpose(1, 2).to(self.values.dtype)
        self.valid[layer][row, columns] = torch.ones_like(columns, dtype=torch.bool) if leaving is None else leaving
        k, v = (self._rows(buffer[layer][:, :, :window]) for buffer in (self.keys, self.values))
        return k, v, self._rows(self.valid[layer][:, :window])  # cut first: indexing scattered slots copies

    def append_rows(
        self, layer: int, keys: Tensor, values: Tensor, sequence: Tensor, columns: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Store `[n, kv head, width]` at `columns` `[n]` of the sequences `sequence` `[n]`; return the whole layer.

        For layers whose columns a method numbers itself, for example only the tokens that a block processes.
        """
        row = self._batch(self.batch)[sequence]
        self.keys[layer][row, :, columns] = keys.to(self.keys.dtype)
        self.values[layer][row, :, columns] = values.to(self.values.dtype)
        self.valid[layer][row, columns] = True
        return self._rows(self.keys[layer]), self._rows(self.values[layer])

    def advance(self, time: int, valid: Tensor | None, needed: int) -> None:
        """Called once per forward pass, after every layer has appended, with the result of `needed`."""
        new = torch.full_like(self.seen(), time) if valid is None else valid.sum(1)
        self.lengths.index_add_(0, self._batch(len(new)), new)
        if valid is None or self.fixed:
            known = [min(self.bounds[slot] + time, needed) for slot in self._chosen]
        else:
            known = self.seen().tolist()
        self.bound(known)

    def state(self, layer: int | str, *, like: Tensor) -> Tensor:
        """The stored state of the batch, `[batch, ...]`; at first zeros, shaped `like` that of one sequence."""
        states = self._whole.states
        if layer not in states:
            states[layer] = torch.zeros((len(self.lengths), *like.shape), dtype=like.dtype, device=like.device)
        return self._rows(states[layer])

    def remember(self, layer: int | str, values: Tensor, columns: Tensor) -> None:
        """Store the states `values` `[batch, time, ...]` after the tokens at `columns` `[batch, time]`."""
        whole, row = self._whole, self._batch(len(values))
        whole.states[layer][row] = values[:, -1]
        if whole.croppable:
            if layer not in whole.histories:
                shape = (len(self.lengths), self.capacity + 1, *values.shape[2:])
                whole.histories[layer] = values.new_zeros(shape)
            whole.histories[layer][row[:, None], columns] = values

    def _batch(self, count: int) -> Tensor:
        return torch.arange(count, device=self.lengths.device) if self.slots is None else self.slots

    def _index(self, slots: Sequence[int]) -> Tensor:
        return torch.tensor(list(slots), dtype=torch.long, device=self.lengths.device)

    def _rows(self, buffer: Tensor) -> Tensor:
        return buffer[self._taken]
