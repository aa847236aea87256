"""The part of docs/SPEED.md on decoding: measured speed, from results/decode.json, with targets."""

from dataclasses import dataclass
from itertools import groupby

from benchmarks.older import older
from tokendepth.report.tables import piped
from tokendepth.runs.results import Row

INTRODUCTION = """One more token for each sequence in a batch, with a cache, compared with the fastest dense decoding of
the same shape: eager, compiled with a fixed-shape cache, or our own kernels with every token active (on a GPU each as a
CUDA graph). A decoding step is limited by reading the weights and the cached keys and values from memory, so here
`ceiling` is the ratio of bytes read, dense to sparse. A block's weights are read if any token in the batch is active
there. With one sequence, skipping saves most of them; with many, hardly any, and what remains to be saved is attention
over long contexts. Decisions are random, drawn anew for each of eight steps. Measured by `tokendepth bench decode`;
generated from `results/decode.json`.
"""
SHAPES = {
    "paper": "d 256, 6 layers",
    "gpt2": "d 768, 12 layers",
    "d1024": "d 1,024, 24 layers",
    "smollm2": "shape of SmolLM2-135M",
}


@dataclass(frozen=True)
class Target:
    """A speedup of at least `value` at an active fraction."""

    on_gpu: bool
    shape: str
    batch: int
    context: int
    fraction: float
    value: float

    def concerns(self, row: Row) -> bool:
        here = (self.on_gpu, self.shape, self.batch, self.context, self.fraction)
        return here == (on_gpu(row), row["shape"], row["batch"], row["context"], row["asked"])

    def line(self, rows: list[Row]) -> list[str]:
        where = f"{'H200' if self.on_gpu else 'CPU'}, {SHAPES[self.shape]}, context {self.context:,}"
        cells = [where, str(self.batch), f"{self.fraction:g}", f"{self.value:.2f}x"]
        row = next((row for row in rows if self.concerns(row)), None)
        if row is None:
            return [*cells, "not run", "", ""]
        verdict = "met" if row["speedup"] >= self.value else "**missed**"
        return [*cells, f"{row['speedup']:.2f}x", f"{row['ceiling']:.2f}x", verdict]


TARGETS = (
    Target(True, "d1024", 1, 1024, 0.4, 1.5),
    Target(True, "d1024", 8, 1024, 0.4, 1.15),
    Target(True, "d1024", 64, 1024, 0.4, 1.15),
    *(Target(True, "paper", 1, 256, fraction, 1.0) for fraction in (0.2, 0.4, 0.6, 0.8)),
    Target(False, "gpt2", 1, 1024, 0.4, 1.3),
)


def section(rows: list[Row]) -> str:
    lines = [["where", "batch", "active", "target", "measured", "ceiling", "result"]]
    lines += [["---", "--:", "--:", "--:", "--:", "--:", "---"], *(target.line(rows) for target in TARGETS)]
    parts = [f"## Decoding\n\n{INTRODUCTION}\n{piped(lines)}"]
    for (device, shape), found in groupby(sorted(rows, key=_place), key=lambda row: (row["device"], row["shape"])):
        parts.append(f"### {device}: {SHAPES.get(shape, shape)}\n\n{_table(list(found))}")
    return "\n".join(parts)


def _place(row: Row) -> tuple:
    known = list(SHAPES).index(row["shape"]) if row["shape"] in SHAPES else len(SHAPES)
    cell = -row["context"], row["batch"], row["asked"] is None, row["asked"] or 0
    return not on_gpu(row), row["device"], known, row["shape"], *cell


def on_gpu(row: Row) -> bool:
    return not row["device"].startswith("CPU")


def _table(rows: list[Row]) -> str:
    lines = [
        ["context", "batch", "active", "dense, ms", "fastest dense", "sparse, ms", "tokens/s", "speedup", "ceiling"]
    ]
    lines.append(["--:", "--:", "--:", "--:", "---", "--:", "--:", "--:", "--:"])
    for row in rows:
        times = f"{row['dense_ms'][0]:.3f}", row["best_dense"], f"{row['sparse_ms'][0]:.3f}"
        ratios = f"{row['tokens_per_s']:,.0f}", f"{row['speedup']:.2f}x", f"{row['ceiling']:.2f}x"
        lines.append([f"{row['context']:,}", str(row["batch"]), f"{row['active_fraction']:.3f}", *times, *ratios])
    commits = " and ".join(dict.fromkeys(row["commit"] for row in rows))
    return piped(lines) + f"\n{rows[0]['dtype']}; torch {rows[0]['torch']}, commit {commits}.\n" + older(rows)
