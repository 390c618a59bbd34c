"""Estimate the serving of many models on devices that may be absent, and what one device more or less changes.

In: models, a trace, a hardware profile, a number of devices. Out: `ServingEstimate`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.errors import PlacementError
from autopar.hardware.profile import HardwareProfile
from autopar.placement.change import Running
from autopar.placement.cost_of_change import ChangeCost, cost_of_change
from autopar.placement.estimate_times import estimate_times
from autopar.placement.layouts import Layout, StepTimes
from autopar.placement.measured_times import read_step_times
from autopar.placement.models_file import ModelEntry
from autopar.placement.placements import ModelSpec, by_name
from autopar.placement.search import Found, place
from autopar.placement.traces import Trace, synthetic_trace
from autopar.planner.memory_budget import MemoryBudget

#: The effort of a placement on one device more or less, which starts from the one that was found.
_NEIGHBOUR_EFFORT = 40_000
#: The bytes of weights per second that a group reads, if nothing else is said: one NVMe disk.
LOAD_BYTES_PER_S = 2e9
#: Called with a stage's name and the fraction done.
Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class ServingEstimate:
    """A placement of models on devices.

    Args:
        profile: the hardware. num_devices: the number of devices. budget_bytes: the memory of one that a program may use.
        found: the placement. fewer, more: those on one device less and more; None if it was not asked for, or if the models do
            not fit. change: what the change from what runs now costs; None if nothing runs.
    """

    models: Sequence[ModelSpec]
    trace: Trace
    profile: HardwareProfile
    num_devices: int
    budget_bytes: float
    found: Found
    fewer: Found | None
    more: Found | None
    change: ChangeCost | None = None


def layouts_for(num_devices: int, profile: HardwareProfile, max_pipeline: int = 1) -> list[Layout]:
    """The layouts of groups: powers of two, within one host.

    Args:
        max_pipeline: the largest number of stages.

    >>> from autopar.hardware.profile import load
    >>> [tuple(layout) for layout in layouts_for(5, load("h100-sxm"), 2)]
    [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1)]
    """
    most = min(num_devices, profile.devices_per_domain)
    degrees = [1 << power for power in range(most.bit_length())]
    found = [Layout(tensor, stages) for tensor in degrees for stages in degrees if stages <= max_pipeline]
    return [layout for layout in found if layout.num_devices <= most]


def model_specs(
    entries: Sequence[ModelEntry],
    layouts: Sequence[Layout],
    profile: HardwareProfile,
    progress: Progress | None = None,
    **planning: Any,
) -> list[ModelSpec]:
    """The times of all models on all layouts, corrected by what was measured. Equal models are planned once.

    Args:
        planning: as for `estimate_times`.

    Raises:
        PlacementError: a measured layout or shape is not among those of the model.
    """
    known: dict[Any, dict[Layout, StepTimes]] = {}
    specs: list[ModelSpec] = []
    for number, entry in enumerate(entries):
        if progress is not None:
            progress(f"plan {entry.name}", number / len(entries))
        config = entry.served.config
        own = [each for each in layouts if config.num_heads % each.tensor == 0 and each.pipeline <= config.num_layers]
        if entry.served not in known:
            known[entry.served] = estimate_times(entry.served, own, profile, **planning)
        times = known[entry.served]
        if entry.measured is not None:
            layout, seconds = read_step_times(entry.measured)
            if layout not in times:
                raise PlacementError(
                    f"{entry.measured} was measured on {layout.describe()}, but {entry.name!r} is placed on"
                    f" {', '.join(each.describe() for each in times)}: measure one of these"
                )
            corrected = times[layout].corrected(seconds)
            ratios = times[layout].ratios_to(seconds)
            times = {each: corrected if each == layout else times[each].scaled(ratios) for each in times}
        specs.append(ModelSpec(name=entry.name, slo=entry.slo, times=times))
    return specs


def trace_of(entries: Sequence[ModelEntry], duration_s: float, seed: int = 0) -> Trace:
    """Draw a trace from the traffic of the models.

    Raises:
        PlacementError: no model has traffic.
    """
    traffic = [entry.traffic for entry in entries if entry.traffic is not None]
    if not traffic:
        raise PlacementError("no model has traffic: give a trace, or a table [MODEL.traffic] with rate_per_s")
    return synthetic_trace(traffic, duration_s, seed)


def estimate_serving(
    models: Sequence[ModelSpec],
    trace: Trace,
    profile: HardwareProfile,
    num_devices: int,
    *,
    memory_budget_bytes: float | None = None,
    current: Running | None = None,
    keeps_groups: bool = False,
    load_bytes_per_s: float = LOAD_BYTES_PER_S,
    neighbours: bool = True,
    progress: Progress | None = None,
) -> ServingEstimate:
    """Find a placement, and those on one device more and less.

    Args:
        memory_budget_bytes: of one device; by default all that a program may use.
        current: what runs now. keeps_groups: whether its groups stay, and only their models change.
        load_bytes_per_s: the rate at which a group gets weights. neighbours: whether to find placements on one device more and less.

    Raises:
        PlacementError: as for `place`.
    """
    budget = MemoryBudget(profile.usable_bytes if memory_budget_bytes is None else memory_budget_bytes).plan_bytes
    report = progress or (lambda stage, fraction: None)
    report(f"place on {num_devices}", 0.0)
    found = place(models, trace, num_devices, budget, current=current, keeps_groups=keeps_groups)
    others: list[Found | None] = []
    for done, num in enumerate((num_devices - 1, num_devices + 1), 1):
        report(f"place on {num}", done / 3)
        start = found.running if found.placement.num_devices <= num else None
        try:
            others.append(
                place(models, trace, num, budget, current=start, effort=_NEIGHBOUR_EFFORT)
                if neighbours and num
                else None
            )
        except PlacementError:
            others.append(None)
    change = None if current is None else cost_of_change(found, current, by_name(models), budget, load_bytes_per_s)
    report("done", 1.0)
    return ServingEstimate(models, trace, profile, num_devices, budget, found, others[0], others[1], change)
