"""The rules of the tree, checked in the source: imports, confined dependencies, and documentation.

Each rule is a function from text to a list of problems; besides the test that runs it on the repository,
another gives it an offender, so that no rule can pass by checking nothing.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tokendepth.config import METHOD_CONFIGS
from tokendepth.methods import METHODS

ROOT = Path(__file__).resolve().parents[1]
LONGEST_FILE = 400

# A unit is a file or folder directly in tokendepth/. It may import the units of every later layer.
LAYERS: tuple[set[str], ...] = (
    {"__main__"},
    {"cli"},
    {"api"},
    {"explore"},
    {"recipes", "report", "importing", "hf", "serve", "analysis", "bench"},
    {"infer", "measure", "training"},
    {"methods", "data", "model"},
    {"layers", "cache", "context"},
    {"ops"},
    {
        "config",
        "config_base",
        "method_configs",
        "span_config",
        "data_config",
        "retrofit_config",
        "checks",
        "runs",
        "trace",
        "progress",
        "streams",
        "errors",
    },
)
BESIDE = {"paper", "benchmarks", "tests"}  # not in the wheel: they import the package, never the other way round
LAYER_OF = {unit: number for number, units in enumerate(LAYERS) for unit in units}
SATELLITES = LAYERS[4]  # these never import each other; the units of every other layer may
ONLY = {"recipes": {"config", "errors"}, "report": {"config", "runs", "trace", "errors"}}

TORCH_FREE = LAYERS[-1] | {"recipes", "report"}
WITH_TORCH = {"runs/machine.py"}
CONFINED = {  # third-party package -> the only files in tokendepth/ that may import it
    "triton": r"ops/\w+/kernel\.py",
    "transformers": r"(hf|importing)/.+",
    "matplotlib": r"report/.+",
    "jinja2": r"(report|serve)/.+",
    "fastapi": r"(serve|explore)/.+",
    "starlette": r"(serve|explore)/.+",
    "uvicorn": r"(serve|explore)/.+",
    "tyro": r"cli/.+",
    "peft": r"hf/.+",
    "accelerate": r"hf/.+",
    "tokenizers": r"data/bpe\.py|hf/.+",
    "ray": r"training/ray_driver\.py",
}
PICKLES = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
TORCH_PICKLES = {  # functions, and modules whose functions are all suspect
    "torch.load",
    "torch.save",
    "torch.serialization.load",
    "torch.serialization.save",
    "torch.jit.load",
    "torch.jit.save",
    "torch.hub",
    "torch.package",
    "torch.distributed.checkpoint",
}


# --- reading ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> list[str]:
    """What git tracks or would track, in a checkout and in an unpacked archive alike."""
    where = []
    if not (ROOT / ".git").exists():
        scratch = tmp_path_factory.mktemp("git")
        subprocess.run(["git", "init", "--quiet", scratch], check=True)
        where = [f"--git-dir={scratch / '.git'}", f"--work-tree={ROOT}"]
    command = ["git", *where, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    found = sorted({name for name in listed if name and (ROOT / name).is_file()})
    assert "tokendepth/config.py" in found, "git listed nothing of the package"
    return found


@pytest.fixture(scope="module")
def package(files) -> dict[str, str]:
    """The text of every file in tokendepth/, by its path inside it."""
    inside = [name for name in files if name.startswith("tokendepth/")]
    return {name.removeprefix("tokendepth/"): read(name) for name in inside}


@pytest.fixture(scope="module")
def sources(package) -> dict[str, str]:
    return {path: text for path, text in package.items() if path.endswith(".py")}


def read(name: str) -> str:
    return (ROOT / name).read_bytes().decode(errors="replace")


def imports(path: str, source: str, *, module_level: bool = False) -> Iterator[str]:
    """Dotted names imported by tokendepth/`path`. `module_level` leaves out functions and `if TYPE_CHECKING`."""
    folder = ["tokendepth", *path.split("/")[:-1]]

    def visit(node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = folder[: len(folder) - node.level + 1] if node.level else []
            yield from (".".join([*base, *filter(None, [node.module]), alias.name]) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            yield from (arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant))
        children = ast.iter_child_nodes(node)
        if module_level and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            return
        if module_level and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            children = iter(node.orelse)
        for child in children:
            yield from visit(child)

    return visit(ast.parse(source))


def unit_of(path: str) -> str:
    return path.split("/")[0].removesuffix(".py")


# --- the rules --------------------------------------------------------------------------------------------------------


def direction_problems(path: str, source: str) -> list[str]:
    unit = unit_of(path)
    if unit == "__init__":  # lazy: only a type checker sees what it imports
        names = imports(path, source, module_level=True)
        return [f"{path} imports {name}" for name in names if name.startswith("tokendepth")]
    if unit not in LAYER_OF:
        return [f"{path} is in no layer: add {unit} to LAYERS here and to the design"]
    problems = []
    for name in imports(path, source):
        top, _, rest = name.partition(".")
        target = rest.split(".")[0]
        if top in BESIDE:
            problems.append(f"{path} imports {name}, which an installed package does not have")
        if top != "tokendepth" or target in ("", unit, "__version__"):
            continue
        if unit in ONLY:
            allowed = target in ONLY[unit]
        else:
            distance = LAYER_OF.get(target, -1) - LAYER_OF[unit]
            allowed = distance > 0 or (distance == 0 and unit not in SATELLITES)
        if not allowed:
            problems.append(f"{path} imports {name}, but {unit} may not import {target}")
    return problems


def torch_problems(path: str, source: str) -> list[str]:
    if unit_of(path) not in TORCH_FREE or path in WITH_TORCH:
        return []
    names = imports(path, source, module_level=True)
    return [f"{path} imports {name} at module level" for name in names if "torch" in name.split(".")]


def without_torch(modules: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Import `modules` without torch."""
    code = "import importlib, sys; sys.modules['torch'] = None; [importlib.import_module(m) for m in sys.argv[1:]]"
    return subprocess.run([sys.executable, "-c", code, *modules], cwd=folder, capture_output=True, text=True)


def confinement_problems(path: str, source: str) -> list[str]:
    tops = {name.split(".")[0] for name in imports(path, source)}
    stray = [top for top in sorted(tops & set(CONFINED)) if not re.fullmatch(CONFINED[top], path)]
    return [f"{path} imports {top}, which belongs in {CONFINED[top]}" for top in stray]


METHOD_CLASSES = {cls.__name__ for cls in [*METHODS.values(), *METHOD_CONFIGS.values()]}


def method_problems(path: str, source: str) -> list[str]:
    """A consumer that asks which method it has: what it needs to know, a method says about itself."""
    if unit_of(path) in ("methods", "method_configs"):
        return []
    problems = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
            asked = [ast.unparse(name) for name in ast.walk(node.args[1]) if isinstance(name, ast.Name)]
            problems += [f"{path}:{node.lineno} asks for {name}" for name in asked if name in METHOD_CLASSES]
    return problems


def hf_problems(path: str, source: str) -> list[str]:
    """transformers is needed only by those who use it: hf/ is imported only inside commands and functions."""
    if unit_of(path) == "hf":
        return []
    names = imports(path, source, module_level=True)
    return [f"{path} imports {name} at module level" for name in names if name.split(".")[:2] == ["tokendepth", "hf"]]


def size_problems(path: str, text: str) -> list[str]:
    lines = len(text.splitlines())
    return [f"{path} has {lines} lines; the cap is {LONGEST_FILE}"] if lines > LONGEST_FILE else []


def pickle_problems(path: str, source: str) -> list[str]:
    tree = ast.parse(source)
    names = list(imports(path, source))
    torch_pickle = re.compile(rf"({'|'.join(map(re.escape, TORCH_PICKLES))})(\..+)?")
    problems = [f"{path} imports {n}" for n in names if n.split(".")[0] in PICKLES or torch_pickle.fullmatch(n)]
    nodes = list(ast.walk(tree))
    aliases = {a.asname: a.name for node in nodes if isinstance(node, ast.Import) for a in node.names if a.asname}
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            aliases |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    for node in nodes:
        if isinstance(node, ast.Attribute):
            head, _, rest = ast.unparse(node).partition(".")
            if f"{aliases.get(head, head)}.{rest}" in TORCH_PICKLES:
                problems.append(f"{path}:{node.lineno} uses {ast.unparse(node)}")
        elif isinstance(node, ast.keyword):
            safe = {"weights_only": True, "allow_pickle": False}.get(node.arg or "")
            if safe is not None and not (isinstance(node.value, ast.Constant) and node.value.value is safe):
                problems.append(f"{path}:{node.value.lineno} passes {ast.unparse(node)}")
    return problems


def private_path_problems(name: str, text: str) -> list[str]:
    """An absolute path that exists on one machine only. A slash after a word, `..` or a variable is not its start."""
    found = re.finditer(r"(?<![\w.~})-])/(?:home|root|work)/", text)
    return [f"{name}:{text.count(chr(10), 0, match.start()) + 1} names {match[0]}" for match in found]


def tree_problems(readme: str, files: list[str]) -> list[str]:
    """Compare the fenced block under the heading "The tree" with `files`.

    A line is `name  comment`, two spaces of indentation a level. A folder ends in a slash; with nothing below it, it
    stands for all its files, else for those that are listed.
    """
    block = re.search(r"^#+ The tree[ \t]*\n(?:(?!#|```).*\n)*?```.*\n((?:.*\n)*?)```", readme, re.MULTILINE)
    if not block:
        return ['CONTRIBUTING.md has no fenced block under a heading "The tree"']
    lines = [line for line in block[1].splitlines() if line.strip()]
    depths = [(len(line) - len(line.lstrip(" "))) / 2 for line in lines]
    problems, parents, seen, covered = [], [], set(), set()
    for line, depth, next_depth in zip(lines, depths, [*depths[1:], 0], strict=True):
        name, _, comment = line.strip().partition("  ")
        if depth > len(parents) or depth % 1:
            problems.append(f"{line!r} is indented by {2 * depth:g} spaces, not by two for each folder above it")
            continue
        parents = parents[: int(depth)]
        path = "".join(parents) + name
        if path in seen:
            problems.append(f"{path} is listed twice")
        seen.add(path)
        expanded = path.endswith("/") and next_depth > depth
        if path.endswith("/"):
            parents.append(name)
        if not (expanded or comment.strip()):
            problems.append(f"{path} has no comment (two spaces stand before one)")
        if path == "tokendepth/" and not expanded:
            problems.append("tokendepth/ is not expanded: name every file and folder in it")
        matches = {file for file in files if file == path or (path.endswith("/") and file.startswith(path))}
        if not matches:
            problems.append(f"{path} is listed but not there")
        if not expanded:
            covered |= matches
    return problems + [f"{file} is not listed" for file in files if file not in covered]


# --- over the repository ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rule", [direction_problems, torch_problems, confinement_problems, hf_problems, pickle_problems, method_problems]
)
def test_source_keeps_the_rule(rule, sources):
    problems = [problem for path, source in sources.items() for problem in rule(path, source)]
    assert not problems, "\n".join(problems)


def test_torch_free_modules_import_without_torch(sources):
    paths = [path for path in sources if unit_of(path) in TORCH_FREE and path not in WITH_TORCH]
    modules = ["tokendepth." + path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in paths]
    assert {"tokendepth.config", "tokendepth.runs.run", "tokendepth.trace"} <= set(modules)
    result = without_torch(modules, ROOT)
    assert result.returncode == 0, result.stderr


def test_no_file_is_too_long(package):
    problems = [problem for path, text in package.items() for problem in size_problems(path, text)]
    assert not problems, "\n".join(problems)


def test_no_file_names_a_private_path(files):
    problems = [problem for name in files for problem in private_path_problems(name, read(name))]
    assert not problems, "\n".join(problems)


def test_the_documented_tree_equals_the_tracked_files(files):
    assert "CONTRIBUTING.md" in files, "CONTRIBUTING.md is missing"
    problems = tree_problems(read("CONTRIBUTING.md"), files)
    assert not problems, "\n".join(problems)


# --- the rules find an offender ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "path", "source"),
    [
        (direction_problems, "trace.py", "from tokendepth.ops import rows"),
        (direction_problems, "ops/rows/eager.py", "def f():\n    from tokendepth import model"),
        (direction_problems, "ops/rows/eager.py", "from ...model import Block"),
        (direction_problems, "report/page.py", "import tokendepth.bench.run"),
        (direction_problems, "report/page.py", "from tokendepth import training"),
        (direction_problems, "recipes/synthetic.py", "from tokendepth.runs.run import Run"),
        (direction_problems, "hf/export.py", "import importlib\nimportlib.import_module('tokendepth.serve')"),
        (direction_problems, "__init__.py", "from tokendepth.config import RunConfig"),
        (direction_problems, "bench/training.py", "from paper import grid"),
        (direction_problems, "training/loop.py", "import benchmarks.faults.worker"),
        (direction_problems, "utils.py", ""),
        (torch_problems, "runs/run.py", "import torch"),
        (torch_problems, "report/page.py", "try:\n    from safetensors.torch import load\nexcept ImportError: pass"),
        (confinement_problems, "ops/rows/eager.py", "import triton.language as tl"),
        (confinement_problems, "report/__init__.py", "from transformers import AutoModel"),
        (confinement_problems, "training/step.py", "def f():\n    from peft import LoraConfig"),
        (confinement_problems, "train.py", "def plot():\n    import matplotlib.pyplot"),
        (confinement_problems, "cli/main.py", "from jinja2 import Template"),
        (confinement_problems, "cli/main.py", "import fastapi"),
        (confinement_problems, "config.py", "import tyro"),
        (confinement_problems, "data/tokenizer.py", "import tokenizers"),
        (confinement_problems, "train/sweep.py", "def f():\n    import ray"),
        (hf_problems, "api.py", "from tokendepth.hf.export import export"),
        (hf_problems, "cli/main.py", "import tokendepth.hf"),
        (method_problems, "measure/evaluate.py", "if isinstance(model.method, EarlyExit): pass"),
        (method_problems, "report/page.py", "isinstance(config.method, (BudgetConfig,))"),
        (size_problems, "model.py", "x\n" * (LONGEST_FILE + 1)),
        (pickle_problems, "runs.py", "import pickle"),
        (pickle_problems, "runs.py", "torch.load(path)"),
        (pickle_problems, "runs.py", "import torch as t\nt.save(x, path)"),
        (pickle_problems, "runs.py", "from torch import load"),
        (pickle_problems, "runs.py", "read(path, weights_only=False)"),
        (pickle_problems, "runs.py", "torch.hub.load('owner/name', 'model')"),
        (pickle_problems, "runs.py", "torch.hub.load_state_dict_from_url(address)"),
        (pickle_problems, "runs.py", "from torch.hub import load"),
        (pickle_problems, "runs.py", "torch.jit.load(path)"),
        (pickle_problems, "runs.py", "from torch import jit\njit.load(path)"),
        (pickle_problems, "runs.py", "torch.distributed.checkpoint.load(state, checkpoint_id=path)"),
        (pickle_problems, "runs.py", "import torch.distributed.checkpoint as dcp\ndcp.load(state)"),
        (pickle_problems, "runs.py", "from torch.distributed import checkpoint\ncheckpoint.load(state)"),
        (private_path_problems, "README.md", "see /" + "home/me/x"),
        (private_path_problems, "README.md", "see `/" + "work/x`"),
        (private_path_problems, "README.md", "file:///" + "root/x"),
    ],
)
def test_rule_finds_the_offender(rule, path, source):
    assert len(rule(path, source)) == 1


@pytest.mark.parametrize(
    ("rule", "path", "source"),
    [
        (direction_problems, "cli/main.py", "from tokendepth import report, training, __version__"),
        (direction_problems, "methods/tsa.py", "from tokendepth.model import Block\nfrom . import base"),
        (torch_problems, "trace.py", "if TYPE_CHECKING:\n    import torch\ndef f():\n    import torch"),
        (confinement_problems, "ops/rows/kernel.py", "import triton"),
        (hf_problems, "api.py", "def export():\n    from tokendepth.hf import export"),
        (hf_problems, "hf/export.py", "from tokendepth.hf import cache"),
        (method_problems, "methods/switch.py", "isinstance(block, SwitchConfig)"),
        (method_problems, "measure/evaluate.py", "isinstance(value, Tensor)"),
        (size_problems, "model.py", "x\n" * LONGEST_FILE),
        (pickle_problems, "runs.py", '"""No pickle, no torch.load(."""\nread(path, weights_only=True)'),
        (pickle_problems, "step.py", "import torch\ntorch.jit.script(f)\ntorch.distributed.barrier()"),
        (private_path_problems, "README.md", "docs/home/x ../home/x example.org/home/ $(TOP)/home/"),
    ],
)
def test_rule_lets_the_innocent_pass(rule, path, source):
    assert rule(path, source) == []


def test_import_without_torch_finds_the_offender(tmp_path):
    (tmp_path / "offender.py").write_text("import torch")
    result = without_torch(["offender"], tmp_path)
    assert result.returncode != 0
    assert "torch" in result.stderr


TREE = """# x

## The tree

```
README.md  this
tests/  all of them
tokendepth/
  config.py  why
  ops/  numerics
```
"""
TREE_FILES = ["README.md", "tests/test_x.py", "tokendepth/config.py", "tokendepth/ops/a/eager.py"]


def test_tree_that_is_right_passes():
    assert tree_problems(TREE, TREE_FILES) == []


@pytest.mark.parametrize(
    ("right", "wrong", "problem"),
    [
        ("## The tree", "## A tree", "no fenced block"),
        ("README.md  this", "README.md  this\nSTALE.md  gone", "STALE.md is listed but not there"),
        ("  config.py  why\n", "", "tokendepth/config.py is not listed"),
        ("  ops/  numerics\n", "", "tokendepth/ops/a/eager.py is not listed"),
        ("\n  config.py  why\n  ops/  numerics", "  all", "tokendepth/ is not expanded"),
        ("config.py  why", "config.py", "no comment"),
        ("  config.py  why", "   config.py  why", "indented by 3 spaces"),
        ("README.md  this", "README.md  this\nREADME.md  this", "listed twice"),
    ],
)
def test_tree_that_is_wrong_is_found(right, wrong, problem):
    assert right in TREE
    assert problem in "\n".join(tree_problems(TREE.replace(right, wrong), TREE_FILES))


@pytest.mark.xdist_group("together")
def test_groups_of_tests_stay_together(request):
    """pytest 9.2 keeps ids where xdist 3.8 does not write them: groups are ignored, and shared fixtures made twice."""
    if not request.config.getoption("loadgroup", default=False):
        pytest.skip("only with -n and --dist loadgroup")
    assert request.node.nodeid.endswith("@together")
