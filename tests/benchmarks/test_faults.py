"""The small version of `python -m benchmarks faults`, and that its functions notice when something is lost."""

import contextlib
import math
import pickle  # noqa: TID251 only to show that the payloads are alive
from pathlib import Path

import numpy as np
import pytest

from benchmarks.__main__ import BENCHMARKS
from benchmarks.faults import damage, exactness, mutation
from benchmarks.faults.outcome import Outcome, max_difference, subject
from benchmarks.faults.registry import FAULTS, measure
from tests.shown import every_update
from tests.tiny import one_line
from tokendepth.cli.main import main
from tokendepth.errors import UserError
from tokendepth.runs import run as runs
from tokendepth.runs.results import read_rows
from tokendepth.runs.run import Run
from tokendepth.training.loop import train

pytestmark = pytest.mark.slow

SMALL = {
    "kill": 10,
    "kill-rank": 1,
    "resume": 4,
    "gpu-resume": 1,
    "stop": 4,
    "damage": 24,
    "foreign": 3,
    "mutation": 360,
    "pickle": 12,
    "disk-full": 4,
    "read-only": 4,
    "not-finite": 12,
    "finished": 2,
    "second": 1,
    "data-order": 20,
    "layouts": 3,
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TOKENDEPTH_CACHE", str(tmp_path / "cache"))


def nothing(*_: object) -> None:
    """Nobody watches."""


def tried(name: str, folder: Path, count: int | None = None) -> Outcome:
    return FAULTS[name].inject(folder, count or SMALL[name], nothing)


def test_every_fault_is_tried():
    assert SMALL.keys() == FAULTS.keys()


@pytest.mark.parametrize("name", SMALL)
def test_nothing_is_lost(name, tmp_path):
    outcome = tried(name, tmp_path)
    if outcome.skipped:
        pytest.skip(outcome.skipped)
    assert outcome.failures == []
    assert outcome.attempts >= SMALL[name]
    for line in outcome.says:
        assert "\n" not in line
        assert str(tmp_path) not in line
        assert ";" in line, f"no remedy: {line}"


def test_mutations_by_hypothesis_are_read_as_written_or_refused(tmp_path):
    hypothesis = pytest.importorskip("hypothesis")
    from hypothesis import strategies as st

    outcome = Outcome()
    edit = st.tuples(st.floats(0, 1), st.integers(0, 9), st.binary(max_size=4) | st.sampled_from(mutation.SPLICES))
    with contextlib.ExitStack() as held:
        examinations = [
            held.enter_context(mutation.Examination(name, loader, outcome))
            for name, loader in mutation.loaders(tmp_path).items()
        ]

        @hypothesis.settings(max_examples=300)
        @hypothesis.given(st.sampled_from(examinations), st.lists(edit, max_size=4))
        def read(examination, edits):
            content = bytearray(examination.original)
            for where, length, new in edits:
                start = int(where * len(content))
                content[start : start + length] = new
            examination.try_out(bytes(content))
            examination.loader.path.write_bytes(examination.original)
            assert outcome.failures == []

        read()
    assert outcome.attempts >= 200


# --- the measurement can fail -----------------------------------------------------------------------------------------


def test_a_single_bit_of_difference_is_seen(tmp_path):
    config = subject(tmp_path, steps=2)
    one, other = (train(config, tmp_path / name, show=False) for name in ("one", "other"))
    outcome = Outcome()
    outcome.compare(one, other)
    assert outcome.failures == []
    for change in (lambda a: a.flat.__setitem__(0, np.nextafter(a.flat[0], np.float32(9))), lambda a: a.fill(math.nan)):
        weights = {name: array.copy() for name, array in one.weights().items()}
        change(weights["norm.weight"])
        other.finish(weights)
        assert max_difference(other, one) > 0
        outcome.compare(other, one)
    assert len(outcome.failures) == 2
    outcome.compare(Run(tmp_path / "nowhere"), one)
    assert "not finished" in outcome.failures[-1]


def test_checksums_that_are_not_looked_at_are_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "verify_file", nothing)
    monkeypatch.setattr("tokendepth.runs.files.verify_file", nothing)
    assert len(tried("mutation", tmp_path).failures) > 20


def test_small_files_that_are_restored_in_silence_are_noticed(tmp_path, monkeypatch):
    real = Run.restore
    monkeypatch.setattr(Run, "restore", lambda self, files: real(self, files)[:0])
    assert len(damage.damage(tmp_path, 8, nothing).failures) == 8


def test_a_number_that_stops_nothing_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(exactness, "PLACES", {"nowhere": lambda training, value: None})
    failures = exactness.not_finite(tmp_path, 3, nothing).failures
    assert sum("not noticed" in failure for failure in failures) == 3


def test_the_pickles_are_alive(tmp_path):
    made = damage.payloads(tmp_path / "executed")
    for kind in ("pickle", "pickle 2"):
        pickle.loads(made[kind])  # noqa: S301
        (tmp_path / "executed").rmdir()
    with pytest.raises(FileNotFoundError):
        (tmp_path / "executed").rmdir()


def test_mutations_are_of_every_kind_and_repeatable():
    import random

    content = b'{"version": 1, "step": 27, "name": "abc"}' * 3
    made = [mutation.mutate(content, random.Random(seed)) for seed in range(300)]
    assert made == [mutation.mutate(content, random.Random(seed)) for seed in range(300)]
    assert len(set(made)) > 200
    assert {len(m) < len(content) for m in made} == {True, False}
    assert any(len(m) == len(content) and m != content for m in made)


# --- the rows ---------------------------------------------------------------------------------------------------------


def test_rows_are_written_as_they_come(tmp_path, monkeypatch):
    log = every_update(monkeypatch)
    rows = list(measure("cpu", tmp_path / "results", "finished, data-order", 0.05))
    assert [row["fault"] for row in rows] == ["finished", "data-order"]
    assert read_rows(tmp_path / "results" / "faults.json") == rows
    assert all(row["failed"] == 0 and row["attempts"] > 0 and row["commit"] and row["torch"] for row in rows)
    assert rows[0]["device"].endswith("1 threads")
    for name in ("finished", "data-order"):
        log.check_told(name, "tried")


def test_what_was_skipped_makes_no_row(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (row,) = measure("cpu", tmp_path, "gpu-resume", 1.0)
    assert "no GPU" in row["skipped"]
    assert not (tmp_path / "faults.json").exists()


@pytest.mark.parametrize(
    ("only", "scale", "said"), [("kil", 1.0, "'kill'"), ("kill", 0.0, "--scale"), (None, 2.0, "2")]
)
def test_a_wrong_choice_is_one_line(only, scale, said, tmp_path):
    with pytest.raises(UserError) as raised:
        next(measure("cpu", tmp_path, only, scale))
    assert said in one_line(raised.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--only", "sleep"], "--only has 'sleep': no such fault; expected one of damage"),
        (["--only", ""], "--only has ''"),
        (["--scale", "lots"], "lots"),
        (["--scale", "0"], "--scale is 0; expected a number above 0, up to 1"),
    ],
)
def test_a_mistake_is_answered_in_one_line(words, said, capsys, tmp_path):
    with pytest.raises(SystemExit) as stop:
        main(["faults", *words, "--out", str(tmp_path)], BENCHMARKS)
    assert stop.value.code == 2
    answer = capsys.readouterr().err
    assert said in answer
    assert answer.count("\n") == 1
