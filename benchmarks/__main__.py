"""The benchmarks beside the package: python -m benchmarks faults."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tokendepth.cli.main import main, program


@dataclass(frozen=True)
class Faults:
    """The fault-injection suite: kill, fill, damage and poison small runs, and count what is lost."""

    only: str | None = None
    """The names of some faults, with commas between them."""
    scale: float = 1.0
    """The part of the full number of attempts, from 0 to 1."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to try the faults that need a GPU."""
    out: Path = Path("runs/faults")
    """Folder of faults.json; --out results makes the committed rows anew."""

    def __call__(self) -> None:
        from benchmarks.faults.registry import measure

        failed = 0
        for row in measure(self.device, self.out, self.only, self.scale):
            counts = f"{row['attempts']} tried, {row['failed']} failed" if not row["skipped"] else row["skipped"]
            print(f"{row['fault']:<11} {counts}")
            for line in row["failures"]:
                print(f"            {line}")
            failed += row["failed"]
        if failed:
            sys.exit(1)


BENCHMARKS = program("python -m benchmarks", "What writes the committed rows of results/.", (Faults,))

if __name__ == "__main__":
    main(of=BENCHMARKS)
