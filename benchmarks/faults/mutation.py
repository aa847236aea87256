"""Mutated files through every loader: what is read is what was written, or a UserError; quickly, in bounded memory."""

import contextlib
import io
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.faults.damage import stopped_run
from benchmarks.faults.outcome import Outcome, Tell, subject
from tokendepth import data
from tokendepth.config import DataConfig, to_dict
from tokendepth.data.store import cache_folder, load_tokens
from tokendepth.errors import UserError
from tokendepth.runs.files import MANIFEST
from tokendepth.runs.run import Run
from tokendepth.training.loop import train

LONGEST_S = 2.0
MOST_MEMORY = 2**30


@dataclass(frozen=True)
class Loader:
    """A file, the function that reads it, and the answers that are right."""

    path: Path
    read: Callable[[], Any]
    """What was read, in a form that can be compared."""
    fallback: Any = None
    """What may be read instead, where a damaged file has a good one before it."""


def loaders(folder: Path) -> dict[str, Loader]:
    """Over files of two runs under `folder`, one finished and one stopped, of their corpus and of its tokens."""
    config = subject(folder, steps=4)
    finished = train(config, folder / "finished", show=False)
    stopped = stopped_run(config, folder / "stopped", 3)
    config = finished.config
    only_config = Run.create(folder / "begun", config, resume=False)
    before = Run(shutil.copytree(stopped.path, folder / "before"))
    shutil.rmtree(before.checkpoints / "step-00000003")

    def checkpoint(run: Run = stopped) -> Any:
        found = run.load_checkpoint()[0]
        return found and (found.step, found.files, {n: a.tobytes() for n, a in found.tensors.items()})

    def tokens() -> Any:
        with contextlib.redirect_stderr(io.StringIO()):
            found = load_tokens(index.stem, config.data.corpus)
        return found and (found.ids.tobytes(), found.tokenizer, found.ends, found.split_bytes, found.fingerprint)

    def corpus() -> Any:
        dataset = data.load(DataConfig(f"text:{copy}"))
        stopped.check_corpus(dataset.fingerprint)
        return dataset.fingerprint

    def weights() -> Any:
        return {name: array.tobytes() for name, array in finished.weights().items()}

    newest = stopped.checkpoints / "step-00000003"
    index = next((cache_folder() / "tokens").glob("*.json"))
    copy = folder / "copy.txt"
    copy.write_bytes((folder / "corpus.txt").read_bytes())
    return {
        "config, to resume": Loader(
            only_config.path / "config.json",
            lambda: to_dict(Run.create(only_config.path, config, resume=True).config),
        ),
        "config, finished": Loader(finished.path / "config.json", lambda: to_dict(finished.config)),
        "environment": Loader(finished.path / "env.json", lambda: finished.env),
        "metrics": Loader(finished.path / "metrics.jsonl", finished.metrics),
        "model": Loader(finished.path / "model.safetensors", weights),
        "model's manifest": Loader(finished.path / MANIFEST, weights),
        "tokenizer": Loader(finished.path / "tokenizer.json", weights),
        "checkpoint": Loader(newest / "state.safetensors", checkpoint, checkpoint(before)),
        "checkpoint's manifest": Loader(newest / MANIFEST, checkpoint, checkpoint(before)),
        "token cache": Loader(index.with_suffix(".npy"), tokens),
        "token cache's index": Loader(index, tokens),
        "corpus": Loader(copy, corpus),
    }


class Examination:
    """One loader, whose file is replaced by mutations of it and put back in the end."""

    def __init__(self, name: str, loader: Loader, outcome: Outcome) -> None:
        self.name, self.loader, self.outcome = name, loader, outcome
        self.original = loader.path.read_bytes()
        self.right = loader.read()
        assert self.right is not None, f"{name} reads nothing"
        self.slowest = 0.0

    def __enter__(self) -> "Examination":
        return self

    def __exit__(self, *_: object) -> None:
        self.loader.path.write_bytes(self.original)

    def try_out(self, content: bytes) -> None:
        self.loader.path.write_bytes(content)
        start = time.perf_counter()
        try:
            found = self.loader.read()
            if content == self.original:
                self.outcome.check(found == self.right, f"{self.name}: the file as it was is refused")
            else:
                ok = found == self.right or found == self.loader.fallback
                self.outcome.check(ok, f"{self.name}: accepted {content[:60]!r}")
        except UserError as error:
            self.outcome.check("\n" not in str(error), f"{self.name}: more than one line: {error}")
            self.outcome.check(content != self.original, f"{self.name}: the file as it was is refused")
        except Exception as error:
            self.outcome.check(False, f"{self.name}: {type(error).__name__}: {error} for {content[:60]!r}")
        seconds = time.perf_counter() - start
        self.slowest = max(self.slowest, seconds)
        self.outcome.check(seconds <= LONGEST_S, f"{self.name}: took {seconds:.1f} s")
        self.outcome.attempts += 1


SPLICES = (b"", b"\0", b"\xff", b" ", b"\n", b"9" * 40, b"-1", b'"', b"{", b"}", b",", b"null", b"NaN", b"[" * 99)


def mutate(content: bytes, dice: random.Random) -> bytes:
    """One to three edits: bits flipped, bytes replaced, cut, moved, added; or a number made another."""
    changed = bytearray(content)
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        where = dice.randrange(len(changed) + 1)
        match dice.randrange(7):
            case 0 | 1 if changed:
                changed[min(where, len(changed) - 1)] ^= 1 << dice.randrange(8)
            case 2:
                changed[where : where + dice.randrange(9)] = dice.choice(SPLICES)
            case 3:
                changed[where : where + dice.randrange(1, 200)] = b""
            case 4:
                del changed[where:]
            case 5:
                changed[where:where] = changed[dice.randrange(len(changed) + 1) :][: dice.randrange(1, 64)]
            case _:
                digits = [n for n, byte in enumerate(changed[:20_000]) if 48 <= byte < 58]
                if digits:
                    changed[dice.choice(digits)] = 48 + dice.randrange(10)
    return bytes(changed)


def mutation(folder: Path, count: int, tell: Tell) -> Outcome:
    """`count` mutated files, spread over the loaders."""
    outcome, dice, slowest = Outcome(), random.Random(4), 0.0
    tried = loaders(folder)
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of what this process did before
    for place, (name, loader) in enumerate(tried.items()):
        share = count * (place + 1) // len(tried) - count * place // len(tried)
        with Examination(name, loader, outcome) as examination:
            for _ in range(share):
                examination.try_out(mutate(examination.original, dice))
                if outcome.attempts % 50 == 0:
                    tell(outcome.attempts, count)
        slowest = max(slowest, examination.slowest)
    grown = _memory("VmHWM") - before
    outcome.check(grown <= MOST_MEMORY, f"memory grew by {grown} bytes")
    outcome.figures |= {"slowest, s": round(slowest, 4), "memory grew by at most, bytes": grown, "files": len(tried)}
    return outcome


def _memory(name: str) -> int:
    """Bytes that Linux counts for this process: VmRSS now, VmHWM at most."""
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024
