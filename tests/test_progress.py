"""Progress is never silent: a bar in a terminal, a line every few seconds in a log."""

import io
import re
import threading
import time

import pytest
from rich.console import Console

from tokendepth import progress as module
from tokendepth.progress import Progress


class Heard(io.StringIO):
    """What was written so far; a test can wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.changed = threading.Condition()

    def write(self, text: str) -> int:
        with self.changed:
            self.changed.notify_all()
            return super().write(text)

    def wait_for(self, pattern: str) -> re.Match:
        with self.changed:
            assert self.changed.wait_for(lambda: re.search(pattern, self.getvalue()), timeout=30), self.getvalue()[
                -500:
            ]
        match = re.search(pattern, self.getvalue())
        assert match
        return match


@pytest.fixture
def log(monkeypatch) -> Heard:
    heard = Heard()
    monkeypatch.setattr(module, "console", Console(file=heard, highlight=False))
    monkeypatch.setattr(module, "EVERY_S", 0.01)
    monkeypatch.setattr(module, "_next_line", 0.0)
    return heard


@pytest.fixture
def terminal(monkeypatch) -> Heard:
    heard = Heard()
    console = Console(file=heard, force_terminal=True, width=120, _environ={"TERM": "xterm"}, color_system=None)
    monkeypatch.setattr(module, "console", console)
    return heard


def test_a_log_hears_of_a_task_that_stands_still(log):
    """One unit may take minutes without an update; lines appear all the same."""
    with Progress("evaluating [b]x", 3000, unit="tokens") as progress:
        assert log.wait_for(r"evaluating \[b\]x: 0/3,000 tokens, 0:00:00 elapsed\n")
        progress.update(1500, note="sparse")
        assert log.wait_for(r": 1,500/3,000 tokens, sparse, 0:00:00 elapsed, about 0:00:00 left\n")
        progress.advance(500)
        assert log.wait_for(r": 2,000/3,000 tokens, sparse, ")


def test_what_is_left_is_judged_by_what_was_done_here(log, monkeypatch):
    now = 100.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    with Progress("resumed", 100, done=80) as progress:
        now = 110.0
        progress.advance(5)
        assert log.wait_for(r"resumed: 85/100, 0:00:10 elapsed, about 0:00:30 left\n")


def test_a_task_of_unknown_length_says_how_long_it_has_taken(log):
    with Progress("loading"):
        assert log.wait_for(r"^loading: 0:00:00 elapsed\n")


def test_a_log_hears_of_the_innermost_task_and_nothing_once_all_are_done(log):
    with Progress("outer", 2) as outer:
        with Progress("inner", 7, unit="pieces"):
            log.wait_for("inner: 0/7 pieces")
        outer.advance()
        log.wait_for("outer: 1/2, ")
    assert not module._open
    assert not any(thread.name.endswith("(_print_lines)") for thread in threading.enumerate())


def test_a_short_task_leaves_nothing_in_a_log(log, monkeypatch):
    monkeypatch.setattr(module, "EVERY_S", 5.0)
    with Progress("short", 2) as progress:
        progress.advance()
    assert log.getvalue() == ""


def test_short_tasks_one_after_the_other_are_no_silence(log, monkeypatch):
    """A line that was due when the previous task ended is written for the next one."""
    monkeypatch.setattr(module, "EVERY_S", 5.0)
    monkeypatch.setattr(module, "_next_line", time.monotonic())
    with Progress("second"):
        log.wait_for(r"^second: 0:00:00 elapsed\n")
    assert module._next_line > time.monotonic() + 1, "and the following line is five seconds away"


def test_once_all_is_done_nothing_is_said_to_be_left(log):
    with Progress("task", 2, unit="steps") as progress:
        progress.update(2, note="saving")
        log.wait_for(r"task: 2/2 steps, saving, 0:00:00 elapsed\n")
    assert "left" not in log.getvalue()


def test_a_task_that_fails_is_closed(log):
    with pytest.raises(ZeroDivisionError), Progress("failing"):
        _ = 1 / 0
    assert not module._open


@pytest.mark.parametrize("how", ["rank", "show"])
def test_it_is_quiet_where_nobody_looks(how, log, monkeypatch):
    if how == "rank":
        monkeypatch.setenv("RANK", "1")
    before = threading.active_count()
    with Progress("quiet", 2, show=how == "rank") as progress:
        progress.advance()
        assert threading.active_count() == before
        assert not progress.live
        assert progress.done == 1
    assert log.getvalue() == ""


def test_a_terminal_shows_a_bar_for_each_task(terminal):
    with Progress("outer [b]", 2, unit="runs") as outer:
        assert outer.live
        with Progress("inner", 4) as inner:
            inner.update(3, note="hard")
            line = terminal.wait_for(r"inner +\S+ +3/4 +0:00:0\d \S+ +hard")
            assert "outer [b]" in terminal.getvalue()[: line.start()]
        outer.advance()
    last = terminal.getvalue().splitlines()[-2]  # then the cursor is shown again
    assert re.search(r"outer \[b\] +\S+.* 1/2 runs +0:00:0\d", last), "the outermost bar stays"


def test_a_narrow_terminal_cuts_the_note_short_and_no_figure(monkeypatch, terminal):
    monkeypatch.setattr(module.console, "width", 60)
    with Progress("task", 100, unit="steps") as progress:
        progress.update(7, note="loss 2.345, active 0.678, 123,456 tokens/s")
        line = terminal.wait_for(r"task +\S+ +7/100 steps +0:00:0\d \S+ +loss .*…")
    assert len(line[0]) <= 60


def test_bars_leave_stdout_to_the_file_it_was_sent_to(terminal, capsys):
    with Progress("task"):
        print("a result")
    assert capsys.readouterr().out == "a result\n"
    assert "a result" not in terminal.getvalue()


def test_a_terminal_that_cannot_move_its_cursor_is_told_in_lines(monkeypatch):
    heard = Heard()
    monkeypatch.setattr(module, "EVERY_S", 0.01)
    monkeypatch.setattr(module, "_next_line", 0.0)
    monkeypatch.setattr(module, "console", Console(file=heard, force_terminal=True, _environ={"TERM": "dumb"}))
    with Progress("task", 2):
        assert heard.wait_for("task: 0/2, ")
