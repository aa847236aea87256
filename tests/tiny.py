"""A run that trains in a fraction of a second, and what its tests compare."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokendepth.config import DataConfig, MethodConfig, ModelConfig, RunConfig, TrainConfig, TSAConfig
from tokendepth.runs.metrics import METRICS, row_bytes
from tokendepth.runs.run import Run

# Not one line over and over, so that the splits differ; the dash is three bytes, so characters are not bytes.
TEXT = "".join(
    f"{n} green bottles hanging on the wall; {n} green bottles \u2013 and if one of them should accidentally fall,\n"
    for n in range(40, 0, -1)
)


def write_corpus(folder: Path, text: str = TEXT) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "corpus.txt").write_text(text, encoding="utf-8")
    return f"text:{folder / 'corpus.txt'}"


def tiny(folder: Path, method: MethodConfig | None = None, **changes: Any) -> RunConfig:
    """A tiny run on a text file in `folder`; a change is named as in its part of the config: `steps=3, dropout=0.1`."""
    data = DataConfig(changes.pop("corpus", None) or write_corpus(folder))
    model = ModelConfig(d_model=32, n_layer=3, n_head=4, d_ff=64, context=16, dropout=0.0)
    train = TrainConfig(
        steps=8, batch_size=4, lr=1e-2, eval_every=4, checkpoint_every=4, log_every=1, device="cpu", dtype="float32"
    )
    parts = {"data": data, "model": model, "train": train}
    for name, part in parts.items():
        own = {key: changes.pop(key) for key in list(changes) if key in vars(part)}
        parts[name] = replace(part, **own)
    assert not changes, f"no such option: {changes}"
    return RunConfig(method=method or TSAConfig(depth_penalty=0.1), **parts)


def steady(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Metrics without the one number that a clock makes."""
    return [{key: value for key, value in row.items() if key != "tokens_per_s"} for row in rows]


def hashes(folder: Path) -> dict[str, str]:
    """Every file and folder below `folder`, by its path; the SHA-256 of a file."""
    found = sorted(folder.rglob("*"))
    return {
        str(path.relative_to(folder)): "folder" if path.is_dir() else hashlib.sha256(path.read_bytes()).hexdigest()
        for path in found
    }


def add_rows(run: Run, *rows: dict[str, Any]) -> None:
    with open(run.path / METRICS, "ab") as file:
        file.writelines(map(row_bytes, rows))


def one_line(error: BaseException) -> str:
    """The message, which a user must be able to read as one line."""
    message = str(error)
    assert message.strip()
    assert "\n" not in message
    return message


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
