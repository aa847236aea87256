import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

ROOT = Path(__file__).resolve().parents[2]
NO_TRITON = "no kernel: triton is not installed (pip install 'tokendepth[kernels]')"


@pytest.fixture(autouse=True)
def _poisoned_memory():
    """Memory that is allocated but not written holds NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


RUN = """
import runpy, sys
from tests.ops.interpreted import remember_builtins
remember_builtins()
for path in sys.argv[1:]:
    runpy.run_path(path, run_name="__main__")
"""


@pytest.fixture(scope="session")
def scripts(request) -> dict[str, dict[str, Any]]:
    """The output of each test file with a kernel, all run as scripts by one process."""
    if find_spec("triton") is None:
        pytest.skip(NO_TRITON)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    environment |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    files = sorted({str(item.path) for item in request.session.items if "measured" in item.fixturenames})
    done = subprocess.run(
        [sys.executable, "-c", RUN, *files], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(zip(files, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.fixture
def measured(request, scripts) -> dict[str, Any]:
    """What the test file prints about its kernel when run as a script, on a GPU or in Triton's interpreter.

    Its users are in one group, "kernels", so that one worker runs all scripts.
    """
    return scripts[str(request.path)]


class _Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        namespace, name, _ = str(func).split(".")
        if namespace == "tokendepth":
            self.names.append(name)
        return func(*args, **kwargs or {})


@pytest.fixture
def kernels_on_a_gpu() -> Callable[..., list[str]]:
    """The kernels that a function would launch, in order, on a GPU; no GPU is needed."""
    if find_spec("triton") is None:
        pytest.skip(NO_TRITON)

    def launched(function: Callable[..., Any], *arguments: Any) -> list[str]:
        def there(x: Any) -> Any:
            return torch.empty(x.shape, dtype=x.dtype, device="cuda") if isinstance(x, torch.Tensor) else x

        with FakeTensorMode(), _Calls() as calls:
            function(*tree_map(there, arguments))
        return calls.names

    return launched
