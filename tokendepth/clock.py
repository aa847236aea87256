"""Times that can be compared: conditions in turn, so that drift hits all alike, and nothing left running on a GPU."""

import statistics
import time
from collections.abc import Callable, Hashable
from typing import TypeVar

import torch

Name = TypeVar("Name", bound=Hashable)


def interleaved(
    conditions: dict[Name, Callable[[], object]], repeats: int, device: torch.device, warm_up: int = 3
) -> dict[Name, list[float]]:
    """Milliseconds of every condition, round by round through all of them; the first rounds are not counted."""
    times: dict[Name, list[float]] = {name: [] for name in conditions}
    for repeat in range(warm_up + repeats):
        for name, condition in conditions.items():
            if device.type == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            condition()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if repeat >= warm_up:
                times[name].append(1000 * (time.perf_counter() - start))
    return times


def quartiles(values: list[float]) -> list[float]:
    """[median, lower quartile, upper quartile]"""
    lower, median, upper = statistics.quantiles(values, n=4)
    return [median, lower, upper]


def captured(function: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """On a GPU `function` as one graph launch, as whoever wants speed would run it; elsewhere as it is."""
    if device.type != "cuda":
        return function
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # what is made lazily must not be captured
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = function()

    def replay() -> object:
        graph.replay()
        return kept

    return replay
