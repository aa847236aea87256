"""metrics.jsonl: rows are read back unchanged, either file may be lost, and long files cost no more."""

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pytest

from tests.tiny import add_rows, hashes, one_line
from tokendepth.config import RunConfig, TrainConfig, TSAConfig
from tokendepth.errors import UserError
from tokendepth.runs.metrics import LONGEST_ROW, MetricsLog, row_bytes
from tokendepth.runs.run import Run

CONFIG = RunConfig(method=TSAConfig(), train=TrainConfig(steps=9))
STATE = {"w": np.zeros(3, np.float32)}


def rows(*steps: int) -> list[dict]:
    return [{"step": step, "loss": step / 3} for step in steps]


@pytest.fixture
def run(tmp_path) -> Run:
    return Run.create(tmp_path / "run", CONFIG, resume=False)


# --- reading ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def logged(run) -> Run:
    add_rows(run, *rows(1, 2, 2, 3))
    return run


def test_metrics_come_back_in_order(logged):
    assert logged.metrics() == logged.last_metrics() == rows(1, 2, 2, 3)


def test_a_last_line_cut_anywhere_is_ignored(logged):
    path = logged.path / "metrics.jsonl"
    content = path.read_bytes()
    last = len(content.splitlines(keepends=True)[-1])
    for kept in range(1, last):
        path.write_bytes(content[: len(content) - last + kept])
        whole = kept == last - 1  # only the line end is missing
        assert logged.metrics() == logged.last_metrics() == rows(1, 2, 2, *[3] * whole)


@pytest.mark.parametrize(
    "line",
    [
        b'{"step": 2',
        b"hello",
        b"",
        b"[]",
        b"2",
        b"{}",
        b'{"step": "2"}',
        b'{"step": -1}',
        b'{"step": 0}',
        b'{"step": 2, "loss": NaN}',
        b'{"step": 2, "loss": -Infinity}',
        b'{"step": 2, "loss": 1e999}',
        b'{"step": 2, "loss": "1"}',
        b'{"step": 2, "loss": null}',
        b'{"step": 2, "loss": true}',
        b'{"step": 2, "loss": [1]}',
        b'{"step": 2, "loss": ' + b"9" * 4000 + b"}",
        b"\xff\xfe",
        b"[" * 9999,
        b" " * LONGEST_ROW,
    ],
    ids=lambda line: repr(line[:20]),
)
def test_a_damaged_line_in_the_middle_is_named(logged, line):
    path = logged.path / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")
    lines[1] = line
    path.write_bytes(b"\n".join(lines))
    before = path.read_bytes()
    with pytest.raises(UserError) as raised:
        logged.metrics()
    message = one_line(raised.value)
    assert f"{path} line 2" in message
    assert "restore" in message
    assert path.read_bytes() == before


def test_the_last_rows_are_whole_rows_wherever_they_are_cut(run):
    every = rows(*range(3000))
    for extra in range(1, 60):
        (run.path / "metrics.jsonl").write_bytes(b" " * extra + b"".join(map(row_bytes, every)))
        found = run.last_metrics()
        assert 1000 < len(found) < 3000
        assert found == every[-len(found) :]


# --- writing ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def log(run) -> MetricsLog:
    """A training run that has logged three rows; a checkpoint records the first two."""
    log = run.metrics_log(None)
    log.restore()
    for row in rows(1, 2):
        log.append(row)
    run.save_checkpoint(2, STATE, {}, log)
    log.append({"step": 3})
    return log


def going_on(run: Run) -> MetricsLog:
    checkpoint, skipped = run.load_checkpoint()
    assert skipped == []
    return run.metrics_log(checkpoint)


def test_a_row_is_written_as_it_says(run):
    row = {"step": 1, "loss": 0.1 + 0.2, "tokens": 10**15, "tlops": 1e-300}
    log = run.metrics_log(None)
    log.restore()
    log.append(row)
    log.append({"step": 2})
    assert run.metrics() == [row, {"step": 2}]
    assert log.path.read_bytes() == log.copy.read_bytes() == row_bytes(row) + row_bytes({"step": 2})


def test_a_number_that_is_none_is_not_written(run, log):
    before = hashes(run.path)
    with pytest.raises(ValueError, match="not JSON compliant"):
        log.append({"step": 4, "loss": float("nan")})
    assert hashes(run.path) == before


def test_rows_of_steps_that_will_be_taken_again_are_no_damage(run, log):
    resumed = going_on(run)
    assert resumed.restore() == []
    assert log.path.read_bytes() == log.copy.read_bytes() == b"".join(map(row_bytes, rows(1, 2)))
    resumed.append({"step": 3, "loss": 1.5})
    assert resumed.restore() == []
    assert run.metrics() == [*rows(1, 2), {"step": 3, "loss": 1.5}]


DAMAGE = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:20]),
    "another number": lambda path: path.write_bytes(path.read_bytes().replace(b"0.3", b"0.4")),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "a link to nothing": lambda path: (path.unlink(), path.symlink_to("nothing")),
    "a link to itself": lambda path: (path.unlink(), path.symlink_to(path.name)),
    "endless": lambda path: (path.write_bytes(b""), os.truncate(path, 10**12)),
}


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("training", [False, True], ids=["stopped", "training"])
def test_the_rows_are_restored_from_the_copy(run, log, kind, training):
    expected = rows(1, 2) + [{"step": 3}] * training
    DAMAGE[kind](log.path)
    (line,) = (log if training else going_on(run)).restore()
    assert line.startswith(f"{log.path} was ")
    assert "nothing is lost" in line
    assert run.metrics() == expected
    assert log.copy.read_bytes() == log.path.read_bytes()


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_copy_takes_nothing_with_it(run, log, kind):
    DAMAGE[kind](log.copy)
    log = going_on(run)
    assert log.restore() == []
    log.append({"step": 3})
    assert run.metrics() == [*rows(1, 2), {"step": 3}]


def test_where_both_are_damaged_the_weights_are_not_lost_and_what_was_there_is_kept(run, log):
    for path in (log.path, log.copy):
        path.write_bytes(b"rot\n")
    log = going_on(run)
    (line,) = log.restore()
    assert "rows up to here are lost, the weights are not" in line
    assert log.restore() == []
    assert (run.path / "metrics.jsonl.aside").read_bytes() == b"rot\n"
    log.append({"step": 3})
    assert run.metrics() == [{"step": 3}]
    assert log.restore() == []


def test_a_checkpoint_of_the_first_format_brings_its_rows(run):
    content = b"".join(map(row_bytes, rows(1, 2)))
    run.save_checkpoint(2, STATE, {"metrics.jsonl": content})
    log = going_on(run)
    (line,) = log.restore()
    assert "metrics.jsonl was missing" in line
    assert log.facts() == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert run.metrics() == rows(1, 2)


@pytest.mark.parametrize("link", [os.link, os.symlink])
@pytest.mark.parametrize("which", ["path", "copy"])
def test_a_file_that_is_somebody_elses_too_is_not_written_to(run, log, link, which, tmp_path):
    """As after `cp -al run backup`, during training or before resuming."""
    ours, theirs = getattr(log, which), tmp_path / "backup.jsonl"
    if link is os.link:
        os.link(ours, theirs)
    else:
        ours.rename(theirs)
        ours.symlink_to(theirs)
    before = theirs.read_bytes()
    log.append({"step": 4})
    assert theirs.read_bytes() == before
    assert run.metrics() == [*rows(1, 2), {"step": 3}, {"step": 4}]
    ours.unlink()
    link(theirs, ours)
    assert going_on(run).restore() == []
    assert theirs.read_bytes() == before
    assert run.metrics() == rows(1, 2)


# --- a long history ---------------------------------------------------------------------------------------------------


def transferred() -> dict[str, int]:
    """Bytes that this process has read and written by system calls, including the page cache."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return {name: int(count) for name, count in (line.split(": ") for line in lines)}


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="only Linux counts what a process reads and writes")
def test_a_long_history_is_read_once_and_never_written_again(run):
    row, small = row_bytes({"step": 1, "loss": 1.0, "tokens": 123456789}), 200_000
    log = MetricsLog(run.path, rows=row * 200_000)
    log.restore()
    assert log.size > 40 * small
    log.append({"step": 2})
    run.save_checkpoint(2, STATE, {}, log)

    def spent(action) -> tuple[int, int]:
        before = transferred()
        action()
        after = transferred()
        return after["rchar"] - before["rchar"], after["wchar"] - before["wchar"]

    def save() -> None:
        log.append({"step": 3})
        run.save_checkpoint(3, STATE, {}, log)

    read, written = spent(save)
    assert read < small
    assert written < small
    read, written = spent(lambda: going_on(run).restore())
    assert read < log.size + small
    assert written < small
    read, _ = spent(run.last_metrics)
    assert read < small
    assert run.last_metrics()[-2:] == [{"step": 2}, {"step": 3}]
    assert json.loads(row) in run.last_metrics()
