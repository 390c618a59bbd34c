"""What each equation's values hold and take on one device: what it costs to keep them, and to compute them again.

In: the formulation, an assignment, its device's program. Out: `Numbers`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.cost.kernel_time import op_seconds
from autopar.formulate.formulation import Formulation
from autopar.ir.device_program import DeviceProgram


@dataclass(frozen=True, slots=True)
class Numbers:
    """By value of the graph, on one device.

    Args:
        num_bytes: its size, as it is made.
        held: of that, and of what it is resharded to, the bytes that the backward pass reads.
        stored: values that are in memory at all, as they are made or resharded; others stay inside kernels.
        seconds: of the kernels that make it, and of the collectives what nothing hides; a value inside a kernel takes
            none of its own.
    """

    num_bytes: dict[int, float]
    held: dict[int, float]
    stored: frozenset[int]
    seconds: dict[int, float]


def numbers_of(
    f: Formulation, choices: Sequence[int], device: DeviceProgram, start: int, exposed: Mapping[str, float]
) -> Numbers:
    """Read the numbers off the program of a plan.

    Args:
        start: the node at which the backward pass starts.
        exposed: by kind of collective, the part that nothing hides; all of it where a kind is not there.
    """
    profile = replace(f.profile, xla_estimator=None)
    held: dict[int, float] = defaultdict(float)
    stored: set[int] = set()
    seconds: dict[int, float] = defaultdict(float)
    written: set[int] = set()
    late = {b for op in device.ops if op.node >= start for b in op.reads}
    for op in device.ops:
        own = [b for b in op.writes if device.buffers[b].value >= 0]
        for b in own:
            buffer = device.buffers[b]
            if b in written or buffer.argument:
                continue
            written.add(b)
            stored.add(buffer.value)
            if b in late:
                held[buffer.value] += buffer.num_bytes
        if op.kind != "border":
            for value in {device.buffers[b].value for b in own}:  # each of them takes the whole kernel
                part = exposed.get(op.collective, 1.0) if op.kind == "collective" else 1.0
                seconds[value] += part * op_seconds(op, f.mesh, profile)
    return Numbers(_sizes(f, choices), dict(held), frozenset(stored), dict(seconds))


def _sizes(f: Formulation, choices: Sequence[int]) -> dict[int, float]:
    sizes = {v: info.num_bytes for v, info in enumerate(f.graph.values)}
    for decision, chosen in zip(f.decisions, choices, strict=True):
        if decision.kind != "group":
            continue
        for define in f.groups[decision.group].defines:
            info = f.graph.values[define.value]
            sharding = decision.strategies[chosen].sharding(define.dims, define.pending)
            sizes[define.value] = info.itemsize * sharding.local_size(info.shape, f.mesh)
    return sizes
