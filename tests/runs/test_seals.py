"""In every file that results are read from, changes are detected and invalid values are rejected."""

import copy
import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.report.fakes import dense_evaluation, tsa_evaluation
from tests.tiny import add_rows, edit_json, one_line
from tokendepth.config import RunConfig, TrainConfig, TSAConfig
from tokendepth.data import tokenizer_from_dict
from tokendepth.errors import UserError
from tokendepth.report import markdown_table, rows
from tokendepth.report.records import Record
from tokendepth.report.results import record
from tokendepth.runs import shapes
from tokendepth.runs.files import json_bytes, sealed, write_json, write_manifest
from tokendepth.runs.results import read_rows
from tokendepth.runs.run import EVALUATION_VERSION, SMALL_FILES, Run

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden"
CONFIG = RunConfig(method=TSAConfig(), train=TrainConfig(steps=12))
FILES = ("model.safetensors", *SMALL_FILES)


@pytest.fixture
def run(tmp_path) -> Run:
    """A finished and evaluated run."""
    run = Run.create(tmp_path / "run", CONFIG, resume=False)
    write_json(run.path / "tokenizer.json", {"kind": "char", "chars": "abc"})
    write_json(run.path / "env.json", {"torch": "2", "ranks": 1, "corpus_sha256": "f" * 64})
    add_rows(run, {"step": 1, "task_loss": 3.5}, {"step": 2, "task_loss": 3.25, "val_loss": 3.75})
    run.finish({"w": np.ones(3, np.float32)})
    run.write_evaluation(tsa_evaluation(text="ab c"))
    return run


def old_run(folder: Path, evaluation: dict[str, Any]) -> Run:
    """A run finished before there were seals."""
    run = Run(Path(shutil.copytree(GOLDEN / "format-2" / "finished", folder)))
    write_json(run.path / "eval.json", {**evaluation, "version": 1})
    return run


def refused(run: Run, *words: str) -> str:
    with pytest.raises(UserError) as raised:
        _ = run.evaluation
    message = one_line(raised.value)
    assert str(run.path / "eval.json") in message
    assert f"tokendepth evaluate {run.path}" in message
    assert all(word in message for word in words), message
    return message


# --- the seal of eval.json; calibration.json has the same, see measure/test_calibrate.py ------------------------------


def test_an_evaluation_comes_back_as_it_was_written(run):
    assert run.evaluation == {"curve": [], **tsa_evaluation(text="ab c")}


def test_no_flipped_bit_is_read_as_another_number(run):
    """RELIABILITY 23."""
    path, dice = run.path / "eval.json", random.Random(0)
    content = path.read_bytes()
    for place in dice.sample(range(8 * len(content)), 1000):
        flipped = bytearray(content)
        flipped[place // 8] ^= 1 << place % 8
        path.write_bytes(flipped)
        with pytest.raises(UserError):
            Record.read(run)
    path.write_bytes(content)
    assert Record.read(run).number("hard", "loss") == tsa_evaluation()["hard"]["loss"]


def test_no_edit_is_read_as_another_number(run):
    hypothesis = pytest.importorskip("hypothesis")
    from hypothesis import strategies as st

    path = run.path / "eval.json"
    content, right = path.read_bytes(), run.evaluation
    words = st.sampled_from([b"", b"0", b"9", b"-", b".", b"e", b" ", b"\n", b'"', b",", b"}", b"1", b"NaN"])

    edit = st.tuples(st.floats(0, 1), st.integers(0, 9), st.binary(max_size=3) | words)

    @hypothesis.settings(max_examples=300)
    @hypothesis.given(st.lists(edit, min_size=1, max_size=5))
    def never(edits):
        changed = bytearray(content)
        for where, length, new in edits:
            start = int(where * len(changed))
            changed[start : start + length] = new
        path.write_bytes(changed)
        try:
            assert run.evaluation == right
        except UserError as error:
            one_line(error)
        else:
            assert changed == content

    never()


def unsealed(run: Run) -> dict[str, Any]:
    tree = json.loads((run.path / "eval.json").read_text())
    del tree["sha256"]
    return tree


def test_an_evaluation_that_lost_its_seal_does_not_pass_for_an_old_one(run):
    tree = unsealed(run)
    write_json(run.path / "eval.json", tree)
    assert "is not what tokendepth wrote" in refused(run)
    write_json(run.path / "eval.json", {**tree, "version": 1})
    assert "its seal is gone" in refused(run)
    (run.path / "eval.json").write_bytes(json_bytes({**tree, "version": 1, "sha256": "0" * 64}))
    assert "is not what tokendepth wrote" in refused(run)


def test_an_old_run_keeps_its_unsealed_evaluation_and_gets_a_sealed_one(tmp_path):
    run = old_run(tmp_path / "run", dense_evaluation())
    assert run.evaluation == {"curve": [], **dense_evaluation(), "version": 1}
    run.write_evaluation(dense_evaluation(1.5))
    assert Record.read(run).number("hard", "loss") == 1.5
    edit_json(run.path / "eval.json", seed=1)
    refused(run, "is not what tokendepth wrote")


def test_an_evaluation_of_a_later_version_is_not_called_damaged(run):
    (run.path / "eval.json").write_bytes(sealed({**unsealed(run), "version": EVALUATION_VERSION + 1}))
    with pytest.raises(UserError, match="upgrade tokendepth") as raised:
        _ = run.evaluation
    assert "damaged" not in one_line(raised.value)


# --- invalid content under a valid seal -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"passage": "x"}, "its passage is 'x'; expected"),
        ({"passage": {"pieces": ["a"], "sites": 3}}, "its passage.sites is 3; expected a list"),
        ({"passage": {"pieces": ["a"], "sites": ["b"], "soft": [[2.0]]}}, "passage.soft[0][0] is 2.0"),
        ({"hard": {"loss": "3.5", "active_fraction": 0.5}}, "its hard.loss is '3.5'; expected a number from 0 up"),
        ({"hard": {"loss": -3.5, "active_fraction": 0.5}}, "its hard.loss is -3.5"),
        ({"hard": {"loss": 3.5, "active_fraction": 1.5}}, "its hard.active_fraction is 1.5; expected a number from 0"),
        ({"hard": {"loss": 3.5}}, "its hard.active_fraction is missing"),
        ({"soft": []}, "its soft is a list"),
        ({"tokens": 1.5}, "its tokens is 1.5; expected a whole number"),
        ({"tokens": True}, "its tokens is True"),
        ({"parameters": 10**400}, "its parameters is 1000"),
        ({"method": None}, "its method is None; expected text"),
        ({"curve": [3]}, "its curve[0] is 3; expected an object"),
        ({"curve": [{"budget": 0.5}]}, "its curve[0].sparse is missing"),
        ({"time": {"dense_ms": 4}}, "its time.dense_ms is 4"),
        ({"controls": {"dice": {"loss": None, "active_fraction": 0.0}}}, "its controls.dice.loss is None"),
        ({"new\nline": []}, "its new\\nline is a list"),
    ],
)
def test_a_wrong_value_under_a_right_seal_is_named(run, change, said):
    run.write_evaluation({**tsa_evaluation(text="ab c"), **change})
    refused(run, said)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "[" * 5000])
def test_what_is_no_finite_number_is_refused_in_an_old_evaluation_too(tmp_path, number):
    run = old_run(tmp_path / "run", dense_evaluation(7.25))
    path = run.path / "eval.json"
    assert run.evaluation
    path.write_text(path.read_text().replace("7.25", number))
    assert "eval.json" in refused(run)


def test_the_committed_rows_have_the_shape_of_an_evaluation():
    paths = [path for path in (ROOT / "results").glob("*.json") if "evaluation" in read_rows(path)[0]]
    found = [record(row, path) for path in paths for row in read_rows(path)]
    assert len(found) > 200


@pytest.mark.parametrize("change", [{"evaluation": []}, {"evaluation": None}, {"trained_on": 3}, {"history": [3]}])
def test_a_row_of_another_shape_is_named(change):
    path = ROOT / "results" / "shakespeare.json"
    row = {**read_rows(path)[0], **change}
    with pytest.raises(UserError) as raised:
        record(row, path)
    message = one_line(raised.value)
    assert row["name"] in message
    assert next(iter(change)) in message


JUNK = [
    None,
    True,
    -1,
    0,
    1.5,
    -0.5,
    1e300,
    10**400,
    "",
    "x",
    "\n",
    [],
    [[]],
    {},
    {"a": {}},
    [None],
    ["a"],
    {"step": 2},
]


def places(tree: Any, path: tuple = ()) -> list[tuple]:
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [path, *(place for key, value in inner for place in places(value, (*path, key)))]


def forged(tree: Any, dice: random.Random) -> Any:
    """The same tree with another value in one place, or without that value."""
    tree = copy.deepcopy(tree)
    *path, last = dice.choice([place for place in places(tree) if place])
    inner = tree
    for key in path:
        inner = inner[key]
    if dice.random() < 0.2:
        del inner[last]
    else:
        inner[last] = dice.choice(JUNK)
    return tree


def test_forged_evaluations_are_reported_or_refused_in_one_line(run):
    dice, outcomes = random.Random(1), set()
    for _ in range(400):
        body = forged(tsa_evaluation(text="ab"), dice)
        try:
            (run.path / "eval.json").write_bytes(sealed(body))
            page = markdown_table(rows([run]))
            _ = Record.read(run).passage
            outcomes.add("reported")
            assert "nan" not in page
        except UserError as error:
            outcomes.add("refused" if str(run.path / "eval.json") in one_line(error) else f"did not name it: {error}")
    assert outcomes == {"reported", "refused"}


@pytest.mark.parametrize("name", SMALL_FILES)
def test_forged_files_of_a_finished_run_are_read_or_refused_in_one_line(run, name):
    """With a manifest that vouches for them."""
    dice, path, refusals = random.Random(2), run.path / name, 0
    lines = [json.loads(line) for line in path.read_text().splitlines()] if name == "metrics.jsonl" else None
    original = lines or json.loads(path.read_text())
    for _ in range(60):
        tree = forged(original, dice)
        path.write_text("".join(json.dumps(row) + "\n" for row in tree) if lines else json.dumps(tree))
        write_manifest(run.path, FILES, CONFIG.train.steps)
        try:
            markdown_table(rows([run]))
            run.weights()
            run.check_corpus("f" * 64)
            tokenizer_from_dict(run.tokenizer)
        except UserError as error:
            one_line(error)
            refusals += 1
    assert refusals > 10


def test_a_manifest_of_another_step_than_the_last_is_refused(run):
    write_manifest(run.path, FILES, 4)
    with pytest.raises(UserError, match=r"MANIFEST\.json is damaged: it is of step 4, not 12"):
        run.weights()


def test_a_manifest_names_no_file_outside_of_its_folder(run, tmp_path):
    (tmp_path / "theirs").write_text("x")
    write_manifest(run.path, (*FILES, "../theirs"), CONFIG.train.steps)
    with pytest.raises(UserError, match="does not list what it must"):
        run.weights()


# --- checkpoints ------------------------------------------------------------------------------------------------------


def checkpoint_of(run: Run, name: str, step: int, **tensors: np.ndarray) -> None:
    """A checkpoint with correct checksums whose state was saved as that of step 4."""
    run.save_checkpoint(4, {"progress": np.array([1.0, 2.0]), **tensors})
    if step != 4:
        (run.checkpoints / "step-00000004").rename(run.checkpoints / name)
        write_manifest(run.checkpoints / name, ("state.safetensors",), step)


@pytest.fixture
def begun(tmp_path) -> Run:
    return Run.create(tmp_path / "run", CONFIG, resume=False)


@pytest.mark.parametrize("step", [99, 8])
def test_a_checkpoint_whose_manifest_tells_another_step_is_passed_over(begun, step):
    """The run would end with the weights of an earlier step."""
    checkpoint_of(begun, f"step-{step:08d}", step)
    checkpoint, (line,) = begun.load_checkpoint()
    assert checkpoint is None
    assert "holds a different step" in line


def test_a_checkpoint_of_a_later_step_than_the_last_is_of_another_run(begun):
    begun.save_checkpoint(99, {"w": np.ones(3)})
    with pytest.raises(UserError, match="it is of step 99, and this run has 12") as raised:
        begun.check_checkpoint(begun.load_checkpoint()[0], CONFIG, "f")
    assert "remove it" in one_line(raised.value)


def test_a_state_that_is_not_finite_is_passed_over(begun):
    checkpoint_of(begun, "", 4, progress=np.array([np.nan, 1.0]))
    checkpoint, (line,) = begun.load_checkpoint()
    assert checkpoint is None
    assert "its progress is not finite" in line


@pytest.mark.parametrize("noted", [b"", b"3", b"[]", b'{"bytes": -1, "sha256": "0"}', b'{"bytes": 1}', b"[" * 9999])
def test_a_checkpoint_that_notes_no_metrics_is_passed_over(begun, noted):
    begun.save_checkpoint(4, {"w": np.ones(3)}, {"metrics": noted})
    checkpoint, (line,) = begun.load_checkpoint()
    assert checkpoint is None
    assert "metrics.jsonl" in one_line(UserError(line))


@pytest.mark.parametrize("name", ["config.json", "env.json"])
@pytest.mark.parametrize(
    "content", [b"", b"3", b"[]", b"[" * 9999, b"NaN", b'{"version": 2, "train": {"steps": [12]}}']
)
def test_small_files_of_a_checkpoint_that_are_none_are_one_line(begun, name, content):
    begun.save_checkpoint(4, {"w": np.ones(3)}, {name: content})
    (begun.path / "config.json").write_bytes(b"rot")
    with pytest.raises(UserError) as raised:
        Run.create(begun.path, CONFIG, resume=True)
    one_line(raised.value)
    try:
        begun.check_checkpoint(begun.load_checkpoint()[0], CONFIG, "f")
    except UserError as error:
        one_line(error)
    else:
        assert name == "env.json"


def test_a_shape_names_the_first_wrong_place():
    shape = shapes.Object({"a": [(None, shapes.SHARE)]}, {"b": shapes.TEXT}, other=shapes.COUNT)
    assert shapes.problem({"a": [None, 0.5], "c": 3}, shape) is None
    assert shapes.problem({"b": "x"}, shape) == "its a is missing"
    assert shapes.problem({"a": [1, 2]}, shape) == "its a[1] is 2; expected a number from 0 to 1"
    assert shapes.problem({"a": [], "b": None}, shape) == "its b is None; expected text"
    assert shapes.problem({"a": [], "c": -1}, shape) == "its c is -1; expected a whole number from 0 up"
    assert shapes.problem([], shape) == "its content is a list; expected an object"
    assert shapes.problem({"a": 1}, shapes.Object()) == "its a is unknown"
