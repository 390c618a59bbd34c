"""Search for the few sharding changes that recover most of the time lost to an unconstrained plan.

In: a program's inputs with the user's shardings (pins), and a function that prices a set of pins. Out: groups of inputs
to change together, and the `Repin`s to apply. The module sees shardings and prices only; the caller does the planning.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from autopar.diagnosis.unintended_collectives import without_numbers
from autopar.ir.sharding import TensorSharding
from autopar.plans.records import Role, TensorPlan

#: Input position -> the sharding that it is pinned to.
Pins = Mapping[int, TensorSharding]

#: A change that recovers less than this fraction of the difference is not worth making alone.
LEAST_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Priced:
    """The plan of a set of pins: its step time (`inf` where it does not fit), and the sharding of every input."""

    step_time_s: float
    shardings: tuple[TensorSharding, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """Inputs that change together: a module's parameters in every layer with their optimizer state, or a whole batch.

    Args:
        name: e.g. `state/params/h/*/attn/c_attn`.
        members: positions of the inputs.
    """

    name: str
    members: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Repin:
    """One change of shardings.

    Args:
        groups: the changed groups; more than one only where no single group helps.
        to: position of each changed input -> its new sharding.
        step_time_s: predicted step time after this and all earlier changes.
    """

    groups: tuple[Group, ...]
    to: Pins
    step_time_s: float


def groups_of(tensors: Sequence[TensorPlan]) -> tuple[Group, ...]:
    """Partition the inputs into groups."""
    parameters = [n for n, tensor in enumerate(tensors) if tensor.role == "parameter"]
    owners = _owners(tensors, parameters)
    modules: dict[str, list[int]] = defaultdict(list)
    batches: dict[tuple[str, int], list[int]] = defaultdict(list)
    alone: dict[tuple[Role, str], list[int]] = defaultdict(list)
    for n, tensor in enumerate(tensors):
        if n in owners:
            modules[tensors[owners[n]].path.rpartition("/")[0]].append(n)
        elif tensor.role == "data" and tensor.shape:
            batches[tensor.path.split("/")[0], tensor.shape[0]].append(n)
        else:
            alone[tensor.role, without_numbers(tensor.path)].append(n)
    by_key: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for module, members in modules.items():  # layers of one module: the same tensors under another number
        own = tuple((tensors[n].path.rpartition("/")[2], tensors[n].shape) for n in members if owners[n] == n)
        by_key[without_numbers(module), own] += members
    found = [Group(str(key[0]), tuple(members)) for key, members in by_key.items()]
    found += [Group(_common(tensors, members), tuple(members)) for members in batches.values()]
    found += [Group(path, tuple(members)) for (_, path), members in alone.items()]
    return tuple(found)


def _owners(tensors: Sequence[TensorPlan], parameters: Sequence[int]) -> dict[int, int]:
    """Map parameters to themselves, and optimizer state to the parameter with the longest common path suffix."""
    by_ending: dict[tuple[tuple[str, ...], tuple[int, ...]], int] = {}
    for n in parameters:
        parts = tensors[n].path.split("/")
        for start in range(1, len(parts)):
            by_ending.setdefault((tuple(parts[start:]), tensors[n].shape), n)
    owners = {n: n for n in parameters}
    for n, tensor in enumerate(tensors):
        if tensor.role != "optimizer":
            continue
        parts = tensor.path.split("/")
        endings = ((tuple(parts[start:]), tensor.shape) for start in range(1, len(parts)))
        owner = next((by_ending[ending] for ending in endings if ending in by_ending), None)
        if owner is not None:
            owners[n] = owner
    return owners


def _common(tensors: Sequence[TensorPlan], members: Collection[int]) -> str:
    paths = [without_numbers(tensors[n].path) for n in members]
    return paths[0] if len(set(paths)) == 1 else os.path.commonpath(paths)


def search(
    own: Pins,
    groups: Sequence[Group],
    price: Callable[[Pins], Priced],
    first_s: float,
    to_recover_s: float,
    tensors: Sequence[TensorPlan],
    trying: Callable[[int], None] = lambda number: None,
) -> tuple[Repin, ...]:
    """Greedily change the group that saves most time until enough time is recovered.

    To price a group, unpin it: the planner then chooses its best shardings, with all other pins in place. The sharding
    that most layers get becomes the change. Where no single group helps, change all remaining groups together, except
    those that are not needed for the same gain.

    Args:
        own: the user's pins.
        price: the planner, as a function of pins.
        first_s: step time with the user's pins.
        to_recover_s: seconds to recover.
        trying: progress callback with the number of each plan.
    """
    return _Search(price, tensors, trying).run(dict(own), list(groups), first_s, to_recover_s)


@dataclass
class _Search:
    """The state of a search: it counts the plans."""

    solve: Callable[[Pins], Priced]
    tensors: Sequence[TensorPlan]
    trying: Callable[[int], None]
    tried: int = 0

    def run(self, pins: dict[int, TensorSharding], left: list[Group], first: float, enough: float) -> tuple[Repin, ...]:
        now = first
        found: list[Repin] = []
        while left and first - now < enough:
            free = {group.name: self.freed(pins, [group]) for group in left}
            best = min(left, key=lambda group: free[group.name].step_time_s)
            if now - free[best.name].step_time_s < LEAST_SHARE * enough:
                one = self.several(pins, left, now, enough - (first - now))
                return (*found, one) if one is not None else tuple(found)
            left.remove(best)
            one = self.repinned(pins, [best], free[best.name], now)
            if one is not None:
                pins, now = pins | dict(one.to), one.step_time_s
                found.append(one)
        return tuple(found)

    def several(self, pins: Pins, left: Sequence[Group], now: float, enough: float) -> Repin | None:
        """Change all remaining groups that are needed for the gain; None where even all of them gain too little."""
        gained = now - self.freed(pins, left).step_time_s
        if gained < LEAST_SHARE * enough:
            return None
        enough, needed = min(enough, gained), list(left)
        spared = {group.name: self.freed(pins, [one for one in left if one is not group]) for group in left}
        for group in sorted(left, key=lambda group: spared[group.name].step_time_s):
            fewer = [one for one in needed if one is not group]
            if fewer and now - self.freed(pins, fewer).step_time_s >= enough:
                needed = fewer
        return self.repinned(pins, needed, self.freed(pins, needed), now)

    def repinned(self, pins: Pins, groups: Sequence[Group], free: Priced, now: float) -> Repin | None:
        """Pin groups to shardings of the free plan: the same in all layers, or if that gains nothing, each its own."""
        members = [n for group in groups for n in group.members]
        for to in (
            _same_in_every_layer(members, pins, free.shardings, self.tensors),
            _changed(members, pins, free.shardings),
        ):
            after = self.price({**pins, **to}).step_time_s
            if to and after < now:
                return Repin(tuple(groups), to, after)
        return None

    def freed(self, pins: Pins, groups: Sequence[Group]) -> Priced:
        members = {n for group in groups for n in group.members}
        return self.price({n: sharding for n, sharding in pins.items() if n not in members})

    def price(self, pins: Pins) -> Priced:
        self.tried += 1
        self.trying(self.tried)
        return self.solve(pins)


def _same_in_every_layer(
    members: Sequence[int], pins: Pins, shardings: Sequence[TensorSharding], tensors: Sequence[TensorPlan]
) -> Pins:
    """The changed pins, with the most frequent sharding of each tensor in all layers."""
    families: dict[tuple[str, tuple[int, ...]], list[int]] = defaultdict(list)
    for n in members:
        families[without_numbers(tensors[n].path), tensors[n].shape].append(n)
    to: dict[int, TensorSharding] = {}
    for family in families.values():
        ((sharding, _),) = Counter(shardings[n] for n in family).most_common(1)
        to |= {n: sharding for n in family if pins.get(n) != sharding}
    return to


def _changed(members: Sequence[int], pins: Pins, shardings: Sequence[TensorSharding]) -> Pins:
    return {n: shardings[n] for n in members if pins.get(n) != shardings[n]}
