"""A captured graph on a fake GPU: what it reads must not be freed while it can be replayed."""

import contextlib
import gc
import weakref
from unittest import mock

import pytest
import torch

from tokendepth.measure.clock import captured

GPU = torch.device("cuda")


class Weights:
    """An object that a pass reads."""


@pytest.fixture(autouse=True)
def pools(monkeypatch) -> list:
    """The memory pool of every captured graph."""
    seen = []
    for name in ("Stream", "CUDAGraph", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, mock.MagicMock())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())

    def graph(graph, pool=None):
        seen.append(pool)
        return contextlib.nullcontext()

    monkeypatch.setattr(torch.cuda, "graph", graph)
    return seen


def test_what_a_graph_reads_lives_as_long_as_the_graph():
    read = Weights()
    alive = weakref.ref(read)
    replay = captured(lambda read=read: None, GPU)
    del read
    gc.collect()
    assert alive() is not None
    replay()
    del replay
    gc.collect()
    assert alive() is None


def test_a_pass_is_run_three_times_before_it_is_captured_and_each_is_undone():
    calls = []
    replay = captured(lambda: calls.append("run") or len(calls), GPU, lambda: calls.append("undone"))
    assert calls == ["run", "undone"] * 3 + ["run"]
    assert replay() == 7
    assert len(calls) == 7, "a replay is the graph's"


def test_graphs_that_share_memory_return_nothing(pools):
    assert captured(lambda: "logits", GPU)() == "logits"
    assert captured(lambda: "logits", GPU, pool="shared")() is None
    assert pools == [None, "shared"]


def test_elsewhere_it_is_the_function_itself():
    def function() -> int:
        return 3

    assert captured(function, torch.device("cpu")) is function
