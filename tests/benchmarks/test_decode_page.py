"""The part of the page about decoding: targets with the result, and `not run` if there is none."""

import pytest

from benchmarks.decode import TARGETS, section
from tokendepth.bench.decode import SHAPES


def row(**changes) -> dict:
    whole = {
        "shape": "d1024", "device": "NVIDIA H200", "batch": 1, "context": 1024, "asked": 0.4, "active_fraction": 0.402,
        "dense_ms": [0.5, 0.4, 0.6], "best_dense": "compiled dense", "sparse_ms": [0.3, 0.2, 0.4],
        "tokens_per_s": 3333.3, "speedup": 1.5, "ceiling": 1.65, "dtype": "bfloat16", "torch": "2.11", "commit": "abc",
    }  # fmt: skip
    return {**whole, **changes}


def lines(rows: list[dict], start: str) -> list[str]:
    return [line for line in section(rows).splitlines() if line.startswith(f"| {start}")]


@pytest.mark.parametrize(
    ("changes", "where", "verdict"),
    [
        ({}, "H200, d 1,024, 24 layers, context 1,024 | 1 | 0.4", "1.50x | 1.50x | 1.65x | met |"),
        ({"speedup": 1.49}, "H200, d 1,024, 24 layers, context 1,024 | 1 |", "1.50x | 1.49x | 1.65x | **missed** |"),
        ({"batch": 8}, "H200, d 1,024, 24 layers, context 1,024 | 8 |", "1.15x | 1.50x | 1.65x | met |"),
        ({"context": 128}, "H200, d 1,024, 24 layers, context 1,024 | 1 |", "1.50x | not run |  |  |"),
        ({"device": "CPU x86_64"}, "H200, d 1,024, 24 layers, context 1,024 | 1 |", "1.50x | not run |  |  |"),
        ({"device": "CPU x86_64", "shape": "gpt2"}, "CPU, d 768", "1.30x | 1.50x | 1.65x | met |"),
    ],
)
def test_targets(changes, where, verdict):
    (line,) = lines([row(**changes)], where)
    assert line.endswith(verdict)


def test_every_row_is_shown_once():
    rows = [row(batch=batch, asked=asked) for batch in (64, 1) for asked in (0.8, 0.4)]
    rows.append(row(shape="a run", asked=None))
    assert [line.split(" | ")[1] for line in lines(rows, "1,024 |")] == ["1", "1", "64", "64", "1"]
    assert "### NVIDIA H200: a run" in section(rows)


def test_targets_are_of_what_the_benchmark_measures():
    for target in TARGETS:
        shape = SHAPES[target.shape]
        assert target.batch in (shape.batches if target.on_gpu else shape.on_cpu)
        assert target.context in shape.contexts
