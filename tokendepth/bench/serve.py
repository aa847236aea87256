"""The server under load: latency and throughput by number of clients, with and without skipping, and with several
requests at a time or one by one.

The server is a separate process, started as users start it; this process runs the clients. Every row of a run uses the
same prompts in the same order, and the texts are compared, since a speed means nothing if the text differs.
"""

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tokendepth.bench.load import Answer, Client, Load, put
from tokendepth.config import method_name
from tokendepth.errors import UserError
from tokendepth.methods import build
from tokendepth.progress import Progress
from tokendepth.runs.machine import choose_device, environment
from tokendepth.runs.results import Row, add_rows
from tokendepth.runs.run import Run
from tokendepth.trace import Execution

CLIENTS = (1, 4, 16)
REQUESTS = 64
SECONDS = 30.0
"""Limit per row: after this time no further request is sent."""
PERCENTILES = (50, 90, 99)
IDENTITY = ("benchmark", "server", "run", "execution", "slots", "clients", "tokens", "device")


def measure(path: Path, device_name: str, results: Path, clients: Sequence[int] = CLIENTS) -> Iterator[Row]:
    """Rows for a run, each written to `results`/serve.json as soon as it is known."""
    run, device, most = Run.open(path), choose_device(device_name), max(clients)
    routed = any(site.routed for site in build(run.config).method.sites(keys=1))
    executions: tuple[Execution, ...] = ("sparse", "hard") if routed else ("sparse",)
    servers = [(execution, slots) for execution in executions for slots in dict.fromkeys((most, 1))]
    texts: dict[str, str] = {}
    facts = {"server": "tokendepth", "run": run.name, "checkpoint": run.fingerprint}
    facts |= {"method": method_name(run.config.method)}
    for execution, slots in servers:
        with started(run, execution, slots, device.type) as (client, pid):
            # One request at a time is measured only with the most clients.
            for number in clients if slots > 1 or most == 1 else (most,):
                answers, figures = _measured(client, number, pid, f"{run.name}, {execution}, {slots} at a time")
                differing = sum(texts.setdefault(each.prompt, each.text) != each.text for each in answers)
                own = {"execution": execution if routed else "dense", "slots": slots, "differing_texts": differing}
                yield _written(results, {**facts, **own, **figures, **environment(device)})


def measure_other(
    url: str, name: str, model: str | None, device_name: str, results: Path, clients: Sequence[int] = CLIENTS
) -> Iterator[Row]:
    """Rows for another server on this machine, which the user calls `name`."""
    device, client = choose_device(device_name), Client(url, model)
    facts = {"server": name, "run": client.model.rstrip("/").rpartition("/")[2], "execution": "dense", "slots": None}
    for number in clients:
        _, figures = _measured(client, number, None, name)
        yield _written(results, {**facts, **figures, **environment(device)})


def in_words(row: Row) -> str:
    at_once = "" if row["slots"] is None else f", {row['slots']} at a time"
    return (
        f"{row['run']} on {row['server']}, {row['execution']}{at_once}, {row['clients']} clients: "
        f"{row['tokens_per_s']:.1f} tokens/s; first token {row['first_token_ms'][0]:.0f} ms, "
        f"then {row['token_ms'][0]:.1f} ms per token; whole request {row['request_ms'][0]:.0f} ms "
        f"({row['request_ms'][-1]:.0f} ms at the 99th percentile)"
    )


def parse_clients(text: str | None) -> tuple[int, ...]:
    if text is None:
        return CLIENTS
    words = [word.strip() for word in text.split(",")]
    if not all(re.fullmatch("[1-9][0-9]{0,2}", word) for word in words):
        raise UserError(f"--clients is {text!r}; expected whole numbers from 1 to 999 with commas between: 1,4,16")
    return tuple(map(int, words))


# --- one row ----------------------------------------------------------------------------------------------------------


def _measured(client: Client, clients: int, pid: int | None, title: str) -> tuple[list[Answer], Row]:
    """Answers and figures for a load of `clients`, after a warm-up. `pid`: of the server, if it is ours."""
    load = Load(clients, REQUESTS, SECONDS)
    with Progress(f"{title}, {clients} clients", REQUESTS, unit="requests") as progress:
        put(Load(clients, clients, SECONDS, tokens=4, seed=1), client)
        before = None if pid is None else (_spent(client), _Clock.read(pid))
        answers, seconds = put(load, client, progress.update)
    figures: Row = {
        "benchmark": "serve",
        "clients": clients,
        "requests": len(answers),
        "tokens": load.tokens,
        "prompt_words": load.words,
        "tokens_per_s": sum(answer.tokens for answer in answers) / seconds,
        "first_token_ms": _percentiles([answer.first for answer in answers]),
        "token_ms": _percentiles([answer.a_token for answer in answers if answer.a_token is not None]),
        "request_ms": _percentiles([answer.last for answer in answers]),
        "percentiles": list(PERCENTILES),
        "seconds": seconds,
    }
    if pid is not None and before is not None:
        flops, dense = (now - then for now, then in zip(_spent(client), before[0], strict=True))
        figures |= {"flops_skipped": 1 - flops / dense, "others_cores": _Clock.read(pid).others(before[1])}
    return answers, figures


def _percentiles(seconds: list[float]) -> list[float]:
    return [1000 * float(each) for each in np.percentile(seconds, PERCENTILES)]


def _written(results: Path, row: Row) -> Row:
    add_rows(results / "serve.json", [row], identity=IDENTITY)
    return row


def _spent(client: Client) -> tuple[float, float]:
    """FLOPs that the server has executed so far, and those it would have executed with nothing skipped."""
    figures = dict(re.findall(r"^tokendepth_(\w+) (\S+)$", client.get("/metrics")[1].decode(), re.MULTILINE))
    return float(figures["flops_total"]), float(figures["flops_dense_total"])


@dataclass(frozen=True)
class _Clock:
    """Seconds of processor time used so far, by the whole machine and by the server with its clients."""

    wall: float
    everyone: float
    ours: float

    @classmethod
    def read(cls, server: int) -> "_Clock":
        tick = os.sysconf("SC_CLK_TCK")
        machine = Path("/proc/stat")
        if not machine.exists():
            return cls(time.perf_counter(), 0.0, 0.0)
        user, nice, system, _, _, *other = map(int, machine.read_text().splitlines()[0].split()[1:9])
        after_name = Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()
        of_server = (int(after_name[11]) + int(after_name[12])) / tick
        return cls(time.perf_counter(), (user + nice + system + sum(other)) / tick, of_server + time.process_time())

    def others(self, before: "_Clock") -> float:
        """How many cores other processes kept busy since `before`."""
        spent = (self.everyone - before.everyone) - (self.ours - before.ours)
        return max(0.0, spent / (self.wall - before.wall))


# --- the server -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def started(run: Run, execution: str, slots: int, device: str) -> Iterator[tuple[Client, int]]:
    """Run `tokendepth serve` in a separate process; yields a client for it and its process id."""
    command = [sys.executable, "-m", "tokendepth", "serve", str(run.path), "--port", "0", "--queue", "1000"]
    command += ["--execution", execution, "--slots", str(slots), "--device", device, "--seconds", "3600"]
    environ = {name: value for name, value in os.environ.items() if name != "TOKENDEPTH_API_KEY"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            with Progress(f"starting a server of {run.name}"):
                said = process.stdout.readline()
            found = re.search(r"serving (.+) at (http://\S+)/v1;", said)
            if found is None:
                silent = f"the server ended before it served; try: tokendepth serve {run.path}"
                lines = process.stderr.read().strip().splitlines() or [silent]
                raise UserError(lines[-1].removeprefix("tokendepth: "))
            yield Client(found[2], found[1]), process.pid
        finally:
            process.terminate()
            process.communicate()
