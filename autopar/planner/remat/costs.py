"""Price keeping and recomputing each value: bytes live into the backward pass, seconds to compute it again.

In: the formulation, an assignment, its device program. Out: `Costs`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.cost.kernel_time import op_seconds
from autopar.formulate.formulation import Formulation
from autopar.ir.device_program import DeviceProgram


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs on one device, by value of the graph.

    Args:
        num_bytes: the local size of the value as its producer writes it.
        live_bytes: bytes of the value and its resharded copies that the backward pass reads.
        stored: the values that are in memory, directly or as a resharded copy; all others exist only inside kernels.
        seconds: the time of the kernels that produce the value, plus the exposed time of its collectives; missing for a value
            that exists only inside a kernel.
    """

    num_bytes: dict[int, float]
    live_bytes: dict[int, float]
    stored: frozenset[int]
    seconds: dict[int, float]


def costs_of(
    f: Formulation, choices: Sequence[int], device: DeviceProgram, start: int, exposed: Mapping[str, float]
) -> Costs:
    """The costs of each value, from the device program of a plan.

    Args:
        start: the node at which the backward pass starts.
        exposed: exposed share by kind of collective; 1 for a missing kind.
    """
    profile = f.profile
    live_bytes: dict[int, float] = defaultdict(float)
    stored: set[int] = set()
    seconds: dict[int, float] = defaultdict(float)
    written: set[int] = set()
    read_later = {b for op in device.ops if op.node >= start for b in op.reads}
    for op in device.ops:
        own = [b for b in op.writes if device.buffers[b].value >= 0]
        for b in own:
            buffer = device.buffers[b]
            if b in written or buffer.argument:
                continue
            written.add(b)
            stored.add(buffer.value)
            if b in read_later:
                live_bytes[buffer.value] += buffer.num_bytes
        if op.kind != "border":
            for value in {device.buffers[b].value for b in own}:  # recomputing any of them repeats the whole kernel
                part = exposed.get(op.collective, 1.0) if op.kind == "collective" else 1.0
                seconds[value] += part * op_seconds(op, f.mesh, profile)
    return Costs(_sizes(f, choices), dict(live_bytes), frozenset(stored), dict(seconds))


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
