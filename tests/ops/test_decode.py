"""Decoding steps: the kernels, for a few slots and for many, against the reference in float64.

They are measured in one subprocess, this file run as a script: Triton's interpreter has to be chosen before Triton is
imported. It runs a single program, which does everything; on a GPU the same script measures the real kernels, in
bfloat16, whose programs have to wait for each other.
"""

import json
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from tokendepth.ops import decode_inputs as chosen
from tokendepth.ops.block_inputs import BlockInputs, NormWeights, RouterWeights, Threshold
from tokendepth.ops.decode_block import MOST_ROWS, decode_block, runs_eager, runs_kernel
from tokendepth.ops.decode_inputs import FEW_ROWS, CacheLayer, KeyWeights, decode_inputs
from tokendepth.ops.sparse_block import BlockWeights

ROUNDING = 2.0**-22  # of float32 sums in a different order from the library's
FAR = 1e30  # in keys and values that must not be seen; finite, because weight 0 times NaN is NaN

# slots, d, heads, kv heads, width, d_ff, columns. One slot and several; sizes that are not powers of two; more slots
# than a block of rows; more keys than a program takes; sums that are split into parts.
SIZES = {
    "alone, odd": (1, 72, 3, 3, 24, 100, 37),
    "few": (3, 48, 3, 3, 16, 100, 21),
    "many": (19, 32, 2, 2, 16, 32, 19),
    "long": (2, 32, 2, 2, 16, 32, 150),
    "long sums": (2, 32, 2, 2, 16, 2064, 9),
}
MODERN = {
    "modern, alone": (1, 24, 4, 2, 16, 40, 21),
    "modern": (3, 24, 4, 1, 16, 40, 21),
    "shared by many": (2, 24, 10, 2, 16, 40, 45),
}
BIASED = {"biased, alone": (1, 40, 2, 1, 24, 72, 75), "biased": (5, 24, 4, 2, 16, 40, 9)}
"""With biases everywhere, norms of queries and keys, and GeGLU."""
ON_A_GPU = {
    "paper": (1, 256, 8, 8, 32, 1024, 256),
    "paper, many": (64, 256, 8, 8, 32, 1024, 256),
    "d1024": (1, 1024, 16, 16, 64, 4096, 1024),
    "d1024, few": (8, 1024, 16, 16, 64, 4096, 1024),
    "d1024, many": (64, 1024, 16, 16, 64, 4096, 1024),
    "SmolLM2, alone": (1, 576, 9, 3, 64, 1536, 700),
    "SmolLM2": (8, 576, 9, 3, 64, 1536, 700),
}
MEASURED = {**SIZES, **MODERN, **BIASED, **(ON_A_GPU if torch.cuda.is_available() else {})}
PATHS = {"one kernel": MOST_ROWS, "many": 0}
"""Slots up to which one kernel does everything; both ways are tested with every number of slots."""
SHARES = {"none": 0.0, "one": None, "some": 0.4, "all": 1.0}
KINDS: tuple[dict[str, Any], ...] = (
    {"share": "none", "gate": True},
    {"share": "one"},
    {"share": "some", "gate": True, "resting": True},
    {"share": "all", "normed": True, "inclusive": True},
    {"everybody": True},
)

SOME_KINDS = ("alone, odd", "modern", "long", "long sums", "shared by many", "modern, alone", "biased, alone")
"""Sizes that differ from others in one respect only; tested with some tokens active and without a decision."""


class Given(NamedTuple):
    """The arguments of both steps."""

    h: Tensor
    norm: NormWeights
    keys: KeyWeights
    layer: CacheLayer
    writes: Tensor
    columns: Tensor
    rotation: tuple[Tensor, Tensor] | None
    active: Tensor | None
    router: RouterWeights
    threshold: Threshold
    weights: BlockWeights
    gate: Tensor | None

    def inputs(self, backend: str, *, routed: bool = True) -> BlockInputs:
        """With a router, of all tokens; without one, only of the active tokens."""
        start = self.h, self.norm, self.keys, self.layer, self.writes, self.rotation
        if routed:
            return decode_inputs(*start, self.threshold.valid, None, self.router, self.threshold, backend=backend)
        return decode_inputs(*start, self.active, self.active, backend=backend)

    def block(self, inputs: BlockInputs, backend: str) -> Tensor:
        rest = self.columns, self.active, self.weights, self.gate, self.rotation, inputs.unwritten
        return decode_block(self.h, inputs.x, self.layer, *rest, backend=backend)

    def to(self, dtype: torch.dtype, device: str = "cpu") -> "Given":
        def one(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            return x.to(device, dtype if x.is_floating_point() else x.dtype, copy=True)

        return tree_map(one, self)


def operands(
    size: tuple[int, ...],
    share: str = "all",
    *,
    everybody: bool = False,
    gate: bool = False,
    resting: bool = False,
    normed: bool = False,
    inclusive: bool = False,
) -> Given:
    """`resting`: some slots are idle, so that their key goes to the column that is never read."""
    batch, d, heads, kv_heads, width, ff, window = size
    modern, biased = size in (*MODERN.values(), *BIASED.values()) or kv_heads < heads, size in BIASED.values()
    dice = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=dice)

    def matrix(out: int, into: int) -> Tensor:
        return random(out, into) / into**0.5

    eps = 0.1  # large enough to matter
    gated = "geglu" if biased else "swiglu"
    weights = BlockWeights(
        heads, matrix(heads * width, d), matrix(d, heads * width), random(d), None if modern else random(d), eps,
        matrix(2 * ff if modern else ff, d), None if modern and not biased else random(2 * ff if modern else ff),
        matrix(d, ff), None if modern and not biased else random(d), gated if modern else "gelu",
        random(heads * width) if biased else None, random(width) if biased else None, 0.2,
        random(d) if biased else None, modern,
    )  # fmt: skip
    kv_out = 2 * kv_heads * width
    kv = matrix(kv_out, d), random(kv_out) if biased else None, random(width) if biased else None, 0.3
    keys = KeyWeights(kv_heads, *kv, torch.cat([weights.query, kv[0]]))
    active = torch.rand(batch, 1, generator=dice) < (SHARES[share] or 0.0)
    if share == "one":
        active[batch // 2] = True
    columns = torch.randint(window, (batch, 1), generator=dice)
    columns[-1] = window - 1
    rests = torch.rand(batch, 1, generator=dice) < 0.3 if resting else torch.zeros(batch, 1, dtype=torch.bool)
    active &= ~rests
    writes = torch.where(rests, window, columns)
    cache = random(2, batch, kv_heads, window + 1, width)
    seen = torch.rand(batch, window + 1, generator=dice) < 0.7
    key = torch.arange(window + 1)
    cache.masked_fill_(~seen[:, None, :, None], FAR)
    cache.masked_fill_((key > columns)[:, None, :, None], torch.nan)
    hidden = max(16, d // 4)
    router = RouterWeights(matrix(hidden, d), random(hidden), random(1, hidden) / hidden, random(1), normed)
    angles = columns[..., None] / (1 + torch.arange(width // 2))
    return Given(
        random(batch, 1, d),
        NormWeights(random(d), None if modern else random(d), eps),
        keys,
        CacheLayer(cache[0], cache[1], seen, window),
        writes,
        columns,
        (angles.cos(), angles.sin()) if modern else None,
        None if everybody else active,
        router,
        Threshold(torch.zeros(batch, 1) if normed else 0.1, ~rests if resting else None, inclusive),
        weights,
        torch.rand(batch, 1, generator=dice) if gate else None,
    )


@pytest.mark.parametrize("name", ["few", "modern", "biased"])
def test_the_reference_reads_no_more_than_it_may(name):
    """Keys that must not be seen hold values that would dominate the result; columns that do not exist yet hold NaN."""
    given = operands((SIZES | MODERN | BIASED)[name], "some", gate=True, resting=True).to(torch.float64)
    before = given.to(torch.float64)
    inputs = given.inputs("reference")
    found = given.block(inputs, "reference")
    assert found is given.h
    assert found.isfinite().all()
    assert found.abs().max() < 1e3
    assert given.active is not None
    assert torch.equal(found[~given.active], before.h[~given.active])


def test_an_unknown_backend_is_refused():
    given = operands(SIZES["few"])
    for run in (given.inputs, lambda backend: given.block(BlockInputs(given.h, None, None), backend)):
        with pytest.raises(ValueError, match="unknown backend 'fast'"):
            run("fast")


@torch.no_grad()
def test_who_has_a_kernel(kernels_on_a_gpu):
    weights = operands((2, 64, 4, 4, 16, 64, 9)).weights

    def said(*shape: int, dtype: torch.dtype = torch.bfloat16, known: BlockWeights | None = weights) -> bool:
        found = []
        kernels_on_a_gpu(lambda h: found.append(runs_kernel(h, known)), torch.zeros(shape, dtype=dtype))
        return found[0]

    assert said(2, 1, 64)
    assert said(MOST_ROWS, 1, 64)
    assert not said(MOST_ROWS + 1, 1, 64)
    assert not said(2, 2, 64), "more than a token a slot"
    assert not said(2, 1, 64, dtype=torch.float32)
    assert not said(2, 1, 64, known=None)
    assert not runs_kernel(torch.zeros(2, 1, 64, dtype=torch.bfloat16), weights), "on a CPU"


@torch.no_grad()
def test_a_few_slots_are_one_kernel_and_more_are_not(kernels_on_a_gpu):
    def launched(slots: int) -> list[str]:
        given = operands((slots, 64, 4, 4, 16, 64, 9)).to(torch.bfloat16)
        return kernels_on_a_gpu(lambda *parts: Given(*parts).block(Given(*parts).inputs("auto"), "auto"), *given)

    assert launched(FEW_ROWS) == ["decode_inputs", "decode_block"]
    assert launched(FEW_ROWS + 1) == ["decode_inputs", "decode_many"]


@pytest.mark.parametrize("kind", range(len(KINDS)))
@pytest.mark.parametrize("name", [name for name, size in (SIZES | MODERN | BIASED).items() if size[0] == 1])
@torch.no_grad()
def test_eager_equals_reference(name, kind):
    """For one sequence: both steps, and the contents of the cache."""
    given = operands((SIZES | MODERN | BIASED)[name], **KINDS[kind]).to(torch.float64)
    assert runs_eager(given.h)
    by_eager, by_reference = given.to(torch.float64), given.to(torch.float64)
    expected = results(by_reference, "reference")
    for part, found in results(by_eager, "eager").items():
        torch.testing.assert_close(found, expected[part], rtol=1e-10, atol=1e-10)
    pairs = [(by_eager, by_reference)]
    if given.active is not None:  # keys of the active tokens only
        pairs.append((given.to(torch.float64), given.to(torch.float64)))
        for one, backend in zip(pairs[1], ("eager", "reference"), strict=True):
            one.inputs(backend, routed=False)
    for one, other in pairs:
        for found, wanted in zip(one.layer[:3], other.layer[:3], strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10, equal_nan=True)


def test_eager_is_for_one_token_alone_without_a_gradient():
    with torch.no_grad():
        assert runs_eager(torch.zeros(1, 1, 8))
        assert not runs_eager(torch.zeros(2, 1, 8))
        assert not runs_eager(torch.zeros(1, 2, 8))
    assert not runs_eager(torch.zeros(1, 1, 8))


# --- kernel -----------------------------------------------------------------------------------------------------------


def cases() -> dict[str, tuple[str, dict[str, Any], str]]:
    found = {}
    for path, name, kind in product(PATHS, MEASURED, KINDS):
        if name in SOME_KINDS and kind not in (KINDS[2], KINDS[-1]):
            continue
        if (path, name) == ("one kernel", "long sums"):  # which splits no sum into parts
            continue
        in_words = ", ".join(str(v) if k == "share" else k for k, v in kind.items())
        found[f"{path}, {name}: {in_words}"] = name, kind, path
    return found


@pytest.mark.slow
@pytest.mark.xdist_group("kernels")
def test_kernel(measured):
    """For each case and result: the errors of kernel and library, and what changed although it must not."""
    assert set(measured) == set(cases())
    wrong = {case: found for case, found in measured.items() if not fine(found)}
    assert wrong == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("alone, odd", "one kernel"),
        ("biased", "one kernel"),
        ("long", "many"),
        ("biased", "many"),
        ("many", "many"),
        ("long sums", "many"),
    ],
)
def test_the_kernels_compile_for_a_gpu(name, path, monkeypatch):
    """No GPU is needed. Triton's interpreter has no types, so it runs code that the compiler rejects."""
    pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from tokendepth.ops.decode_attention import kernel as attention
    from tokendepth.ops.decode_block import kernel as block
    from tokendepth.ops.decode_inputs import kernel as inputs
    from tokendepth.ops.decode_many import kernel as many
    from tokendepth.ops.slot_products import kernel as products

    launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    class Launched:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *arguments, **options: launches.append((self.kernel, arguments, options))

    modules = {inputs: ["_enter"], attention: ["_attend"], block: ["_work"], many: ["_add", "_activate"]}
    modules[products] = ["_project", "_update", "_make_hidden"]
    for module, kernels in modules.items():
        for kernel in kernels:
            monkeypatch.setattr(module, kernel, Launched(getattr(module, kernel)))
        monkeypatch.setattr(module, "programs_at_once", lambda device: 132, raising=False)
        monkeypatch.setattr(module, "overlapped", lambda h: {"OVERLAP": 2, "launch_pdl": True})
    monkeypatch.setattr(chosen, "FEW_ROWS", PATHS[path])
    given = operands((SIZES | BIASED)[name], "some", gate=True).to(torch.bfloat16)
    given.block(given.inputs("kernel"), "kernel")
    types = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.int64: "i64", torch.int32: "i32", torch.uint8: "u8"}
    few = ["_project", "_attend", "_update", "_make_hidden", "_update"]
    rest = ["_work"] if path == "one kernel" else ["_attend", "_add", "_activate"] if name == "many" else few
    assert [kernel.fn.__name__ for kernel, *_ in launches] == ["_enter", *rest]
    for kernel, arguments, options in launches:
        settings = {name: options.pop(name) for name in ("num_warps", "num_stages", "launch_pdl") if name in options}
        options |= {"FETCH": True} if "FETCH" in kernel.arg_names else {}
        signature = dict.fromkeys(options, "constexpr")
        for argument, value in zip(kernel.arg_names, arguments, strict=False):
            is_tensor = isinstance(value, Tensor)
            signature[argument] = (
                f"*{types[value.dtype]}" if is_tensor else "fp32" if isinstance(value, float) else "i32"
            )
        constants = {(kernel.arg_names.index(option),): value for option, value in options.items()}
        ordered = {argument: signature[argument] for argument in kernel.arg_names}
        made = compile(ASTSource(kernel, ordered, constants), target=GPUTarget("cuda", 90, 32), options=settings)
        assert made.metadata.shared < 227 * 1024, "more shared memory than a multiprocessor has"
        assert "prefetch.global.L2" in made.asm["ptx"]


def fine(found: dict[str, Any]) -> bool:
    errors = found["errors"].values()
    return found["changed"] == [] and all(kernel <= 2 * library + ROUNDING for kernel, library in errors)


def error(found: Tensor, exact: Tensor) -> float:
    assert found.shape == exact.shape
    exact = exact.double()
    return float((found.cpu().double() - exact).norm() / exact.norm().clamp(min=1e-30)) if exact.numel() else 0.0


def results(given: Given, backend: str) -> dict[str, Tensor]:
    """The results of both steps, and the visible contents of the cache."""
    routed = given.inputs(backend)
    assert routed.decision is not None
    there = torch.arange(given.layer.seen.shape[1], device=given.h.device) == given.writes
    found = {"logit": routed.decision.logit, "keep": routed.decision.kept(), "x": routed.x}
    found["h"] = given.block(routed, backend).clone()
    found |= {"keys": at(given.layer.keys, there), "values": at(given.layer.values, there)}
    return found


def at(part: Tensor, there: Tensor) -> Tensor:
    """The columns that were written: `[slot, kv head, width]`."""
    return part.transpose(1, 2)[there].clone()


def compared(name: str, kind: dict[str, Any], path: str, to: tuple[torch.dtype, str]) -> dict[str, Any]:
    chosen.FEW_ROWS = PATHS[path]
    given = operands(MEASURED[name], **kind)
    # The layer's contents are rounded first, so that only computed values differ.
    given = given.to(to[0]).to(torch.float32)
    exact, library, kernel = given.to(torch.float64), given.to(*to), given.to(*to)
    before = kernel.to(*to)
    expected, by_library, by_kernel = (
        results(exact, "reference"),
        results(library, "reference"),
        results(kernel, "kernel"),
    )
    errors = {
        part: (error(by_kernel[part], expected[part]), error(by_library[part], expected[part])) for part in expected
    }
    changed = []
    written = torch.arange(kernel.layer.seen.shape[1], device=to[1]) == kernel.writes
    for part in ("keys", "values"):
        now, was = (getattr(one.layer, part).transpose(1, 2)[~written] for one in (kernel, before))
        changed += [] if torch.equal(now.nan_to_num(FAR), was.nan_to_num(FAR)) else [part]
    changed += [] if torch.equal(kernel.layer.seen.cpu(), exact.layer.seen) else ["seen"]
    if kernel.active is not None:
        rest = ~kernel.active
        changed += [] if torch.equal(kernel.h[rest], before.h[rest]) else ["h"]
        alone, wanted = before.to(*to), before.to(torch.float64)
        found, x = alone.inputs("kernel", routed=False), wanted.inputs("reference", routed=False).x
        alone.block(found, "kernel")  # may have keys to write
        active = alone.active
        assert active is not None
        errors["x of the active"] = error(found.x[active], x[active.cpu()]), error(by_library["x"], expected["x"])
        for part in ("keys", "values"):
            now, was = (getattr(one.layer, part).transpose(1, 2) for one in (alone, before))
            rest = ~(written & active)
            changed += (
                [] if torch.equal(now[rest].nan_to_num(FAR), was[rest].nan_to_num(FAR)) else [f"{part} of others"]
            )
            now, exactly = (
                at(getattr(one.layer, part), (written & active).to(one.h.device)) for one in (alone, wanted)
            )
            errors[f"{part} of the active"] = error(now, exactly), errors[part][1]
        changed += [] if torch.equal(alone.layer.seen.cpu(), wanted.layer.seen) else ["seen of others"]
    return {"errors": errors, "changed": changed}


def _measure() -> None:
    """Print one JSON object: for every case, what `test_kernel` checks."""
    from tokendepth.ops.decode_attention import kernel as attention
    from tokendepth.ops.decode_block import kernel
    from tokendepth.ops.decode_many import kernel as many

    on_gpu = torch.cuda.is_available()
    to = (torch.bfloat16, "cuda") if on_gpu else (torch.float32, "cpu")
    if not on_gpu:  # so that small shapes are split like large ones
        kernel.KEYS, attention.TILE, attention.PROGRAMS, many.UNITS = 16, 16 * 16, 16, 32
    torch.use_deterministic_algorithms(True, warn_only=True)  # memory that is not written holds NaN
    with torch.no_grad():
        found = {case: compared(*arguments, to) for case, arguments in cases().items()}
    print(json.dumps(found))


if __name__ == "__main__":
    _measure()
