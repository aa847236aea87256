"""A forward pass over all slots as one CUDA graph: one launch instead of hundreds, and no host synchronisation."""

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from torch import Tensor

from tokendepth.cache import KVCache
from tokendepth.measure.clock import captured

Found = TypeVar("Found")
Run = Callable[[Tensor, Tensor | None, Tensor | None], Found]
"""Called with tokens, a mask of those that count and thresholds; for one token per slot, as in `decode_one`."""


class _Step(NamedTuple):
    """A captured pass and its static input tensors."""

    given: list[Tensor | None]
    replay: Callable[[], object]


class CapturedPass(Generic[Found]):
    """`run` over `width` tokens of every slot of a `fixed` cache, for a model that `can_be_captured`.

    There is one graph for each combination of with or without a mask, and given thresholds or the model's own. It is
    captured at the first such call. Each call overwrites the result of the previous one.
    """

    def __init__(self, run: Run[Found], cache: KVCache, width: int = 1) -> None:
        assert cache.fixed
        assert cache.slots is None, "a graph is of all slots"
        self._run, self._cache, self._width = run, cache, width
        self._steps: dict[tuple[bool, bool], _Step] = {}

    def __call__(self, tokens: Tensor, counted: Tensor | None = None, thresholds: Tensor | None = None) -> Found:
        given, kind = (tokens, counted, thresholds), (counted is not None, thresholds is not None)
        bounds = list(self._cache.bounds)
        if kind not in self._steps:
            self._steps[kind] = self._captured([None if part is None else part.clone() for part in given])
        step = self._steps[kind]
        for static, part in zip(step.given, given, strict=True):
            if static is not None and part is not None:
                static.copy_(part)
        found: Found = step.replay()  # pyright: ignore[reportAssignmentType] - what `run` returned
        self._cache.bounds[:] = [min(length + self._width, self._cache.capacity) for length in bounds]
        return found

    def _captured(self, given: list[Tensor | None]) -> _Step:
        tokens, counted, thresholds = given
        assert tokens is not None
        cache, lengths = self._cache, self._cache.lengths.clone()
        states = {name: state.clone() for name, state in cache.states.items()}

        def run() -> Found:
            cache.bounds[:] = [0] * len(cache.bounds)  # so the cache need not check for room; `__call__` sets them
            return self._run(tokens, counted, thresholds)

        def restore() -> None:
            """Undo the warm-up passes before a capture. What they wrote beyond the sequences is overwritten later."""
            cache.lengths.copy_(lengths)
            for name, state in states.items():
                cache.states[name].copy_(state)

        replay = captured(run, tokens.device, restore)
        restore()
        return _Step(given, replay)
