"""The page about speed: never stale, targets with the result, one checkpoint per line."""

from pathlib import Path

import pytest

from benchmarks.__main__ import BENCHMARKS
from benchmarks.speed import TARGETS, headline, page, rows_of
from tokendepth.cli.main import parse

ROOT = Path(__file__).resolve().parents[2]


def row(**changes) -> dict:
    whole = {
        "positions": "random", "run": None, "shape": "paper", "device": "NVIDIA H200", "batch": 64, "asked": 0.4,
        "active_fraction": 0.401, "execution": "sparse", "dense_ms": [1.0, 0.9, 1.1], "sparse_ms": [0.7, 0.6, 0.8],
        "best_dense": "compiled dense", "speedup": 1.43, "ceiling": 1.48, "efficiency": 0.9, "auto": "sparse",
        "auto_over_hard": 1.5, "auto_over_dense": 1.43,
        "tlops_skipped": 0.5, "flops_skipped": 0.33, "dtype": "bfloat16", "torch": "2.11",
        "commit": "abc",
    }  # fmt: skip
    return {**whole, **changes}


def test_the_page_is_not_stale():
    made = page(*rows_of(ROOT / "results"))
    assert made == (ROOT / "docs/SPEED.md").read_text(encoding="utf-8"), "stale: run make readme"


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "1.40x: met"),
        ({"speedup": 1.39}, "1.40x: **missed**"),
        ({"asked": 0.726, "speedup": 1.12}, "1.12x: met"),
        ({"asked": 0.8}, ""),
        ({"batch": 8}, "1.10x: met"),
        ({"batch": 1, "speedup": 0.99}, "1.00x: **missed**"),
        ({"shape": "gpt2", "batch": 16, "efficiency": 0.84}, "efficiency 0.85: **missed**"),
        ({"shape": "d1024", "batch": 8, "asked": 0.8}, "1.00x: met"),
        ({"device": "CPU x86_64", "efficiency": 0.81}, "efficiency 0.8: met"),
        ({"device": "CPU x86_64", "efficiency": None, "asked": 0.8, "speedup": 1.0}, "1.00x: met"),
    ],
)
def test_targets(changes, verdict):
    (line,) = (line for line in page([row(**changes)], [], []).splitlines() if "compiled dense" in line)
    assert line.split(" | ")[8] == verdict


@pytest.mark.parametrize(
    ("device", "ratio", "verdict"),
    [("NVIDIA H200", 0.75, "0.75: met"), ("NVIDIA H200", 0.751, "0.75: **missed**"), ("CPU x86_64", 0.7, "")],
)
def test_a_training_step_that_skips(device, ratio, verdict):
    step = {
        "shape": "d1024 L24 V50304, 8x1024", "device": device, "dtype": "bfloat16", "commit": "abc",
        "dense_ms": [40.0, 39.0, 41.0], "budget_ms": [30.0, 29.0, 31.0], "budget_ratio": [ratio, 0.7, 0.8],
    }  # fmt: skip
    text = page([], [step, {"benchmark": "whole run"}], [])
    (line,) = (line for line in text.splitlines() if "8x1024" in line)
    assert line.split(" | ")[2:6] == ["40.00", "30.00", f"{ratio:.3f} (0.700 to 0.800)", verdict]


def test_auto_is_judged_by_its_worst_row():
    rows = [row(), row(asked=0.5, active_fraction=0.5, auto_over_hard=0.979), row(asked=0.8, auto_over_dense=0.95)]
    worst = [line for line in page(rows, [], []).splitlines() if line.startswith("| NVIDIA H200 |")]
    assert worst == [
        "| NVIDIA H200 | the same weights run densely | 0.979x | paper, batch 64, active 0.500 | 0.98x: **missed** |",
        "| NVIDIA H200 | dense | 0.950x | paper, batch 64, active 0.401 | 0.95x: met |",
    ]


def test_no_target_is_for_a_shape_that_is_not_there():
    shapes = {"paper": (1, 8, 64), "gpt2": (16,), "d1024": (8,), "smollm2": (1, 8, 64)}
    assert all(set(target.batches) <= set(shapes[target.shape]) for target in TARGETS)


def test_a_line_for_each_model_and_way_to_execute_it():
    trained = {"positions": "trained", "val_loss": 1.5, "asked": None, "checkpoint": "one"}
    skipped = {"val_tlops_skipped": 0.51, "val_flops_skipped": 0.41}
    rows = [
        row(**trained, run="b", method="budget", **skipped) | {"asked": 0.4},
        row(**trained, run="b", method="budget", **skipped) | {"asked": 0.7, "val_loss": 1.4},
        row(**trained, run="t", method="tsa", execution="soft") | {"tlops_skipped": 0.0, "flops_skipped": -0.01},
        row(**trained, run="t", method="tsa", **skipped) | {"val_loss": 2.2},
        row(**trained, run="d", method="dense") | {"tlops_skipped": 0.0, "flops_skipped": 0.0, "speedup": 1.0},
        row(**trained, run="d", method="dense", device="CPU") | {"batch": 1, "speedup": 0.5},
    ]
    _, _, *lines = headline(rows).splitlines()
    assert lines == [
        "| d | dense | 1.5000 | 0.0% | 0.0% | 0.50x / — | — / 1.00x |",
        "| t | soft: gates as weights | 1.5000 | 0.0% | -1.0% | — / — | — / 1.43x |",
        "| t | skipping | 2.2000 | 51.0% | 41.0% | — / — | — / 1.43x |",
        "| b | skipping, budget 0.7 | 1.4000 | 51.0% | 41.0% | — / — | — / 1.43x |",
        "| b | skipping, budget 0.4 | 1.5000 | 51.0% | 41.0% | — / — | — / 1.43x |",
    ]


def test_a_loss_of_a_part_of_the_text_says_so():
    shown = {"positions": "trained", "run": "d", "method": "dense", "asked": None}
    found = headline([row(**shown, checkpoint="one", val_loss=1.5, val_tokens=8192)])
    assert "| 1.5000 (first 8,192 tokens) |" in found


def test_two_checkpoints_of_one_name_are_two_lines():
    shown = {"positions": "trained", "run": "d", "method": "dense", "asked": None}
    rows = [row(**shown, checkpoint=name, val_loss=loss, device=name) for name, loss in (("CPU", 1.5), ("GPU", 1.9))]
    _, _, *lines = headline(rows).splitlines()
    assert [line.split(" | ")[2] for line in lines] == ["1.5000", "1.9000"]


@pytest.mark.parametrize("command", ["faults", "timings"])
def test_committed_rows_are_written_only_where_that_is_asked_for(command):
    assert parse([command], BENCHMARKS).out.parts[0] == "runs"
    assert parse([command, "--out", "results"], BENCHMARKS).out == Path("results")
