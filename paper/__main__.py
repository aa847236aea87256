"""The paper beside the package: python -m paper reproduce, python -m paper compare, python -m paper pages."""

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from tokendepth.cli.commands.one import LOADING
from tokendepth.cli.main import main, program
from tokendepth.progress import Progress

if TYPE_CHECKING:
    from paper import grid


@dataclass(frozen=True)
class Reproduce:
    """Train, evaluate, time and report the paper, or one table of it. What has its row in results/ is not repeated."""

    table: tyro.conf.Positional[str]
    """all, or one: synthetic, shakespeare, enwik8, penalty, early-exit, wall-clock, batch, training; or scaling."""
    seeds: int = 3
    """How many seeds each, from 0; fewer than three prove nothing."""
    quick: bool = False
    """A miniature of everything on this CPU, one seed: how it works, not what comes out."""
    max_minutes: float | None = None
    """Stop cleanly after this many minutes; the same line goes on."""
    workers: int | None = None
    """Runs at a time; by default up to 8 on a GPU, one for two cores, and 1 on a CPU."""
    out: Path = Path("runs/reproduce")
    """Folder of the run folders."""
    results: Path | None = None
    """Folder of the rows; by default results/, with --quick OUT/results. The page goes to docs/ beside it."""

    def __call__(self) -> None:
        with Progress(LOADING):
            from paper.document import write
            from paper.reproduce import reproduce
        results = self.results or (self.out / "results" if self.quick else Path("results"))
        settings: dict[str, Any] = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        settings["results"] = results
        done = reproduce(**settings)
        with Progress("drawing the page"):
            page = write(results, results.parent / "docs" / "REPRODUCTION.md", quick=self.quick)
        print(page)
        _tell(done)


@dataclass(frozen=True)
class Compared:
    """Of compare: the text on which the methods are compared."""

    corpus: str = "shakespeare"
    """shakespeare: two budgets, three seeds. enwik8: one budget, one seed."""


@dataclass(frozen=True)
class Compare:
    """Every method at the same budgets beside dense models and random routing: two tables, one figure.

    What has its row in results/ is not repeated.
    """

    data: Compared = Compared()
    seeds: int | None = None
    """How many seeds each, from 0; by default as many as the comparison on this corpus has."""
    quick: bool = False
    """A miniature of everything on this CPU, one seed: how it works, not what comes out."""
    max_minutes: float | None = None
    """Stop cleanly after this many minutes; the same line goes on."""
    workers: int | None = None
    """Runs at a time; by default up to 8 on a GPU, one for two cores, and 1 on a CPU."""
    out: Path = Path("runs/compare")
    """Folder of the run folders."""
    results: Path | None = None
    """Folder of the rows; by default results/, with --quick OUT/results. The page goes to docs/ beside it."""

    def __call__(self) -> None:
        with Progress(LOADING):
            from paper.compare import compare
            from paper.comparison import write
        results = self.results or (self.out / "results" if self.quick else Path("results"))
        settings: dict[str, Any] = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        settings |= {"corpus": settings.pop("data").corpus, "results": results}
        done = compare(**settings)
        with Progress("drawing the page"):
            page = write(results, results.parent / "docs" / "COMPARISON.md", quick=self.quick)
        print(page)
        _tell(done)


def _tell(done: "grid.Progress") -> None:
    """What a study could not do."""
    for name, words in done.failed.items():
        print(f"tokendepth: {name} failed: {words}", file=sys.stderr)
    if done.left:
        print(f"out of time: {len(done.left)} left, {done.left[0]} first; repeat the same line to go on")
    if done.failed:
        sys.exit(1)


@dataclass(frozen=True)
class Pages:
    """Make the README's tables, its figures and the pages in docs/ anew from results/: what `make readme` calls."""

    def __call__(self) -> None:
        from benchmarks import speed
        from paper import document, pages, readme, wanted

        docs, results = Path("docs"), Path("results")
        with Progress("making the pages"):
            speed.write(results, docs / "SPEED.md")
            readme.write(Path())
            document.write(results, docs / "REPRODUCTION.md")
            pages.write(results, docs)
            wanted.write(results, docs / "BUDGET.md")


PAPER = program(
    "python -m paper", "The paper reproduced, every method compared, and their pages.", (Reproduce, Compare, Pages)
)

if __name__ == "__main__":
    main(of=PAPER)
