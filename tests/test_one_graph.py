"""A skipping pass is one graph: no host synchronisation on a GPU, and no graph breaks in torch.compile.

Without a GPU the first is tested on tensors with shapes but no values: reading one fails.
"""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.test_contract import CASES, DEPTH, each_case_at_length, given_decisions, lively, tokens
from tokendepth.cache import KVCache
from tokendepth.config import ModelConfig, RunConfig
from tokendepth.methods import build
from tokendepth.model import LanguageModel
from tokendepth.ops import block_inputs, decide, decode_block, decode_inputs, launch, rows, sparse_block

# Rows in one tile and in several; sequences whose programs find their own rows, and longer ones.
SIZES = {"one tile": (64, 8), "several": (192, 300)}
CLASSIC = [case for case in CASES if not case.endswith(" modern")]


class Launched(TorchDispatchMode):
    """The names of our own kernels, as often as they are launched."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        namespace, name, _ = str(func).split(".")
        if namespace == "tokendepth":
            self.kernels[name] += 1
        return func(*args, **(kwargs or {}))


def without_values(config: RunConfig) -> LanguageModel:
    """The model in bfloat16, of shapes alone; to be made under a FakeTensorMode."""
    model = build(config).eval()
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                empty = torch.empty(parameter.shape, dtype=torch.bfloat16)
                module._parameters[name] = nn.Parameter(empty, requires_grad=False)
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
    return model


@pytest.fixture
def kernels_serve(monkeypatch):
    pytest.importorskip("triton")
    serves = lambda h: h.dtype == torch.bfloat16 and not torch.is_grad_enabled()  # noqa: E731
    for module in (launch, block_inputs, decide, decode_block, decode_inputs, rows, sparse_block):
        monkeypatch.setattr(module, "serves", serves)


@pytest.mark.parametrize("what", ["plain", "padding", "slots", "decisions", "one token"])
@pytest.mark.parametrize("size", ["one tile", pytest.param("several", marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CLASSIC)
def test_what_can_be_captured_asks_nothing_of_the_host(case, size, what, kernels_serve):
    width, time = SIZES[size]
    model = ModelConfig(d_model=width, n_layer=4, n_head=4, d_ff=128, context=300, dropout=0.0, vocab_size=11)
    config = RunConfig(model=replace(model, n_layer=DEPTH.get(case, 4)), method=CASES[case])
    with FakeTensorMode(), torch.no_grad(), Launched() as launched:
        built = without_values(config)
        routed = sum(site.routed for site in built.method.sites(keys=1))
        if not built.can_be_captured:
            assert not built.method.skips_on_device
            pytest.skip("says itself that it asks")
        ids = torch.empty(2, 1 if what == "one token" else time, dtype=torch.long)
        options: dict[str, object] = {}
        if what == "padding":
            options["valid"] = torch.empty(2, time, dtype=torch.bool)
        elif what == "decisions":
            options["decisions"] = torch.empty(routed, 2, time, dtype=torch.bool) if routed else None
        elif what in ("slots", "one token"):
            layers = built.method.cache_layers
            options["cache"] = KVCache(built.config, 2, 300, layers=layers, like=built.norm.weight, fixed=True)
            if what == "one token":
                options["valid"] = torch.empty(2, 1, dtype=torch.bool)
        built(ids, execution="sparse", **options)
    if what == "one token":
        own = launched.kernels["decode_block"] + launched.kernels["decode_many"]
        assert own == launched.kernels["decode_inputs"] > 0
        assert own + launched.kernels["sparse_block"] >= routed, "the latter for given keys"
    elif routed:
        assert launched.kernels["sparse_block"] >= routed


def test_a_question_is_noticed():
    with FakeTensorMode(), pytest.raises(Exception, match="_local_scalar_dense"):
        torch.empty(3).sum().item()


@each_case_at_length
@torch.no_grad()
def test_a_compiler_takes_the_pass_in_one_piece(case):
    """The graph alone, which is what can break; that its code is right is tried in infer/test_compile.py.

    For sizes that may change, as in `compiled` on a CPU, with the Llama-style block; for fixed ones with the classic.
    """
    model, ids = lively(case), tokens(2, 13, seed=9)
    torch.compiler.reset()

    def run(ids: Tensor, decisions: Tensor | None) -> Tensor:
        return model(ids, execution="sparse", decisions=decisions).logits

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        fast = torch.compile(run, backend="eager", fullgraph=True, dynamic=case.endswith(" modern"))
        decisions = given_decisions(model, ids, "some")
        torch.testing.assert_close(fast(ids, decisions), run(ids, decisions), rtol=1e-5, atol=1e-5)
