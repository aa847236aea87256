"""A pipe, device, endless file, folder or link in place of any file: a one-line error, at once, in little memory.

RELIABILITY 25.
"""

import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from benchmarks.faults.outcome import limit
from tests.report.fakes import tsa_evaluation
from tests.runs.samples import CONFIG, resumed, stopped_after_two
from tests.special import SPECIAL, at_once, replaced
from tests.tiny import one_line, tiny
from tokendepth.data import tokenizer_from_dict
from tokendepth.errors import UserError
from tokendepth.report import markdown_table, rows
from tokendepth.runs.files import MANIFEST, write_json
from tokendepth.runs.metrics import METRICS
from tokendepth.runs.run import SMALL_FILES, Run
from tokendepth.training.loop import train


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Run:
    run = Run.create(tmp_path_factory.mktemp("finished") / "run", CONFIG, resume=False)
    write_json(run.path / "tokenizer.json", {"kind": "char", "chars": "abc"})
    write_json(run.path / "env.json", {"corpus_sha256": "f"})
    (run.path / METRICS).write_text('{"step": 1, "task_loss": 3.5}\n')
    run.finish({"w": np.ones(3, np.float32)})
    run.write_evaluation(tsa_evaluation(text="ab c"))
    return run


def read_everything(run: Run) -> None:
    """The files that the commands evaluate, report and generate read."""
    run = Run.open(run.path)
    markdown_table(rows([run]))
    tokenizer_from_dict(run.tokenizer)
    run.check_corpus("f")
    run.weights()


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("name", [*SMALL_FILES, "model.safetensors", MANIFEST, "eval.json"])
def test_a_finished_run_with_something_else_in_the_place_of_a_file_is_refused(finished, name, kind, tmp_path):
    run = Run(Path(shutil.copytree(finished.path, tmp_path / "run")))
    read_everything(run)
    replaced(run.path / name, kind)
    with at_once(), pytest.raises(UserError) as raised:
        read_everything(run)
    message = one_line(raised.value)
    assert str(run.path / name) in message
    assert "restore" in message or "tokendepth evaluate" in message


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize(
    "name",
    [*SMALL_FILES, "checkpoints/metrics.jsonl", f"checkpoints/step-00000002/{MANIFEST}",
     "checkpoints/step-00000002/state.safetensors"],
)  # fmt: skip
def test_a_stopped_run_with_something_else_in_the_place_of_a_file_goes_on_or_is_refused(name, kind, tmp_path):
    run = stopped_after_two(tmp_path / "run")
    path = run.path / name
    replaced(path, kind)
    with at_once():
        refusal = ""
        try:
            checkpoint, lines = resumed(run)
        except UserError as error:
            refusal = one_line(error)
            path.rename(tmp_path / "away")  # as the message says
            checkpoint, lines = resumed(run)
    # Anything that is not a folder is replaced without asking.
    assert ("folder" in kind and "step-" not in name) == bool(refusal), refusal
    assert "move it away" in refusal or not refusal
    lines.append(refusal)
    assert any(str(path) in line for line in lines) or name == "checkpoints/metrics.jsonl"
    in_checkpoint = "step-" in name
    assert checkpoint.step == (1 if in_checkpoint else 2)
    assert run.metrics() == [{"step": step} for step in range(1, checkpoint.step + 2)]
    if "folder with" in kind:
        assert len(list(tmp_path.rglob("note.txt"))) == 1, "what was in it is still there"


@pytest.mark.parametrize("kind", ["pipe", "a terabyte", "link to nothing"])
def test_something_else_in_the_place_of_the_checkpoints_is_named(kind, tmp_path):
    run = stopped_after_two(tmp_path / "run")
    shutil.rmtree(run.checkpoints)
    SPECIAL[kind](run.checkpoints)
    with at_once(), pytest.raises(UserError) as raised:
        run.save_checkpoint(3, {"w": np.ones(3)})
    assert str(run.checkpoints) in one_line(raised.value)


@pytest.mark.parametrize("kind", [kind for kind in SPECIAL if kind != "folder"])
def test_something_else_in_the_place_of_the_run_is_refused(kind, tmp_path):
    place = tmp_path / "run"
    SPECIAL[kind](place)
    for read in (Run.open, partial(train, tiny(tmp_path), resume=True, show=False)):
        with limit(60), pytest.raises(UserError) as raised:
            read(place)
        assert str(place) in one_line(raised.value)


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("name", ["config.json", "eval.json"])
def test_a_file_is_written_over_what_is_there_or_refused_in_one_line(kind, name, tmp_path):
    path = tmp_path / name
    SPECIAL[kind](path)
    with at_once():
        if "folder" in kind:
            with pytest.raises(UserError, match="move it away") as raised:
                write_json(path, {"a": 1})
            one_line(raised.value)
            assert path.is_dir()
        else:
            write_json(path, {"a": 1})
            assert path.is_file()
            assert not path.is_symlink()


def test_a_run_and_its_files_may_lie_behind_links(finished, tmp_path):
    (tmp_path / "link").symlink_to(shutil.copytree(finished.path, tmp_path / "run"))
    (tmp_path / "run" / "model.safetensors").rename(tmp_path / "elsewhere")
    (tmp_path / "run" / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    linked = Run(tmp_path / "link")
    read_everything(linked)
    expected = finished.weights()
    assert expected.keys() == linked.weights().keys()
    assert all(np.array_equal(weight, expected[name]) for name, weight in linked.weights().items())
