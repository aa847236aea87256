"""Train one run, from scratch or from its newest intact checkpoint; interruptions do not change the result.

Initial weights, data order and dropout depend only on (seed, step, rank). A checkpoint is therefore weights, optimiser
moments and a step number, and a run that was killed and resumed ends with the same weights, bit for bit (on the same
kind of CPU, with the same PyTorch).
"""

import contextlib
import functools
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from tokendepth import data
from tokendepth.config import RunConfig, TrainConfig, method_name
from tokendepth.data import Dataset
from tokendepth.errors import Interrupted, UserError
from tokendepth.measure.block_changes import sample
from tokendepth.measure.calibrate import calibrate
from tokendepth.measure.describe import check_fits
from tokendepth.measure.evaluate import Batch, batches, measure
from tokendepth.model import LanguageModel
from tokendepth.progress import Progress
from tokendepth.runs.files import disk_faults, json_bytes
from tokendepth.runs.lock import only_one
from tokendepth.runs.machine import choose_device, environment, freed_memory_kept
from tokendepth.runs.run import Checkpoint, Run, config_bytes
from tokendepth.streams import lenient_stderr
from tokendepth.trace import DepthTotals
from tokendepth.training.progress import TrainingProgress, console
from tokendepth.training.ranks import Ranks
from tokendepth.training.retrofit import merge, start
from tokendepth.training.signals import StopSignals
from tokendepth.training.step import NotFinite, OptimiserStep, Stats, fitting, learning_rate
from tokendepth.training.threads import keep_threads

VALIDATION_TOKENS = 2**18
"""Validation during training takes at most this many tokens from the start of the split; `evaluate` takes all."""


def resolve(config: RunConfig, dataset: Dataset) -> RunConfig:
    """Check `config` against the corpus and fill in the size of the vocabulary."""
    found, wanted = dataset.tokenizer.vocab_size, config.model.vocab_size
    if 0 < wanted < found:
        expected = f"{config.data.corpus} has {found} tokens; expected as many or more"
        raise UserError(f"model.vocab_size is {wanted}; {expected}; drop --model.vocab-size")
    dataset.check_context(config.model.context)
    return replace(config, model=replace(config.model, vocab_size=wanted or found))


def _check_batch(config: TrainConfig, world: int) -> None:
    parts = config.accumulate * world
    if config.batch_size % parts:
        expected = f"expected a multiple of accumulate x ranks ({parts})"
        raise UserError(f"train.batch_size is {config.batch_size}; {expected}; set it with --train.batch-size")


def train(config: RunConfig, out: str | Path, *, resume: bool = False, show: bool = True) -> Run:
    """Train `config` into the folder `out`. `resume` continues the run in it, or starts one if there is none."""
    device = choose_device(config.train.device, "--train.device")
    ranks = Ranks.join(device)
    with contextlib.ExitStack() as held:
        held.enter_context(lenient_stderr())  # a reader that goes away must not stop the training
        held.callback(torch.set_num_threads, torch.get_num_threads())
        held.callback(ranks.leave)
        held.enter_context(freed_memory_kept(device))  # each step frees what the next one allocates
        show = show and ranks.rank == 0
        # In a terminal, a corpus that takes long to load has its own progress bar.
        with Progress(f"preparing {Run(Path(out)).name}", show=show and not console.is_terminal):
            training = _Training(config, Path(out), resume, show, device, ranks, held)
        held.enter_context(training.stop)  # from here on there is something to save
        return training.run_to_end()


class _Training:
    def __init__(
        self,
        config: RunConfig,
        out: Path,
        resume: bool,
        show: bool,
        device: torch.device,
        ranks: Ranks,
        held: contextlib.ExitStack,
    ) -> None:
        self.device, self.ranks, self.stop, self.show = device, ranks, StopSignals(), show
        self.run, self.writer = Run(out), None
        with ranks.agreeing():
            _check_batch(config.train, ranks.world)
            config.method.check_retrofit(config.retrofit is not None)
            summary_writer = _summary_writer() if config.train.tensorboard else None
            if ranks.rank == 0:  # loads first: it fills the cache that the other ranks share
                with Progress(f"loading {config.data.corpus}", show=show and not console.is_terminal):
                    self.dataset = data.load(config.data)
        with ranks.agreeing():
            if ranks.rank > 0:
                self.dataset = data.load(config.data)
            self.config = resolve(config, self.dataset)
            if not self.run.finished:
                check_fits(self.config, device, ranks.world)
        with ranks.agreeing():
            if ranks.rank == 0:
                if not self.run.finished:  # a finished run may be on a read-only disk
                    held.enter_context(only_one(out))
                Run.create(out, self.config, resume=resume)
        if summary_writer and ranks.rank == 0 and not self.run.finished:
            self.writer = summary_writer(str(out / "tensorboard"))

    def run_to_end(self) -> Run:
        run, config = self.run, self.config.train
        if run.finished:
            run.verify()
            run.check_corpus(self.dataset.fingerprint)
            self._say(f"{run.path} is already finished")
            return run
        with Progress(f"preparing {run.name}", show=self.show):
            with self.ranks.agreeing():
                begun = start(self.config, self.dataset, self.device)
            self.model = begun.model
            if statistic := self._depends_on_the_cut():
                self._say(
                    f"{method_name(self.config.method)} computes {statistic}, separately for each of {self._parts} "
                    "parts of a batch: gradients depend on the number of micro-batches and ranks"
                )
            if warning := self.model.method.warning(sample(self.dataset, self.config.model.context)[0]):
                self._say(warning)
            alone = self.config.retrofit.routers_first if self.config.retrofit else 0.0
            self.optimiser_step = OptimiserStep(
                self.model, config, self.device, self.ranks, begun.teacher, routers_first=alone
            )
            self.tokens, self.tlops, self.saved = 0, 0.0, None
            self.next_batch: tuple[np.ndarray, np.ndarray] | None = None
            first = self._restore()
        with (
            contextlib.closing(self.writer) if self.writer else contextlib.nullcontext(),
            TrainingProgress(run.name, config.steps, first, show=self.show) as self.progress,
        ):
            if begun.base is not None and first == 0:
                self._validate(0, begun.base)
            self._validate_if_due(first)
            if self.optimiser_step.compiled:
                self.progress.update(note="compiling")
            for step in range(first, config.steps):
                self._stop_if_asked(step)
                self._step(step)
            self._stop_if_asked(config.steps)
            self._finish()
        return run

    def _finish(self) -> None:
        if self.ranks.rank == 0:
            with self.progress.pause("calibrating"), self.optimiser_step.uncompiled():
                calibrate(self.model, self.dataset, show=self.show)
            self._restore_files()
            merge(self.model)
            weights = {name: tensor.detach().cpu().numpy() for name, tensor in self.model.state_dict().items()}
            with self.progress.pause("saving the model"):
                self.run.finish(weights)
        self.ranks.wait()

    @property
    def _parts(self) -> int:
        return self.config.train.accumulate * self.ranks.world

    def _depends_on_the_cut(self) -> str | None:
        """The statistic that the method computes over each part of a batch, if there are several parts."""
        return self.model.method.batch_statistic if self._parts > 1 else None

    def _say(self, line: str) -> None:
        if self.show:
            console.print(line, markup=False, soft_wrap=True)

    def _restore(self) -> int:
        """Load the newest intact checkpoint, if there is one; return how many steps are done."""
        step = 0
        with self.ranks.agreeing():
            checkpoint, skipped = self.run.load_checkpoint()
            for line in skipped:
                self._say(line)
            if checkpoint:
                step = checkpoint.step
                self.run.check_checkpoint(checkpoint, self.config, self.dataset.fingerprint)
                self.optimiser_step.load_state(checkpoint.tensors, step)
                tokens, self.tlops = fitting(checkpoint.tensors, "progress", torch.zeros(2)).tolist()
                self.tokens, self.saved = int(tokens), step
        if self.device.type == "cpu":
            self._keep_threads(checkpoint)
        weights = self.run.path / "model.safetensors"
        if not checkpoint and self.ranks.rank == 0 and weights.exists():
            with disk_faults(weights):
                weights.rename(kept := weights.with_name("model.unverified.safetensors"))
            self._say(f"{weights} has lost its manifest; it is kept as {kept.name}, and training starts from scratch")
        self.files = checkpoint.files if checkpoint else self._first_files()
        self.metrics = self.run.metrics_log(checkpoint)
        if checkpoint and self.ranks.rank == 0:
            self._restore_files()
        self.ranks.wait()
        self.run.check_corpus(self.dataset.fingerprint)
        if not checkpoint and self.ranks.rank == 0:
            self.run.restore(self.files)
            self.metrics.restore()
        self.validated = {row["step"] for row in self.run.last_metrics() if "val_loss" in row}
        self.ranks.wait()
        return step

    def _keep_threads(self, checkpoint: Checkpoint | None) -> None:
        """Use as many threads as the run began with, even if it was killed before its first checkpoint."""
        env = json.loads(checkpoint.files.get("env.json", b"null")) if checkpoint else self.run.env
        begun = env.get("threads") if isinstance(env, dict) else None
        line = keep_threads(begun, self.ranks.max(torch.get_num_threads()))
        if checkpoint and begun is None:
            line = "an older version started it and did not record its CPU threads: its last bits may differ"
        if line:
            self._say(f"{self.run.path}: {line}")

    def _first_files(self) -> dict[str, bytes]:
        facts = {**environment(self.device), "ranks": self.ranks.world, "corpus_sha256": self.dataset.fingerprint}
        if self.device.type == "cpu":
            facts["threads"] = torch.get_num_threads()
        if statistic := self._depends_on_the_cut():
            facts |= {"parts_of_a_batch": self._parts, "taken_over_each_part": statistic}
        return {
            "config.json": config_bytes(self.config),
            "env.json": json_bytes(facts),
            "tokenizer.json": json_bytes(self.dataset.tokenizer.to_dict()),
        }

    def _restore_files(self) -> None:
        for line in [*self.run.restore(self.files), *self.metrics.restore()]:
            self._say(line)

    def _step(self, step: int) -> None:
        """Take step number `step` (from 0); then log, validate and save if due."""
        config = self.config.train
        inputs, targets = self.next_batch or self._batch(step)
        self.optimiser_step.begin(inputs, targets, step=step)
        self.next_batch = self._batch(step + 1)  # while the GPU is busy
        lr = learning_rate(step, config)
        try:
            stats = self.optimiser_step.finish(lr=lr)
        except NotFinite as error:
            raise UserError(f"{error} ({self._examples(step)})") from None
        done, tokens = step + 1, inputs.size * self.ranks.world
        self.tokens += tokens
        self.tlops += sum(stats.work)
        active = self._active_fraction(stats, tokens)
        self.progress.step(done, tokens, stats.task, active)
        if done % config.log_every == 0 or done == config.steps:
            row = {"loss": stats.task + stats.depth, "task_loss": stats.task, "depth_loss": stats.depth}
            row |= {"active_fraction": active, "lr": lr, "grad_norm": stats.grad_norm}
            self._log(done, row | {"tokens_per_s": round(self.progress.tokens_per_s)})
        self._validate_if_due(done)
        if done % config.checkpoint_every == 0 or done == config.steps:
            self._save(done)

    def _batch(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        config = self.config.train
        return self.dataset.train_batch(
            seed=config.seed,
            step=step,
            batch_size=config.batch_size,
            context=self.config.model.context,
            rank=self.ranks.rank,
            world=self.ranks.world,
        )

    def _examples(self, step: int) -> str:
        """The indices of a step's training examples, so that a user can look at them."""
        config = self.config.train
        ids = self.dataset.batch_ids(
            seed=config.seed, step=step, batch_size=config.batch_size, context=self.config.model.context
        )
        shown = ", ".join(map(str, ids[:8])) + (", ..." if len(ids) > 8 else "")
        return f"examples {shown} of {self.config.data.corpus}'s training part"

    def _active_fraction(self, stats: Stats, tokens: int) -> float:
        routed = tuple(site.routed for site in self.model.method.sites(keys=1))
        return DepthTotals(routed, stats.work, tokens, 0.0, 0.0).active_fraction

    def _validate_if_due(self, step: int) -> None:
        every = self.config.train.eval_every
        due = step > 0 and (step % every == 0 or step == self.config.train.steps)
        if due:
            self._validate(step, self.model)

    def _validate(self, step: int, model: LanguageModel) -> None:
        """Log the loss of `model`, which at step 0 of a retrofit is the untouched model."""
        if step in self.validated or self.ranks.rank != 0:
            return
        with self.progress.pause("validating"), self.optimiser_step.uncompiled():
            calibrate(model, self.dataset, roughly=True)
            with self.optimiser_step.autocast:
                measured = measure(model, self._validation_stream(), model)
        if self.stop.received:  # cut short, so the loss is of no use; the resumed run repeats it
            return
        self.validated.add(step)
        row = {"val_loss": measured.loss, "val_active_fraction": measured.depth.active_fraction}
        if not self.config.data.synthetic:  # bits per byte can be compared across tokenizers
            bytes_per_token = self.dataset.bytes_per_token("val", measured.targets)
            row["val_bits_per_byte"] = measured.loss / math.log(2) / bytes_per_token
        self._log(step, row)
        self.progress.validation(step, row)

    @functools.cached_property
    def _validation_batches(self) -> list[Batch]:
        """The start of the validation split."""
        kept, tokens = [], 0
        for batch in batches(self.dataset, "val", self.config.model.context, self.device):
            tokens += batch[0].numel()
            if kept and tokens > VALIDATION_TOKENS:
                break
            kept.append(batch)
        return kept

    def _validation_stream(self) -> Iterator[Batch]:
        """Yield the validation batches; ends early when a signal asks to stop."""
        for number, batch in enumerate(self._validation_batches):
            if number and self.stop.received:
                return
            self.progress.update(note=f"validating, {number}/{len(self._validation_batches)} batches")
            yield batch

    def _log(self, step: int, row: dict[str, float]) -> None:
        row = {"step": step, **row, "tokens": self.tokens, "tlops": self.tlops}
        if self.ranks.rank == 0:
            self.metrics.append(row)
        if self.writer:
            for name, value in row.items():
                self.writer.add_scalar(name, value, step)

    def _stop_if_asked(self, step: int) -> None:
        """Stop all ranks at the same step, whichever of them got the signal."""
        number = self.ranks.max(self.stop.received)
        if number:
            self._save(step)
            raise Interrupted(number, step, self.run.path)

    def _save(self, step: int) -> None:
        if self.ranks.rank == 0 and self.saved != step:
            state = {**self.optimiser_step.state(), "progress": np.array([self.tokens, self.tlops])}
            if bad := next((name for name, array in state.items() if not np.isfinite(array).all()), None):
                raise UserError(
                    f"step {step}: {bad} is not finite, so it is not saved; what was saved before is intact: "
                    "continue from it with --resume; if it happens again, train again in another --out with a lower "
                    "--train.lr"
                )
            with self.progress.pause("saving"):
                self.run.save_checkpoint(step, state, self.files, self.metrics)
        self.saved = step
        self.ranks.wait()


def _summary_writer():
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        remedy = "pip install 'tokendepth[tensorboard]'"
        raise UserError(f"train.tensorboard is on, but TensorBoard is not installed; {remedy}") from None
    return SummaryWriter
