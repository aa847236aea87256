"""Processes that train, to be killed: `python -m benchmarks.faults.worker`, spoken to by `processes.py`.

It imports torch once, takes one step so that everything is loaded, and then forks a process for every order that it
reads, so that a process costs a tenth of a second instead of three. Each is a process of its own, with its own memory
and files; a kill takes one, and it is another that resumes. What they report goes to stdout, a line of JSON each.
"""

import contextlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.faults.damage import at_step
from tokendepth.config import from_dict
from tokendepth.errors import Interrupted, UserError
from tokendepth.methods import build
from tokendepth.runs.files import serialize
from tokendepth.runs.run import Run
from tokendepth.training import loop as module
from tokendepth.training.ranks import Ranks
from tokendepth.training.step import OptimiserStep

Order = dict[str, Any]


def say(order: Order, what: str, value: object) -> None:
    os.write(1, (json.dumps([order["number"], what, value]) + "\n").encode())


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


def gradient(order: Order) -> int:
    """The gradient of one batch over `world` processes, written to `out` by the first of them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(order["world"])}
    rank = next((rank for rank in range(1, order["world"]) if os.fork() == 0), 0)
    os.environ["RANK"] = str(rank)
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
    if rank:
        os._exit(0)
    codes = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(1, order["world"])]
    return max(map(abs, codes), default=0)


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
                    say(order, "pid", os.getpid())
                    code = {"train": train, "gradient": gradient}[order["do"]](order)
                except BaseException:
                    traceback.print_exc()
            os._exit(code)
        _, status = os.waitpid(pid, 0)
        say(order, "exit", os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
