"""What one device runs: the planned step as kernels and collectives, the way XLA's GPU compiler makes them.

In: a formulation and an assignment. Out: `DeviceProgram`: operations in the order they run, over buffers of known size.
Both predictions of a plan are read off it: the peak of memory (which buffers are live together) and
the step time (what each kernel takes, and what of the collectives no kernel hides).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: A `view` gives what it reads another name or shape, for nothing; a program may go without.
OpKind = Literal["gemm", "convolution", "fusion", "collective", "view"]


@dataclass(frozen=True, slots=True)
class Gemm:
    """One matrix product on one device: `batch` times [m, k] @ [k, n], in the operands' dtype."""

    batch: int
    m: int
    n: int
    k: int
    dtype: str
    out_dtype: str


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory on one device.

    Args:
        num_bytes: its size.
        value: the graph's value that is in it.
        argument: whether it is an argument of the step, and so held throughout.
        output: whether it leaves the step.
    """

    num_bytes: float
    value: int
    argument: bool = False
    output: bool = False


@dataclass(frozen=True, slots=True)
class Op:
    """One kernel or one collective.

    Args:
        kind: what runs it.
        node: the graph's node that names it: the last one it computes.
        reads, writes: positions of buffers.
        read_bytes, written_bytes: what it moves from and to device memory (a slice reads part of a buffer).
        flops: arithmetic outside matrix units (for a convolution: inside them).
        num_nodes: how many of the graph's nodes are fused in it.
        gemm: for a matrix product.
        collective: kind as in `cost.collectives.KINDS`, for a collective.
        axes: mesh axes of a collective.
        payload_bytes: of a collective, by the convention of `cost.collectives`.
        combinable: whether XLA merges it with its like.
        unpriced: XLA's estimator takes it for free (a Triton normalisation, a copy, a sort).
        reread_bytes, broadcast_bytes: what it reads again, out of a cache: of large operands, and of those
            under a quarter of a MiB.
        num_blocks: thread blocks it runs in, where they are too few for the whole device; 0: enough.
    """

    kind: OpKind
    node: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    read_bytes: float
    written_bytes: float
    flops: float = 0.0
    num_nodes: int = 1
    gemm: Gemm | None = None
    dtype: str = "float32"
    collective: str = ""
    axes: tuple[str, ...] = ()
    payload_bytes: float = 0.0
    combinable: bool = False
    unpriced: bool = False
    reread_bytes: float = 0.0
    broadcast_bytes: float = 0.0
    num_blocks: float = 0.0


@dataclass(frozen=True, slots=True)
class DeviceProgram:
    """Operations in the order they run, and the buffers they read and write."""

    ops: tuple[Op, ...]
    buffers: tuple[Buffer, ...]
