"""docs/SPEED.md and the table of trained models in docs/RESULTS.md: measured speed, from results/forward.json, with
targets. `decode.py` has the part on decoding.
"""

from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from benchmarks import decode
from benchmarks.older import older
from tokendepth.report.tables import piped
from tokendepth.runs.files import write_bytes
from tokendepth.runs.results import Row, rows_so_far

INTRODUCTION = """# Measured speed

The time of a forward pass that skips what its routers decide to skip, compared with the fastest dense run of the same
shape without routers. Dense candidates are eager, compiled, with packed weights (on a CPU), in a CUDA graph, and our
own kernels at full activity (with every token active). Both sides include the output head, and the sparse side also
its routers and the listing of active tokens. Active tokens are at scattered positions. Before timing, results were
checked against masking. Conditions take turns in one process; times are medians.

    efficiency = (speedup - 1) / (ceiling - 1)

`ceiling` is the ratio of FLOPs, dense to executed: the speedup that arithmetic allows. `auto` is the execution that a
measured profile chooses, with its speedup over the same weights run with masks. Measured by `tokendepth bench
forward`; generated from [results/forward.json](../results/forward.json) by `make readme`.
"""


@dataclass(frozen=True)
class Target:
    """A speedup or an efficiency of at least `value`, at active fractions from `least` to `most`."""

    shape: str
    on_gpu: bool
    batches: tuple[int, ...]
    least: float
    most: float
    figure: str
    value: float

    def concerns(self, row: Row) -> bool:
        here = (row["shape"], _on_gpu(row)) == (self.shape, self.on_gpu) and row["batch"] in self.batches
        return here and self.least <= row["asked"] <= self.most

    def met(self, row: Row) -> bool:
        return row[self.figure] is not None and row[self.figure] >= self.value

    @property
    def words(self) -> str:
        return f"{self.value:.2f}x" if self.figure == "speedup" else f"efficiency {self.value:g}"


_LARGE = (("gpt2", (16,)), ("d1024", (8,)))
TARGETS = (
    *(Target(shape, True, batches, 0, 0.6, "efficiency", 0.85) for shape, batches in _LARGE),
    *(Target(shape, True, batches, 0.6001, 0.8, "speedup", 1.0) for shape, batches in _LARGE),
    Target("smollm2", True, (8,), 0, 0.7, "efficiency", 0.85),
    Target("paper", True, (64,), 0.726, 0.726, "speedup", 1.12),
    Target("paper", True, (64,), 0.4, 0.4, "speedup", 1.4),
    Target("paper", True, (64,), 0.1, 0.1, "speedup", 1.8),
    Target("paper", True, (8,), 0.4, 0.4, "speedup", 1.1),
    Target("paper", True, (1, 8), 0, 0.6, "speedup", 1.0),
    Target("paper", False, (1, 8, 64), 0, 0.6, "efficiency", 0.8),
    Target("paper", False, (1, 8, 64), 0.8, 0.8, "speedup", 1.0),
)
"""The first one that concerns a row counts."""
SHAPES = {
    "paper": "d 256, 6 layers, vocabulary 6,064, context 256",
    "gpt2": "d 768, 12 layers, vocabulary 50,304, context 1,024",
    "d1024": "d 1,024, 24 layers, vocabulary 50,304, context 1,024",
    "smollm2": "shape of SmolLM2-135M (d 576, 30 Llama-style layers), vocabulary 49,152, context 1,024",
}


TRAINING_TARGETS = {"d1024 L24 V50304, 8x1024": 0.75}
"""By shape: the time of a step that skips, as a share of the dense step, on a GPU."""


def page(rows: list[Row], training: list[Row], decoding: list[Row]) -> str:
    parts = [INTRODUCTION]
    if trained := [row for row in rows if row["positions"] == "trained"]:
        parts.append(f"## Trained models with their own decisions\n\n{headline(trained)}")
    at_random = [row for row in rows if row["positions"] == "random"]
    for (device, shape), found in groupby(sorted(at_random, key=_place), key=lambda row: (row["device"], row["shape"])):
        parts.append(f"## {device}: {SHAPES[shape]}\n\n{_table(list(found))}")
    if chosen := [row for row in rows if row["execution"] == "sparse"]:
        parts.append(f"## What `auto` chooses\n\nIts lowest speedup over all rows above:\n\n{_auto(chosen)}")
    parts.append(decode.section(decoding))
    if steps := [row for row in training if "budget_ratio" in row]:
        parts.append(f"## An optimiser step that skips\n\n{_STEPS}\n{_steps(steps)}")
    return "\n".join(parts)


_STEPS = """Budget routing at budget 0.4, trained for that budget only, with one forward pass per step. The output
projection, the feed-forward and, since commit 5be72f6, the queries are computed only for active tokens, of which
there is a fixed number. Timed in turns with the dense step in one process (median and quartiles) by `tokendepth bench
training`. The rest of the time ([log](LOG.md)): attention is computed for all rows, and the optimiser updates all
weights.
"""


AUTO_TARGETS = {"auto_over_hard": ("the same weights run densely", 0.98), "auto_over_dense": ("dense", 0.95)}


def _auto(rows: list[Row]) -> str:
    """For each device the lowest speedup of the choice, over the same weights and over a model without routers."""
    lines = [["device", "compared with", "lowest speedup", "where", "target"], ["---", "---", "--:", "---", "---"]]
    for device in dict.fromkeys(row["device"] for row in sorted(rows, key=_on_gpu, reverse=True)):
        for figure, (words, target) in AUTO_TARGETS.items():
            worst = min((row for row in rows if row["device"] == device), key=lambda row: row[figure])
            where = f"{worst['shape']}, batch {worst['batch']}, active {worst['active_fraction']:.3f}"
            verdict = f"{target:.2f}x: {'met' if worst[figure] >= target else '**missed**'}"
            lines.append([device, words, f"{worst[figure]:.3f}x", where, verdict])
    return piped(lines)


def _steps(rows: list[Row]) -> str:
    lines = [["device", "shape", "dense, ms", "skipping, ms", "skipping / dense", "target", "commit"]]
    lines.append(["---", "---", "--:", "--:", "--:", "---", "---"])
    for row in rows:
        ratio, target = row["budget_ratio"], TRAINING_TARGETS.get(row["shape"]) if _on_gpu(row) else None
        verdict = "" if target is None else f"{target:g}: {'met' if ratio[0] <= target else '**missed**'}"
        times = [f"{row[name][0]:.2f}" for name in ("dense_ms", "budget_ms")]
        spread = "{:.3f} ({:.3f} to {:.3f})".format(*ratio)
        lines.append([f"{row['device']}, {row['dtype']}", row["shape"], *times, spread, verdict, row["commit"]])
    return piped(lines)


def _place(row: Row) -> tuple:
    return not _on_gpu(row), row["device"], list(SHAPES).index(row["shape"]), row["batch"], row["asked"]


def _on_gpu(row: Row) -> bool:
    return not row["device"].startswith("CPU")


def _table(rows: list[Row]) -> str:
    titles = ["batch", "active", "dense, ms", "fastest dense", "sparse, ms", "speedup", "ceiling", "efficiency",
              "target", "auto"]  # fmt: skip
    lines = [titles, ["--:" if title not in ("fastest dense", "target") else "---" for title in titles]]
    lines += [_line(row) for row in rows]
    commits = " and ".join(dict.fromkeys(row["commit"] for row in rows))
    about = f"{rows[0]['dtype']}; torch {rows[0]['torch']}, commit {commits}"
    if count := len(rows[0].get("speedup_processes", ())):
        about += f"; for each batch size the median of {count} processes"
    return piped(lines) + f"\n{about}.\n" + older(rows)


def _line(row: Row) -> list[str]:
    target = next((target for target in TARGETS if target.concerns(row)), None)
    verdict = "" if target is None else f"{target.words}: {'met' if target.met(row) else '**missed**'}"
    efficiency = "" if row["efficiency"] is None else f"{row['efficiency']:.2f}"
    return [
        str(row["batch"]), f"{row['active_fraction']:.3f}", f"{row['dense_ms'][0]:.2f}", row["best_dense"],
        f"{row['sparse_ms'][0]:.2f}", f"{row['speedup']:.2f}x", f"{row['ceiling']:.2f}x", efficiency, verdict,
        f"{row['auto']}, {row['auto_over_hard']:.2f}x",
    ]  # fmt: skip


def headline(rows: list[Row]) -> str:
    """One line for each trained model and execution; all figures in a line are from one checkpoint."""
    devices = sorted({row["device"] for row in rows}, key=lambda device: not device.startswith("CPU"))
    batches = sorted({row["batch"] for row in rows})
    speeds = [f"speed on {device}, batch {' / '.join(map(str, batches))}" for device in devices]
    lines = [["model", "execution", "validation loss", "work skipped", "FLOPs skipped", *speeds]]
    lines.append(["---", "---", *("--:" for _ in lines[0][2:])])
    found: dict[tuple, dict[tuple, Row]] = {}
    for row in rows:
        key = (row["run"], row["checkpoint"], row["execution"], row["asked"])
        found.setdefault(key, {})[row["device"], row["batch"]] = row
    order = {"dense": 0, "tsa": 1}
    for key in sorted(found, key=lambda key: _order(key, found[key], order)):
        cells, (run, _, execution, budget) = found[key], key
        one = next(iter(cells.values()))
        skipping = "skipping" if budget is None else f"skipping, budget {budget:g}"
        how = {"soft": "soft: gates as weights", "sparse": skipping}
        skipped = [one.get(f"val_{name}", one[name]) for name in ("tlops_skipped", "flops_skipped")]
        measured = [[cells.get((device, batch)) for batch in batches] for device in devices]
        speed = [" / ".join("—" if row is None else f"{row['speedup']:.2f}x" for row in line) for line in measured]
        label = "dense" if one["method"] == "dense" else how[execution]
        part = f" (first {one['val_tokens']:,} tokens)" if "val_tokens" in one else ""
        lines.append(
            [run, label, f"{one['val_loss']:.4f}{part}", *(f"{100 * share:.1f}%" for share in skipped), *speed]
        )
    return piped(lines) + older(rows)


def _order(key: tuple, cells: dict, order: dict[str, int]) -> tuple:
    run, checkpoint, execution, budget = key
    method = next(iter(cells.values()))["method"]
    return order.get(method, 2), run, checkpoint, execution != "soft", -(budget or 0)


def write(results: Path, page_path: Path) -> None:
    write_bytes(page_path, page(*rows_of(results)).encode())


def rows_of(results: Path) -> tuple[list[Row], list[Row], list[Row]]:
    """The rows for `page`; none if a file is missing."""
    paths = [results / f"{name}.json" for name in ("forward", "training", "decode")]
    forward, training, decoding = (rows_so_far(path) for path in paths)
    return forward, training, decoding
