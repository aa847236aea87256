"""Positions: rotations by hand, frequencies by the published formulas in plain Python.

Frequencies are computed in float32 from base ** x; an exponent of order 10 with an error of 6e-8 gives 1e-6 relative.
"""

import math

import pytest
import torch
from torch import Tensor

from tokendepth.config import DenseConfig, ModelConfig, RunConfig
from tokendepth.layers.positions import LearnedPositions, RotaryPositions, make_positions, rotary_frequencies, rotated
from tokendepth.methods import build


def rotary(width: int = 4, **options) -> ModelConfig:
    return ModelConfig(d_model=width, n_head=1, positions="rotary", **options)


def turned(x: Tensor, positions: list[int], shape: ModelConfig) -> Tensor:
    """`[time, width]`, each row at its position."""
    return rotated(x[None, :, None], RotaryPositions(shape).rotation(torch.tensor(positions)))[0, :, 0]


# --- the rotation -----------------------------------------------------------------------------------------------------


def test_a_head_of_four_by_hand():
    """Pairs (x_0, x_2) and (x_1, x_3), rotated by 3 * 1 and 3 * 100^(-1/2) = 0.3."""
    a, b, c, d = 1.0, 2.0, -3.0, 0.5
    expected = [
        a * math.cos(3.0) - c * math.sin(3.0),
        b * math.cos(0.3) - d * math.sin(0.3),
        c * math.cos(3.0) + a * math.sin(3.0),
        d * math.cos(0.3) + b * math.sin(0.3),
    ]
    x = torch.tensor([[a, b, c, d]])
    assert turned(x, [3], rotary(rope_base=100.0))[0].tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("shape", [(5,), (2, 5)], ids=["time", "batch and time"])
def test_a_compiler_takes_angles_as_one_op(shape):
    """Otherwise it would recompute cosines and sines in every block."""
    places, turns = torch.arange(math.prod(shape)).view(shape), RotaryPositions(rotary(8))
    graphs = []

    def backend(graph, inputs):
        graphs.append({node.target for node in graph.graph.nodes if node.op == "call_function"})
        return graph

    torch.compiler.reset()
    with torch.no_grad():
        found = torch.compile(turns.rotation, backend=backend, fullgraph=True)(places)
    for one, expected in zip(found, turns.rotation(places), strict=True):
        assert torch.equal(one, expected)
    assert torch.ops.tokendepth.rotation in {getattr(target, "overloadpacket", target) for target in graphs[0]}


def test_the_first_position_is_not_turned():
    x = torch.randn(1, 8)
    assert torch.equal(turned(x, [0], rotary(8)), x)


def test_a_rotation_changes_no_length():
    x = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    after = turned(x, list(range(50)), rotary(8))
    torch.testing.assert_close(after.norm(dim=1), x.norm(dim=1))
    assert not torch.allclose(after[1:], x[1:], atol=0.1)


def test_a_score_depends_on_the_distance_alone():
    q, k = torch.randn(2, 1, 16, generator=torch.Generator().manual_seed(0))

    def score(query_at: int, key_at: int) -> float:
        shape = rotary(16)
        return float((turned(q, [query_at], shape) * turned(k, [key_at], shape)).sum())

    for distance in (0, 1, 7, 30):
        near = score(distance, 0)
        for shift in (1, 12, 100):
            assert score(distance + shift, shift) == pytest.approx(near, abs=1e-4)
    assert abs(score(1, 0) - score(7, 0)) > 1e-2, "and it does depend on it"
    assert abs(score(7, 0) - score(0, 7)) > 1e-2, "also on its sign"


def test_every_sequence_may_have_positions_of_its_own():
    positions = torch.tensor([[0, 1, 2], [4, 4, 9]])
    x = torch.randn(2, 3, 2, 8, generator=torch.Generator().manual_seed(0))
    after = rotated(x, RotaryPositions(rotary(8)).rotation(positions))
    for b, t in ((0, 2), (1, 0), (1, 1), (1, 2)):
        for head in range(2):
            alone = turned(x[b, t, head][None], [int(positions[b, t])], rotary(8))[0]
            torch.testing.assert_close(after[b, t, head], alone)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_turned_in_float32_and_rounded_once(dtype):
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    positions = list(range(0, 640, 10))
    after = turned(x, positions, rotary(8))
    assert after.dtype == dtype
    assert torch.equal(after, turned(x.float(), positions, rotary(8)).to(dtype))


def test_float64_stays_float64():
    assert turned(torch.randn(1, 8, dtype=torch.float64), [3], rotary(8)).dtype == torch.float64


def test_without_a_rotation_nothing_is_turned():
    x = torch.randn(1, 2, 1, 4)
    assert rotated(x, None) is x


# --- frequencies ------------------------------------------------------------------------------------------------------


def plain(width: int, base: float) -> list[float]:
    """base^(-2i / width), i = 0 .. width / 2 - 1."""
    return [base ** (-2 * i / width) for i in range(width // 2)]


def llama3(width: int, base: float, factor: float, original: int, low: float, high: float) -> list[float]:
    """As in Meta's code for Llama 3.1, by wavelength."""
    found = []
    for frequency in plain(width, base):
        wavelength = 2 * math.pi / frequency
        if wavelength < original / high:
            found.append(frequency)
        elif wavelength > original / low:
            found.append(frequency / factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            found.append((1 - smooth) * frequency / factor + smooth * frequency)
    return found


def yarn(width: int, base: float, factor: float, original: int, slow: float, fast: float) -> list[float]:
    """As in the authors' code: a ramp over the pairs between those that make `fast` and `slow` turns."""

    def pair(turns: float) -> float:
        return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    first, last = max(math.floor(pair(fast)), 0), min(math.ceil(pair(slow)), width - 1)
    found = []
    for i, frequency in enumerate(plain(width, base)):
        ramp = min(max((i - first) / (last - first), 0.0), 1.0)
        found.append(frequency * (1 - ramp) + frequency / factor * ramp)
    return found


def assert_frequencies(shape: ModelConfig, expected: list[float]) -> None:
    found = rotary_frequencies(shape)
    assert found.dtype == torch.float32
    assert found.tolist() == pytest.approx(expected, rel=2e-6)


@pytest.mark.parametrize(("width", "base"), [(2, 10_000.0), (8, 10_000.0), (64, 500_000.0)])
def test_plain_and_linear(width, base):
    assert_frequencies(rotary(width, rope_base=base), plain(width, base))
    stretched = rotary(width, rope_base=base, rope_scaling="linear", rope_factor=4.0)
    assert_frequencies(stretched, [f / 4 for f in plain(width, base)])


@pytest.mark.parametrize(
    ("factor", "original", "low", "high"), [(8.0, 8192, 1.0, 4.0), (32.0, 8192, 1.0, 4.0), (4.0, 64, 0.5, 6.0)]
)
def test_llama3(factor, original, low, high):
    shape = rotary(
        128,
        rope_base=500_000.0,
        rope_scaling="llama3",
        rope_factor=factor,
        rope_original_context=original,
        rope_low=low,
        rope_high=high,
    )
    expected = llama3(128, 500_000.0, factor, original, low, high)
    assert_frequencies(shape, expected)
    before = plain(128, 500_000.0)
    kinds = {round(after / f * factor, 6) for after, f in zip(expected, before, strict=True)}
    assert {1.0, factor} < kinds, "some stretched in full, some left alone, some between"


def test_llama3_takes_four_turns_as_the_upper_end_unless_told():
    options = {"rope_scaling": "llama3", "rope_factor": 8.0, "rope_original_context": 8192, "rope_base": 500_000.0}
    assert_frequencies(rotary(128, **options), llama3(128, 500_000.0, 8.0, 8192, 1.0, 4.0))


@pytest.mark.parametrize(
    ("width", "factor", "original", "low", "high"), [(128, 16.0, 4096, 1.0, 0.0), (64, 4.0, 2048, 2.0, 24.0)]
)
def test_yarn(width, factor, original, low, high):
    shape = rotary(
        width,
        rope_scaling="yarn",
        rope_factor=factor,
        rope_original_context=original,
        rope_low=low,
        rope_high=high,
    )
    expected = yarn(width, 10_000.0, factor, original, low, high or 32.0)
    assert_frequencies(shape, expected)
    before = plain(width, 10_000.0)
    kinds = {round(after / f * factor, 6) for after, f in zip(expected, before, strict=True)}
    assert {1.0, factor} < kinds, "some stretched in full, some left alone, some between"


def test_yarn_scales_cosines_and_sines():
    """By 0.1 ln(factor) + 1, so that scores grow by its square; at position 0 that is the only effect."""
    shape = rotary(8, rope_scaling="yarn", rope_factor=16.0, rope_original_context=32)
    cos, sin = RotaryPositions(shape).rotation(torch.tensor([0, 5]))
    magnitude = 0.1 * math.log(16) + 1
    assert cos[0, 0].tolist() == pytest.approx([magnitude] * 4)
    assert (cos**2 + sin**2)[0, 1].tolist() == pytest.approx([magnitude**2] * 4)


@pytest.mark.parametrize("scaling", ["linear", "llama3"])
def test_the_others_scale_nothing_but_frequencies(scaling):
    original = 32 if scaling == "llama3" else 0
    shape = rotary(8, rope_scaling=scaling, rope_factor=16.0, rope_original_context=original)
    cos, _ = RotaryPositions(shape).rotation(torch.tensor([0]))
    assert cos.flatten().tolist() == [1.0] * 4


# --- in a model -------------------------------------------------------------------------------------------------------


def test_frequencies_are_not_rounded_with_the_weights():
    shape = ModelConfig(d_model=32, n_layer=1, n_head=2, d_ff=32, context=8, vocab_size=7, positions="rotary")
    model = build(RunConfig(model=shape, method=DenseConfig()))
    exact = model.positions.frequencies.clone()
    for converted in (model.bfloat16(), model.half(), model.float(), model.double()):
        assert converted.positions.frequencies.dtype == torch.float32
        assert torch.equal(converted.positions.frequencies, exact)
    assert model.norm.weight.dtype == torch.float64, "while the weights were"
    assert not torch.equal(exact, exact.bfloat16().float()), "and rounding would be seen"
    assert "positions.frequencies" not in model.state_dict(), "they follow from the config"


def test_learned_positions_are_rows_that_are_added():
    table = make_positions(ModelConfig(d_model=4, n_head=1, context=6))
    assert isinstance(table, LearnedPositions)
    embedded, positions = torch.randn(2, 2, 4), torch.tensor([[0, 5], [3, 3]])
    added = table.added_to(embedded, positions)
    assert torch.equal(added[1, 0], embedded[1, 0] + table.weight[3])
    assert torch.equal(added[0, 1], embedded[0, 1] + table.weight[5])
    assert table.rotation(positions) is None


def test_rotary_positions_add_nothing_and_have_no_parameters():
    positions, embedded = make_positions(rotary()), torch.randn(1, 2, 4)
    assert positions.added_to(embedded, torch.arange(2)) is embedded
    assert list(positions.parameters()) == []
