"""auto: chooses the faster execution from a measured profile; profiles are stored, and damaged ones ignored."""

import pytest
import torch

from tokendepth.config import DenseConfig, ITTConfig, ModelConfig, RunConfig, TSAConfig
from tokendepth.infer import auto, profiles
from tokendepth.methods import build
from tokendepth.runs.files import write_sealed

MODEL = ModelConfig(d_model=16, n_layer=2, n_head=2, d_ff=16, context=8, dropout=0.0, vocab_size=7)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TOKENDEPTH_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def model():
    return build(RunConfig(model=MODEL, method=TSAConfig())).eval()


def measured(monkeypatch, hard: float, sparse: list[float]) -> list[int]:
    calls = []

    def fake(model, batch, time_steps):
        calls.append(batch)
        return {"hard_ms": hard, "sparse_ms": sparse}

    monkeypatch.setattr(auto, "_measured", fake)
    return calls


def test_the_faster_one_is_chosen_at_the_fraction_that_was_asked(monkeypatch, model):
    measured(monkeypatch, 10.0, [4.0, 7.0, 10.0, 13.0])  # at 0.1, 0.4, 0.7, 1.0
    assert [auto.choose(model, 2, 8, f).execution for f in (0.0, 0.1, 0.55, 0.69)] == ["sparse"] * 4
    assert [auto.choose(model, 2, 8, f).execution for f in (0.7, 0.85, 1.0)] == ["hard"] * 3
    assert "8.50 ms sparse and 10.00 ms dense at active fraction 0.55" in auto.choose(model, 2, 8, 0.55).reason


def test_a_profile_is_measured_once_for_each_shape(monkeypatch, model):
    calls = measured(monkeypatch, 10.0, [4.0, 7.0, 10.0, 13.0])
    for batch in (2, 2, 3, 2):
        auto.choose(model, batch, 8, 0.5)
    assert calls == [2, 3]


@pytest.mark.parametrize("text", ["{", "[]", '{"x": 3}', '{"x": {"hard_ms": 1.0, "sparse_ms": [1.0]}}'])
def test_a_damaged_profile_is_measured_anew(monkeypatch, model, own_cache, text):
    calls = measured(monkeypatch, 10.0, [4.0, 7.0, 10.0, 13.0])
    (own_cache / "profile.json").write_text(text)
    auto.choose(model, 2, 8, 0.5)
    auto.choose(model, 2, 8, 0.5)
    assert calls == [2]


@pytest.mark.parametrize(
    "junk",
    [
        None,
        [],
        {"x": 1},
        {"x": {}},
        {"x": {"hard_ms": "1", "sparse_ms": [1] * 4}},
        {"x": {"hard_ms": 1, "sparse_ms": [1]}},
    ],
)
def test_a_sealed_profile_of_another_shape_is_measured_anew(own_cache, junk):
    own_cache.mkdir(exist_ok=True)
    write_sealed(own_cache / "profile.json", {"version": profiles.VERSION, "profiles": junk})
    assert profiles._kept(own_cache / "profile.json", auto.PROFILE) == {}
    write_sealed(own_cache / "profile.json", {"version": profiles.VERSION})
    assert profiles._kept(own_cache / "profile.json", auto.PROFILE) == {}


def test_a_real_profile_has_a_time_for_every_fraction(model):
    profile = auto._measured(model, 2, 8)
    assert profile["hard_ms"] > 0
    assert len(profile["sparse_ms"]) == len(auto.FRACTIONS)
    assert all(time > 0 for time in profile["sparse_ms"])


def test_a_model_that_decides_nothing_needs_no_profile(own_cache):
    choice = auto.choose(build(RunConfig(model=MODEL, method=DenseConfig())).eval(), 2, 8, 1.0)
    assert choice.execution == "hard"
    assert not (own_cache / "profile.json").exists()


def test_either_choice_gives_the_same_result(model):
    ids = torch.randint(7, (2, 8), generator=torch.Generator().manual_seed(0))
    decisions = torch.rand(1, 2, 8, generator=torch.Generator().manual_seed(1)) < 0.5
    with torch.no_grad():
        sparse, hard = (model(ids, execution=e, decisions=decisions).logits for e in ("sparse", "hard"))
    torch.testing.assert_close(sparse, hard, rtol=1e-5, atol=1e-6)


def test_a_compiled_model_has_a_profile_of_its_own(monkeypatch, model):
    calls = measured(monkeypatch, 10.0, [4.0, 7.0, 10.0, 13.0])
    for form in (model, torch.compile(model), model):
        auto.choose(form, 2, 8, 0.5)
    assert len(calls) == 2


def test_models_that_differ_in_a_knob_have_profiles_of_their_own():
    """A method with other options has other costs."""
    shapes = [profiles._shape(build(RunConfig(model=MODEL, method=ITTConfig(steps=steps)))) for steps in (2, 2, 8)]
    assert shapes[0] == shapes[1] != shapes[2]
