"""Compare steps across kinds and numbers of devices: the fewest devices that fit, step time, memory, price.

In: steps, hardware profiles, optional numbers of devices. Out: `Comparison`, with the fewest devices that fit (`Fit`)
for each step and profile; or `GridComparison`, with a plan (`Cell`) for each number of devices as well. An interrupted
comparison has the results so far.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autopar.comparison.least_devices import MAX_DEVICES, Fit, Refused, TrainingState, fits, plan_on, state_of
from autopar.errors import AutoparError, HardwareError, MeshError
from autopar.hardware.profile import HardwareProfile, known_names, load
from autopar.planner.request import Progress
from autopar.plans.plan import Plan
from autopar.transforms.program import program_of

#: The user's name of a step -> a function that returns the step and its arguments; each step is traced once.
Targets = Mapping[str, Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One step on a number of devices of one kind.

    Args:
        plan: the fastest plan with the fewest microbatches that fit; None where none fits.
        refused: the reason why none fits.
    """

    profile: HardwareProfile
    num_devices: int
    plan: Plan | None
    refused: Refused | None = None

    @property
    def usd_per_step(self) -> float | None:
        """The price of all devices for one step; None without a plan, or without a price in the profile."""
        price = self.profile.usd_per_device_hour
        if price is None or self.plan is None:
            return None
        return self.plan.prediction.step_time_s * self.num_devices * price / 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One step on every kind and number of devices.

    Args:
        target: the user's name of the step.
        name: name of the step's function.
        state: training state of the step.
        fits: results in the order of the given profiles, up to an interruption or an error.
        cells: results of a grid, by profile, then by number of devices, in the given order.
        error: the reason why the step could not be planned; else empty.
    """

    target: str
    name: str = ""
    state: TrainingState | None = None
    fits: tuple[Fit, ...] = ()
    cells: tuple[Cell, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Several steps on several kinds of devices.

    Args:
        interrupted: whether the user interrupted the comparison; it then has the results so far.
    """

    compared: tuple[Compared, ...]
    max_devices: int
    interrupted: bool = False

    @property
    def failed(self) -> bool:
        """Whether a step could not be planned."""
        return any(one.error for one in self.compared)


@dataclass(frozen=True, slots=True, kw_only=True)
class GridComparison:
    """Several steps on several kinds and numbers of devices; `interrupted` as in `Comparison`."""

    grids: tuple[Compared, ...]
    interrupted: bool = False

    @property
    def failed(self) -> bool:
        """Whether a step could not be planned."""
        return any(one.error for one in self.grids)


def profiles_of(names: Sequence[str]) -> tuple[HardwareProfile, ...]:
    """Load distinct hardware profiles by name or path.

    Raises:
        HardwareError: there is no profile of that name or path, or no name is given.
    """
    wanted = list(dict.fromkeys(name.strip() for name in names if name.strip()))
    if not wanted:
        raise HardwareError(
            f"there is no hardware to compare: give profiles, separated by commas, from {', '.join(known_names())}"
        )
    return tuple(load(name) for name in wanted)


def compare(
    targets: Targets,
    profiles: Sequence[HardwareProfile],
    *,
    max_devices: int = MAX_DEVICES,
    progress: Progress | None = None,
    **options: Any,
) -> Comparison:
    """Find the fewest devices of each kind for every step; a step that cannot be planned does not stop the others.

    Args:
        targets: steps by name.
        max_devices: the most devices to try.
        progress: callback with a stage's name and the fraction done.
        options: further options of `fits`.
    """
    compared, interrupted = _compare(targets, profiles, (), progress, options, max_devices)
    return Comparison(compared=compared, max_devices=max_devices, interrupted=interrupted)


def compare_grid(
    targets: Targets,
    profiles: Sequence[HardwareProfile],
    devices: Sequence[int],
    *,
    progress: Progress | None = None,
    **options: Any,
) -> GridComparison:
    """Plan every step for every kind of device and number of them (`devices`).

    Args:
        targets, progress, options: as in `compare`.

    Raises:
        MeshError: a number above a host's devices is not a multiple of them.
    """
    for profile in profiles:
        for number in devices:
            _check_hosts(profile, number)
    compared, interrupted = _compare(targets, profiles, devices, progress, options, max(devices))
    return GridComparison(grids=compared, interrupted=interrupted)


def _compare(
    targets: Targets,
    profiles: Sequence[HardwareProfile],
    devices: Sequence[int],
    progress: Progress | None,
    options: Mapping[str, Any],
    max_devices: int,
) -> tuple[tuple[Compared, ...], bool]:
    """The results per step, and whether the user interrupted the comparison."""
    compared: list[Compared] = []
    for done, (target, make) in enumerate(targets.items()):
        now = Compared(target=target)

        def report(stage: str, fraction: float, target: str = target, done: int = done) -> None:
            if progress is not None:
                progress(f"{target}, {stage}", (done + fraction) / len(targets))

        try:
            if progress is not None and not devices:
                progress(f"trace {target}", done / len(targets))
            step, args = make()
            program = program_of(step, args, carry=None, donate=None)
            now = replace(now, name=program.signature.name, state=state_of(program))
            for fit in fits(program, profiles, max_devices=max_devices, progress=report, **options):
                found = [_cell(program, fit, number, report, options) for number in devices]
                now = replace(
                    now, fits=_in_order(profiles, *now.fits, fit), cells=_in_order(profiles, *now.cells, *found)
                )
        except AutoparError as error:
            now = replace(now, error=str(error))
        except KeyboardInterrupt:
            return (*compared, now), True
        compared.append(now)
    return tuple(compared), False


def _in_order(profiles: Sequence[HardwareProfile], *found: Any) -> tuple[Any, ...]:
    return tuple(sorted(found, key=lambda one: profiles.index(one.profile)))


def _cell(program: Any, fit: Fit, number: int, report: Progress, options: Mapping[str, Any]) -> Cell:
    """Plan for a number of devices, unless `fit` already has the result."""
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
            f"{number} devices of {profile.name!r} are not whole hosts of {host}: give a multiple of {host}, or fewer"
        )
