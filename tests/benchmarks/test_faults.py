"""The small version of `python -m benchmarks faults`, and that its functions notice when something is lost."""

import contextlib
import math
import os
import pickle  # noqa: TID251 only to show that the payloads are alive
import shutil
import signal
import stat
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.__main__ import BENCHMARKS
from benchmarks.faults import (
    belongings,
    commands,
    damage,
    equivalence,
    exactness,
    kills,
    mutation,
    pickles,
    processes,
    seals,
    signals,
    special,
)
from benchmarks.faults import outcome as outcomes
from benchmarks.faults.outcome import Outcome, max_difference, subject
from benchmarks.faults.registry import FAULTS, measure
from tests.shown import every_update
from tests.tiny import one_line
from tokendepth.cli.main import main
from tokendepth.errors import UserError
from tokendepth.runs import checkpoints, shapes
from tokendepth.runs import run as runs
from tokendepth.runs.files import parse_json
from tokendepth.runs.results import read_rows
from tokendepth.runs.run import Run
from tokendepth.training.loop import train

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("processes")]

SMALL = {
    "kill": 4,
    "kill-rank": 1,
    "resume": 4,
    "gpu-resume": 1,
    "stop": 4,
    "signals": 5,
    "damage": 2,
    "foreign": 2,
    "mutation": 80,
    "seals": 40,
    "special-files": 12,
    "foreign-files": 3,
    "pickle": 12,
    "power-cut": 6,
    "disk-full": 2,
    "read-only": 2,
    "not-finite": 12,
    "finished": 2,
    "second": 2,
    "data-order": 2,
    "layouts": 3,
    "equivalence": 2000,
}
OF_SERVERS = {
    "malformed": 60,
    "overload": 12,
    "soak": 6,
    "rude-clients": 11,
    "server-defaults": 2,
    "server-restart": 2,
    "connections": 40,
}
"""Tried in test_server_faults.py."""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TOKENDEPTH_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def runs_read(tmp_path_factory) -> tuple[Path, list[commands.Reading]]:
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOKENDEPTH_CACHE", str(folder / "cache"))
        return folder, commands.readings(folder)


@pytest.fixture(autouse=True)
def _made_once(runs_read, monkeypatch):
    """The runs whose files are damaged take seconds to make, and every attempt restores them."""
    folder, readings = runs_read

    def shared(_: Path) -> list[commands.Reading]:
        monkeypatch.setenv("TOKENDEPTH_CACHE", str(folder / "cache"))
        return readings

    for module in (damage, mutation, seals, special, commands):
        monkeypatch.setattr(module, "readings", shared)


@pytest.fixture(autouse=True)
def _one_server(server, monkeypatch):
    """Starting one takes seconds."""
    for module in (exactness, kills, signals):
        monkeypatch.setattr(module, "Server", lambda _: contextlib.nullcontext(server))


def nothing(*_: object) -> None:
    """Progress is not shown."""


def tried(name: str, folder: Path, count: int | None = None) -> Outcome:
    return FAULTS[name].inject(folder, count or SMALL[name], nothing)


def test_every_fault_is_tried():
    assert SMALL.keys() | OF_SERVERS.keys() == FAULTS.keys()


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
    quick = [reading for reading in commands.readings(tmp_path) if reading.words[0] in ("generate", "report")]
    examinations = [mutation.Examination(reading, outcome) for reading in quick]

    @hypothesis.settings(max_examples=100)
    @hypothesis.given(st.sampled_from(examinations), st.lists(edit, min_size=1, max_size=4))
    def read(examination, edits):
        content = bytearray(examination.content)
        for where, length, new in edits:
            start = int(where * len(content))
            content[start : start + length] = new
        examination.try_out(bytes(content))
        assert outcome.failures == []

    read()
    assert outcome.attempts >= 60


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
    assert len(tried("mutation", tmp_path, 60).failures) > 5


def test_small_files_that_are_restored_in_silence_are_noticed(tmp_path, monkeypatch):
    real = Run.restore
    monkeypatch.setattr(Run, "restore", lambda self, files: real(self, files)[:0])
    monkeypatch.setattr(damage, "readings", lambda folder: commands.readings(folder)[:1])
    outcome = tried("damage", tmp_path)
    assert len(outcome.failures) == outcome.attempts == len(damage.WAYS)


def test_numbers_that_are_not_sealed_are_noticed(tmp_path, monkeypatch):
    def unsealed(path, version):
        return parse_json(path.read_bytes()), True

    monkeypatch.setattr(runs, "read_sealed", unsealed)
    monkeypatch.setattr(shapes, "problem", nothing)
    assert tried("seals", tmp_path, 8).failures


def test_what_waits_for_a_pipe_is_a_hang(tmp_path, monkeypatch):
    monkeypatch.setattr("tokendepth.runs.files.regular", lambda path, flags: os.open(path, flags))
    monkeypatch.setattr(special, "SPECIAL", {"pipe": os.mkfifo})
    monkeypatch.setattr(special, "PATIENCE_S", 1.0)
    outcome = tried("special-files", tmp_path, 4)
    assert 0 < outcome.hangs <= len(outcome.failures)


def test_a_process_that_says_nothing_any_more_is_a_hang(tmp_path, server, monkeypatch):
    outcome = Outcome()
    server.finish(subject(tmp_path, steps=1), tmp_path / "quick")
    monkeypatch.setattr(processes, "PATIENCE_S", 0.5)
    with outcome.attempt("asleep"):
        server.start(subject(tmp_path), tmp_path / "run", action="sleep", step=0).exit_code()
    assert (outcome.attempts, outcome.hangs, len(outcome.failures)) == (1, 1, 1)


def test_an_attempt_without_end_or_with_an_error_of_any_kind_is_a_failure(monkeypatch):
    monkeypatch.setattr(outcomes, "LIMIT_S", 0.1)
    outcome = Outcome()
    with outcome.attempt("slow"):
        time.sleep(10)
    with outcome.attempt("wrong"):
        raise KeyError("x")
    with outcome.attempt("late"):
        raise outcomes.NotTried
    assert (outcome.attempts, outcome.hangs) == (2, 1)
    assert [failure.split(":")[0] for failure in outcome.failures] == ["slow", "wrong"]


def test_a_signal_that_saves_nothing_and_a_command_that_fails_are_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(signals, "ending_signals", lambda: [signal.SIGKILL])
    quiet = str(tmp_path / "quiet")
    monkeypatch.setattr(signals, "_streams", lambda *_: [(["describe", "nothing"], quiet, quiet)])
    failures = tried("signals", tmp_path).failures
    assert "SIGKILL: exit code -9" in failures
    assert any("describe" in failure for failure in failures)


def test_a_users_note_that_is_removed_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "_clear", lambda path: shutil.rmtree(path, ignore_errors=True))
    monkeypatch.setattr(checkpoints, "remove", lambda folder, names: shutil.rmtree(folder, ignore_errors=True))
    name = "note.txt in checkpoints/step-00000003"
    monkeypatch.setattr(belongings, "CASES", {name: belongings.CASES[name]})
    (failure,) = tried("foreign-files", tmp_path).failures
    assert failure == f"{name}: run/checkpoints/step-00000003/note.txt is gone or changed"


class Forgetful:
    """`os`, with an fsync that does nothing for files or for folders."""

    def __init__(self, forgotten: str) -> None:
        self.forgotten = forgotten

    def __getattr__(self, name):
        return getattr(os, name)

    def fsync(self, handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode) != (self.forgotten == "folders"):
            os.fsync(handle)


@pytest.mark.parametrize("forgotten", ["files", "folders"])
def test_what_is_not_synced_is_noticed(forgotten, tmp_path, monkeypatch):
    monkeypatch.setattr("tokendepth.runs.files.os", Forgetful(forgotten))
    assert tried("power-cut", tmp_path).failures


def test_ranks_that_take_other_batches_are_noticed(tmp_path, monkeypatch):
    real = exactness.subject
    monkeypatch.setattr(exactness, "subject", lambda folder, **train: real(folder, seed=1, **train))
    failures = tried("data-order", tmp_path, 1).failures
    assert any("of 2 processes" in failure for failure in failures)
    assert any("of 4 processes" in failure for failure in failures)


def test_logits_that_are_not_those_of_the_reference_are_noticed(tmp_path, monkeypatch):
    real = equivalence._passed

    def off(model, ids, execution, **options):
        out = real(model, ids, execution, **options)
        return replace(out, logits=out.logits * (1 + 1e-4)) if execution == "sparse" else out

    monkeypatch.setattr(equivalence, "_passed", off)
    monkeypatch.setattr(equivalence, "METHODS", {"dense": 0, "tsa": 0})
    failures = tried("equivalence", tmp_path, 100).failures
    assert sum("sparse is not hard" in failure for failure in failures) == 4


def test_a_number_that_stops_nothing_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(exactness, "PLACES", {"nowhere": lambda training, value: None})
    failures = exactness.not_finite(tmp_path, 3, nothing).failures
    assert sum("not noticed" in failure for failure in failures) == 3


def test_the_pickles_are_alive(tmp_path):
    made = pickles.payloads(tmp_path / "executed")
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
    rows = list(measure("cpu", tmp_path / "results", "finished, foreign", 0.05))
    assert [row["fault"] for row in rows] == ["finished", "foreign"]
    assert read_rows(tmp_path / "results" / "faults.json") == rows
    assert all(row["failed"] == 0 and row["attempts"] > 0 and row["commit"] and row["torch"] for row in rows)
    assert rows[0]["device"].endswith("1 threads")
    for name in ("finished", "foreign"):
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
        (["--only", "sleep"], "--only has 'sleep': no such fault; expected one of connections"),
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
