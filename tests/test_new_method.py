"""What it takes to add a method: one file, one config class, two entries. The contract suite then runs over it."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("new method")]

ROOT = Path(__file__).resolve().parents[1]

CONFIG = '''
@dataclass(frozen=True)
class ToyConfig(MethodConfig):
    """Every block but the first works on the tokens whose first number is above a threshold."""

    threshold: float = 0.0
    """Work above this."""


'''
METHOD = '''"""A toy: who works is written on the token itself."""

from torch import Tensor, nn

from tokendepth.config import ModelConfig
from tokendepth.method_configs import ToyConfig
from tokendepth.methods.base import Method, blocks_of, everyone
from tokendepth.context import Context, Rows
from tokendepth.model import Block, MethodOutput
from tokendepth.trace import Site


class Toy(Method):
    has_soft = False

    def __init__(self, model: ModelConfig, config: ToyConfig) -> None:
        super().__init__(model, config)
        self.threshold = config.threshold
        self.blocks = nn.ModuleList(Block(model, layer) for layer in range(model.n_layer))

    def forward(self, hidden: Tensor, ctx: Context) -> MethodOutput:
        stem, *later = self.blocks
        score = hidden[..., 0].clone()  # as it enters: no rounding can move it
        hidden, work = stem(hidden, ctx), [everyone(hidden)]
        for block, threshold in zip(later, ctx.thresholds([self.threshold] * len(later)), strict=True):
            active = ctx.real(score > threshold)
            hidden = block(hidden, ctx, Rows(active))
            work.append(active)
        return MethodOutput(hidden, self.traced(work, ctx), {})

    def sites(self, keys: int) -> tuple[Site, ...]:
        return tuple(block.site(f"block {n}", keys, routed=n > 0) for n, block in enumerate(blocks_of(self.blocks)))
'''
WHO_ASKS_FOR_ALL_METHODS = [
    "test_config.py", "test_recipes.py", "test_architecture.py",
    "report/test_palette.py::test_every_method_with_a_page_has_a_colour_of_its_own_and_so_has_a_new_one",
    "paper/test_depth.py::test_every_method_gets_the_same_eight_runs",
]  # fmt: skip


def insert(path: Path, *, before: str, text: str) -> None:
    source = path.read_text()
    assert source.count(before) == 1, (path, before)
    path.write_text(source.replace(before, text + before))


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """The repository with one method more."""
    root = tmp_path_factory.mktemp("tree")
    for name in ("tokendepth", "paper", "benchmarks", "tests", "docs", "results", "examples"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in (
        "README.md",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "LICENSE",
        "NOTICE",
        "Makefile",
        "pyproject.toml",
        "constraints.txt",
    ):
        shutil.copy(ROOT / name, root)
    for name in (".gitignore", ".gitattributes", ".ci"):
        source = ROOT / name
        shutil.copytree(source, root / name) if source.is_dir() else shutil.copy(source, root)
    package = root / "tokendepth"
    (package / "methods" / "toy.py").write_text(METHOD)
    insert(package / "method_configs.py", before="METHOD_CONFIGS: dict", text=CONFIG.lstrip())
    insert(package / "method_configs.py", before='    "itt": ITTConfig,\n', text='    "toy": ToyConfig,\n')
    insert(package / "methods" / "__init__.py", before='    "itt": ITT,\n', text='    "toy": Toy,\n')
    insert(
        package / "methods" / "__init__.py",
        before="from tokendepth.methods.tsa import TSA\n",
        text="from tokendepth.methods.toy import Toy\n",
    )
    return root


@pytest.fixture(scope="module")
def results(tree) -> dict[str, list[str]]:
    """By outcome: the tests of the new method, and those that cover all methods."""
    asked = [name.partition("::") for name in WHO_ASKS_FOR_ALL_METHODS]
    chosen = " or ".join(["toy", *(test or Path(file).name for file, _, test in asked)])
    files = ["test_contract.py", "infer/test_engine.py", *(file for file, _, _ in asked)]
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-k", chosen, "-m", "not slow"]
    done = subprocess.run([*command, *(f"tests/{file}" for file in files)], cwd=tree, capture_output=True, text=True)
    found: dict[str, list[str]] = {"PASSED": []}
    for name, outcome in re.findall(r"^tests/(\S.*) ([A-Z]{5,})\b", done.stdout, re.MULTILINE):
        found.setdefault(outcome, []).append(name)
    assert done.returncode == 0, done.stdout[-3000:]
    return found


def test_the_contract_suite_runs_over_it(results):
    own = [name for name in results["PASSED"] if "toy" in name]
    assert len(own) > 100, "on both kinds of block"
    for file in ("test_contract.py", "infer/test_engine.py"):
        assert any(name.startswith(file) for name in own)


def test_nothing_else_turns_red(results):
    for name in WHO_ASKS_FOR_ALL_METHODS:
        assert any(passed.startswith(name) for passed in results["PASSED"]), name
