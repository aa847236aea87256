"""What must not depend on how a run was cut: by a stop, by ranks, by accumulation; and numbers that are none."""

import hashlib
import math
import os
import shutil
import signal
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.faults.outcome import Outcome, Tell, max_difference, subject
from benchmarks.faults.processes import Server, check_killed
from benchmarks.faults.stopped import at_step, stopped_run
from tokendepth import data
from tokendepth.config import DataConfig, TSAConfig, override
from tokendepth.errors import UserError
from tokendepth.runs.files import deserialize
from tokendepth.runs.run import Run
from tokendepth.training.loop import train


def resume(folder: Path, count: int, tell: Tell) -> Outcome:
    """A run of `count` steps, killed before each of them in turn and resumed by another process; dropout on."""
    outcome, largest = Outcome(), 0.0
    config = subject(folder, steps=count)
    with Server(folder) as server:
        expected = server.finish(config, folder / "expected")
        for step in range(count):
            run = Run(folder / f"stopped-{step}")
            with outcome.attempt(run.name):
                child = server.start(config, run.path, action="kill", step=step)
                code = child.exit_code()
                outcome.check(code == -signal.SIGKILL, f"{run.name}: exit code {code}")
                check_killed(outcome, run, child)
                outcome.compare(server.finish(config, run.path), expected)
                largest = max(largest, max_difference(run, expected))
            tell(outcome.attempts, count)
    outcome.figures["max difference"] = largest
    return outcome


def gpu_resume(folder: Path, count: int, tell: Tell) -> Outcome:
    """On a GPU, in bfloat16 with a CUDA graph, as written and compiled, with PyTorch's deterministic algorithms."""
    outcome = Outcome()
    if not torch.cuda.is_available():
        outcome.skipped = "no GPU on this machine"
        return outcome
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # read when cuBLAS is first used
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            for compiled in ("off", "on"):
                _gpu_resume(folder / compiled, count, compiled, outcome, tell)
        alerts = {str(w.message).split(". ")[0] for w in heard if "deterministic" in str(w.message)}
        outcome.figures["not deterministic in PyTorch"] = sorted(alerts)
    finally:
        torch.use_deterministic_algorithms(False)
    return outcome


def _gpu_resume(folder: Path, count: int, compiled: str, outcome: Outcome, tell: Tell) -> None:
    steps = 60
    config = subject(folder, steps=steps, device="cuda", dtype="auto", compile=compiled, batch_size=32, eval_every=20)
    config = replace(config, model=replace(config.model, d_model=128, n_head=8, d_ff=256, context=128))

    def trained(name: str) -> Run:
        torch.compiler.reset()  # a process of its own would have to compile too
        return train(config, folder / name, resume=True, show=False)

    expected, again = trained("expected"), trained("again")
    largest = 0.0
    for number in range(count):
        step = 1 + number * (steps - 2) // max(count - 1, 1)
        run = stopped_run(config, folder / f"stopped-{step}", step)
        trained(run.name)
        largest = max(largest, max_difference(run, expected))
        outcome.compare(run, expected)
        outcome.attempts += 1
        tell(outcome.attempts, 2 * count)
    kind = "compiled" if compiled == "on" else "as written"
    outcome.figures[f"max difference, {kind}"] = largest
    outcome.figures[f"max difference of two undisturbed runs, {kind}"] = max_difference(again, expected)


def finished(folder: Path, count: int, tell: Tell) -> Outcome:
    """A finished run is resumed: no file changes, none appears."""
    outcome = Outcome()
    config = subject(folder, steps=3)
    run = train(config, folder / "run", show=False)
    before = _state(run.path)
    for number in range(count):
        with outcome.attempt(f"resume {number}"):
            train(config, run.path, resume=True, show=False)
            outcome.check(_state(run.path) == before, "a file changed")
        tell(outcome.attempts, count)
    return outcome


FOREIGN = ("seed=1", "lr=0.02", "weight_decay=0", "clip=2", "decay=all", "accumulate=2")
"""By what a run may differ from another whose checkpoints have the same shapes."""


def foreign(folder: Path, count: int, tell: Tell) -> Outcome:
    """The checkpoints of another run in the place of a stopped one's: refused, and the run's own put back serve it."""
    outcome = Outcome()
    config = subject(folder, steps=8)
    expected = train(config, folder / "expected", show=False)
    stopped = stopped_run(config, folder / "stopped", 6)
    for change in FOREIGN[:count]:
        with outcome.attempt(change):
            key, _, value = change.partition("=")
            other = stopped_run(override(config, {f"train.{key}": value}), folder / f"other-{key}", 6)
            run = Run(shutil.copytree(stopped.path, folder / f"run-{key}"))
            shutil.rmtree(run.checkpoints)
            shutil.copytree(other.checkpoints, run.checkpoints)
            before = _state(run.path)
            try:
                train(config, run.path, resume=True, show=False)
                outcome.check(False, f"{change}: accepted")
            except UserError as error:
                outcome.check("is of another run" in str(error), f"{change}: {error}")
                outcome.said([str(error)], run.path)
            outcome.check(_state(run.path) == before, f"{change}: a file changed")
            shutil.rmtree(run.checkpoints)
            shutil.copytree(stopped.checkpoints, run.checkpoints)
            outcome.compare(train(config, run.path, resume=True, show=False), expected)
        tell(outcome.attempts, count)
    return outcome


def _state(folder: Path) -> dict[str, tuple[str, int]]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(p): (hashlib.sha256(p.read_bytes()).hexdigest(), p.stat().st_mtime_ns) for p in files}


# --- ranks and accumulation -------------------------------------------------------------------------------------------

LAYOUTS = [(world, parts) for world, parts in product((1, 2, 4), (1, 2, 4, 8, 16)) if world * parts <= 16]
GRADIENT_TOLERANCE = 1e-5


def layouts(folder: Path, count: int, tell: Tell) -> Outcome:
    """What the depth penalty adds to the routers' gradient, for a batch of 16 cut over ranks and accumulation."""
    outcome, largest = Outcome(), 0.0
    chosen = LAYOUTS[:: max(1, len(LAYOUTS) // count)] if count < len(LAYOUTS) else LAYOUTS
    with Server(folder) as server:
        expected: dict[str, np.ndarray] = {}
        for world, accumulate in chosen:
            name = f"{world} ranks x {accumulate}"
            with outcome.attempt(name):
                found = _of_penalty(server, folder, world, accumulate)
                expected = expected or found
                size = math.sqrt(sum(float((g**2).sum()) for g in expected.values()))
                apart = math.sqrt(sum(float(((found[n] - g) ** 2).sum()) for n, g in expected.items())) / size
                outcome.check(size > 0 and apart <= GRADIENT_TOLERANCE, f"{name}: {apart}")
                largest = max(largest, apart)
            tell(outcome.attempts, len(chosen))
    outcome.figures["largest relative difference"] = largest
    return outcome


def _of_penalty(server: Server, folder: Path, world: int, accumulate: int) -> dict[str, np.ndarray]:
    gradients = []
    for penalty in (0.1, 0.0):
        config = subject(folder, batch_size=16, accumulate=accumulate, clip=1e9)
        config = replace(config, method=TSAConfig(penalty), model=replace(config.model, dropout=0.0))
        out = folder / f"gradient-{world}-{accumulate}-{penalty}.safetensors"
        child = server.start(config, out, do="gradient", world=world)
        code = child.exit_code()
        assert code == 0, f"exit code {code}: {child.said}"
        gradients.append({name: g.astype(np.float64) for name, g in deserialize(out).items() if "router" in name})
    whole, of_task = gradients
    return {name: whole[name] - of_task[name] for name in whole}


def data_order(folder: Path, count: int, tell: Tell) -> Outcome:
    """The sequences of a step are the same for 1, 2 and 4 ranks, in whichever order the steps are asked for.

    Asked of the dataset for `count` steps, and of trainings with that many ranks, each a process, for STEPS_OF_RANKS.
    """
    outcome = Outcome()
    text = subject(folder).data
    corpora = [text, replace(text, tokens="byte"), DataConfig("copy", source_length=5)]
    steps_of_ranks = min(count, STEPS_OF_RANKS)
    total = 2 * len(corpora) * (count + steps_of_ranks)
    with Server(folder) as server:
        for number, corpus in enumerate(corpora):
            dataset = data.load(corpus)
            first = [_global_batch(dataset, step, 1) for step in range(count)]
            outcome.check(len({batch[0].tobytes() for batch in first}) == count, f"{corpus.corpus}: two steps alike")
            for world in (2, 4):
                for step in reversed(range(count)):
                    with outcome.attempt(f"{corpus.corpus}: step {step} for {world} ranks"):
                        same = all(map(np.array_equal, _global_batch(dataset, step, world), first[step]))
                        outcome.check(same, f"{corpus.corpus}: step {step} for {world} ranks")
                config = replace(subject(folder, steps=steps_of_ranks, batch_size=BATCH), data=corpus)
                out = folder / f"ranks-{number}-{world}"
                with outcome.guard(f"{corpus.corpus}: {world} processes"):
                    code = server.start(config, out, do="batches", world=world).exit_code()
                    outcome.check(code == 0, f"{corpus.corpus}: {world} processes ended with code {code}")
                    parts = [deserialize(Path(f"{out}-{rank}.safetensors")) for rank in range(world)]
                    for step in range(steps_of_ranks):
                        seen = [np.concatenate([p[f"{what}/{step}"] for p in parts]) for what in ("inputs", "targets")]
                        same = all(map(np.array_equal, seen, first[step]))
                        outcome.check(same, f"{corpus.corpus}: step {step} of {world} processes")
                outcome.attempts += steps_of_ranks
                tell(outcome.attempts, total)
    outcome.figures["of them seen by ranks in training"] = 2 * len(corpora) * steps_of_ranks
    return outcome


STEPS_OF_RANKS, BATCH = 25, 8


def _global_batch(dataset: data.Dataset, step: int, world: int) -> list[np.ndarray]:
    settings = {"seed": 0, "step": step, "batch_size": BATCH, "context": 16, "world": world}
    parts = [dataset.train_batch(**settings, rank=rank) for rank in range(world)]
    return [np.concatenate(arrays) for arrays in zip(*parts, strict=True)]


# --- numbers that are none --------------------------------------------------------------------------------------------


def _in_loss(training: Any, value: float) -> None:
    step = training.optimiser_step
    real, task_alone = step.losses, torch.zeros_like(step.stats)
    task_alone[0] = value
    step.losses = lambda inputs, targets: real(inputs, targets) + task_alone


def _in_gradient(training: Any, value: float) -> None:
    step = training.optimiser_step
    real = step._add_gradient

    def poisoned(batch: torch.Tensor) -> None:
        real(batch)
        step.gradients[-1].view(-1)[0] = value

    step._add_gradient = poisoned


def _in_weights(training: Any, value: float) -> None:
    list(training.optimiser_step.parameters.values())[3].data.view(-1)[0] = value


def _in_weights_after_the_update(training: Any, value: float) -> None:
    real = training._validate_if_due  # what comes between the update and the save

    def poisoned(step: int) -> None:
        real(step)
        _in_weights(training, value)

    training._validate_if_due = poisoned


PLACES: dict[str, Callable[..., None]] = {
    "loss": _in_loss,
    "gradient": _in_gradient,
    "weights": _in_weights,
    "weights after the update": _in_weights_after_the_update,
}


def not_finite(folder: Path, count: int, tell: Tell) -> Outcome:
    """NaN and infinities in loss, gradient and weights: stopped, nothing of it saved, and resumed as if never there."""
    outcome = Outcome()
    config = subject(folder, steps=8)
    expected = train(config, folder / "expected", show=False)
    for (place, inject), value in product(PLACES.items(), (math.nan, math.inf, -math.inf)):
        for step in range(1, 8)[: max(1, count // 12)]:
            run = Run(folder / f"poisoned-{outcome.attempts}")
            name = f"{value} in {place} at step {step + 1}"
            with outcome.attempt(name):
                try:
                    with at_step(step, partial(inject, value=value)):
                        train(config, run.path, show=False)
                    outcome.check(False, f"{name}: not noticed")
                except UserError as error:
                    outcome.check(f"step {step + 1}: " in str(error), f"{name}: {error}")
                    outcome.said([str(error)], folder)
                checkpoint, skipped = run.load_checkpoint()
                outcome.check(checkpoint is not None and checkpoint.step == step and not skipped, f"{name}: {skipped}")
                arrays = checkpoint.tensors.values() if checkpoint else ()
                outcome.check(all(np.isfinite(a).all() for a in arrays), f"{name}: in the checkpoint")
                outcome.compare(train(config, run.path, resume=True, show=False), expected)
            tell(outcome.attempts, count)
    return outcome
