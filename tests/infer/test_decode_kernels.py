"""Token by token through the decode kernels equals the full forward, for every method that reaches them.

A subprocess runs this file as a script for all cases, since Triton's interpreter must be selected before the import.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.test_contract import CASES, DEPTH, SPREAD, TIME, VOCABULARY, enlivened, tokens
from tokendepth.cache import KVCache
from tokendepth.config import ModelConfig, RunConfig
from tokendepth.infer.engine import decode_one, prefill
from tokendepth.methods import build
from tokendepth.ops import decode_inputs

ROOT = Path(__file__).resolve().parents[2]
CLASSIC = ModelConfig(32, 3, 2, 48, TIME, 0.0, VOCABULARY)
MODERN = replace(
    CLASSIC, norm="rms", positions="rotary", n_kv_head=1, attention_bias="qkv", qk_norm=True, ffn="swiglu",
    ffn_bias=False, tie_head=False,
)  # fmt: skip
BLOCKS = {"classic": CLASSIC, "modern": MODERN}
# Each method once: kinds of blocks are tested with the kernels (ops/test_decode.py), and each kind occurs here, too.
# The classic block uses the kernels for few slots, the modern one those for many.
REACHED = [("tsa", "classic"), ("tsa", "modern"), ("budget", "modern"), ("mod", "classic"), ("span", "modern")]
REACHED += [(case, "classic") for case in ("span-gain", "early_exit-learned", "mor")]
ROUNDING = 1e-5


@pytest.mark.slow
def test_step_by_step_equals_the_full_forward():
    if find_spec("triton") is None:
        pytest.skip("no kernel: triton is not installed (pip install 'tokendepth[kernels]')")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, __file__],
        env={**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        cwd=ROOT, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found) == {f"{case}, {block}" for case, block in REACHED}
    for name, (error, work_differs, launched) in found.items():
        assert error <= ROUNDING, name
        assert work_differs == 0, name
        by = launched["decode_many" if name.endswith("modern") else "decode_block"]
        assert by == launched["decode_inputs"] >= 2 * 3, f"{name} did not reach the kernels"


@torch.no_grad()
def _compared(case: str, block: str) -> tuple[float, int, dict[str, int]]:
    """Over some steps: the largest difference of logits, the number of different decisions, and kernel launches."""
    from tests.test_one_graph import Launched

    decode_inputs.FEW_ROWS = 0 if block == "modern" else 2
    depth = DEPTH.get(case, 3)
    config = RunConfig(model=replace(BLOCKS[block], n_layer=depth), method=CASES[case])
    model = enlivened(build(config).eval(), tokens(64), SPREAD.get(case, 1.0))
    ids = torch.randint(VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(1))
    prompts, error, differs, kernels = [ids[0, :4].tolist(), ids[1, :2].tolist()], 0.0, 0, Counter()
    cache = KVCache(model.config, 2, TIME, layers=model.method.cache_layers, like=model.norm.weight, fixed=True)
    prefill(model, cache, prompts, "sparse")
    running = torch.tensor([True, True])
    for step in range(2):
        if step == 1:
            running = torch.tensor([False, True])  # the first slot is idle
        last = torch.tensor([ids[0, 4 + step], ids[1, 2 + step]])
        with Launched() as launched:
            found = decode_one(model, cache, last, "sparse", running)
        kernels += launched.kernels
        for row, length in enumerate((5 + step, 3 + step)):
            if running[row]:
                full = model(ids[row : row + 1, :length], execution="hard")
                error = max(error, float((found.logits[row] - full.logits[0, -1]).abs().max()))
                differs += int((found.trace.work[:, row, 0] != full.trace.work[:, 0, -1]).sum())
    return error, differs, dict(kernels)


def _everything() -> None:
    from functools import partial

    from tests.ops.interpreted import remember_builtins
    from tokendepth import model

    remember_builtins()
    model.decode_inputs = partial(model.decode_inputs, backend="kernel")
    model.decode_block = partial(model.decode_block, backend="kernel")
    model.decodes_by_kernel = lambda h, weights: h.shape[1] == 1 and weights is not None
    model.Block.skips_by_kernel = lambda self, h: h.shape[1] == 1  # as on a GPU, where nothing is packed
    print(json.dumps({f"{case}, {block}": _compared(case, block) for case, block in REACHED}))


if __name__ == "__main__":
    _everything()
