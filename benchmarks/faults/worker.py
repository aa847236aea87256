"""Processes that train, to be killed: `python -m benchmarks.faults.worker`, spoken to by `processes.py`.

It imports torch once, takes one step so that everything is loaded, and then forks a process for every order that it
reads, so that a process costs a tenth of a second instead of three. Each is a process of its own, with its own memory
and files; a kill takes one, and it is another that resumes. What they report goes to stdout, a line of JSON each.
"""

import contextlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch

from benchmarks.faults.ports import free_port
from benchmarks.faults.stopped import at_step
from tokendepth import streams
from tokendepth.cli.main import main as main_program
from tokendepth.config import from_dict
from tokendepth.errors import Interrupted, UserError
from tokendepth.methods import build
from tokendepth.runs.files import serialize
from tokendepth.runs.run import Run
from tokendepth.training import loop as module
from tokendepth.training.ranks import Ranks
from tokendepth.training.step import OptimiserStep

Order = dict[str, Any]
REPORTS = os.dup(1)
"""Where stdout led at first: what is disturbed may have one of its own."""


def say(order: Order, what: str, value: object) -> None:
    os.write(REPORTS, (json.dumps([order["number"], what, value]) + "\n").encode())


def told(order: Order, owner: Any, name: str, before: str = "", after: str = "") -> None:
    """Let every call of a method with a number be reported before it begins or after it has returned."""
    real = getattr(owner, name)

    def wrapped(self: Any, number: int, *rest: Any) -> Any:
        if before:
            say(order, before, number)
        result = real(self, number, *rest)
        if after:
            say(order, after, number)
        return result

    setattr(owner, name, wrapped)


def kill_at_call(number: int, folder: str) -> None:
    """Every name on the disk that is opened, made, renamed or removed is announced to an audit hook beforehand."""
    calls = 0

    def hook(event: str, args: tuple) -> None:
        nonlocal calls
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir") and str(args[0]).startswith(folder):
            calls += 1
            if calls == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def signal_in_backward(order: Order) -> Callable[[Any], None]:
    """Send a signal from inside the backward pass, in the middle of the model."""

    def arm(training: Any) -> None:
        def fire(gradient: torch.Tensor) -> None:
            hook.remove()
            say(order, "in backward", order["signal"])
            os.kill(os.getpid(), order["signal"])

        hook = training.model.method.blocks[1].ffn.up.weight.register_hook(fire)

    return arm


def train(order: Order) -> int:
    told(order, Run, "save_checkpoint", after="saved")
    told(order, module._Training, "_step", before="step")
    told(order, module.StopSignals, "_note", after="noted")
    if number := order.get("kill_at_call"):
        kill_at_call(number, order["out"])
    actions: dict[str, Callable[[Any], object]] = {
        "": lambda training: None,
        "kill": lambda training: os.kill(os.getpid(), signal.SIGKILL),
        "sleep": lambda training: (say(order, "asleep", 0), time.sleep(60)),
        "signal in backward": signal_in_backward(order),
    }
    try:
        with at_step(order.get("step", -1), actions[order.get("action", "")]):
            module.train(from_dict(order["config"]), order["out"], resume=True, show=False)
    except Interrupted as stop:
        say(order, "interrupted", str(stop))
        return stop.exit_code
    except UserError as error:
        say(order, "refused", str(error))
        return 2
    return 0


def over_ranks(order: Order, work: Callable[[Order, int], None]) -> int:
    """Do `work` in `world` processes with the environment that torchrun gives them."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(order["world"])}
    rank = next((rank for rank in range(1, order["world"]) if os.fork() == 0), 0)
    os.environ["RANK"] = str(rank)
    try:
        work(order, rank)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    if rank:
        os._exit(0)
    codes = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(1, order["world"])]
    return max(map(abs, codes), default=0)


def gradient(order: Order, rank: int) -> None:
    """The gradient of one batch, written to `out` by the first rank."""
    config = from_dict(order["config"])
    dataset = module.data.load(config.data)
    config = module.resolve(config, dataset)
    ranks = Ranks.join(torch.device("cpu"))
    step = OptimiserStep(build(config).train(), config.train, torch.device("cpu"), ranks)
    settings = {"batch_size": config.train.batch_size, "context": config.model.context}
    batch = dataset.train_batch(seed=0, step=0, **settings, rank=ranks.rank, world=ranks.world)
    step(*batch, step=0, lr=0.0)
    if rank == 0:
        gradients = {name: g.numpy() for name, g in zip(step.parameters, step.gradients, strict=True)}
        Path(order["out"]).write_bytes(serialize(gradients))
    ranks.leave()


def together(order: Order, rank: int) -> None:
    """Train to the end."""
    module.train(from_dict(order["config"]), order["out"], resume=True, show=False)


def batches(order: Order, rank: int) -> None:
    """Train, and keep what each rank's training asked its dataset for, step by step, in OUT-RANK.safetensors."""
    seen, real = {}, module._Training._batch

    def noted(self: Any, step: int) -> tuple:
        inputs, targets = real(self, step)
        seen[f"inputs/{step}"], seen[f"targets/{step}"] = inputs, targets
        return inputs, targets

    module._Training._batch = noted
    together(order, rank)
    Path(f"{order['out']}-{rank}.safetensors").write_bytes(serialize(seen))


def command(order: Order) -> int:
    """A command line, with stdout and stderr sent elsewhere. It ends as any interpreter does, by its own flush."""
    sys.stdout = sys.__stdout__ = _send(1, order["stdout"])
    sys.stderr = sys.__stderr__ = _send(2, order["stderr"])
    streams.PATIENCE_S = 0.01
    try:
        main_program(order["arguments"])
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
    return 0


def _send(descriptor: int, where: str) -> IO[str]:
    """To a path; to a pipe whose reader is "gone"; or to one that is full and whose reader has "stalled"."""
    if where in ("gone", "stalled"):
        reader, target = os.pipe()
        if where == "gone":
            os.close(reader)
        else:
            os.set_blocking(target, False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    os.write(target, bytes(4096))
            os.set_blocking(target, True)
    else:
        target = os.open(where, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(target, descriptor)
    return open(descriptor, "w", buffering=1 if descriptor == 2 else -1, closefd=False)


DO: dict[str, Callable[[Order], int]] = {
    "train": train,
    "gradient": lambda order: over_ranks(order, gradient),
    "batches": lambda order: over_ranks(order, batches),
    "together": lambda order: over_ranks(order, together),
    "command": command,
}


def main() -> None:
    torch.set_num_threads(1)
    warm = json.loads(sys.stdin.readline())
    module.train(from_dict(warm["config"]), warm["out"], show=False)
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            code = 1
            with contextlib.suppress(BaseException):  # a process that fails must not go on as a second server
                try:
                    torch.set_num_threads(order.get("threads", 1))  # what this machine would choose
                    say(order, "pid", os.getpid())
                    code = DO[order["do"]](order)
                except BaseException:
                    traceback.print_exc()
            os._exit(code)
        _, status = os.waitpid(pid, 0)
        say(order, "exit", os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
