"""Count the memory accesses of a scatter that combines its updates with what is in memory.

In: its node, its updates. Out: bytes per element of the updates.
"""

from __future__ import annotations

from autopar.ir.graph import Node, Value
from autopar.rules.table import traits_of

#: The least that an access to device memory moves.
SECTOR_BYTES = 32
_WORD_BYTES = 4  # the least that an atomic operation changes


def accessed_bytes(node: Node, updates: Value) -> float:
    """Bytes of sectors that a scatter reads and writes per element of its updates; 0 for one that only writes them.

    Threads that update contiguous elements share a sector, unless an element is smaller than a word: XLA then compares
    and swaps each word by itself. Two scatters of a measured step bear this out (benchmarks/results/kernels.md).
    """
    if not traits_of(node.primitive).terms:
        return 0.0
    if updates.itemsize < _WORD_BYTES:
        return 2.0 * SECTOR_BYTES * updates.itemsize / _WORD_BYTES
    is_contiguous = len(updates.shape) - 1 in node.params["dimension_numbers"]["update_window_dims"]
    contiguous = updates.shape[-1] if is_contiguous else 1
    return 2.0 * max(updates.itemsize, SECTOR_BYTES / max(contiguous, 1))
