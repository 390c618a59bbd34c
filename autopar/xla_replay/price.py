"""Define the prices that a replay needs: the duration of each kernel and each transfer.

In: an instruction. Out: `KernelPrice` or `TransferPrice`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from autopar.xla_compiler.hlo_text import Computation, Instruction, Module


@dataclass(frozen=True, slots=True)
class KernelPrice:
    """One run of a kernel.

    Args:
        kind: `gemm`, `fusion`, `convolution`, `attention`, `custom-call`, `host`.
        bound: what limits it: `FLOPs`, `memory`, `latency`, or `unknown`.
        notes: what had to be assumed.
    """

    kind: str
    seconds: float
    bound: str = "latency"
    flops: float = 0.0
    num_bytes: float = 0.0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TransferPrice:
    """One collective or host transfer.

    Args:
        kind: HLO's name of the collective, or `host-copy`.
        stream: transfers of one stream run in order.
        link: transfers on one link at one time share it.
        seconds: duration on an idle link.
        slows_by: fraction of the kernels' rate that it takes while it runs.
        num_bytes: bytes that a device sends.
    """

    kind: str
    stream: str
    link: str
    seconds: float
    slows_by: float = 0.0
    num_bytes: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def flops(self) -> float:
        return 0.0

    @property
    def bound(self) -> str:
        return "link"


class Prices(Protocol):
    """The prices of one device kind in one topology."""

    def of(self, module: Module, computation: Computation, one: Instruction) -> KernelPrice | TransferPrice:
        """The price of one run of an instruction."""
        ...

    def host_round_trip(self) -> KernelPrice:
        """The price of a decision that the host takes: it reads a predicate and launches what follows."""
        ...
