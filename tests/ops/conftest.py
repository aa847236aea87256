import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _poisoned_memory():
    """Memory that is allocated and not written holds NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def measured(request) -> dict[str, Any]:
    """What the test file, run as a script, prints about its kernel: on a GPU, else in Triton's interpreter."""
    if find_spec("triton") is None:
        pytest.skip("no kernel: triton is not installed (pip install 'tokendepth[kernels]')")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    environment |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, str(request.path)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])
