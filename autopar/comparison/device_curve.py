"""Step time over the number of devices: how many of them a plan uses, and how far more of them help.

In: the cells of a grid. Out: `curves`: for each kind of device, a point for each number of devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.comparison.by_hardware import Cell, Compared
from autopar.hardware.profile import HardwareProfile
from autopar.planner.simplest_plan import TIE
from autopar.plans.plan import Plan


@dataclass(frozen=True, slots=True)
class Point:
    """The step with a number of devices available.

    Args:
        num_devices: number of available devices.
        on_all: plan on all of them.
        used: the plan on the fewest devices that is as fast as any plan on at most `num_devices`.
    """

    num_devices: int
    on_all: Plan
    used: Plan

    @property
    def step_time_s(self) -> float:
        return self.used.prediction.step_time_s

    @property
    def uses_all(self) -> bool:
        return self.used is self.on_all


@dataclass(frozen=True, slots=True)
class Curve:
    """The points of one kind of device, by number of devices; numbers on which the step does not fit are left out."""

    profile: HardwareProfile
    points: tuple[Point, ...]

    def speedup(self, point: Point) -> float:
        """How many times as fast the step is as on the fewest devices."""
        return self.points[0].step_time_s / point.step_time_s if point.step_time_s else 1.0

    def efficiency(self, point: Point) -> float:
        """The speedup relative to that of a step that divides evenly over all devices."""
        return self.speedup(point) * self.points[0].num_devices / point.num_devices


def curves(grid: Compared) -> list[Curve]:
    """The curve of each kind of device on which the step fits."""
    profiles = list(dict.fromkeys(cell.profile.name for cell in grid.cells))
    by_profile = ([cell for cell in grid.cells if cell.profile.name == name] for name in profiles)
    found = [Curve(cells[0].profile, _points(cells)) for cells in by_profile]
    return [one for one in found if one.points]


def _points(cells: Sequence[Cell]) -> tuple[Point, ...]:
    points: list[Point] = []
    plans: list[Plan] = []
    for cell in sorted(cells, key=lambda one: one.num_devices):
        if cell.plan is not None:
            plans.append(cell.plan)
            fastest_s = min(plan.prediction.step_time_s for plan in plans)
            used = next(plan for plan in plans if plan.prediction.step_time_s <= (1 + TIE) * fastest_s)
            points.append(Point(cell.num_devices, cell.plan, used))
    return tuple(points)
