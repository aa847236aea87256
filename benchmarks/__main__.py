"""Programs that write the committed rows in results/: python -m benchmarks faults, python -m benchmarks timings."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tokendepth.cli.main import main, program


@dataclass(frozen=True)
class Faults:
    """The fault-injection suite: kill, fill, damage and poison small runs, and count what is lost."""

    only: str | None = None
    """Names of faults, separated by commas."""
    scale: float = 1.0
    """The share of the full number of attempts, from 0 to 1."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device for the faults that need a GPU."""
    out: Path = Path("runs/faults")
    """Folder for faults.json; --out results replaces the committed rows."""

    def __call__(self) -> None:
        from benchmarks.faults.registry import check_scale, chosen, measure

        chosen(self.only)  # before the progress bar starts
        check_scale(self.scale)
        failed = 0
        for row in measure(self.device, self.out, self.only, self.scale):
            counts = f"{row['attempts']} tried, {row['failed']} failed" if not row["skipped"] else row["skipped"]
            print(f"{row['fault']:<11} {counts}")
            for line in row["failures"]:
                print(f"            {line}")
            failed += row["failed"]
        if failed:
            sys.exit(1)


@dataclass(frozen=True)
class Timings:
    """Time forward passes and training steps on this machine, for all shapes on the pages."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to measure."""
    out: Path = Path("runs/bench")
    """Folder for forward.json and training.json; --out results replaces the committed rows."""

    def __call__(self) -> None:
        from tokendepth.bench import forward, training

        for row in forward.measure(self.device, self.out):
            print(forward.in_words(row))
        for row in training.measure(self.device, self.out):
            print(json.dumps(row))


BENCHMARKS = program("python -m benchmarks", "Write the committed rows in results/.", (Faults, Timings))

if __name__ == "__main__":
    main(of=BENCHMARKS)
