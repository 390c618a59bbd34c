"""Steps on kinds and numbers of devices: how fast, how much memory, at what price, and the least number that fits.

In: steps, hardware profiles, numbers of devices. Out: `GridComparison`, with a `Cell` for each step, profile and number; where
it is interrupted, those found until then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autopar.comparison.least_devices import Fit, Refused, TrainingState, fits, plan_on, state_of
from autopar.cost.hardware_profile import HardwareProfile
from autopar.errors import AutoparError, MeshError
from autopar.planner.planner import Progress
from autopar.plans.plan import Plan
from autopar.transforms.program import program_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One step on a number of devices of one kind.

    Args:
        plan: the fastest with the fewest microbatches that fit; None where none does. refused: then, why.
    """

    profile: HardwareProfile
    num_devices: int
    plan: Plan | None
    refused: Refused | None = None

    @property
    def usd_per_step(self) -> float | None:
        """What all devices cost for as long as a step takes; None without a plan, or without a price in the profile."""
        price = self.profile.usd_per_device_hour
        if price is None or self.plan is None:
            return None
        return self.plan.prediction.step_time_s * self.num_devices * price / 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """One step on all kinds and numbers.

    Args:
        least: for each profile the least number that fits, of those up to the largest asked for.
        cells: by profile, then by number, as asked for.
        error: why it could not be planned; empty where it could.
    """

    target: str
    name: str = ""
    state: TrainingState | None = None
    least: tuple[Fit, ...] = ()
    cells: tuple[Cell, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GridComparison:
    """Several steps. `interrupted` by the user: what was found until then is here."""

    grids: tuple[Grid, ...]
    interrupted: bool = False

    @property
    def failed(self) -> bool:
        """Whether a step could not be planned."""
        return any(one.error for one in self.grids)


def compare_grid(
    targets: Mapping[str, Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]],
    profiles: Sequence[HardwareProfile],
    devices: Sequence[int],
    *,
    progress: Progress | None = None,
    **options: Any,
) -> GridComparison:
    """Every step on every number of every kind of device. One that cannot be planned does not stop the others.

    Args:
        targets: by name, what makes a step and its arguments; each is traced once.
        devices: how many. options: of `least_devices.fits`.

    Raises:
        MeshError: a number that is no whole hosts.
    """
    for profile in profiles:
        for number in devices:
            _check_hosts(profile, number)
    grids: list[Grid] = []
    for done, (target, make) in enumerate(targets.items()):
        now = Grid(target=target)

        def report(stage: str, fraction: float, target: str = target, done: int = done) -> None:
            if progress is not None:
                progress(f"{target}, {stage}", (done + fraction) / len(targets))

        try:
            step, args = make()
            program = program_of(step, args, carry=None, donate=None)
            now = replace(now, name=program.signature.name, state=state_of(program))
            for fit in fits(program, profiles, max_devices=max(devices), progress=report, **options):
                found = tuple(_cell(program, fit, number, report, options) for number in devices)
                now = replace(
                    now,
                    least=tuple(sorted((*now.least, fit), key=lambda one: profiles.index(one.profile))),
                    cells=tuple(sorted((*now.cells, *found), key=lambda one: profiles.index(one.profile))),
                )
        except AutoparError as error:
            now = replace(now, error=str(error))
        except KeyboardInterrupt:
            return GridComparison(grids=(*grids, now), interrupted=True)
        grids.append(now)
    return GridComparison(grids=tuple(grids))


def _cell(program: Any, fit: Fit, number: int, report: Progress, options: Mapping[str, Any]) -> Cell:
    """A number of devices: planned, unless it is known to be too small or has been planned."""
    if fit.num_devices == number:
        return Cell(profile=fit.profile, num_devices=number, plan=fit.plan)
    if fit.num_devices is None or number < fit.num_devices:  # memory falls with the number of devices
        larger = [one for one in fit.refused if one.num_devices >= number]
        return Cell(profile=fit.profile, num_devices=number, plan=None, refused=larger[0] if larger else None)
    outcome = plan_on(program, fit.profile, number, progress=report, **options)
    if isinstance(outcome, Plan):
        return Cell(profile=fit.profile, num_devices=number, plan=outcome)
    return Cell(profile=fit.profile, num_devices=number, plan=None, refused=outcome)


def _check_hosts(profile: HardwareProfile, number: int) -> None:
    host = profile.devices_per_host
    if number > host and number % host:
        raise MeshError(
            f"{number} devices of {profile.name!r} are not whole hosts of {host}: give a multiple, or fewer"
        )
