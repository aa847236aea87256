"""Only one process at a time trains into a run folder, and no lock outlives its holder."""

import errno
import os
import shutil
import stat
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.faults.special import SPECIAL
from tests.tiny import hashes, one_line, tiny
from tokendepth.errors import UserError
from tokendepth.measure.evaluate import evaluate
from tokendepth.runs.lock import only_one, wait_until_free
from tokendepth.runs.run import LOCK, Run
from tokendepth.training.loop import train

fcntl = pytest.importorskip("fcntl")


def test_the_second_is_refused_and_told_who_the_first_is(tmp_path):
    with only_one(tmp_path / "new" / "run"):
        with pytest.raises(UserError) as raised, only_one(tmp_path / "new" / "run"):
            pytest.fail("let in")
        message = one_line(raised.value)
        assert f"{tmp_path / 'new' / 'run'} is being trained by process {os.getpid()} on " in message
        assert "choose another --out" in message
        with only_one(tmp_path / "other"):
            pass
    with only_one(tmp_path / "new" / "run"):
        pass
    assert list((tmp_path / "new" / "run").iterdir()) == []


def test_one_can_wait_for_it(tmp_path):
    wait_until_free(tmp_path, 60)  # no process holds it
    (tmp_path / LOCK).write_text("process 1 on nowhere since long")  # left over from a killed process
    wait_until_free(tmp_path, 60)
    held, waited = threading.Event(), threading.Event()

    def train_for_a_while() -> None:
        with only_one(tmp_path):
            held.set()
            waited.wait(60)

    with ThreadPoolExecutor() as others:
        others.submit(train_for_a_while)
        assert held.wait(60)
        wait_until_free(tmp_path, 0.1)  # gives up
        waiting = others.submit(wait_until_free, tmp_path, 60)
        with pytest.raises(TimeoutError):
            waiting.result(0.3)
        waited.set()
        waiting.result(60)
    with only_one(tmp_path):
        pass


def test_it_is_released_when_the_training_fails(tmp_path):
    with pytest.raises(ZeroDivisionError), only_one(tmp_path):
        _ = 1 / 0
    with only_one(tmp_path):
        pass


def test_the_file_that_a_killed_process_left_holds_nobody_up(tmp_path):
    config = tiny(tmp_path, steps=2)
    out = tmp_path / "run"
    out.mkdir()
    (out / LOCK).write_text("process 4711 on a machine that is off, with a name longer than the next one's " * 3)
    run = train(config, out, show=False)
    assert run.finished
    assert not (out / LOCK).exists()


def test_a_file_removed_by_the_one_before_is_not_locked_in_vain(tmp_path, monkeypatch):
    """It ended between our opening and locking the file: our lock would be on a file that no one else can see."""
    real, calls = fcntl.flock, []

    def removed(handle, how):
        if stat.S_ISREG(os.fstat(handle).st_mode):
            calls.append(handle)
            if len(calls) == 1:
                (tmp_path / LOCK).unlink()
        real(handle, how)

    monkeypatch.setattr(fcntl, "flock", removed)
    with only_one(tmp_path):
        assert len(calls) == 2
        with pytest.raises(UserError), only_one(tmp_path):
            pytest.fail("let in")


def test_the_folder_stays_locked_when_the_file_is_removed(tmp_path):
    with only_one(tmp_path):
        (tmp_path / LOCK).unlink()
        with pytest.raises(UserError, match="is being trained by another process") as raised, only_one(tmp_path):
            pytest.fail("let in")
        one_line(raised.value)
        (tmp_path / LOCK).write_text("of somebody else's, put there meanwhile")
    assert (tmp_path / LOCK).read_text() == "of somebody else's, put there meanwhile"


def test_where_only_files_can_be_locked_the_file_serves(tmp_path, monkeypatch):
    real = fcntl.flock

    def on_nfs(handle, how):
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EBADF, "Bad file descriptor")
        real(handle, how)

    monkeypatch.setattr(fcntl, "flock", on_nfs)
    with only_one(tmp_path), pytest.raises(UserError, match=f"trained by process {os.getpid()}"), only_one(tmp_path):
        pytest.fail("let in")


@pytest.mark.parametrize(
    "kind", ["link", "dangling link", "loop", "pipe", "folder", "file", "second name of an empty file", "a terabyte"]
)
def test_what_is_in_the_place_of_the_lock_is_left_alone(tmp_path, kind):
    theirs, lock = tmp_path / "thesis.tex", tmp_path / "run" / LOCK
    theirs.write_text("years of work")
    lock.parent.mkdir()
    {
        "link": lambda: lock.symlink_to(theirs),
        "dangling link": lambda: lock.symlink_to(tmp_path / "nothing"),
        "loop": lambda: lock.symlink_to(LOCK),
        "pipe": lambda: os.mkfifo(lock),
        "folder": lambda: lock.mkdir(),
        "file": lambda: shutil.copy(theirs, lock),
        "second name of an empty file": lambda: ((tmp_path / "empty").touch(), os.link(tmp_path / "empty", lock)),
        "a terabyte": lambda: SPECIAL["a terabyte"](lock),
    }[kind]()
    before = os.lstat(lock)
    with pytest.raises(UserError, match="move it away") as raised, only_one(lock.parent):
        pytest.fail("let in")
    assert str(lock) in one_line(raised.value)
    after = os.lstat(lock)
    assert (after.st_ino, after.st_size, after.st_mtime_ns) == (before.st_ino, before.st_size, before.st_mtime_ns)
    assert theirs.read_text() == "years of work"
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("content", [b"", bytes(40), b"process 12 on "])
def test_a_lock_that_a_power_cut_left_holds_nobody_up(tmp_path, content):
    (tmp_path / LOCK).write_bytes(content)
    with only_one(tmp_path):
        assert (tmp_path / LOCK).read_bytes().startswith(b"process ")
    assert not (tmp_path / LOCK).exists()


def test_where_there_are_no_locks_nobody_is_refused(tmp_path, monkeypatch):
    def unsupported(handle, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    entered = 0
    with only_one(tmp_path):
        entered += 1
        with only_one(tmp_path):
            entered += 1
    assert entered == 2


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    def read_only(*_):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(UserError) as raised, only_one(tmp_path):
        pytest.fail("let in")
    assert "read-only" in one_line(raised.value)


def test_a_second_training_changes_nothing_and_readers_need_no_lock(tmp_path):
    config = tiny(tmp_path, steps=2)
    run = train(config, tmp_path / "run", show=False)
    begun = Run.create(tmp_path / "begun", run.config, resume=False)
    (begun.path / ".tmp-of-the-first").write_text("half")
    with only_one(begun.path), only_one(run.path):
        before = hashes(begun.path)
        with pytest.raises(UserError, match="is being trained by"):
            train(config, begun.path, resume=True, show=False)
        assert hashes(begun.path) == before
        assert evaluate(run, timing=False)["tokens"] > 0
        assert train(config, run.path, resume=True, show=False) == run  # finished, so it only reads
    assert train(config, begun.path, resume=True, show=False).finished


@pytest.mark.parametrize("left", [b"", b"proc", bytes(40), b"process 12 on" + bytes(9)])
def test_what_a_power_cut_left_of_a_lock_holds_nobody_up(tmp_path, left):
    (tmp_path / LOCK).write_bytes(left)
    with only_one(tmp_path):
        assert (tmp_path / LOCK).read_bytes().startswith(b"process %d on " % os.getpid())
    assert not (tmp_path / LOCK).exists()
