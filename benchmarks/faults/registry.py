"""Every fault, how often it is tried and what is claimed of it.

`python -m benchmarks faults` tries each as often as the table says; the tests try the same functions a few times.
"""

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.faults import (
    belongings,
    crowds,
    damage,
    defaults,
    disk,
    equivalence,
    exactness,
    kills,
    malformed,
    mutation,
    pickles,
    power,
    rude,
    seals,
    signals,
    special,
)
from benchmarks.faults.outcome import LIMIT_S, Outcome, Tell
from tokendepth.errors import UserError, did_you_mean
from tokendepth.progress import Progress
from tokendepth.runs.machine import choose_device, commit, environment
from tokendepth.runs.results import Row, add_rows

MOST_FAILURES_KEPT = 10


@dataclass(frozen=True)
class Fault:
    inject: Callable[[Path, int, Tell], Outcome]
    count: int
    """How often in full; where the cases are a list, all of them."""
    title: str
    claim: str
    """What is true of every attempt that did not fail."""
    on_gpu: bool = False


FAULTS = {
    "kill": Fault(
        kills.kill, 600,
        "`kill -9` at a random moment: every method, saves 1, 3 or 7 steps apart, resumed with other threads",
        "no resume refused, no saved step lost, the same bits in the end",
    ),
    "kill-rank": Fault(
        kills.kill_rank, 50, "`kill -9` of one of two ranks under torchrun",
        "the same: torchrun starts both again and they go on",
    ),
    "resume": Fault(
        exactness.resume, 50, "stopped before every step of a run with dropout, and resumed",
        "the same bits in the end",
    ),
    "gpu-resume": Fault(
        exactness.gpu_resume, 5, "stopped and resumed on a GPU, bfloat16, CUDA graph, deterministic mode",
        "the same bits in the end", on_gpu=True,
    ),
    "stop": Fault(
        kills.stop, 100, "SIGTERM or SIGINT at a random moment, or inside the backward pass",
        "saved within the step, exit code 143 or 130, the same bits in the end",
    ),
    "signals": Fault(
        signals.signals, 200, "every catchable signal that ends a process; stdout or stderr gone, full or stuck",
        "a training saves first, or goes on; every command ends without a traceback",
    ),
    "damage": Fault(
        damage.damage, 100, "any file of any kind of run missing, cut, emptied or with a random bit flipped",
        "named by every command that reads it; a stopped run goes on to the same bits, a finished one is refused",
    ),
    "foreign": Fault(
        exactness.foreign, len(exactness.FOREIGN), "another run's checkpoint in the place of its own, shapes alike",
        "refused with what differs, no file changed; with its own put back, the same bits in the end",
    ),
    "mutation": Fault(
        mutation.mutation, 10_000,
        "a mutated file: of a run begun, stopped or finished, its evaluation, thresholds, tokens or text",
        "every command that reads it gives the right answer or refuses in one line; no crash, no hang",
    ),
    "seals": Fault(
        seals.seals, 1000, "a random bit flipped in eval.json or calibration.json",
        "refused by name, never read as another number",
    ),
    "special-files": Fault(
        special.special_files, 300, "a pipe, device, sparse terabyte, folder or link in the place of any file",
        "the right answer or one line, within 5 s, memory flat",
    ),
    "foreign-files": Fault(
        belongings.foreign_files, len(belongings.CASES),
        "copies, notes and links of the user's beside and in the place of ours",
        "none removed, none written to",
    ),
    "pickle": Fault(
        pickles.pickle, 12, "a pickle in the place of any file, with checksums that fit",
        "never executed",
    ),
    "power-cut": Fault(
        power.power_cut, 300, "a power cut: of what was not flushed to the disk all, some or nothing is left",
        "no resume refused, no saved step lost, the same bits in the end",
    ),
    "disk-full": Fault(
        disk.full, 100, "a disk that is full from a random step on",
        "one line, the last checkpoint intact, the same bits in the end",
    ),
    "read-only": Fault(
        disk.read_only, 100, "a folder that is read-only from a random step on",
        "one line, the last checkpoint intact, the same bits in the end",
    ),
    "not-finite": Fault(
        exactness.not_finite, 84, "NaN or infinity in loss, gradient or weights",
        "stopped before it was applied or saved, the same bits in the end",
    ),
    "finished": Fault(exactness.finished, 20, "a finished run, resumed", "no file changed"),
    "second": Fault(
        kills.second, 20, "a second process on the run folder of one at work, its lock file there or removed",
        "refused, with the first one's name where the file is there; free again when that is killed",
    ),
    "data-order": Fault(
        exactness.data_order, 200,
        "the batches of a step on 2 and 4 ranks: computed, and as taken by trainings of so many processes",
        "those of one process at the same global batch",
    ),
    "layouts": Fault(
        exactness.layouts, len(exactness.LAYOUTS), "the depth penalty's gradient, over ranks and accumulation",
        f"equal to {exactness.GRADIENT_TOLERANCE:g}",
    ),
    "equivalence": Fault(
        equivalence.equivalence, 2_000_000,
        "decisions in float32, skipped or masked; cached or whole, together or alone, padded or not; every method, "
        "classic and modern blocks",
        f"equal to {equivalence.TOLERANCE:g} of the largest logit; a decision flips only so close to the threshold",
    ),
    "malformed": Fault(
        malformed.malformed, 10_000,
        "a malformed request to the server: JSON, fields, address, type, or no HTTP at all",
        "no answer of 500 or above, every error in OpenAI's shape, within 1 s",
    ),
    "overload": Fault(
        crowds.overload, 200, "200 clients at once, on 8 slots with a queue of 16 and on 1 slot with a queue of 4",
        "the rest answered 429 with Retry-After within 1 s, health 200, memory flat, every accepted text complete and "
        "equal to the offline one",
    ),
    "soak": Fault(
        crowds.soak, 1800, "a request a second to the server: whole, streamed, malformed, or left by its client",
        "every text equal to the offline one, no slot lost, memory flat",
    ),
    "rude-clients": Fault(
        rude.rude_clients, 100,
        "a client that goes away, sends a body without end, dawdles over its head or body, or does not read",
        "its slot is free within 1 s, its connection closed when its time is up, others are served meanwhile",
    ),
    "server-defaults": Fault(
        defaults.server_defaults, len(defaults.HOSTILE),
        f"{len(defaults.HOSTILE)} hostile strings in every place of a request to a server with no options",
        "JSON or an event stream, never HTML; reached from this machine alone, by its own names, by no other origin",
    ),
    "server-restart": Fault(
        rude.restart, 20, "the server under load: `kill -9` or SIGTERM at a random moment, then started again",
        "after SIGTERM all that was accepted is complete, a text that was cut off by `kill -9` says so; slots are free "
        "again",
    ),
    "connections": Fault(
        crowds.connections, 10_000, "10,000 connections to the server that ask for nothing",
        "others are served, health within 1 s, and the idle ones are closed when their time is up",
    ),
}  # fmt: skip


def chosen(only: str | None) -> list[str]:
    """The faults that `only` names, or all."""
    names = list(FAULTS) if only is None else [name.strip() for name in only.split(",")]
    for name in names:
        if name not in FAULTS:
            raise UserError(f"--only has {name!r}: no such fault; {did_you_mean(name, FAULTS)}")
    return names


def check_scale(scale: float) -> None:
    if not 0 < scale <= 1:
        raise UserError(f"--scale is {scale:g}; expected a number above 0, up to 1")


def measure(device_name: str, results: Path, only: str | None, scale: float) -> Iterator[Row]:
    """Yield a row for each fault, or for those that `only` names, written to results/faults.json at once.

    `scale` is the part of the full counts to try.
    """
    device = choose_device(device_name)
    check_scale(scale)
    for name in chosen(only):
        fault = FAULTS[name]
        count = max(1, round(fault.count * scale))
        with _undisturbed() as folder, Progress(name, count, unit="tried") as progress:
            outcome = fault.inject(folder, count, lambda done, total, to=progress: to.update(done, total=total))
            facts = environment(device if fault.on_gpu else torch.device("cpu"))
        row = {
            "fault": name,
            "title": fault.title,
            "claim": fault.claim,
            "attempts": outcome.attempts,
            "failed": len(outcome.failures),
            "failures": outcome.failures[:MOST_FAILURES_KEPT],
            "hangs": outcome.hangs,
            "limit_s": LIMIT_S,
            "figures": outcome.figures,
            "skipped": outcome.skipped,
            "says": outcome.says,
            **facts,
        }
        if not outcome.skipped:
            add_rows(results / "faults.json", [row], identity=("fault", "device"))
        yield row


@contextlib.contextmanager
def _undisturbed() -> Iterator[Path]:
    """A folder, with a token cache of its own, and one thread: bits depend on how many share a sum."""
    threads, before = torch.get_num_threads(), dict(os.environ)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TOKENDEPTH_CACHE"] = str(Path(folder) / "cache")
        os.environ["TOKENDEPTH_COMMIT"] = commit()  # else every evaluation asks git
        torch.set_num_threads(1)
        try:
            yield Path(folder)
        finally:
            torch.set_num_threads(threads)
            os.environ.clear()
            os.environ.update(before)
