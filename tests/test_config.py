"""Configs: what is valid survives JSON, what is not is told in one line that names it."""

import json
import math
from dataclasses import FrozenInstanceError, fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokendepth.config import (
    CORPORA,
    FORMAT_VERSION,
    METHOD_CONFIGS,
    SYNTHETIC_CORPORA,
    ACTConfig,
    BudgetConfig,
    DataConfig,
    DenseConfig,
    EarlyExitConfig,
    ITTConfig,
    MoDConfig,
    ModelConfig,
    MoRConfig,
    RunConfig,
    SpanConfig,
    SwitchConfig,
    TrainConfig,
    TSAConfig,
    from_dict,
    method_name,
    options,
    override,
    to_dict,
)
from tokendepth.errors import UserError, one_line
from tokendepth.retrofit_config import RetrofitConfig

TSA = RunConfig(method=TSAConfig())

# --- valid configs ----------------------------------------------------------------------------------------------------


@st.composite
def data_configs(draw) -> DataConfig:
    paths = st.text(min_size=1, max_size=20).map("text:{}".format)
    corpus = draw(st.sampled_from(CORPORA) | paths)
    if corpus in SYNTHETIC_CORPORA:
        return DataConfig(corpus, source_length=draw(st.none() | st.integers(3, 10_000)))
    return DataConfig(corpus, draw(st.sampled_from(["char", "byte"])))


@st.composite
def model_configs(draw, context: int) -> ModelConfig:
    n_head = draw(st.integers(1, 64))
    sizes = st.integers(1, 1_000_000)
    return ModelConfig(
        d_model=n_head * draw(st.integers(1, 1000)),
        n_layer=draw(st.integers(1, 1000)),
        n_head=n_head,
        d_ff=draw(sizes),
        context=draw(st.integers(context, 1_000_000)),
        dropout=draw(st.floats(0, 1, exclude_max=True)),
        vocab_size=draw(st.integers(0, 10_000_000)),
    )


tsa_configs = st.builds(
    TSAConfig,
    depth_penalty=st.floats(0, 1000) | st.integers(0, 1000),
    threshold=st.floats(0, 1),
    skip=st.sampled_from(["block", "ffn"]),
)
method_configs = st.sampled_from([cls() for cls in METHOD_CONFIGS.values()]) | tsa_configs


@st.composite
def train_configs(draw) -> TrainConfig:
    accumulate = draw(st.integers(1, 64))
    counts = st.integers(1, 10**9)
    return TrainConfig(
        steps=draw(counts),
        batch_size=accumulate * draw(st.integers(1, 1000)),
        accumulate=accumulate,
        lr=draw(st.floats(0, 10)),
        weight_decay=draw(st.floats(0, 10)),
        clip=draw(st.floats(0, exclude_min=True, allow_infinity=False)),
        seed=draw(st.integers(0, 2**31 - 1)),
        eval_every=draw(counts),
        device=draw(st.sampled_from(["auto", "cpu", "cuda"])),
        dtype=draw(st.sampled_from(["auto", "float32", "bfloat16"])),
        compile=draw(st.sampled_from(["auto", "on", "off"])),
        tensorboard=draw(st.booleans()),
    )


@st.composite
def run_configs(draw) -> RunConfig:
    data = draw(data_configs())
    needed = 2 * (data.source_length or 20) + 2 if data.synthetic else 1
    model, method = draw(model_configs(needed)), draw(method_configs)
    if isinstance(method, MoRConfig):
        model = replace(model, n_layer=2 + method.recursions * draw(st.integers(1, 998 // method.recursions)))
    if isinstance(method, SpanConfig):
        model = replace(model, n_layer=max(2, model.n_layer))
    return RunConfig(data, model, method, draw(train_configs()), draw(st.text()))


@given(run_configs())
def test_a_valid_config_survives_json(config):
    text = json.dumps(to_dict(config), allow_nan=False)
    again = from_dict(json.loads(text))
    assert again == config
    assert type(again.method) is type(config.method)
    assert from_dict(to_dict(again)) == config


@given(run_configs())
def test_an_option_given_as_text_is_what_it_says(config):
    """Every option of a config can be set by its own value as text: that changes nothing."""
    tree = to_dict(config)
    names = {name: name.split(".") for name in options(config)}
    assert override(config, {name: str(tree[part][key]) for name, (part, key) in names.items()}) == config


def test_the_default_config_is_written_in_full():
    tree = to_dict(TSA)
    assert tree["version"] == FORMAT_VERSION == 2
    assert tree["method"] == {"name": "tsa", "depth_penalty": 0.001, "threshold": 0.5, "skip": "block"}
    for part in ("data", "model", "train"):
        assert set(tree[part]) == {field.name for field in fields(getattr(TSA, part))}
    assert from_dict({"version": 1, "method": {"name": "tsa"}}) == TSA, "what is left out has its default"


def test_a_config_cannot_be_changed():
    for part in (TSA, TSA.data, TSA.model, TSA.method, TSA.train):
        with pytest.raises(FrozenInstanceError):
            setattr(part, fields(part)[0].name, None)


def test_reading_leaves_the_tree_as_it_was():
    tree = to_dict(TSA)
    before = json.dumps(tree)
    from_dict(tree)
    assert json.dumps(tree) == before


def test_a_method_is_known_by_its_config():
    assert {method_name(cls()): cls for cls in METHOD_CONFIGS.values()} == METHOD_CONFIGS


def test_an_integer_may_stand_for_a_number():
    config = from_dict({"version": 1, "method": {"name": "tsa", "threshold": 1}})
    assert config.method == TSAConfig(threshold=1.0)


# --- invalid ones -----------------------------------------------------------------------------------------------------


def refused(function, *arguments, **options) -> str:
    """The message of the UserError, which is one line."""
    with pytest.raises(UserError) as caught:
        function(*arguments, **options)
    message = str(caught.value)
    assert message
    assert len(message.splitlines()) == 1, message
    return message


def read(part: str, **values) -> RunConfig:
    tree = to_dict(TSA)
    tree[part] = {**tree[part], **values}
    return from_dict(tree)


def test_an_unknown_key_is_refused_with_the_nearest():
    assert refused(read, "model", n_layers=4) == "model.n_layers: unknown key; did you mean 'n_layer'?"
    assert "did you mean 'depth_penalty'?" in refused(read, "method", depth_penality=0.1)
    message = refused(from_dict, {**to_dict(TSA), "trian": {}})
    assert "trian" in message
    assert "did you mean 'train'?" in message
    message = refused(read, "data", zzz=1)
    assert "data.zzz" in message
    assert "expected one of corpus, source_length, tokens" in message


def test_a_key_of_another_method_is_refused():
    message = refused(from_dict, {"version": 1, "method": {"name": "dense", "depth_penalty": 0.1}})
    assert "method.depth_penalty: unknown key" in message


def test_an_unknown_method_is_refused_with_the_nearest():
    message = refused(read, "method", name="tsaa")
    assert "'tsaa'" in message
    assert "did you mean 'tsa'?" in message


WRONG_TYPES = [
    ("data", "corpus", 5),
    ("data", "corpus", None),
    ("data", "source_length", "20"),
    ("data", "source_length", 20.0),
    ("data", "tokens", 1),
    ("model", "d_model", "256"),
    ("model", "d_model", 256.0),
    ("model", "d_model", True),
    ("model", "d_model", None),
    ("model", "dropout", "0.1"),
    ("model", "dropout", False),
    ("model", "dropout", [0.1]),
    ("method", "threshold", "0.5"),
    ("method", "threshold", None),
    ("method", "skip", "attention"),
    ("method", "skip", ["block"]),
    ("method", "skip", None),
    ("method", "name", 3),
    ("method", "name", None),
    ("method", "name", ["tsa"]),
    ("method", "name", {}),
    ("train", "steps", 1e3),
    ("train", "steps", True),
    ("train", "seed", False),
    ("train", "lr", "3e-4"),
    ("train", "tensorboard", 1),
    ("train", "tensorboard", "true"),
    ("train", "device", "tpu"),
    ("train", "seed", {}),
]


@pytest.mark.parametrize(("part", "key", "value"), WRONG_TYPES)
def test_a_value_of_the_wrong_type_is_refused(part, key, value):
    message = refused(read, part, **{key: value})
    assert f"{part}.{key}" in message
    assert repr(value) in message


OUT_OF_RANGE = [
    ("model", "d_model", 0),
    ("model", "d_model", 257),
    ("model", "n_layer", -1),
    ("model", "n_head", 0),
    ("model", "d_ff", 1_000_001),
    ("model", "context", 0),
    ("model", "context", 10**400),
    ("model", "vocab_size", -1),
    ("model", "dropout", 1.0),
    ("model", "dropout", -0.1),
    ("model", "dropout", math.nan),
    ("model", "dropout", math.inf),
    ("method", "depth_penalty", -0.001),
    ("method", "depth_penalty", 1000.5),
    ("method", "depth_penalty", math.nan),
    ("method", "depth_penalty", math.inf),
    ("method", "threshold", 1.1),
    ("method", "threshold", -0.1),
    ("method", "threshold", math.nan),
    ("train", "steps", 0),
    ("train", "batch_size", 0),
    ("train", "accumulate", 3),
    ("train", "lr", -1e-9),
    ("train", "lr", math.nan),
    ("train", "lr", -math.inf),
    ("train", "lr", 10**400),
    ("train", "weight_decay", math.inf),
    ("train", "warmup", -1),
    ("train", "warmup", 5000),
    ("train", "clip", 0.0),
    ("train", "clip", math.nan),
    ("train", "clip", math.inf),
    ("train", "seed", -1),
    ("train", "seed", 2**31),
    ("train", "eval_every", 0),
    ("train", "checkpoint_every", -5),
    ("train", "log_every", 0),
]


@pytest.mark.parametrize(("part", "key", "value"), OUT_OF_RANGE, ids=lambda value: str(value)[:20])
def test_a_value_out_of_range_is_refused(part, key, value):
    """In JSON and where the config is made in Python alike."""
    named = "train.batch_size" if key == "accumulate" else f"{part}.{key}"
    shown = "64" if key == "accumulate" else one_line(repr(value))
    for refuse in (lambda: read(part, **{key: value}), lambda: replace(getattr(TSA, part), **{key: value})):
        message = refused(refuse)
        assert named in message
        assert shown in message
        assert "expected" in message


REFUSED_KNOBS = [
    (MoDConfig, "capacity", 0.0),
    (MoDConfig, "capacity", 1.1),
    (MoDConfig, "capacity", math.nan),
    (MoDConfig, "every", 0),
    (MoDConfig, "decision_loss", 0.0),
    (MoDConfig, "decision_loss", math.inf),
    (EarlyExitConfig, "threshold", 0.0),
    (EarlyExitConfig, "threshold", 1.0),
    (EarlyExitConfig, "oracle_penalty", -0.1),
    (EarlyExitConfig, "oracle_smoothing", math.inf),
    (EarlyExitConfig, "halting_loss", 0.0),
    (SwitchConfig, "experts", 1),
    (SwitchConfig, "capacity_factor", 0.0),
    (SwitchConfig, "every", 0),
    (SwitchConfig, "balance_loss", -1.0),
    (SwitchConfig, "z_loss", math.nan),
    (SwitchConfig, "jitter", 1.0),
    (ACTConfig, "max_steps", 0),
    (ACTConfig, "max_steps", 1001),
    (ACTConfig, "epsilon", 0.0),
    (ACTConfig, "epsilon", 1.0),
    (ACTConfig, "ponder_cost", -0.1),
    (MoRConfig, "recursions", 1),
    (MoRConfig, "alpha", 0.0),
    (MoRConfig, "decision_loss", 0.0),
    (MoRConfig, "balance_loss", -0.1),
    (MoRConfig, "z_loss", math.inf),
    (ITTConfig, "steps", 1),
    (ITTConfig, "steps", 1001),
    (ITTConfig, "capacity", 0.0),
    (ITTConfig, "every", 0),
    (ITTConfig, "decision_loss", 0.0),
    (SpanConfig, "begin", -1),
    (SpanConfig, "length", 0),
    (SpanConfig, "width", 0),
    (SpanConfig, "budget", 0.0),
    (SpanConfig, "budget", 1.1),
    (SpanConfig, "ratio_loss", -0.1),
    (SpanConfig, "anneal", 1.1),
    (SpanConfig, "gain", "kl"),  # the decider does not use a gain
    (SpanConfig, "draft", 1.0),  # with carried updates
    (BudgetConfig, "anneal", 0.5),  # with the dial
    (BudgetConfig, "shares", "0.5,0.4"),
]


@pytest.mark.parametrize(("cls", "key", "value"), REFUSED_KNOBS, ids=str)
def test_a_knob_out_of_range_is_refused(cls, key, value):
    message = refused(cls, **{key: value})
    assert message.startswith(f"method.{key} is {value!r}; expected ")
    assert message.endswith(f"; set it with --method.{key.replace('_', '-')}")


@pytest.mark.parametrize("cls", [DataConfig, ModelConfig, TrainConfig, *METHOD_CONFIGS.values()])
def test_a_config_made_in_python_is_checked_as_json_is(cls):
    for field in fields(cls):
        message = refused(cls, **{field.name: object})
        assert field.name in message
        assert repr(object) in message


def test_a_corpus_that_is_not_there():
    message = refused(DataConfig, "shakspeare")
    assert "'shakspeare'" in message
    assert "did you mean 'shakespeare'?" in message
    message = refused(DataConfig, "text:")
    assert "'text:'" in message
    assert "text:PATH" in message
    assert "''" in refused(DataConfig, "")


def test_only_copy_and_sort_have_a_source_length():
    assert "data.source_length is 10" in refused(DataConfig, "stdlib", source_length=10)
    assert DataConfig("sort", source_length=10).source_length == 10
    assert "data.source_length is 2" in refused(DataConfig, "copy", source_length=2)
    assert "data.tokens is 'byte'" in refused(DataConfig, "copy", tokens="byte")


@pytest.mark.parametrize("n_layer", [1, 2, 4, 6])
def test_recursions_must_fit_between_the_first_and_the_last_layer(n_layer):
    method = MoRConfig(recursions=3)
    message = refused(RunConfig, model=ModelConfig(n_layer=n_layer), method=method)
    assert message.startswith(
        f"model.n_layer is {n_layer}; expected 2 and a multiple of method.recursions (3), such as 8"
    )
    assert message.endswith("set it with --model.n-layer")
    for fitting in (5, 8):
        assert RunConfig(model=ModelConfig(n_layer=fitting), method=method).method == method


def test_a_span_must_fit_the_layers():
    method = SpanConfig(begin=2, length=8)
    message = refused(RunConfig, model=ModelConfig(n_layer=9), method=method)
    assert message.startswith("model.n_layer is 9; expected at least 10, since the span has blocks 2 to 9")
    assert message.endswith("set it with --model.n-layer")
    assert RunConfig(model=ModelConfig(n_layer=10), method=method).method == method


def test_a_span_whose_knobs_contradict_each_other_is_refused():
    for decide in ("gain", "entropy", "rule", "dice"):
        message = refused(SpanConfig, decide=decide, carry="smooth")
        assert message.startswith(f"method.carry is 'smooth'; expected none or last, since decide is {decide}")
    message = refused(SpanConfig, decide="boundary", budget=1.0)
    assert message.startswith("method.ratio_loss is 0.03; expected 0, since the budget is 1")
    assert SpanConfig(decide="boundary", budget=1.0, ratio_loss=0.0).budget == 1

    message = refused(SpanConfig, decide="dice", learn="straight")
    assert message.startswith("method.learn is 'straight'; expected weight, since decide is dice")
    message = refused(SpanConfig, carry="smooth", learn="straight")
    assert message.startswith("method.learn is 'straight'; expected weight, since smoothed updates are weighted")

    message = refused(SpanConfig, width=64, keys="all")
    assert message.startswith("method.keys is 'all'; expected active, since the span has its own width")
    message = refused(SpanConfig, width=64, decide="dice", carry="none", bypass=True, budget=0.0)
    assert message.startswith("method.width is 64; expected None, since no token takes the span")
    message = refused(RunConfig, method=SpanConfig(width=64), retrofit=RetrofitConfig("runs/base", "0" * 64))
    assert message.startswith("method.width is 64; expected None, since a retrofit starts from the base's blocks")


def test_shares_of_blocks_are_numbers_one_for_each_routed_block():
    method = BudgetConfig(dial=False, shares="0.9,1,0.25")
    assert method.profile == [0.9, 1.0, 0.25]
    assert RunConfig(model=ModelConfig(n_layer=4), method=method).method == method
    message = refused(RunConfig, model=ModelConfig(n_layer=5), method=method)
    assert message.startswith("method.shares is '0.9,1,0.25'; expected 4 numbers, one for each block but the first")
    for shares in ("0", "0.5,", "0.5;0.5", "1.5", "a", "-1", "0.5,0"):
        message = refused(BudgetConfig, dial=False, shares=shares)
        assert message.startswith(f"method.shares is {shares!r}; expected numbers above 0 and up to 1")
    assert refused(BudgetConfig, routing="random", learn="update").startswith(
        "method.learn is 'update'; expected weight"
    )


def test_a_span_of_no_given_length_is_in_the_middle():
    spans = {n_layer: list(SpanConfig(begin=2).ranges(n_layer)[0]) for n_layer in (3, 5, 6, 12)}
    assert spans == {3: [2], 5: [2], 6: [2, 3], 12: [2, 3, 4, 5, 6, 7, 8, 9]}


@pytest.mark.parametrize(("length", "needed"), [(None, 42), (10, 22)])
def test_an_example_must_fit_the_context(length, needed):
    data = DataConfig("copy", source_length=length)
    assert RunConfig(data, ModelConfig(context=needed)).model.context == needed
    message = refused(RunConfig, data, ModelConfig(context=needed - 1))
    assert f"model.context is {needed - 1}" in message
    assert f"at least {needed}" in message


@pytest.mark.parametrize("version", [FORMAT_VERSION + 1, 10**9])
def test_a_newer_version_is_refused_with_the_remedy(version):
    message = refused(from_dict, {**to_dict(TSA), "version": version})
    assert str(version) in message
    assert "upgrade tokendepth" in message


@pytest.mark.parametrize("version", [None, 0, -1, "1", 1.0, True, [1], math.nan])
def test_a_version_that_is_none_is_refused(version):
    assert repr(version) in refused(from_dict, {**to_dict(TSA), "version": version})


@pytest.mark.parametrize("tree", [None, [], "config", 3, math.nan])
def test_what_is_no_object_is_refused(tree):
    assert "JSON object" in refused(from_dict, tree)
    for part in ("data", "model", "method", "train"):
        message = refused(from_dict, {**to_dict(TSA), part: tree})
        assert part in message
        assert repr(tree) in message


def test_a_missing_method_is_refused():
    tree = to_dict(TSA)
    del tree["method"]
    assert "method.name" in refused(from_dict, tree)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=4,
)


@settings(max_examples=300)
@given(
    part=st.sampled_from(["data", "model", "method", "train"]),
    key=st.text(max_size=8) | st.sampled_from(["name", "corpus", "d_model", "threshold", "skip", "steps", "lr"]),
    value=json_values,
)
def test_whatever_json_holds_it_is_read_or_refused_in_one_line(part, key, value):
    message = ""
    try:
        config = read(part, **{key: value})
    except UserError as error:
        message = str(error)
    else:
        assert from_dict(to_dict(config)) == config
    assert len(message.splitlines()) <= 1


@pytest.mark.parametrize("key", ["a\nb", "a\r\nb", "a\u2028b"])
def test_a_line_end_in_a_key_leaves_the_message_one_line(key):
    assert "unknown key" in refused(read, "model", **{key: 1})
    assert "unknown option" in refused(override, TSA, {f"model.{key}": "1"})


# --- overrides --------------------------------------------------------------------------------------------------------


def test_override_sets_what_it_names_and_nothing_else():
    changed = override(TSA, {"train.steps": "100", "method.threshold": "0.25", "data.corpus": "text:a.txt"})
    assert changed.train == replace(TSA.train, steps=100)
    assert changed.method == TSAConfig(threshold=0.25)
    assert changed.data == DataConfig("text:a.txt")
    assert changed.model == TSA.model
    assert override(TSA, {"train.tensorboard": "true"}).train.tensorboard is True
    assert override(TSA, {"train.lr": "1e-3"}).train.lr == 1e-3
    assert override(TSA, {}) == TSA


def test_values_that_depend_on_each_other_are_checked_together():
    assert override(TSA, {"model.d_model": "6", "model.n_head": "3"}).model.d_model == 6
    assert "model.d_model is 6" in refused(override, TSA, {"model.d_model": "6"})
    copy = override(RunConfig(), {"data.corpus": "copy", "data.source_length": "5", "model.context": "12"})
    assert override(copy, {"data.source_length": "None", "model.context": "42"}).data.source_length is None


def test_an_option_of_another_method_is_refused_by_its_owner():
    dense = RunConfig(method=DenseConfig())
    message = refused(override, dense, {"method.depth_penalty": "0.1"})
    assert "--method.depth-penalty" in message
    assert "an option of method tsa" in message
    assert "this run's method is dense" in message
    assert "method dense has no options" in refused(override, dense, {"method.zzz": "1"})


def test_an_unknown_option_is_refused_with_the_nearest():
    message = refused(override, TSA, {"train.step": "5"})
    assert "--train.step:" in message
    assert "did you mean '--train.steps'?" in message
    assert "did you mean '--method.depth-penalty'?" in refused(override, TSA, {"method.depth_penality": "5"})
    for name in ("train", "recipe", "version", "", ".", "train.steps.more", "--train.steps"):
        assert name.replace("_", "-") in refused(override, TSA, {name: "5"})


BAD_TEXT = [
    ("train.steps", "many"),
    ("train.steps", "1.5"),
    ("train.steps", ""),
    ("train.steps", "-1"),
    ("train.lr", "nan"),
    ("train.lr", "inf"),
    ("train.lr", "fast"),
    ("train.tensorboard", "yes"),
    ("train.device", "gpu"),
    ("method.skip", "all"),
    ("method.threshold", "1e400"),
    ("data.source_length", "ten"),
    ("data.corpus", "nothing"),
    ("data.corpus", "text:"),
]


@pytest.mark.parametrize(("name", "text"), BAD_TEXT)
def test_text_that_is_no_such_value_is_refused(name, text):
    message = refused(override, TSA, {name: text})
    assert name in message
    shown = {"nan": "nan", "inf": "inf", "1e400": "inf", "-1": "-1"}.get(text, repr(text))
    assert shown in message
