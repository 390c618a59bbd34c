"""What steps need of each kind of device: which fit on one, and the least number on which they fit.

In: steps and hardware profiles. Out: `Comparison`, with a `Fit` for each pair; where it is interrupted, those found
until then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autopar.comparison.least_devices import MAX_DEVICES, Fit, TrainingState, fits, state_of
from autopar.cost.hardware_profile import HardwareProfile, known_names, load
from autopar.errors import AutoparError, HardwareError
from autopar.planner.planner import Progress
from autopar.transforms.program import program_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One step on every kind of device.

    Args:
        target: what the user calls it. name: of the step's function.
        fits: in the order of the profiles asked for; those found before an interruption or an error.
        error: why it could not be planned; empty where it could.
    """

    target: str
    name: str = ""
    state: TrainingState | None = None
    fits: tuple[Fit, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Several steps on several kinds of devices.

    Args:
        interrupted: by the user: what was found until then is here, and nothing else.
    """

    compared: tuple[Compared, ...]
    max_devices: int
    interrupted: bool = False

    @property
    def failed(self) -> bool:
        """Whether a step could not be planned."""
        return any(one.error for one in self.compared)


def profiles_of(names: Sequence[str]) -> tuple[HardwareProfile, ...]:
    """Hardware profiles by name or path, each once.

    Raises:
        HardwareError: a name or file that is none, or nothing to compare.
    """
    wanted = list(dict.fromkeys(name.strip() for name in names if name.strip()))
    if not wanted:
        raise HardwareError(
            f"there is no hardware to compare: name profiles, with commas between, of {', '.join(known_names())}"
        )
    return tuple(load(name) for name in wanted)


def compare(
    targets: Mapping[str, Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]],
    profiles: Sequence[HardwareProfile],
    *,
    max_devices: int = MAX_DEVICES,
    progress: Progress | None = None,
    **options: Any,
) -> Comparison:
    """Every step on every kind of device. One that cannot be planned does not stop the others.

    Args:
        targets: by name, what makes a step and its arguments; each is traced once.
        options: of `fits`.
    """
    compared: list[Compared] = []
    for done, (target, make) in enumerate(targets.items()):
        now = Compared(target=target)

        def report(stage: str, fraction: float, target: str = target, done: int = done) -> None:
            if progress is not None:
                progress(f"{target}, {stage}", (done + fraction) / len(targets))

        try:
            if progress is not None:
                progress(f"trace {target}", done / len(targets))
            step, args = make()
            program = program_of(step, args, carry=None, donate=None)
            now = replace(now, name=program.signature.name, state=state_of(program))
            for fit in fits(program, profiles, max_devices=max_devices, progress=report, **options):
                now = replace(now, fits=tuple(sorted((*now.fits, fit), key=lambda one: profiles.index(one.profile))))
        except AutoparError as error:
            now = replace(now, error=str(error))
        except KeyboardInterrupt:
            return Comparison(compared=(*compared, now), max_devices=max_devices, interrupted=True)
        compared.append(now)
    return Comparison(compared=tuple(compared), max_devices=max_devices)
