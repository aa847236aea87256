"""The command that shows which tokens get the depth."""

import dataclasses
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from tokendepth.cli.commands.one import LOADING
from tokendepth.cli.cores import share_cores
from tokendepth.progress import Progress


@dataclass(frozen=True)
class Analyse:
    """Show which tokens get the depth in finished runs: by kind of token, surprisal, position (docs/ANALYSE.md)."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """A run folder, or several with the same config and different seeds."""
    out: Path = Path("analysis")
    """Folder for analysis.html, analysis.md, analysis.json and figures/."""
    split: Literal["val", "test"] = "val"
    """Which split to analyse."""
    tokens: int | None = None
    """Analyse only this many tokens from the start of the split; by default all."""
    corpus: str | None = None
    """A text other than the runs' own, as text:PATH."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run."""

    def __call__(self) -> None:
        share_cores()
        from tokendepth.report.analysis import write_analysis
        from tokendepth.report.folder import check_extra

        check_extra()
        with Progress(LOADING):
            from tokendepth.analysis import analyse
        settings = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("runs", "out")}
        tree = analyse(self.runs, **settings, show=True)
        with Progress("drawing the figures"):
            page = write_analysis(tree, self.out)
        for sentence in tree["summary"]:
            print(textwrap.fill(sentence, 100), end="\n\n")
        print(f"Tables and figures: {page}")
