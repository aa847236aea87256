"""A run stopped in the middle, made without training, and the file operations of a resume."""

from pathlib import Path

import numpy as np

from tokendepth.config import RunConfig, TrainConfig, TSAConfig, to_dict
from tokendepth.runs.checkpoints import Checkpoint
from tokendepth.runs.files import json_bytes
from tokendepth.runs.run import Run

CONFIG = RunConfig(method=TSAConfig(), train=TrainConfig(steps=12))


def small_files() -> dict[str, bytes]:
    return {
        "config.json": json_bytes(to_dict(CONFIG)),
        "env.json": json_bytes({"corpus_sha256": "f"}),
        "tokenizer.json": json_bytes({"kind": "byte"}),
    }


def stopped_after_two(path: Path) -> Run:
    """A run with steps 1 and 2 logged and saved."""
    run = Run.create(path, CONFIG, resume=False)
    log = run.metrics_log(None)
    run.restore(small_files())
    log.restore()
    for step in (1, 2):
        log.append({"step": step})
        run.save_checkpoint(step, {"w": np.full(3, step)}, small_files(), log)
    return run


def resumed(run: Run) -> tuple[Checkpoint, list[str]]:
    """Resume it and save one more step."""
    Run.create(run.path, CONFIG, resume=True)
    checkpoint, lines = run.load_checkpoint()
    assert checkpoint is not None
    run.check_checkpoint(checkpoint, CONFIG, "f")
    lines += run.restore(checkpoint.files)
    log = run.metrics_log(checkpoint)
    lines += log.restore()
    run.check_corpus("f")
    log.append({"step": checkpoint.step + 1})
    run.save_checkpoint(checkpoint.step + 1, checkpoint.tensors, checkpoint.files, log)
    return checkpoint, lines
