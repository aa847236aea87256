"""Run: one training run on disk, the only interface between training, evaluation, report and export.

    config.json  env.json  tokenizer.json  metrics.jsonl  checkpoints/
    model.safetensors  MANIFEST.json       once finished
    eval.json                              once evaluated
    calibration.json                       once thresholds for other budgets are saved

The manifest holds checksums of a finished run's files; files added later contain their own. A run folder and each of
its files may be links: reading follows links to regular files, writing replaces a link by a file. No file is a pickle.
Does not import torch: tensors are numpy arrays.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokendepth.config import RunConfig, from_dict, to_dict
from tokendepth.errors import UserError
from tokendepth.runs import checkpoints, shapes
from tokendepth.runs.checkpoints import CARRIED_FILES, Checkpoint
from tokendepth.runs.checkpoints import CHECKPOINT_FILES as CHECKPOINT_FILES
from tokendepth.runs.files import (
    MANIFEST,
    NewerFormat,
    Tensors,
    deserialize,
    disk_faults,
    json_bytes,
    left_overs,
    make_folder,
    parse_json,
    read_bytes,
    read_json,
    read_manifest,
    read_sealed,
    remove_left_overs,
    replace_bytes,
    serialize,
    verify_file,
    verify_manifest,
    write_bytes,
    write_manifest,
    write_sealed,
)
from tokendepth.runs.metrics import METRICS, MetricsLog, Row, last_rows, read_rows

LOCK = ".lock"
EVALUATION_VERSION = 2
"""Version of eval.json, which is sealed since version 2. In version 1, only types and ranges of values are checked."""
SMALL_FILES = (*CARRIED_FILES, METRICS)
MODEL_FILES = ("config.json", "tokenizer.json", "model.safetensors")
OWN_NAMES = "|".join((*SMALL_FILES, "model.safetensors", MANIFEST, "eval.json", "calibration.json")).replace(".", r"\.")
RESTORE = "restore it from a copy, or train the run again in another folder"


@dataclass(frozen=True)
class Run:
    """A run folder: config, metrics, checkpoints during training, then weights and evaluation.

    Functions take a `Run` or the path of its folder.

    >>> run = td.Run.open("runs/tsa")
    >>> run.finished, run.config.recipe
    (True, 'demo.tsa')
    """

    path: Path
    """The folder."""

    @classmethod
    def open(cls, path: str | Path) -> "Run":
        """Open an existing run; UserError if there is none."""
        run = cls(Path(path))
        # os.path's tests never raise; Path's do for names that are too long and folders that may not be read.
        if os.path.isfile(run.path):
            raise UserError(f"{run.path} is a file; expected a run folder; name the folder")
        if not os.path.isdir(run.path):
            raise UserError(f"{run.path}: no such run folder; train one with tokendepth train RECIPE --out {run.path}")
        if not os.path.lexists(run.path / "config.json"):
            inside = sorted(str(config.parent) for config in run.path.glob("*/config.json"))
            remedy = f"it holds runs: {', '.join(inside[:3])}" if inside else "name a folder that is one"
            raise UserError(f"{run.path} is not a tokendepth run: it has no config.json; {remedy}")
        return run

    @classmethod
    def create(cls, path: str | Path, config: RunConfig, *, resume: bool) -> "Run":
        """The run folder for `config`: a new one or, with `resume`, an existing one with the same config."""
        run = cls(Path(path))
        with disk_faults(run.path):
            make_folder(run.path)
        if not resume:
            run.check_free()
        stray = run._stray()
        if stray and (problem := run._problem_with(config, stray)) and not run._was_of(config):
            raise UserError(problem)
        remove_left_overs(run.path, OWN_NAMES)
        remove_left_overs(run.checkpoints, f"[0-9]{{8,}}|{OWN_NAMES}")
        if not stray:
            write_bytes(run.path / "config.json", config_bytes(config))
        return run

    def check_free(self) -> None:
        """Raise UserError unless a new run can be started here."""
        stray = self._stray()
        if "config.json" in stray:
            raise UserError(f"{self.path} already holds a run; continue it with --resume, or choose another --out")
        if stray:
            raise UserError(self._no_run(stray))

    def _stray(self) -> list[str]:
        """Names of files here, except those left over from a run that was killed before it began."""
        if not os.path.isdir(self.path):
            return []
        with disk_faults(self.path):
            ours = {LOCK, *(path.name for path in left_overs(self.path, OWN_NAMES))}
            return [path.name for path in self.path.iterdir() if path.name not in ours]

    def _no_run(self, stray: list[str]) -> str:
        return f"{self.path} is not empty and not a run (it holds {min(stray)}); choose another --out"

    def _problem_with(self, config: RunConfig, stray: list[str]) -> str | None:
        """Why `config` cannot be resumed in this folder, judging by config.json; None if it can."""
        if not os.path.lexists(self.path / "config.json"):
            return self._no_run(stray)
        try:
            difference = first_difference(to_dict(self.config), to_dict(config))
        except UserError as error:
            return str(error)
        return f"{self.path} holds another run: {difference}; choose another --out" if difference else None

    def _was_of(self, config: RunConfig) -> bool:
        """Whether the newest intact checkpoint has this `config`: then only config.json is damaged."""
        checkpoint, _ = self.load_checkpoint()
        try:
            return checkpoint is not None and from_dict(parse_json(checkpoint.files["config.json"])) == config
        except (KeyError, ValueError, RecursionError):  # missing, or not readable by this version
            return False

    @property
    def name(self) -> str:
        """Name of the folder."""
        return os.path.basename(os.path.realpath(self.path))  # unlike Path, no error for a link to itself

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    # -- small files that describe the run: the folder and every checkpoint have a copy

    @property
    def config(self) -> RunConfig:
        """Its `RunConfig`."""
        path = self._checked("config.json")
        tree = read_json(path)
        try:
            return from_dict(tree)
        except UserError as error:
            raise UserError(f"{path}: {error}") from None

    @property
    def env(self) -> dict[str, Any] | None:
        """Machine, versions and commit of the training; None if it has not begun."""
        path = self._checked("env.json")
        if not os.path.lexists(path):
            return None
        facts = read_json(path)
        if problem := shapes.problem(facts, shapes.ENVIRONMENT):
            raise UserError(f"{path} is damaged: {problem}; restore it from a copy")
        return facts

    @property
    def tokenizer(self) -> Any:
        """The tree for `tokenizer_from_dict`."""
        return read_json(self._checked("tokenizer.json"))

    def _checked(self, name: str) -> Path:
        """The path of a file, which is verified first if the run is finished."""
        if self.finished:
            with _remedy(RESTORE):
                files = read_manifest(self.path).files
                if name in files:
                    verify_file(self.path / name, files[name])
        return self.path / name

    def restore(self, files: dict[str, bytes]) -> list[str]:
        """Restore those of `files` that differ; returns one line for each that was lost or damaged."""
        lines = []
        for name, content in files.items():
            path = self.path / name
            found = _content(path)
            if found != content:
                what = "was missing or unreadable" if found is None else "was damaged"
                lines.append(f"{path} {what}; it is restored, nothing is lost")
                write_bytes(path, content)
        return lines

    def check_corpus(self, fingerprint: str) -> None:
        """Raise UserError if this is not the corpus that the run was trained on."""
        env = self.env
        if env is None:
            return
        if "corpus_sha256" not in env:
            raise UserError(f"{self.path / 'env.json'} is damaged: it does not name the corpus; restore it from a copy")
        if env["corpus_sha256"] != fingerprint:
            corpus = self.config.data.corpus
            raise UserError(
                f"the corpus {corpus!r} or its tokenizer is not the one {self.path} was trained on; restore it, or "
                "train again"
            )

    # -- metrics

    def metrics(self) -> list[Row]:
        """All rows of metrics.jsonl, in order of steps."""
        return read_rows(self._checked(METRICS))

    def last_metrics(self) -> list[Row]:
        """The last few hundred rows: fast, however long the run is."""
        return last_rows(self.path / METRICS)

    def metrics_log(self, checkpoint: Checkpoint | None) -> MetricsLog:
        """The log for a training run that resumes from `checkpoint`, or begins."""
        return MetricsLog(self.path, checkpoint.metrics, checkpoint.rows) if checkpoint else MetricsLog(self.path)

    # -- checkpoints

    def save_checkpoint(
        self, step: int, tensors: Tensors, files: dict[str, bytes] | None = None, metrics: MetricsLog | None = None
    ) -> None:
        checkpoints.save(self.checkpoints, step, tensors, files or {}, metrics)

    def load_checkpoint(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest intact checkpoint, and one line for each newer, damaged one."""
        return checkpoints.load(self.checkpoints)

    def check_checkpoint(self, checkpoint: Checkpoint, config: RunConfig, fingerprint: str) -> None:
        """Raise UserError if the checkpoint is from another run; users who move folders can mix them up."""
        folder, difference = self.checkpoints / f"step-{checkpoint.step:08d}", None
        there, env = (checkpoint.files.get(name, b"null") for name in ("config.json", "env.json"))
        try:
            if (tree := parse_json(there)) is not None:
                difference = first_difference(to_dict(from_dict(tree)), to_dict(config))
            facts = parse_json(env)
        except (ValueError, RecursionError) as error:  # a UserError is a ValueError too
            raise UserError(f"{folder} is of a run that this version cannot read ({error}); remove it") from None
        if not difference and isinstance(facts, dict) and facts.get("corpus_sha256", fingerprint) != fingerprint:
            difference = f"its corpus {config.data.corpus!r} had another content"
        if not difference and checkpoint.step > config.train.steps:
            difference = f"it is of step {checkpoint.step}, and this run has {config.train.steps}"
        if difference:
            remedy = "put the run's own checkpoint in its place, or remove it to continue without it"
            raise UserError(f"{folder} is of another run: {difference}; {remedy}")

    # -- the finished model

    @property
    def finished(self) -> bool:
        """Whether the training has finished."""
        return os.path.lexists(self.path / MANIFEST)

    def finish(self, weights: Tensors) -> None:
        """Write the trained weights and the manifest, which marks the run as finished; then remove the checkpoints."""
        small = [name for name in SMALL_FILES if os.path.lexists(self.path / name)]
        with disk_faults(self.path):
            replace_bytes(self.path / "model.safetensors", serialize(weights))
            write_manifest(self.path, sorted({*MODEL_FILES, *small}), self.config.train.steps)
        checkpoints.remove_all(self.checkpoints)

    def verify(self) -> None:
        """UserError if the run is not finished, or if one of its files has changed since."""
        if not self.finished:
            missing = f", or {self.path / MANIFEST} was lost" if (self.path / "model.safetensors").exists() else ""
            remedy = f"continue it: tokendepth train ... --out {self.path} --resume"
            raise UserError(f"{self.path} is not finished{missing}; {remedy}")
        with _remedy(RESTORE):
            step, steps = verify_manifest(self.path, MODEL_FILES, SMALL_FILES).step, self.config.train.steps
            if step != steps:
                raise UserError(f"{self.path / MANIFEST} is damaged: it is of step {step}, not {steps}")

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the finished run's weights."""
        self.verify()
        return read_manifest(self.path).files["model.safetensors"]["sha256"]

    def weights(self) -> Tensors:
        """The weights of a finished run as numpy arrays by name; their checksum is verified."""
        self.verify()
        with _remedy(RESTORE):
            return deserialize(self.path / "model.safetensors")

    # -- files added to a finished run

    @property
    def evaluation(self) -> dict[str, Any] | None:
        """The evaluation saved by `evaluate`; None if there is none."""
        remedy = f"measure the run again: tokendepth evaluate {self.path}"
        tree = self.read_added("eval.json", EVALUATION_VERSION, remedy)
        if tree is None:
            return None
        if problem := shapes.problem(tree, shapes.EVALUATION):
            raise UserError(f"{self.path / 'eval.json'} is damaged: {problem}; {remedy}")
        return {"curve": [], "passage": None, **tree}  # not written by the first versions

    def write_evaluation(self, tree: dict[str, Any]) -> None:
        write_sealed(self.path / "eval.json", tree)

    def read_added(self, name: str, version: int, remedy: str) -> dict[str, Any] | None:
        """The content of a sealed file of at most this `version`; None if there is none.

        Files of version 1 have no seal; a run finished by a version with seals cannot have such a file.
        """
        path = self.path / name
        if not os.path.lexists(path):
            return None
        with _remedy(remedy):
            tree, is_sealed = read_sealed(path, version)
            if not is_sealed and self.finished and read_manifest(self.path).version > 1:
                raise UserError(f"{path} is damaged: its seal is gone")
        return tree


def config_bytes(config: RunConfig) -> bytes:
    return json_bytes(to_dict(config))


def _content(path: Path) -> bytes | None:
    try:
        return read_bytes(path)
    except OSError:
        return None


@contextlib.contextmanager
def _remedy(remedy: str) -> Iterator[None]:
    try:
        yield
    except NewerFormat:
        raise
    except UserError as error:
        raise UserError(f"{error}; {remedy}") from None


def first_difference(there: dict[str, Any], wanted: dict[str, Any], prefix: str = "") -> str | None:
    """The first difference of two configs, in words; None if there is none."""
    for key in {**there, **wanted}:
        a, b = there.get(key), wanted.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            if found := first_difference(a, b, f"{prefix}{key}."):
                return found
        elif a != b:
            return f"its {prefix}{key} is {a!r}, not {b!r}"
    return None
