"""Consider meshes over a part of the devices, because a small batch does not keep all of them busy.

In: a request, the step time on one device, the step times found. Out: the meshes over a part of the devices, a lower bound of their step
time, and the reason for the user.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autopar.errors import MicrobatchError
from autopar.hardware.profile import HardwareProfile
from autopar.ir.graph import Graph
from autopar.ir.mesh import MeshShape, factorisations
from autopar.planner.pins import axes_of_pins, sharded_by_program
from autopar.planner.request import PlanRequest
from autopar.plans.plan import Plan
from autopar.system.units import human_seconds
from autopar.transforms.microbatch.batch_dims import num_examples
from autopar.transforms.program import Program


def smaller_meshes(request: PlanRequest, graph: Graph, pin: Mapping[str, Any]) -> list[tuple[MeshShape, ...]]:
    """The meshes over a part of the devices, by number of devices, the largest number first.

    There are none if the request has a mesh, or if a pin or the program itself shards over mesh axes: then the user has
    decided how much the step is split.
    """
    if request.mesh is not None or request.all_devices or axes_of_pins(pin) or sharded_by_program(graph):
        return []
    return [factorisations(number) for number in parts_of(request.meshes[0].num_devices, request.profile)]


def parts_of(num_devices: int, profile: HardwareProfile) -> list[int]:
    """The smaller numbers of devices to plan for, the largest first: powers of two and divisors, of the devices of a host or of
    whole hosts.

    >>> from autopar.hardware.profile import load
    >>> parts_of(48, load("h100-sxm")), parts_of(6, load("h100-sxm"))
    ([32, 24, 16, 8, 6, 4, 3, 2, 1], [4, 3, 2, 1])
    """
    host = profile.devices_per_host
    within = [n for n in range(1, min(host + 1, num_devices)) if _is_even_part(n, num_devices)]
    hosts = num_devices // host if num_devices % host == 0 else 0
    whole = [host * n for n in range(2, hosts) if _is_even_part(n, hosts)]
    return sorted({*within, *whole}, reverse=True)


def least_s(one_device_s: float, num_devices: int) -> float:
    """A lower bound of the step time: that of one device, which communicates nothing, divided evenly."""
    return one_device_s / num_devices


def reason(program: Program, plan: Plan, on_all: tuple[MeshShape, float] | None, available: int) -> str:
    """Why a plan uses a part of the devices, as a note for the user.

    Args:
        on_all: mesh and step time of the fastest plan found on all of them.
    """
    text = f"{plan.num_devices} of {available} devices: more do not help{_at_batch(program)}"
    if on_all is None:
        return text
    own_s, (mesh, all_s) = plan.prediction.step_time_s, on_all
    slower = f" ({100 * (all_s / own_s - 1):+.1f} %)" if own_s else ""
    return f"{text}. On all {available} (mesh {mesh}) a step would take {human_seconds(all_s)}{slower}"


def _at_batch(program: Program) -> str:
    try:
        return f" at a batch of {num_examples(program.as_traced.graph)}"
    except MicrobatchError:  # the step has no batch
        return ""


def _is_even_part(part: int, whole: int) -> bool:
    return part & (part - 1) == 0 or whole % part == 0
