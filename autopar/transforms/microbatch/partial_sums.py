"""Move additions of partial sums into the loop over microbatches or out of it, to keep few accumulators.

In: the placement of a step's units and the kinds of its values. Out: both changed in place.
"""

from __future__ import annotations

from collections import Counter

from autopar.rules.table import traits_of
from autopar.transforms.microbatch.units import Placement, Unit
from autopar.transforms.microbatch.value_kinds import ValueKinds


def add_inside(placed: Placement, kinds: ValueKinds) -> None:
    """Move an addition of partial sums into the loop if nothing else reads these: the loop then has one accumulator
    instead of two."""
    num_users = Counter(value for unit in placed.units for value in unit.operands)
    num_users.update(output for output in kinds.graph.outputs if output is not None)

    def chain(value: int) -> list[int] | None:
        """Units between a partial sum and a value, if each result on the way has one user."""
        found: list[int] = []
        while kinds.made.get(value) != "sum" or value in kinds.own:
            i = placed.producers.get(value)
            if i is None or i not in placed.after - placed.inside or num_users[value] != 1:
                return None
            unit = placed.units[i]
            equation = kinds.trace.equations[unit.start]
            if unit.region is not None or not traits_of(equation.primitive).one_to_one or len(unit.operands) != 1:
                return None
            found.append(i)
            value = unit.operands[0]
        return found if num_users[value] == 1 else None

    for i in sorted(placed.after):
        unit = placed.units[i]
        node, traits = kinds.graph.nodes[unit.start], traits_of(kinds.graph.nodes[unit.start].primitive)
        if unit.region is not None or i not in placed.after or i in placed.inside:
            continue
        adds = traits.elementwise and traits.linear == "all" and len(set(unit.operands)) == 2
        chains = [chain(v) for v in unit.operands] if adds else [None]
        if any(one is None for one in chains) or node.effect or _meets_layers(unit, placed, kinds):
            continue
        for j in [i, *(j for one in chains for j in one or ())]:
            placed.move_inside(j)
            kinds.made.update(dict.fromkeys(placed.units[j].results, "sum"))


def add_between_layers_after(placed: Placement, kinds: ValueKinds) -> None:
    """Move additions of two layers' terms, and additions that read them, after the loop if the step is cut into
    layers: one total passes between layers instead of a term per microbatch."""
    users: dict[int, list[int]] = {}
    for i in sorted(placed.inside):
        for value in placed.units[i].operands:
            users.setdefault(value, []).append(i)
    for i in sorted(placed.inside):
        unit = placed.units[i]
        if i not in placed.inside or not _only_adds(unit, kinds) or not _meets_layers(unit, placed, kinds):
            continue
        moved = [i]
        for j in moved:
            moved += [user for v in placed.units[j].results for user in users.get(v, ()) if user not in moved]
        if all(_only_adds(placed.units[j], kinds) for j in moved):
            placed.inside.difference_update(moved)
            placed.after.update(moved)
            for j in moved:
                for value in placed.units[j].results:
                    kinds.made.pop(value, None)


def _only_adds(unit: Unit, kinds: ValueKinds) -> bool:
    """Whether a unit only computes partial sums from partial sums."""
    is_sum = all(kinds.made.get(v) == "sum" for v in unit.results)
    return is_sum and unit.region is None and not kinds.has_batch(unit)


def _meets_layers(unit: Unit, placed: Placement, kinds: ValueKinds) -> bool:
    """Whether a unit reads partial sums that two layers make."""
    producers = (placed.units[placed.producers[v]] for v in unit.operands if kinds.made.get(v) == "sum")
    return len({kinds.trace.equations[producer.start].layer for producer in producers}) > 1
