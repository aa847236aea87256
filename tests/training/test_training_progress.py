"""No part of training is silent in a log, however long it takes: each part waits here until it is reported."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from rich.console import Console

from tests.test_progress import Heard
from tests.tiny import tiny
from tokendepth import progress as progress_module
from tokendepth.cli.main import parse
from tokendepth.config import BudgetConfig
from tokendepth.errors import UserError
from tokendepth.measure import calibrate as calibrate_module
from tokendepth.runs.run import Run
from tokendepth.training import loop as module
from tokendepth.training.loop import train
from tokendepth.training.ranks import Ranks
from tokendepth.training.step import OptimiserStep


@pytest.fixture
def log(monkeypatch) -> Heard:
    heard = Heard()
    monkeypatch.setattr(progress_module, "console", Console(file=heard, highlight=False))
    monkeypatch.setattr(progress_module, "EVERY_S", 0.01)
    monkeypatch.setattr(progress_module, "_next_line", 0.0)
    return heard


def until_heard(log: Heard, pattern: str, real: Callable) -> Callable:
    """`real`, but it begins only when the log has a line with `pattern`."""

    def waiting(*args: Any, **kwargs: Any) -> Any:
        log.wait_for(pattern)
        return real(*args, **kwargs)

    return waiting


TIMES = r"\d:\d\d:\d\d elapsed"


@pytest.mark.parametrize(
    ("owner", "name", "line"),
    [
        (module.data, "load", rf"^loading text:\S+: {TIMES}$"),
        (module, "check_fits", rf"^preparing run: {TIMES}$"),
        (module, "start", rf"^preparing run: {TIMES}$"),
        (module._Training, "_restore", rf"^preparing run: {TIMES}$"),
        (module, "measure", rf"^run: 4/8 steps, validating, {TIMES}, about \S+ left$"),
        (Run, "save_checkpoint", rf"^run: 4/8 steps, saving, {TIMES}, about \S+ left$"),
        (Run, "finish", rf"^run: 8/8 steps, saving the model, {TIMES}$"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isidentifier() else "",
)
def test_what_takes_long_is_told(owner, name, line, log, tmp_path, monkeypatch):
    monkeypatch.setattr(owner, name, until_heard(log, f"(?m){line}", getattr(owner, name)))
    assert train(tiny(tmp_path), tmp_path / "run").finished


def test_loading_pytorch_is_told(log, tmp_path, monkeypatch):
    """From a slow disk this takes a minute; here it ends with an error, once it is reported."""

    class SlowDisk:
        def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
            return ModuleSpec(name, self) if name == "tokendepth.training.loop" else None

        def create_module(self, spec: ModuleSpec) -> None: ...

        def exec_module(self, module: ModuleType) -> None:
            log.wait_for(rf"(?m)^loading PyTorch: {TIMES}$")
            raise UserError("enough")

    monkeypatch.delitem(sys.modules, "tokendepth.training.loop")
    monkeypatch.setattr(sys, "meta_path", [SlowDisk(), *sys.meta_path])
    with pytest.raises(UserError, match="enough"):
        parse(["train", "demo.tsa", "--out", str(tmp_path / "run")])()


def test_a_long_step_is_told(log, tmp_path, monkeypatch):
    """The fifth step comes after a validation and a save, which are no longer mentioned."""
    real, told = OptimiserStep.finish, []

    def finish(self: OptimiserStep, *, lr: float) -> Any:
        if self.step in (3, 4):
            line = rf"(?m)^run: ({self.step})/8 steps, loss \S+  active \S+  \S+ tokens/s, {TIMES}, about \S+ left$"
            told.append(log.wait_for(line)[1])
        return real(self, lr=lr)

    monkeypatch.setattr(OptimiserStep, "finish", finish)
    train(tiny(tmp_path), tmp_path / "run")
    assert told == ["3", "4"]


def test_compiling_is_told(log, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr("tokendepth.training.step.compile_blocks", lambda model: None)
    monkeypatch.setattr(OptimiserStep, "uncompiled", lambda self: contextlib.nullcontext())
    real, told = OptimiserStep.begin, []

    def begin(self: OptimiserStep, *batch: Any, step: int) -> None:
        if step == 0:
            told.append(log.wait_for(rf"(?m)^run: 0/8 steps, compiling, {TIMES}$"))
        real(self, *batch, step=step)

    monkeypatch.setattr(OptimiserStep, "begin", begin)
    train(tiny(tmp_path, compile="on"), tmp_path / "run")
    assert len(told) == 1


def test_each_batch_of_a_long_validation_is_told(log, tmp_path, monkeypatch):
    real_batches, real_measure = module.batches, module.measure

    def batches(*args: Any) -> Iterator[Any]:
        """The text is short, so they are smaller."""
        for inputs, targets in real_batches(*args):
            yield from zip(inputs.split(4), targets.split(4), strict=True)

    def measure(model: Any, stream: Iterator[Any], forward: Callable) -> Any:
        def slowly() -> Iterator[Any]:
            for number, batch in enumerate(stream):
                total = log.wait_for(rf"validating, {number}/(\d+) batches")[1]
                assert int(total) > 3
                yield batch

        return real_measure(model, slowly(), forward)

    monkeypatch.setattr(module, "batches", batches)
    monkeypatch.setattr(module, "measure", measure)
    train(tiny(tmp_path), tmp_path / "run")


def test_a_long_calibration_is_told(log, tmp_path, monkeypatch):
    """During training, only that it takes place; at the end, when it uses more text, also how far it is."""
    real = calibrate_module.calibrate_on

    def waiting(*args: Any) -> Any:
        log.wait_for(r"4/8 steps, validating|finding thresholds for budget 0.4: 0/\d block passes")
        return real(*args)

    monkeypatch.setattr(calibrate_module, "calibrate_on", waiting)
    train(tiny(tmp_path, BudgetConfig()), tmp_path / "run")
    told = log.getvalue()
    assert told.index("4/8 steps, validating") < told.index("finding thresholds for budget 0.4")


def test_the_others_of_several_ranks_are_quiet(log, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr("tokendepth.training.loop.Ranks.join", lambda device: Ranks())  # no one else to wait for
    train(tiny(tmp_path), tmp_path / "run")
    assert log.getvalue() == ""
