"""Numbers that the host hears of as soon as the device knows them, while the rest of a pass runs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from tokendepth.ops.launch import compiles_inference

_listener: ContextVar[Callable[[Tensor], object] | None] = ContextVar("listener", default=None)


@contextmanager
def heard_by(listener: Callable[[Tensor], object]) -> Iterator[None]:
    """Within it `listener` is called with all that is announced, in order with the device's work and as part of it."""
    before = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(before)


def announced(numbers: Tensor) -> Tensor:
    """A copy of `numbers`: since it is used, a compiler does not drop the announcement."""
    return torch.ops.tokendepth.announced(numbers) if compiles_inference() else _announced(numbers)


def _announced(numbers: Tensor) -> Tensor:
    listener = _listener.get()
    if listener is not None:
        listener(numbers)
    return numbers.clone()


_library = torch.library.Library("tokendepth", "FRAGMENT")
_library.define("announced(Tensor numbers) -> Tensor")
_library.impl("announced", _announced, "CompositeExplicitAutograd")
torch.library.register_fake("tokendepth::announced", torch.empty_like, lib=_library)
