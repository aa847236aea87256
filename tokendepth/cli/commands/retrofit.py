"""The command that adds routers to an existing model."""

import os
from dataclasses import dataclass, fields
from pathlib import Path

import tyro

from tokendepth.cli.commands.one import LOADING
from tokendepth.cli.cores import share_cores
from tokendepth.config import TrainConfig
from tokendepth.progress import Progress
from tokendepth.training.retrofit_options import TRAIN, RetrofitOptions


@dataclass(frozen=True, kw_only=True)
class Retrofit(RetrofitOptions):
    """Add routers to a finished dense model and train it to execute a given share of its blocks' FLOPs.

    Keys and values are computed for skipping tokens too; before training, the model at full budget is unchanged. The
    result is an ordinary run. Controls, trained the same way: --method dense, drop and replace, --router dice.
    """

    model: tyro.conf.Positional[Path]
    """A finished dense run, a Hugging Face folder or a GGUF file."""
    out: Path
    """Run folder."""
    train: TrainConfig = TRAIN
    resume: bool = False
    """Continue the retrofit in --out, or start it if there is none."""

    def __call__(self) -> None:
        share_cores()
        with Progress(LOADING):
            from tokendepth import api
        options = {f.name: getattr(self, f.name) for f in fields(RetrofitOptions)}
        changes = {f"train.{f.name}": getattr(self.train, f.name) for f in fields(self.train)}
        run = api.retrofit(self.model, self.out, changes=changes, resume=self.resume, **options)
        if os.environ.get("RANK", "0") == "0":
            print(f"finished: {run.path}; evaluate it with: tokendepth evaluate {run.path} --curve")
