"""Run folders written once and kept for ever: every later version reads them, with the same logits.

`golden/format-N/` holds a finished run, the same run stopped in the middle, and what the finished one answers: format 1
of the paper's model, format 2 of modern layers. `golden/manifest-N/` holds the same for a format of manifests and
checkpoints; since 2 also a run that was evaluated and calibrated. A new format adds a folder and changes none:
`python -m tests.test_golden_runs`.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.tiny import one_line
from tokendepth import data
from tokendepth.config import FORMAT_VERSION, BudgetConfig, DataConfig, ModelConfig, RunConfig, TrainConfig, TSAConfig
from tokendepth.data import tokenizer_from_dict
from tokendepth.errors import UserError
from tokendepth.measure import calibrate
from tokendepth.measure.evaluate import evaluate, load_model
from tokendepth.report.records import Record
from tokendepth.runs.files import MANIFEST_VERSION, read_json, write_json
from tokendepth.runs.run import Run
from tokendepth.trace import EXECUTIONS
from tokendepth.training.loop import train

GOLDEN = Path(__file__).parent / "golden"
FORMATS = sorted(GOLDEN.iterdir(), key=lambda folder: folder.name)
STOPPED_AT = 6
IDS = [[1, 9, 14, 5, 2, 9, 14, 5], [1, 30, 4, 21, 2, 30, 4, 21]]
ROUNDING = 1e-5  # other processors sum in a different order; logits are of order one


def logits(run: Run) -> dict[str, list]:
    """For the token after each sequence, in each execution mode."""
    model = load_model(run, torch.device("cpu"))
    with torch.no_grad():
        return {e: model(torch.tensor(IDS), execution=e).logits[:, -1].tolist() for e in EXECUTIONS}


def test_there_is_a_folder_for_this_format():
    assert {f"format-{FORMAT_VERSION}", f"manifest-{MANIFEST_VERSION}"} <= {folder.name for folder in FORMATS}


@pytest.fixture(params=FORMATS, ids=lambda folder: folder.name)
def golden(request, tmp_path) -> Path:
    """A copy: what is kept is never written to."""
    return Path(shutil.copytree(request.param, tmp_path / request.param.name))


def test_a_finished_run_answers_as_it_did(golden):
    run = Run.open(golden / "finished")
    expected, found = json.loads((golden / "logits.json").read_text()), logits(run)
    assert expected.keys() == found.keys()
    for execution in expected:
        assert np.ptp(expected[execution]) > 0.5
        np.testing.assert_allclose(found[execution], expected[execution], rtol=0, atol=ROUNDING)


def test_the_rest_of_a_finished_run_is_read(golden):
    record = Record.read(Run.open(golden / "finished"))
    assert record.finished
    assert record.step == record.config.train.steps == 10
    assert record.env["corpus_sha256"]
    assert tokenizer_from_dict(read_json(golden / "finished" / "tokenizer.json")).vocab_size == 32


def test_what_was_added_to_a_finished_run_is_read():
    run = Run.open(GOLDEN / "manifest-2" / "calibrated")
    evaluation = run.evaluation
    assert evaluation is not None
    assert evaluation["version"] == 2
    assert evaluation["hard"]["active_fraction"] == pytest.approx(0.5, abs=0.05)
    model = load_model(run, torch.device("cpu"))
    before = model.method.thresholds
    calibrate.set_budget(model, run, 0.75)  # reads no corpus
    assert model.method.thresholds != before


def test_a_finished_run_is_not_trained_again(golden):
    before = {path: path.read_bytes() for path in golden.rglob("*") if path.is_file()}
    run = Run.open(golden / "finished")
    assert train(run.config, run.path, resume=True, show=False) == run
    assert {path: path.read_bytes() for path in golden.rglob("*") if path.is_file()} == before


def test_a_stopped_run_goes_on_to_the_same_end(golden):
    stopped, finished = Run.open(golden / "stopped"), Run.open(golden / "finished")
    checkpoint, skipped = stopped.load_checkpoint()
    assert checkpoint is not None
    assert (checkpoint.step, skipped) == (STOPPED_AT, [])
    resumed = train(stopped.config, stopped.path, resume=True, show=False)
    for name, array in finished.weights().items():
        np.testing.assert_allclose(resumed.weights()[name], array, rtol=0, atol=1e-4)  # some steps of rounding
    steps = [row["step"] for row in resumed.metrics()]
    assert steps == [row["step"] for row in finished.metrics()]


def test_a_newer_config_says_so(golden):
    """Manifests of checkpoints and models have it in test_runs."""
    path, newer = golden / "stopped" / "config.json", FORMAT_VERSION + 1
    write_json(path, {**read_json(path), "version": newer})
    with pytest.raises(UserError) as raised:
        _ = Run.open(golden / "stopped").config
    message = one_line(raised.value)
    assert f"{path}: config version is {newer}, newer than" in message
    assert "upgrade tokendepth" in message


def make(folder: Path) -> None:
    from benchmarks.faults.stopped import stopped_run

    config = RunConfig(
        DataConfig("copy", source_length=3),
        ModelConfig(
            d_model=8,
            n_layer=3,
            n_head=2,
            d_ff=16,
            context=8,
            norm="rms",
            positions="rotary",
            rope_base=100.0,
            n_kv_head=1,
            attention_bias="qkv",
            qk_norm=True,
            ffn="swiglu",
            ffn_bias=False,
            tie_head=False,
        ),
        TSAConfig(depth_penalty=0.01),
        TrainConfig(steps=10, batch_size=8, lr=0.03, eval_every=5, checkpoint_every=6, log_every=1, device="cpu"),
        recipe="golden",
    )
    run = train(config, folder / "finished", show=False)
    stopped_run(config, folder / "stopped", STOPPED_AT + 1)
    (folder / "logits.json").write_text(json.dumps(logits(run)) + "\n")
    run = train(replace(config, method=BudgetConfig(budget=0.5)), folder / "calibrated", show=False)
    run.write_evaluation(evaluate(run, timing=False, curve=True))
    model = load_model(run, torch.device("cpu"))
    calibrate.calibrate(model, data.load(config.data), 0.75)
    calibrate.keep(model, run, 0.75)


if __name__ == "__main__":
    make(GOLDEN / f"manifest-{MANIFEST_VERSION}")
