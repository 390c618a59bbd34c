"""Summarize the changes of a diagnosis as rows, with one row for equal tensors or values of all layers.

In: the changes that the search found, a plan. Out: `TensorChange`s and `Place`s.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from autopar.diagnosis.sharding_changes import Pins
from autopar.diagnosis.unintended_collectives import without_numbers
from autopar.plans.plan import Plan
from autopar.plans.records import Decision, TensorPlan
from autopar.system.name_patterns import collapse


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorChange:
    """A new sharding for inputs that differ only in the layer number, and for the outputs that update them.

    Args:
        before: previous sharding; None where the program gives none.
    """

    path: str
    count: int
    shape: tuple[int, ...]
    role: str
    before: str | None
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """An intermediate value at an unintended collective, in every layer; and the sharding to constrain it to."""

    path: str
    primitive: str
    phase: str
    source: str
    shape: tuple[int, ...]
    sharding: str
    count: int


def tensor_changes(to: Pins, was: Pins, inputs: Sequence[TensorPlan]) -> tuple[TensorChange, ...]:
    """Rows of the changed inputs, in input order."""
    by_key: dict[tuple[str, str | None, str], list[int]] = defaultdict(list)
    for n, sharding in sorted(to.items()):
        tensor = inputs[n]
        by_key[
            f"{without_numbers(tensor.path)} {tensor.shape}", str(was[n]) if n in was else None, str(sharding)
        ].append(n)
    return tuple(
        TensorChange(
            path=pattern,
            count=len(positions),
            shape=inputs[members[0]].shape,
            role=inputs[members[0]].role,
            before=before,
            after=after,
        )
        for (_, before, after), members in by_key.items()
        for pattern, positions in collapse([inputs[n].path for n in members])
    )


def places(plan: Plan, origins: Collection[tuple[str, str]]) -> tuple[Place, ...]:
    """Rows of the intermediate values that a plan decides at given origins, in program order.

    Args:
        origins: pairs of a module, with `*` for layer numbers, and a primitive.
    """
    by_key: dict[tuple[str, str, str, str], list[Decision]] = defaultdict(list)
    for one in plan.decisions:
        if one.kind == "activation" and (without_numbers(one.path), one.primitive) in origins:
            by_key[f"{without_numbers(one.path)} {one.shape}", one.primitive, one.phase, str(one.sharding)].append(one)
    return tuple(
        Place(
            path=", ".join(pattern for pattern, _ in collapse(list(dict.fromkeys(one.path for one in members)))),
            primitive=members[0].primitive,
            phase=members[0].phase,
            source=members[0].source,
            shape=members[0].shape,
            sharding=str(members[0].sharding),
            count=len(members),
        )
        for members in by_key.values()
    )
