"""Which device to use, and the facts about this machine that are recorded with every result."""

import contextlib
import ctypes
import importlib.metadata
import math
import os
import platform
import subprocess
from collections.abc import Iterator
from pathlib import Path

import torch

import tokendepth
from tokendepth.errors import UserError


def choose_device(request: str, option: str = "--device") -> torch.device:
    """The device for `request`: auto, cpu or cuda. If cuda is missing, that is an error, never a silent fallback."""
    if request == "auto":
        request = "cuda" if torch.cuda.is_available() else "cpu"
    if request == "cuda":
        if not torch.cuda.is_available():
            raise UserError(
                f"{option} is 'cuda', but this machine shows PyTorch no CUDA device; set {option} cpu or auto"
            )
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        return device
    if request != "cpu":
        raise UserError(f"{option} is {request!r}; expected auto, cpu or cuda")
    return torch.device("cpu")


CONTAINER_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Of both versions of Linux's control groups."""


def memory_bytes(device: torch.device) -> float:
    """Total memory of `device`, or what a container allows; infinite if unknown."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else math.inf
    for limit in CONTAINER_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # no such file; "max"
            total = min(total, int(Path(limit).read_text()))
    return total


_keeping: set[object] = set()
"""Who currently wants freed memory kept."""


def keep_freed_memory() -> None:
    """Keep freed memory in this process, for its next allocation.

    glibc returns large blocks to the system, which zeroes their pages again when they are next touched. That takes a
    fifth of a forward pass at the TSA paper's shape. With other C libraries this does nothing.
    """
    _keeping.add("as long as the process lives")
    _tell_glibc()


@contextlib.contextmanager
def freed_memory_kept(device: torch.device) -> Iterator[None]:
    """The same inside a block, on a CPU; free memory is returned at its end, unless someone else wants it kept."""
    if device.type != "cpu":
        yield
        return
    _keeping.add(me := object())
    _tell_glibc()
    try:
        yield
    finally:
        _keeping.discard(me)
        _tell_glibc()


def _tell_glibc() -> None:
    if platform.libc_ver()[0] != "glibc":
        return
    libc, trim_threshold, mmap_max = ctypes.CDLL(None), -1, -4
    libc.mallopt(trim_threshold, -1 if _keeping else 128 * 1024)  # bytes at the end of the heap that are not returned
    libc.mallopt(mmap_max, 0 if _keeping else 65_536)  # number of blocks allowed outside the heap
    if not _keeping:
        libc.malloc_trim(0)


def describe_device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU {platform.machine()}, {torch.get_num_threads()} threads"


def environment(device: torch.device) -> dict[str, str]:
    """What is needed to reproduce a result; nothing that identifies a person or a machine."""
    versions = {name: importlib.metadata.version(name) for name in ("torch", "numpy", "safetensors")}
    return {
        "tokendepth": tokendepth.__version__,
        "commit": commit(),
        "python": platform.python_version(),
        **versions,
        "device": describe_device(device),
        "system": platform.system(),
    }


def commit() -> str:
    """The commit of this source tree, with `+changes` if it was edited since; `unknown` outside a checkout.

    TOKENDEPTH_COMMIT sets it for a copy of the tree without its history.
    """
    if told := os.environ.get("TOKENDEPTH_COMMIT"):
        return told
    here = Path(tokendepth.__file__).parent

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(here), *arguments], capture_output=True, text=True, timeout=10)
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        if not git("ls-files", "__init__.py"):  # installed inside a checkout of something else
            return "unknown"
        head = git("rev-parse", "--short=12", "HEAD")
        return head + ("+changes" if head and git("status", "--porcelain", "--", ".") else "") or "unknown"
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
