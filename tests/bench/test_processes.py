"""Several processes measure the same; the median one is kept."""

import pytest

from tokendepth.bench import processes
from tokendepth.cli.main import main
from tokendepth.errors import UserError
from tokendepth.runs.results import read_rows


def measured(*speedups: float) -> list[dict]:
    """Rows for two batch sizes with two fractions each."""
    asked = [(batch, fraction) for batch in (1, 8) for fraction in (0.1, 0.4)]
    facts = {"benchmark": "forward", "shape": "paper", "positions": "random", "execution": "sparse"}
    facts |= {"dtype": "float32", "device": "CPU", "commit": "abc"}
    return [{**facts, "batch": b, "asked": f, "speedup": s} for (b, f), s in zip(asked, speedups, strict=True)]


def test_of_each_batch_size_the_middle_process_is_kept_whole():
    found = [measured(1.0, 3.0, 5.0, 5.0), measured(1.5, 1.4, 6.0, 6.0), measured(9.0, 0.0, 4.0, 4.0)]
    rows = list(processes.middle(found))
    assert [row["speedup"] for row in rows] == [1.0, 3.0, 5.0, 5.0], "means 2.0 of 1.45, 2.0, 4.5, and 5 of 4, 5, 6"
    assert rows[0]["speedup_processes"] == [1.0, 1.5, 9.0]
    assert rows[1]["speedup_processes"] == [0.0, 1.4, 3.0]


def test_rows_are_written_once(tmp_path, monkeypatch):
    several = iter([measured(1, 1, 1, 1), measured(2, 2, 2, 2), measured(3, 3, 3, 3)])
    monkeypatch.setattr(processes, "_measured", lambda words: next(several))
    rows = list(processes.measure([], 3, tmp_path))
    assert read_rows(tmp_path / "forward.json") == rows
    assert [row["speedup"] for row in rows] == [2, 2, 2, 2]


def test_processes_of_different_code_are_not_compared(tmp_path, monkeypatch):
    changed = [{**row, "commit": "abc+changes"} for row in measured(2, 2, 2, 2)]
    several = iter([measured(1, 1, 1, 1), changed])
    monkeypatch.setattr(processes, "_measured", lambda words: next(several))
    with pytest.raises(UserError, match="the code was changed"):
        next(processes.measure([], 3, tmp_path))
    assert not (tmp_path / "forward.json").exists()


def test_what_a_process_says_is_said(tmp_path):
    with pytest.raises(UserError, match="/nowhere/at/all"):
        next(processes.measure(["--device", "cpu", "--run", "/nowhere/at/all"], 2, tmp_path))


def test_no_process_is_refused(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["bench", "forward", "--processes", "0"])
    assert stop.value.code == 2
    assert "--processes is 0; expected a number from 1 to 1000" in capsys.readouterr().err
