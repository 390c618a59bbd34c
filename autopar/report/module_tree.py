"""Build the module tree of a model with the plan's tensors; layers with the same shardings are folded into one.

In: a plan. Out: `Module`. A parameter belongs to the module in its path of the arguments, an activation to the module
that produced it; the two kinds of path are aligned by the names that they share. Activations of a module without
parameters belong to the enclosing module, activations outside any module to the root.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from autopar.plans.plan import Plan
from autopar.report.rows import TensorRow, merge_tensors, of_activation, of_input
from autopar.system.name_patterns import collapse

#: The path of a module below the model's root, in parts.
Place: TypeAlias = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModuleTensor:
    """A tensor of a module, or of several identical modules.

    Args:
        place: its path below the model's root, with the patterns of the row's path. The path of an input ends in its
            own name.
    """

    row: TensorRow
    place: Place


@dataclass(frozen=True, slots=True)
class Module:
    """A module, or several identical ones.

    Args:
        name: the module's name; a pattern for several; "" for the root.
        members: the names of the modules.
        depth: the number of leading parts of a tensor's place that name the module.
        local_bytes: the bytes of parameters and their optimizer state on one device, of all members together.
    """

    name: str
    members: tuple[str, ...]
    depth: int
    tensors: tuple[ModuleTensor, ...]
    modules: tuple[Module, ...]
    local_bytes: float

    @property
    def count(self) -> int:
        return len(self.members)


@dataclass(frozen=True, slots=True)
class ModuleTree:
    """The model of a plan.

    Args:
        parameters_under: the common prefix of the parameters' paths, which the tree leaves out.
        activations_under: the common prefix of the activations' paths, which the tree leaves out.
        arguments: inputs that belong to no module: data, counters, keys.
    """

    root: Module
    parameters_under: str
    activations_under: str
    arguments: tuple[TensorRow, ...]


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor, its module, and its place."""

    module: Place
    place: Place
    row: TensorRow


def module_tree(plan: Plan) -> ModuleTree:
    """Build the tree of a plan's tensors."""
    decisions = {one.path: one for one in plan.decisions if one.kind != "activation"}
    inputs = [of_input(plan, tensor, decisions.get(tensor.path)) for tensor in plan.inputs]
    activations = [of_activation(plan, one) for one in plan.decisions if one.kind == "activation"]
    paths = [_parts(row.path) for row in inputs if row.kind == "parameter"]
    above, skip_activation = _aligned(paths, [_parts(row.path) for row in activations])
    known = {path[len(above) :] for path in paths if path[: len(above)] == above}
    entries: list[_Entry] = []
    arguments: list[TensorRow] = []
    for row in inputs:
        path = _parts(row.path)
        skipped = len(above) if row.kind == "parameter" and path[: len(above)] == above else None
        if row.kind == "optimizer":
            skipped = next((n for n in range(len(path)) if path[n:] in known), None)
        if skipped is None:
            arguments.append(row)
        else:
            entries.append(_Entry(path[skipped:-1], path[skipped:], row))
    modules = {place[:n] for place in known for n in range(len(place))}
    for row in activations:
        place = _parts(row.path)[skip_activation:]
        entries.append(
            _Entry(next(place[:n] for n in range(len(place), -1, -1) if place[:n] in modules or not n), place, row)
        )
    fronts = {_parts(row.path)[:skip_activation] for row in activations if row.path}
    return ModuleTree(
        root=_module("", ("",), entries, 0, _forward_order(plan, skip_activation)),
        parameters_under="/".join(above),
        activations_under="/".join(fronts.pop()) if len(fronts) == 1 else "",
        arguments=merge_tensors(arguments),
    )


def _parts(path: str) -> Place:
    return tuple(path.split("/")) if path else ()


def _aligned(parameters: Sequence[Place], activations: Sequence[Place]) -> tuple[Place, int]:
    """The prefix to leave out of parameters' paths, and the number of leading parts to leave out of activations' paths,
    so that as many activations as possible are in modules with parameters. If no activation is, the prefix that all
    parameters share."""
    if not parameters:
        return (), 0
    front = Counter(path[:1] for path in parameters).most_common(1)[0][0]
    modules = [path[:-1] for path in parameters if path[:1] == front]
    shared = tuple(_common_prefix(modules))
    named = Counter(path for path in activations if path)
    most_matched, best = 0, (shared, 0)
    for skip in range(len(shared) + 1):
        inside = {module[skip:n] for module in modules for n in range(skip + 1, len(module) + 1)}
        for skip_activation in range(4):
            num_matched = sum(
                count
                for path, count in named.items()
                if any(path[skip_activation:n] in inside for n in range(len(path) + 1))
            )
            if num_matched > most_matched:
                most_matched, best = num_matched, (shared[:skip], skip_activation)
    return best


def _common_prefix(places: Sequence[Place]) -> Iterable[str]:
    """The leading parts that all places share."""
    for parts in zip(*places, strict=False):
        if len(set(parts)) > 1:
            return
        yield parts[0]


def _forward_order(plan: Plan, skipped: int) -> Mapping[Place, int]:
    """The order in which modules first run in the forward pass, as far as the plan has it."""
    order: dict[Place, int] = {}
    for phase, path in plan.trace.places if plan.trace else ():
        place = _parts(path)[skipped:]
        if phase == "forward":
            for n in range(1, len(place) + 1):
                order.setdefault(place[:n], len(order))
    return order


def _module(
    name: str, members: tuple[str, ...], entries: Sequence[_Entry], depth: int, order: Mapping[Place, int]
) -> Module:
    """Build a module from the entries below it.

    Args:
        depth: the number of leading parts of a place that name the module.
    """
    own = [entry for entry in entries if len(entry.module) <= depth]
    below: dict[str, list[_Entry]] = defaultdict(list)
    for entry in entries:
        if len(entry.module) > depth:
            below[entry.module[depth]].append(entry)
    names = sorted(below, key=lambda child: (_first_run(below[child], depth, order), _natural(child)))
    inputs = [entry for entry in entries if entry.row.kind in ("parameter", "optimizer")]
    return Module(
        name=name,
        members=members,
        depth=depth,
        tensors=tuple(_tensors(own)),
        modules=tuple(
            _module(pattern, same, [entry for child in same for entry in below[child]], depth + 1, order)
            for pattern, same in _folded(names, below, depth)
        ),
        local_bytes=sum(entry.row.local_bytes for entry in inputs),
    )


def _tensors(entries: Sequence[_Entry]) -> Iterable[ModuleTensor]:
    """Merge identical tensors, such as those of folded modules, into one row."""
    by_skipped: dict[tuple[str, int], list[TensorRow]] = defaultdict(list)
    for entry in entries:
        by_skipped[entry.row.kind, len(_parts(entry.row.path)) - len(entry.place)].append(entry.row)
    for (kind, skipped), rows in by_skipped.items():
        merged = merge_tensors(rows)
        for row in sorted(merged, key=lambda row: -row.num_bytes) if kind == "activation" else merged:
            yield ModuleTensor(row, _parts(row.path)[skipped:])


def _folded(
    names: Sequence[str], below: Mapping[str, Sequence[_Entry]], depth: int
) -> Iterable[tuple[str, tuple[str, ...]]]:
    """Fold modules into patterns: those whose names differ only in numbers and whose inputs have equal shardings."""
    same: dict[tuple[str, object], list[str]] = defaultdict(list)
    for name in names:
        same[re.sub(r"\d+", "\0", name), _signature(below[name], depth)].append(name)
    for group in same.values():
        for pattern, positions in collapse(group):
            yield pattern, tuple(group[position] for position in positions)


def _signature(entries: Sequence[_Entry], depth: int) -> object:
    rows = (entry for entry in entries if entry.row.kind in ("parameter", "optimizer"))
    return frozenset(
        Counter(
            (entry.place[depth + 1 :], entry.row.kind, entry.row.shape, entry.row.dtype, entry.row.sharding)
            for entry in rows
        ).items()
    )


def _first_run(entries: Sequence[_Entry], depth: int, order: Mapping[Place, int]) -> float:
    return order.get(entries[0].module[: depth + 1], math.inf)


def _natural(name: str) -> tuple[tuple[int, str], ...]:
    """A sort key that puts `h_2` before `h_10`."""
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name) if part)
