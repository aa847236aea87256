"""Every fault, how often it is tried, and what must hold.

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
    """Attempts at full scale; if the cases are a list, all of them."""
    title: str
    claim: str
    """What holds for every attempt that did not fail. Old rows are shown with these words, so a stronger claim is a new
    fault."""
    on_gpu: bool = False


FAULTS = {
    "kill": Fault(
        kills.kill, 600,
        "`kill -9` at a random moment: every method, a checkpoint every 1, 3 or 7 steps, resumed with other threads",
        "every run resumes, no saved step lost, final weights identical bit for bit",
    ),
    "kill-rank": Fault(
        kills.kill_rank, 50, "`kill -9` of one of two ranks under torchrun",
        "the same: torchrun restarts both and training resumes",
    ),
    "resume": Fault(
        exactness.resume, 50, "a run with dropout stopped before every step, and resumed",
        "final weights identical bit for bit",
    ),
    "gpu-resume": Fault(
        exactness.gpu_resume, 5, "a run stopped and resumed on a GPU: bfloat16, CUDA graph, deterministic mode",
        "final weights identical bit for bit", on_gpu=True,
    ),
    "stop": Fault(
        kills.stop, 100, "SIGTERM or SIGINT at a random moment, or inside the backward pass",
        "saved within the step, exit code 143 or 130, after resuming final weights identical bit for bit",
    ),
    "signals": Fault(
        signals.signals, 200, "every catchable signal that ends a process; stdout or stderr closed, full or blocked",
        "training saves before it ends, or continues; no command ends with a traceback",
    ),
    "damage": Fault(
        damage.damage, 100, "any file of any kind of run missing, truncated, empty or with a random bit flipped",
        "named by every command that reads it; a stopped run recovers and ends with identical weights, a finished one "
        "is rejected",
    ),
    "foreign": Fault(
        exactness.foreign, len(exactness.FOREIGN), "a checkpoint replaced by another run's, with the same shapes",
        "rejected with the difference named, no file changed; with its own checkpoint back, final weights identical",
    ),
    "mutation": Fault(
        mutation.mutation, 10_000,
        "a mutated file of a run that has begun, stopped or finished, or its evaluation, thresholds, tokens or text",
        "every command that reads it gives the right result or a one-line error; no crash, no hang",
    ),
    "seals": Fault(
        seals.seals, 1000, "a random bit flipped in eval.json or calibration.json",
        "rejected with the name of the file, never read as a different number",
    ),
    "special-files": Fault(
        special.special_files, 300, "a pipe, device, sparse file of a terabyte, folder or link instead of any file",
        "the right result or a one-line error, within 5 s, memory constant",
    ),
    "foreign-files": Fault(
        belongings.foreign_files, len(belongings.CASES),
        "copies, notes and links from the user, next to our files or instead of them",
        "none removed, none written to",
    ),
    "pickle": Fault(
        pickles.pickle, 12, "a pickle instead of any file, with matching checksums",
        "never executed",
    ),
    "power-cut": Fault(
        power.power_cut, 300, "a power cut: all, some or none of the data not yet flushed to disk survives",
        "every run resumes, no saved step lost, final weights identical bit for bit",
    ),
    "disk-full": Fault(
        disk.full, 100, "the disk is full from a random step on",
        "a one-line error, the last checkpoint intact, after resuming final weights identical bit for bit",
    ),
    "read-only": Fault(
        disk.read_only, 100, "the run folder is read-only from a random step on",
        "a one-line error, the last checkpoint intact, after resuming final weights identical bit for bit",
    ),
    "not-finite": Fault(
        exactness.not_finite, 84, "NaN or infinity in loss, gradient or weights",
        "training stops before it is applied or saved; final weights identical bit for bit",
    ),
    "finished": Fault(exactness.finished, 20, "a finished run, resumed", "no file changed"),
    "second": Fault(
        kills.second, 20, "a second process on a run folder in use, with the lock file present or removed",
        "rejected, naming the first process if the file is present; the folder is free once that process is killed",
    ),
    "data-order": Fault(
        exactness.data_order, 200,
        "the batches of a step on 2 and 4 ranks: computed, and as used by training with that many processes",
        "those of one process with the same global batch",
    ),
    "layouts": Fault(
        exactness.layouts, len(exactness.LAYOUTS), "the depth penalty's gradient, over ranks and accumulation",
        f"equal within {exactness.GRADIENT_TOLERANCE:g}",
    ),
    "equivalence": Fault(
        equivalence.equivalence, 2_000_000,
        "decisions in float32: skipped or masked, cached or not, batched or alone, padded or not; every method, "
        "classic and Llama-style blocks",
        f"logits equal within {equivalence.TOLERANCE:g} of the largest one; decisions flip only that close to the "
        "threshold",
    ),
    "malformed": Fault(
        malformed.malformed, 10_000,
        "a malformed request to the server: JSON, fields, address, type, or not HTTP at all",
        "no status of 500 or above, every error in OpenAI's format, within 1 s",
    ),
    "overload": Fault(
        crowds.overload, 200, "200 clients at once, on 8 slots with a queue of 16 and on 1 slot with a queue of 4",
        "excess requests get 429 with Retry-After within 1 s, health 200, memory constant, every accepted text "
        "complete and equal to the offline one",
    ),
    "soak": Fault(
        crowds.soak, 1800,
        "one request per second to the server: whole, streamed, malformed, or abandoned by its client",
        "every text equal to the offline one, no slot lost, memory constant",
    ),
    "rude-clients": Fault(
        rude.rude_clients, 100,
        "a client that disconnects, sends an endless body, sends head or body slowly, or does not read",
        "its slot is free within 1 s, its connection is closed at its time limit, others are served meanwhile",
    ),
    "server-defaults": Fault(
        defaults.server_defaults, len(defaults.HOSTILE),
        f"{len(defaults.HOSTILE)} hostile strings in every part of a request to a server with default options",
        "JSON or an event stream, never HTML; reachable only from this machine, by its own names, from no other origin",
    ),
    "server-restart": Fault(
        rude.restart, 20, "the server under load: `kill -9` or SIGTERM at a random moment, then started again",
        "after SIGTERM every accepted request is complete; a text cut off by `kill -9` is recognisable; slots are free "
        "again",
    ),
    "connections": Fault(
        crowds.connections, 10_000, "10,000 idle connections to the server",
        "others are served, health answers within 1 s, and idle connections are closed at their time limit",
    ),
}  # fmt: skip


def chosen(only: str | None) -> list[str]:
    """The faults named in `only`, or all."""
    names = list(FAULTS) if only is None else [name.strip() for name in only.split(",")]
    for name in names:
        if name not in FAULTS:
            raise UserError(f"--only has {name!r}: no such fault; {did_you_mean(name, FAULTS)}")
    return names


def check_scale(scale: float) -> None:
    if not 0 < scale <= 1:
        raise UserError(f"--scale is {scale:g}; expected a number above 0, up to 1")


def measure(device_name: str, results: Path, only: str | None, scale: float) -> Iterator[Row]:
    """Yield a row for each fault, or for those named in `only`, and write it to results/faults.json at once.

    `scale` is the share of the full counts to try.
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
    """A folder with its own token cache, and one thread: the last bits of a sum depend on the number of threads."""
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
