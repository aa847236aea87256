"""A few rows of tokens times a matrix, on a CPU.

The library multiplies one row on one core, and a few rows on little more. Cut into as many pieces as there are threads,
the matrix is a batch of smaller ones, which keeps all cores reading: two are 1.2 to 2 times as fast with up to 32 rows.

For several rows it also rearranges the whole matrix first, at every product. Whoever multiplies by the same matrices
again and again keeps them rearranged, in `PackedMatrices`: beside pieces, 1.4 to 1.8 times as fast with one row and 2
to 3 times with several, where a matrix has more than 300,000 numbers.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import torch.nn.functional as F
from torch import Tensor

MOST_ROWS = 32
SMALLEST = 2**16
"""Numbers in a matrix that is worth the cutting."""
PATIENCE = 8
"""Products with a matrix before it is packed, which takes as long as some ten of them gain."""


class PackedMatrices:
    """Copies of matrices, rearranged for products with a few rows; each is made once it has been needed some times.

    A matrix that was changed in place is packed again, unless it was changed through `.data`, which leaves no trace.
    """

    def __init__(self, matrices: Iterable[Tensor]) -> None:
        if not torch.backends.mkldnn.is_available():
            matrices = ()
        self._matrices = [matrix.detach() for matrix in matrices]  # kept: no other tensor can get one's address
        self._storages = {matrix.untyped_storage().data_ptr() for matrix in self._matrices}
        self._needed: Counter[tuple[int, torch.Size]] = Counter()
        self._packed: dict[tuple[int, torch.Size], tuple[int, Tensor]] = {}

    @contextmanager
    def used(self) -> Iterator[None]:
        """`linear` uses them, in this thread."""
        before = _used.set(self)
        try:
            yield
        finally:
            _used.reset(before)

    def of(self, matrix: Tensor) -> Tensor | None:
        """`matrix`, which may be some rows of one of them, as the library wants it; None where it is not packed."""
        key = matrix.data_ptr(), matrix.shape
        if key in self._packed:
            version, packed = self._packed[key]
            if version == matrix._version:
                return packed
        if matrix.untyped_storage().data_ptr() not in self._storages or matrix.is_inference():
            return None
        self._needed[key] += 1
        if self._needed[key] <= PATIENCE:
            return None
        packed = torch.ops.mkldnn._reorder_linear_weight(matrix.detach(), MOST_ROWS)
        self._packed[key] = matrix._version, packed
        return packed


_used: ContextVar[PackedMatrices | None] = ContextVar("packed matrices", default=None)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `F.linear`, to rounding."""
    rows = _few_rows(x, weight)
    if not rows:
        return F.linear(x, weight, bias)
    matrices = _used.get()
    if matrices is not None and (packed := matrices.of(weight)) is not None:
        return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    out, width = weight.shape
    pieces = torch.get_num_threads()
    if pieces < 2 or out % pieces:
        return F.linear(x, weight, bias)
    parts = torch.bmm(
        x.reshape(1, rows, width).expand(pieces, -1, -1), weight.view(pieces, out // pieces, width).transpose(1, 2)
    )
    found = parts.transpose(0, 1).reshape(*x.shape[:-1], out)
    return found if bias is None else found + bias


def _few_rows(x: Tensor, weight: Tensor) -> int:
    """How many rows `x` has; 0 where the library is to have the product as it is."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or x.device.type != "cpu":
        return 0
    if x.dtype != torch.float32 or weight.dtype != torch.float32 or torch.is_autocast_enabled("cpu"):
        return 0
    if weight.numel() < SMALLEST or not weight.is_contiguous():
        return 0
    rows = x.numel() // x.shape[-1]
    if isinstance(rows, torch.SymInt) or rows > MOST_ROWS:  # a shape without a number has no few rows
        return 0
    return rows
