"""Whether kernels can run here at all; which one does is each op's choice."""

from functools import cache
from importlib.util import find_spec


def has_triton() -> bool:
    return _find_triton()


@cache
def _find_triton() -> bool:
    return find_spec("triton") is not None


# What torch.compiler.assume_constant_result does, without its import of all of dynamo. Dynamo traces neither a cache
# nor, in torch 2.11, find_spec.
vars(has_triton)["_dynamo_marked_constant"] = True
