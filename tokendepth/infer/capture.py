"""A pass over all slots as one CUDA graph: the host launches one thing, not hundreds, and is not asked meanwhile."""

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from torch import Tensor

from tokendepth.cache import KVCache
from tokendepth.measure.clock import captured

Found = TypeVar("Found")
Run = Callable[[Tensor, Tensor | None, Tensor | None], Found]
"""From the slots' tokens, which of them count, and thresholds; of one token a slot as of `decode_one`."""


class _Step(NamedTuple):
    """A captured pass and the tensors that it reads."""

    given: list[Tensor | None]
    replay: Callable[[], object]


class CapturedPass(Generic[Found]):
    """`run` over `width` tokens of all slots of a `fixed` cache, for a model that `can_be_captured`.

    Captured at the first call of each kind: with tokens that do not count or without, with given thresholds or the
    model's own. What a call returns is overwritten by the next one.
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
            cache.bounds[:] = [0] * len(cache.bounds)  # so that there is room without asking; `__call__` keeps count
            return self._run(tokens, counted, thresholds)

        def restore() -> None:
            """The pass runs a few times before it is captured. What it leaves beyond the sequences is overwritten."""
            cache.lengths.copy_(lengths)
            for name, state in states.items():
                cache.states[name].copy_(state)

        replay = captured(run, tokens.device, restore)
        restore()
        return _Step(given, replay)
