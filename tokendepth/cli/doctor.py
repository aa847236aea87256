"""Check an installation: what works, what is missing, and how to fix it."""

import importlib.metadata
import importlib.util
import platform
import sys
import tempfile
from dataclasses import dataclass

import torch

from tokendepth.config import ModelConfig, RunConfig, TSAConfig
from tokendepth.errors import UserError
from tokendepth.methods import build
from tokendepth.runs.files import write_json
from tokendepth.runs.machine import choose_device, describe_device
from tokendepth.runs.run import Run

EXTRAS = {
    "report": ("matplotlib", "jinja2"),
    "data": ("tokenizers",),
    "cluster": ("ray",),
    "serve": ("fastapi", "uvicorn", "jinja2"),
    "hf": ("transformers", "accelerate", "gguf", "peft"),
    "tensorboard": ("tensorboard",),
    "kernels": ("triton",),
}


@dataclass(frozen=True)
class Finding:
    name: str
    ok: bool
    detail: str
    needed: bool = True
    """False for optional parts: extras and a GPU."""


def examine() -> list[Finding]:
    device = choose_device("auto")
    findings = [
        Finding("Python", sys.version_info >= (3, 11), f"{platform.python_version()} (3.11 or newer)"),
        Finding("PyTorch", _version("torch") >= (2, 11), f"{torch.__version__} (2.11 or newer)"),
        Finding("device", True, describe_device(device)),
        Finding(
            "GPU", device.type == "cuda", "CUDA" if device.type == "cuda" else "none: training runs on the CPU", False
        ),
        _sparse_equals_hard(device),
        _runs_can_be_written(),
    ]
    for extra, modules in EXTRAS.items():
        missing = [name for name in modules if importlib.util.find_spec(name) is None]
        detail = f"missing {', '.join(missing)}: pip install 'tokendepth[{extra}]'" if missing else "installed"
        findings.append(Finding(f"extra {extra}", not missing, detail, needed=False))
    return findings


def _version(package: str) -> tuple[int, ...]:
    return tuple(int(part) for part in importlib.metadata.version(package).split("+")[0].split(".")[:2])


@torch.no_grad()
def _sparse_equals_hard(device: torch.device) -> Finding:
    """Check the central promise on this machine: skipping changes the time and nothing else."""
    model = ModelConfig(d_model=64, n_layer=4, n_head=4, d_ff=128, context=32, vocab_size=50)
    network = build(RunConfig(model=model, method=TSAConfig())).to(device).eval()
    dice = torch.Generator().manual_seed(0)
    ids = torch.randint(50, (4, 32), generator=dice).to(device)
    decisions = (torch.rand(3, 4, 32, generator=dice) < 0.5).to(device)
    hard, sparse = (network(ids, execution=e, decisions=decisions).logits for e in ("hard", "sparse"))
    difference = ((hard - sparse).norm() / hard.norm()).item()
    return Finding("sparse = hard", difference < 1e-5, f"relative difference {difference:.1e} on the same decisions")


def _runs_can_be_written() -> Finding:
    with tempfile.TemporaryDirectory() as folder:
        try:
            run = Run.create(folder, RunConfig(), resume=True)
            write_json(run.path / "env.json", {})
            return Finding("run folders", True, "written and synced")
        except UserError as error:
            return Finding("run folders", False, str(error))
