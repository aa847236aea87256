import pytest
import torch


@pytest.fixture(autouse=True)
def _poisoned_memory():
    """Memory that is allocated and not written holds NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
