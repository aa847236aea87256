"""The processes of one distributed training run."""

import contextlib
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from tokendepth.errors import ReportedByOtherRank, UserError
from tokendepth.progress import Progress

_groups = itertools.count()


@dataclass(frozen=True)
class Ranks:
    """This process's rank and the number of processes, which is 1 unless torchrun started several."""

    rank: int = 0
    world: int = 1

    @classmethod
    def join(cls, device: torch.device) -> "Ranks":
        if _alone():
            return cls()
        with _peers(), Progress("waiting for the other processes of this training"):
            store, rank, world = next(iter(dist.rendezvous("env://")))
            # Each group gets its own prefix, so that it never reads keys left in the store by an earlier group of this
            # process, or by ranks from before a torchrun restart. If torchrun does not keep the store, every start has
            # a new one, and a launcher that replaces a dead one counts restarts from 0, so the count cannot be used.
            keeps_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if keeps_store else "0"
            store = dist.PrefixStore(f"tokendepth-{attempt}-{next(_groups)}", store)
            backend = "nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(minutes=5))
        return cls(rank, world)

    def leave(self) -> None:
        """Call before the interpreter exits; otherwise the group's threads are torn down while running."""
        if self.world > 1:
            dist.destroy_process_group()

    def sum(self, value: Tensor) -> Tensor:
        """All-reduce, in place."""
        if self.world > 1:
            with _peers():
                dist.all_reduce(value)
        return value

    def total(self, number: int) -> int:
        return sum(self._all(number))

    def max(self, number: int) -> int:
        return max(self._all(number))

    def _all(self, number: int) -> list[int]:
        """The `number` of every rank."""
        if self.world == 1:
            return [number]
        numbers = torch.zeros(self.world, dtype=torch.long, device="cuda" if dist.get_backend() == "nccl" else "cpu")
        numbers[self.rank] = number
        return self.sum(numbers).tolist()

    def wait(self) -> None:
        if self.world > 1:
            with _peers():
                dist.barrier()

    @contextlib.contextmanager
    def agreeing(self) -> Iterator[None]:
        """If any rank raises a UserError inside, all ranks raise on exit; the lowest failing rank prints the reason."""
        refused = None
        try:
            yield
        except UserError as error:
            refused = error
        try:
            refusals = self._all(int(refused is not None))
        except UserError as gone:
            raise refused or gone from None
        if refused and refusals.index(1) == self.rank:
            raise refused
        if any(refusals):
            raise ReportedByOtherRank


def _alone() -> bool:
    """Whether this is the only process. Raises UserError if the environment is not what torchrun would set."""
    world = _whole("WORLD_SIZE", "1")
    _expect(world is not None and world > 0, "WORLD_SIZE", "a whole number from 1 up")
    assert world is not None
    rank = _whole("RANK", "0" if world == 1 else "")
    _expect(rank is not None and rank < world, "RANK", f"a whole number below WORLD_SIZE ({world})")
    if world > 1:
        _expect(bool(os.environ.get("MASTER_ADDR")), "MASTER_ADDR", "the machine of the first process")
        port = _whole("MASTER_PORT", "")
        _expect(port is not None and port < 2**16, "MASTER_PORT", "a whole number up to 65535")
    return world == 1


def _whole(name: str, default: str) -> int | None:
    text = os.environ.get(name, default)
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else None


def _expect(ok: bool, name: str, expected: str) -> None:
    if not ok:
        found = f"is {os.environ[name]!r}" if name in os.environ else "is not set"
        remedy = "start the processes with torchrun, or unset WORLD_SIZE and RANK"
        raise UserError(f"the environment variable {name} {found}; expected {expected}; {remedy}")


@contextlib.contextmanager
def _peers() -> Iterator[None]:
    """Turn any communication failure into a one-line error: another rank is gone."""
    try:
        yield
    except RuntimeError as error:
        if "EADDRINUSE" in str(error):
            port = os.environ["MASTER_PORT"]
            raise UserError(
                f"the environment variable MASTER_PORT is {port!r}; expected a port that is free, but another program "
                "listens there; choose another"
            ) from error
        raise UserError(
            "another process of this training has ended or cannot be reached; every saved step is intact; "
            "repeat the command with --resume to continue"
        ) from error
