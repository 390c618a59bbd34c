"""Describe which devices run which models.

In: groups of devices, each with a layout and the models that have a replica there. Out: `Placement`, checked against memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autopar.errors import PlacementError
from autopar.placement.layouts import Layout, StepTimes
from autopar.system.units import human_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """The latency bounds of a model. A request that meets all of them counts for the goodput.

    Args:
        latency_s: from arrival to the last token. ttft_s: to the first token. tpot_s: the mean per further token.

    Raises:
        PlacementError: a bound is not positive, or all are infinite.
    """

    latency_s: float = math.inf
    ttft_s: float = math.inf
    tpot_s: float = math.inf

    def __post_init__(self) -> None:
        bounds = (self.latency_s, self.ttft_s, self.tpot_s)
        if not all(bound > 0 for bound in bounds) or all(map(math.isinf, bounds)):
            raise PlacementError(
                f"the latency bounds are latency_s={self.latency_s}, ttft_s={self.ttft_s}, tpot_s={self.tpot_s}: give at least"
                " one, all positive"
            )

    def is_met(self, ttft_s: float, latency_s: float, output: int) -> bool:
        """Whether a request meets the bounds.

        Args:
            output: its number of tokens.
        """
        tpot_s = (latency_s - ttft_s) / max(1, output - 1)
        return ttft_s <= self.ttft_s and latency_s <= self.latency_s and tpot_s <= self.tpot_s

    def deadline_s(self, output: int) -> float:
        """The seconds after which a request that has not ended cannot meet the bounds."""
        return min(self.latency_s, self.ttft_s + self.tpot_s * (output - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model to place.

    Args:
        name: the name in traces. slo: its latency bounds.
        times: its times on each layout that it may run on.

    Raises:
        PlacementError: the name is empty, or cannot be printed.
    """

    name: str
    slo: Slo
    times: Mapping[Layout, StepTimes] = field(repr=False)

    def __post_init__(self) -> None:
        check_name(self.name)


def check_name(name: str) -> None:
    """Refuse the name of a model that tables, pictures and files cannot show.

    Raises:
        PlacementError: it is empty, or has control characters.
    """
    if not name.strip() or not name.isprintable():
        raise PlacementError(f"{name!r} cannot be the name of a model: give one that can be printed, in one line")


@dataclass(frozen=True, slots=True, order=True)
class Group:
    """Devices that run the same models.

    Args:
        layout: how they run each of them. models: the names, sorted.
    """

    layout: Layout
    models: tuple[str, ...]

    def with_model(self, name: str) -> Group:
        """This group with one more model."""
        return Group(self.layout, tuple(sorted({*self.models, name})))

    def without_model(self, name: str) -> Group:
        """This group with one model less."""
        return Group(self.layout, tuple(each for each in self.models if each != name))


@dataclass(frozen=True, slots=True)
class Placement:
    """Groups of devices, in order: the first group has the first devices.

    Placements that differ in the order of groups alone are equal in all but the devices; `canonical` sorts the groups.
    """

    groups: tuple[Group, ...]

    @property
    def num_devices(self) -> int:
        """The number of devices of groups that run a model."""
        return sum(group.layout.num_devices for group in self.groups if group.models)

    def canonical(self) -> Placement:
        """The groups that run a model, largest first."""
        used = [group for group in self.groups if group.models]
        return Placement(tuple(sorted(used, key=lambda group: (-group.layout.num_devices, group))))

    def groups_of(self, model: str) -> list[int]:
        """The numbers of the groups with a replica of a model."""
        return [number for number, group in enumerate(self.groups) if model in group.models]


def least_bytes(group: Group, models: Mapping[str, ModelSpec]) -> float:
    """The bytes on one device of a group's weights, of a cache for one sequence of each model, and of temporaries.

    Programs of several models run one after the other, so the largest temporaries count.
    """
    own = [models[name].times[group.layout] for name in group.models]
    return sum(each.least_bytes() for each in own) + max((each.temporary_bytes for each in own), default=0.0)


def fits(group: Group, models: Mapping[str, ModelSpec], budget_bytes: float) -> bool:
    """Whether each model of a group may run on its layout, with a cache for one sequence of each.

    Args:
        budget_bytes: the memory of one device.
    """
    if any(group.layout not in models[name].times for name in group.models):
        return False
    return least_bytes(group, models) <= budget_bytes


def check(placement: Placement, models: Mapping[str, ModelSpec], budget_bytes: float) -> None:
    """Refuse a placement that cannot run.

    Raises:
        PlacementError: a model is unknown, cannot run on a group's layout, or does not fit.
    """
    for number, group in enumerate(placement.groups):
        for name in group.models:
            if name not in models:
                raise PlacementError(f"group {number} has a model {name!r}: the models are {', '.join(models)}")
            if group.layout not in models[name].times:
                raise PlacementError(
                    f"group {number} runs {name!r} on {group.layout.describe()}, for which it has no times: it has"
                    f" {', '.join(layout.describe() for layout in models[name].times)}"
                )
        if not fits(group, models, budget_bytes):
            raise PlacementError(
                f"group {number} needs {human_bytes(least_bytes(group, models))} per device for {', '.join(group.models)} and a cache for one"
                f" sequence of each, but a device has {human_bytes(budget_bytes)}: take models off it, or make it larger"
            )


def by_name(models: Sequence[ModelSpec]) -> dict[str, ModelSpec]:
    """The models by their names.

    Raises:
        PlacementError: there is no model, or a name occurs twice.
    """
    names = [model.name for model in models]
    if not names or len(set(names)) < len(names):
        raise PlacementError(f"the models are {names}: give at least one, each with its own name")
    return {model.name: model for model in models}
