"""The scripts in examples/, run in miniature as a user runs them."""

import importlib.util
import json
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file

import tokendepth as td
from tests.tiny import tiny, write_corpus
from tokendepth.config import TSAConfig
from tokendepth.training.loop import train

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_retrofit(tmp_path):
    line = ["examples/retrofit.py", "--out", str(tmp_path), "--corpus", write_corpus(tmp_path / "text"), "--steps", "4"]
    done = subprocess.run([sys.executable, *line], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [" ".join(words.split()[:3]) for words in done.stdout.splitlines()] == [
        "untouched loss " + done.stdout.split()[2],
        "at the budget",
        "at full budget",
    ]
    assert "of the block FLOPs" in done.stdout


def test_every_example_is_run():
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    assert [path.name for path in (ROOT / "examples").glob("*.py") if f'{path.name}"' not in tests] == []


# --- the plugin of vLLM, without vLLM ---------------------------------------------------------------------------------

PLUGIN = ROOT / "examples" / "vllm_plugin"
LLAMA = {"norm": "rms", "positions": "rotary", "ffn": "swiglu", "ffn_bias": False, "n_kv_head": 2, "n_layer": 3}


def loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def converted(folder: Path) -> tuple[td.Run, Path]:
    config = tiny(folder, TSAConfig(0.1, skip="ffn"), steps=2, context=32, **LLAMA)
    run = train(replace(config, data=replace(config.data, tokens="byte")), folder / "run", show=False)
    loaded(PLUGIN / "convert.py").convert(str(run.path), folder / "llama")
    return run, folder / "llama"


@pytest.mark.slow
def test_a_converted_run_is_a_llama_where_nobody_halts(tmp_path):
    transformers = pytest.importorskip("transformers")
    run, folder = converted(tmp_path)
    model = td.load(run, device="cpu")
    ids = torch.tensor([model.tokenizer.encode("9 green bottles")])
    everyone = torch.ones(2, *ids.shape, dtype=torch.bool)
    with torch.no_grad():
        expected = model.network(ids, execution="hard", decisions=everyone).logits
        found = transformers.LlamaForCausalLM.from_pretrained(folder)(ids).logits
    assert float((found - expected).abs().max()) <= 1e-5 * float(expected.abs().max())
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["RoutedLlamaForCausalLM"]
    assert (config["router_hidden"], config["router_threshold_logit"]) == (16, 0.0)

    states = torch.randn(50, 32)
    router = loaded(PLUGIN / "tokendepth_vllm" / "router.py").Router(32, 16, 0.0)
    weights, prefix = load_file(folder / "model.safetensors"), "model.layers.1.router."
    own = {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}
    router.load_state_dict(own)
    with torch.no_grad():
        assert torch.equal(router(states), model.network.method.routers()[0](states) <= 0)


@pytest.mark.slow
def test_a_run_that_is_no_llama_is_refused(tmp_path):
    run = train(tiny(tmp_path, steps=1), tmp_path / "run", show=False)
    with pytest.raises(td.UserError, match=r"has no Llama-style blocks with --method\.skip ffn; train one"):
        loaded(PLUGIN / "convert.py").convert(str(run.path), tmp_path / "llama")


def test_the_plugin_is_found_by_its_entry_point_and_compiles():
    project = tomllib.loads((PLUGIN / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    module, _, function = project["entry-points"]["vllm.general_plugins"]["tokendepth"].partition(":")
    assert callable(getattr(loaded(PLUGIN / module / "__init__.py"), function))
    sources = {path.name: path.read_text(encoding="utf-8") for path in (PLUGIN / module).glob("*.py")}
    for name, source in sources.items():
        compile(source, name, "exec")
    assert "class RoutedLlamaForCausalLM(" in sources["model.py"], "the name that convert.py writes"
    assert sum(len(source.splitlines()) for source in sources.values()) <= 80
