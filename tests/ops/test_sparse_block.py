"""A block for its active tokens: eager and kernel against the reference in float64.

The kernel is measured in one subprocess, this file run as a script: Triton's interpreter has to be chosen before
Triton is imported. On a GPU the same script measures the real kernel, in bfloat16.
"""

import json
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from tokendepth.layers.positions import rotated
from tokendepth.ops.decide import decide
from tokendepth.ops.rows import Listed
from tokendepth.ops.sparse_block import (
    BlockParts,
    BlockWeights,
    has_kernel,
    launch_bound,
    one_tile,
    sparse_block,
)

ROUNDING = 2.0**-24  # of a float32; allowed even if the library's error is 0
FAR = 1e30  # in keys and values that must not be seen; finite, because weight 0 times NaN is NaN

# batch, time, d, heads, ff, keys. Rows in one tile (d a power of two up to 256) or not; a cache; widths that are not
# powers of two; more rows than one block; more tokens than a program searches for its own rows.
SIZES = {
    "one token": (1, 1, 32, 2, 16, 1),
    "one tile": (2, 19, 32, 2, 48, 19),
    "several": (2, 19, 48, 3, 100, 19),
    "a cache": (3, 5, 64, 2, 64, 21),
    "a cache, wide": (3, 7, 72, 3, 72, 30),
    "blocks of rows": (2, 150, 32, 2, 32, 170),
    "long": (1, 300, 32, 2, 32, 300),
}
# The same with fewer key/value heads, each of width 16: more than d together.
MODERN = {
    "modern": (2, 19, 24, 4, 40, 19, 2),
    "modern, a cache": (3, 7, 24, 4, 40, 21, 1),
    "modern, alone": (1, 11, 24, 4, 40, 14, 2),
}
BIASED = {"modern, biased": (2, 19, 24, 4, 40, 19, 2), "modern, biased, blocks of rows": (1, 150, 24, 2, 72, 170, 1)}
"""With biases everywhere, a norm of the queries, and GeGLU."""
MODERN |= BIASED
ON_A_GPU = {"the paper's": (8, 256, 256, 8, 1024, 256), "GPT-2's": (4, 512, 768, 12, 3072, 512)}
ON_A_GPU["SmolLM2's"] = (4, 512, 576, 9, 1536, 512, 3)
ON_A_GPU["the study's"] = (8, 256, 256, 4, 688, 256, 4)
MEASURED = {**SIZES, **MODERN, **(ON_A_GPU if torch.cuda.is_available() else {})}
EVERY_KIND = {"one tile", "several", "a cache", "modern", "modern, biased", *ON_A_GPU}
SHARES = {"none": 0.0, "one": None, "some": 0.4, "all": 1.0}


class Given(NamedTuple):
    """The arguments of `sparse_block`, with weights instead of parts."""

    h: Tensor
    x: Tensor
    kv: Tensor
    """`[batch, keys + 1, 2, kv head, width]`: a cache whose last column is not read."""
    active: Tensor | None
    weights: BlockWeights
    gate: Tensor | None
    key_valid: Tensor | None
    columns: Tensor | None
    listed: Listed | None
    rotation: tuple[Tensor, Tensor] | None

    def __call__(self, backend: str = "auto") -> Tensor:
        given = self.h, self.x, *self.keys_and_values(), self.active, parts_of(self.weights)
        return sparse_block(*given, *self[5:], backend=backend)

    def keys_and_values(self) -> list[Tensor]:
        return [part.transpose(1, 2) for part in self.kv.narrow(1, 0, self.kv.shape[1] - 1).unbind(2)]

    def to(self, dtype: torch.dtype, device: str = "cpu") -> "Given":
        def one(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            return x.to(device, dtype if x.is_floating_point() else x.dtype, copy=True)

        moved = tree_map(one, self)
        if self.gate is None:
            return moved
        exact = torch.promote_types(dtype, torch.float32)  # as from a router
        return moved._replace(gate=self.gate.to(device, exact, copy=True))


def parts_of(w: BlockWeights) -> BlockParts:
    def query(x: Tensor, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        q = F.linear(x, w.query, w.query_bias).unflatten(-1, (w.heads, -1))
        return rotated(q if w.query_norm is None else F.rms_norm(q, q.shape[-1:], w.query_norm, w.query_eps), rotation)

    def norm(h: Tensor) -> Tensor:
        if w.norm_bias is None:
            return F.rms_norm(h, h.shape[-1:], w.norm, w.eps)
        return F.layer_norm(h, h.shape[-1:], w.norm, w.norm_bias, w.eps)

    def ffn(x: Tensor) -> Tensor:
        hidden = F.linear(x, w.up, w.up_bias)
        if w.activation == "gelu":
            hidden = F.gelu(hidden)
        else:
            gate, up = hidden.chunk(2, -1)
            hidden = (F.silu(gate) if w.activation == "swiglu" else F.gelu(gate, approximate="tanh")) * up
        return F.linear(hidden, w.down, w.down_bias)

    return BlockParts(query, lambda attended: F.linear(attended, w.out, w.out_bias), norm, ffn, w)


def operands(
    size: tuple[int, ...],
    share: float | None = 1.0,
    *,
    everybody: bool = False,
    gate: bool = False,
    valid: bool = False,
    columns: bool = False,
    listed: bool = False,
) -> Given:
    """The share `share` of the tokens is active, one token if it is None, or `everybody`.

    Columns are ragged: each sequence has its own length, and its tokens are anywhere among its keys, in order. Keys
    that no active token may see hold values that would dominate the result.
    """
    batch, time, d, heads, ff, keys = size[:6]
    is_modern = len(size) == 7
    is_biased = size in BIASED.values()
    width, kv_heads = (d // heads if size in ON_A_GPU.values() else 16, size[6]) if is_modern else (d // heads, heads)
    q_out = heads * width
    dice = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=dice)

    def matrix(out: int, into: int) -> Tensor:
        return random(out, into) / into**0.5

    query, out, norm, eps = matrix(q_out, d), matrix(d, q_out), random(d), 0.1  # an eps large enough to matter
    if not is_modern:
        ffn = matrix(ff, d), random(ff), matrix(d, ff), random(d)
        weights = BlockWeights(heads, query, out, norm, random(d), eps, *ffn)
    elif not is_biased:
        ffn = matrix(2 * ff, d), None, matrix(d, ff), None
        weights = BlockWeights(heads, query, out, norm, None, eps, *ffn, "swiglu", rotary=True)
    else:
        ffn = matrix(2 * ff, d), random(2 * ff), matrix(d, ff), random(d)
        more = random(q_out), random(width), 0.2, random(d)
        weights = BlockWeights(heads, query, out, norm, None, eps, *ffn, "geglu", *more, rotary=True)
    kv = random(batch, keys + 1, 2, kv_heads, width)
    kv[:, -1] = torch.nan
    active = torch.rand(batch, time, generator=dice) < (share or 0.0)
    if share is None:
        active[batch // 2, time // 2] = True
    gates = torch.rand(batch, time, generator=dice)
    key_valid = torch.rand(batch, keys, generator=dice) < 0.7 if valid else None
    lengths = torch.randint(time, keys + 1, (batch,), generator=dice).tolist()
    places = torch.stack([torch.randperm(length, generator=dice)[:time].sort().values for length in lengths])
    own = places if columns else torch.arange(keys - time, keys).expand(batch, -1)
    key = torch.arange(keys)
    seen = key <= own[..., None]
    if key_valid is not None:
        seen = seen & (key_valid[:, None] | (key == own[..., None]))
    kv[:, :-1][~(seen if everybody else seen & active[..., None]).any(1)] = FAR
    angles = (own if columns else own[:1])[..., None] / (1 + torch.arange(width // 2))
    return Given(
        random(batch, time, d),
        random(batch, time, d),
        kv,
        None if everybody else active,
        weights,
        gates if gate else None,
        key_valid,
        places if columns else None,
        decide(-active.float(), 0.5, backend="reference").listed if listed else None,
        (angles.cos(), angles.sin()) if is_modern else None,
    )


# --- eager ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("gate", [False, True], ids=["all", "gate"])
@pytest.mark.parametrize("valid", [False, True], ids=["all keys", "key_valid"])
@pytest.mark.parametrize("columns", [False, True], ids=["last keys", "columns"])
@pytest.mark.parametrize("name", [*SIZES, *MODERN])
def test_eager_equals_reference(name, columns, valid, gate, share):
    size = {**SIZES, **MODERN}[name]
    given = operands(size, SHARES[share], gate=gate, valid=valid, columns=columns).to(torch.float64)
    before = given.to(torch.float64)
    expected, found = given("reference"), given("eager")
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    assert torch.equal(found[~given.active], given.h[~given.active]), "what is not active is not touched"
    assert torch.equal(given.h, before.h), "with a gradient it may not overwrite h"
    with torch.no_grad():
        in_place = given("eager")
    assert in_place is given.h, "without a gradient there is no copy"
    torch.testing.assert_close(in_place, expected, rtol=1e-10, atol=1e-10)
    assert changed(given, before) <= {"h"}


def changed(given: Given, before: Given) -> set[str]:
    """The tensors that have changed."""
    parts = ((name, tree_leaves(getattr(given, name)), tree_leaves(getattr(before, name))) for name in Given._fields)
    return {name for name, now, was in parts if not all(map(same_bits, now, was))}


def same_bits(a: Any, b: Any) -> bool:
    return torch.equal(a.nan_to_num(FAR), b.nan_to_num(FAR)) if isinstance(a, Tensor) else a == b


@pytest.mark.parametrize("gate", [False, True], ids=["all", "gate"])
@pytest.mark.parametrize("columns", [False, True], ids=["last keys", "columns"])
@pytest.mark.parametrize("name", [*SIZES, *MODERN])
def test_without_flags_everybody_is_active(name, columns, gate):
    given = operands({**SIZES, **MODERN}[name], everybody=True, gate=gate, valid=True, columns=columns)
    given = given.to(torch.float64)
    expected = given._replace(active=torch.ones(given.h.shape[:2], dtype=torch.bool))("reference")
    for backend in ("reference", "eager"):
        torch.testing.assert_close(given(backend), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["several", *MODERN])
def test_gradients_equal_the_references(name):
    given = operands({**SIZES, **MODERN}[name], 0.4, gate=True, valid=True, columns=True).to(torch.float64)
    leaves = {part: getattr(given, part).requires_grad_() for part in ("h", "x", "gate")}
    grad = torch.randn(given.h.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found, expected = (
        torch.autograd.grad(given._replace(**leaves)(backend), list(leaves.values()), grad)
        for backend in ("eager", "reference")
    )
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_by_hand():
    """Tokens of width 1, so that each step is a simple product."""
    h, x = torch.ones(1, 2, 1), torch.full((1, 2, 1), 5.0)
    k, v = torch.zeros(1, 1, 2, 1), torch.tensor([[[[2.0], [4.0]]]])  # on average 3
    parts = BlockParts(lambda x, _: x[..., None], lambda y: 2 * y, lambda h: h + 10, lambda x: 100 * x, None)
    active, gate = torch.tensor([[False, True]]), torch.tensor([[0.25, 0.5]])
    for backend in ("reference", "eager"):
        plain = sparse_block(h, x, k, v, active, parts, backend=backend)
        assert plain.flatten().tolist() == [1.0, 7 + 100 * 17], "1 + 2 x 3 = 7, and the feed-forward of 7 + 10"
        gated = sparse_block(h, x, k, v, active, parts, gate, backend=backend)
        assert gated.flatten().tolist() == [1.0, 4 + 0.5 * 100 * 14], "half of both updates"
        first = sparse_block(h, x, k, v, active, parts, columns=torch.tensor([[0, 0]]), backend=backend)
        assert first.flatten().tolist() == [1.0, 5 + 100 * 15], "it stands at the first key"


def test_on_a_cpu_auto_is_eager_and_an_unknown_backend_is_refused():
    given = operands(SIZES["one tile"], 0.4, gate=True)
    assert torch.equal(given(), given("eager"))
    with pytest.raises(ValueError, match="unknown backend 'fast'"):
        given("fast")


# --- what auto chooses ------------------------------------------------------------------------------------------------


def test_who_has_a_kernel():
    weights = operands((1, 2, 64, 4, 64, 2)).weights
    assert has_kernel(weights)
    assert not has_kernel(weights._replace(heads=8)), "heads too narrow for tensor cores"
    assert not has_kernel(None)
    for d, ff in ((96, 64), (64, 72)):
        assert not has_kernel(operands((1, 2, d, 2, ff, 2)).weights)
    modern = operands((1, 2, 64, 4, 64, 2, 2)).weights
    assert has_kernel(modern)
    assert one_tile(torch.zeros(1, 2, 64), weights)
    for changed in ({"rotary": True}, {"norm_bias": None}, {"activation": "swiglu"}, {"query": torch.zeros(128, 64)}):
        assert not one_tile(torch.zeros(1, 2, 64), weights._replace(**changed)), "the general kernels take it"


def test_the_kernel_refuses_what_it_does_not_know():
    pytest.importorskip("triton")
    with pytest.raises(ValueError, match="width 16 or more, not 8"):
        operands((1, 2, 64, 8, 64, 2))("kernel")
    given = operands(SIZES["one tile"])
    parts = parts_of(given.weights)._replace(weights=None)
    with pytest.raises(ValueError, match="whose weights are known"):
        sparse_block(given.h, given.x, *torch.zeros(2, 2, 2, 19, 16), None, parts, backend="kernel")
    with pytest.raises(ValueError, match="whose weights are known"):
        given._replace(rotation=(torch.ones(1, 19, 8), torch.zeros(1, 19, 8)))("kernel")


@torch.no_grad()
def test_auto_is_the_kernel_for_what_it_knows_and_lists_only_what_programs_do_not_find(kernels_on_a_gpu, monkeypatch):
    def launched(size: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, **kind: bool) -> tuple[list[str], bool]:
        """The kernels, and whether the block is launch-bound."""
        bound = []

        def run(*fields: Any) -> None:
            given = Given(*fields)
            given()
            bound.append(launch_bound(given.h, given.weights))

        return kernels_on_a_gpu(run, *operands(size, **kind).to(dtype)), bound[0]

    # It would count the active rows, which is impossible with fake tensors.
    monkeypatch.setattr("tokendepth.ops.sparse_block.eager.eager", lambda *_: None)
    short, long, many = ((batch, time, 64, 2, 64, time) for batch, time in ((2, 256), (2, 257), (17, 256)))
    assert launched(short) == launched(short, everybody=True) == (["sparse_block"], True)
    assert launched(long) == launched(long, everybody=True) == (["list_active", "sparse_block"], False)
    assert launched(many) == (["list_active", "sparse_block"], False)
    assert launched(long, listed=True) == (["sparse_block"], False)
    assert launched((2, 5, 64, 4, 64, 5, 2)) == (["list_active", "sparse_block"], False), "modern"
    assert launched((2, 5, 192, 2, 64, 5)) == (["list_active", "sparse_block"], False)
    assert launched((2, 5, 96, 2, 64, 5)) == launched(short, torch.float32) == ([], False)
    with torch.enable_grad():
        assert launched(short) == ([], False)


# --- kernel -----------------------------------------------------------------------------------------------------------


def ways() -> dict[str, tuple[tuple[int, ...], dict[str, Any]]]:
    """Size and kind of every case: all kinds at the sizes in EVERY_KIND, half of them at the others."""
    plain, masks, columns = {}, {"gate": True, "valid": True}, {"columns": True}
    listed = {**masks, **columns, "listed": True}
    kinds = {"none": (masks, listed), "one": (plain, listed), "some": (plain, masks, columns, listed)}
    kinds["all"] = (masks, columns)
    made = [{"share": share, **kind} for share in SHARES for kind in kinds[share]]
    made += [{"everybody": True}, {"everybody": True, **masks, **columns}]
    half = [{"share": share, **listed} for share in ("none", "one", "some")]
    half += [{"share": "some", **masks}, {"share": "all", **columns}, made[-1]]
    found = {}
    for name, size in MEASURED.items():
        for kind in made if name in EVERY_KIND else half:
            found[f"{name}: {', '.join(str(v) if k == 'share' else k for k, v in kind.items())}"] = size, kind
    return found


@pytest.mark.slow
@pytest.mark.xdist_group("kernels")
def test_kernel(measured):
    """For each case: the errors of kernel and library, and whether inactive states and inputs but h are unchanged."""
    assert set(measured) == set(ways())
    wrong = {
        case: found
        for case, found in measured.items()
        if not (found["kernel"] <= 2 * found["library"] + ROUNDING and found["others_same"] and found["inputs_same"])
    }
    assert wrong == {}


def error(found: Tensor, exact: Tensor) -> float:
    assert found.shape == exact.shape
    return float((found.cpu().double() - exact).norm() / exact.norm())


def _measure() -> None:
    """Print one JSON object: for every case, what `test_kernel` checks."""
    from tokendepth.ops.sparse_block.kernel import _sparse_block

    to = (torch.bfloat16, "cuda") if torch.cuda.is_available() else (torch.float32, "cpu")
    torch.use_deterministic_algorithms(True, warn_only=True)  # memory that is not written holds NaN
    found = {}
    with torch.no_grad():
        for case, (size, kind) in ways().items():
            given = operands(size, **{**kind, "share": SHARES[kind.get("share", "all")]})
            exact = given.to(torch.float64)("reference")
            before, arguments = given.to(*to), given.to(*to)
            kernel, library = arguments("kernel"), given.to(*to)("eager")
            assert kernel is arguments.h
            rest = ~before.active if before.active is not None else slice(0)
            found[case] = {
                "kernel": error(kernel, exact),
                "library": error(library, exact),
                "others_same": torch.equal(kernel[rest], before.h[rest]),
                "inputs_same": changed(arguments, before) <= {"h"},
            }
        _views(operands(SIZES["one tile"], 0.4, gate=True, valid=True, columns=True).to(*to))
    for name, kind in (("one tile", {}), ("several", {"listed": True}), ("modern, biased", {"listed": True})):
        given = operands({**SIZES, **MODERN}[name], 0.4, gate=True, valid=True, columns=True, **kind).to(*to)
        listed = given.listed or (None, None)
        rest = given.gate, given.key_valid, given.columns, *(given.rotation or (None, None))
        arguments = (given.h, given.x, *given.keys_and_values(), given.active, *listed, *given.weights, *rest)
        torch.library.opcheck(_sparse_block, arguments, test_utils=("test_schema", "test_faketensor"))
    print(json.dumps(found))


def _views(given: Given) -> None:
    """The same bits for tensors that are not contiguous; then h is not overwritten."""
    turned = {name: getattr(given, name) for name in ("h", "x", "active", "gate", "key_valid", "columns")}
    views = {name: x.transpose(0, 1).contiguous().transpose(0, 1) for name, x in turned.items()}
    assert not any(view.is_contiguous() for view in views.values())
    assert torch.equal(given._replace(**views)("kernel"), given("kernel"))


if __name__ == "__main__":
    _measure()
