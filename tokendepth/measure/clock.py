"""Comparable timings: conditions take turns, so that drift affects all equally, and the GPU is idle before each."""

import math
import statistics
import time
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

from tokendepth.progress import Progress

Name = TypeVar("Name", bound=Hashable)


WARM_UP = 3
"""Rounds."""
SHORTEST_MS = 10.0
"""Shortest measurement of CUDA graphs, so that the host's work before the first of several launches hardly counts.

Launching one and noticing its end takes 20 us, and more for a packed pass; that is a lot compared with 0.2 ms.
"""


def interleaved(
    conditions: dict[Name, Callable[[], object]],
    repeats: int,
    device: torch.device,
    warm_up: int = WARM_UP,
    *,
    graphs: bool = False,
    progress: Progress | None = None,
) -> dict[Name, list[float]]:
    """Milliseconds of every condition; each round runs all of them in turn, and the first rounds are not counted.

    With `graphs`, on a GPU, a short condition is called several times in a row and their mean is recorded. The calls do
    not overlap: those that `captured` returns need nothing from the host but their launch, and a packed pass waits for
    the device in the middle. `progress` advances every round.
    """
    several = graphs and device.type == "cuda"
    calls = dict.fromkeys(conditions, 1)
    times: dict[Name, list[float]] = {name: [] for name in conditions}
    for repeat in range(warm_up + repeats):
        for name, condition in conditions.items():
            spent = _timed(condition, calls[name], device)
            if repeat >= warm_up:
                times[name].append(spent)
            elif several:
                calls[name] = math.ceil(SHORTEST_MS / max(spent, 0.001))
        if progress:
            progress.advance()
    return times


def _timed(condition: Callable[[], object], calls: int, device: torch.device) -> float:
    """Mean milliseconds per call."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        condition()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - start) / calls


def quartiles(values: list[float]) -> list[float]:
    """[median, lower quartile, upper quartile]"""
    lower, median, upper = statistics.quantiles(values, n=4)
    return [median, lower, upper]


def captured(
    function: Callable[[], object],
    device: torch.device,
    restore: Callable[[], object] = lambda: None,
    pool: Any = None,
) -> Callable[[], object]:
    """On a GPU, `function` captured as a CUDA graph; elsewhere `function` itself.

    It is first run a few times; `restore` is called after each, to undo its effects. With a memory `pool` shared by
    several graphs, a call returns nothing, since the others overwrite the result.
    """
    if device.type != "cuda":
        return function
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # lazy initialisations must not be captured
        for _ in range(3):
            function()
            restore()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        kept = function()
    if pool is not None:
        kept = None

    def replay(_reads: object = function) -> object:  # keeps alive what the graph reads
        graph.replay()
        return kept

    return replay
