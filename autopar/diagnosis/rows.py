"""The rows of a diagnosis's changes: tensors and values that differ only in the number of their layer are one.

In: what a search for changes found, and a plan. Out: `TensorChange`s and `Place`s.
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
    """Inputs that differ only in the numbers of their path, split otherwise; with the outputs that renew them.

    Args:
        before: None where the program says nothing.
    """

    path: str
    count: int
    shape: tuple[int, ...]
    role: str
    before: str | None
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A value inside the step, in every layer, at a place where XLA sent what nobody meant; and how to split it."""

    path: str
    primitive: str
    phase: str
    source: str
    shape: tuple[int, ...]
    sharding: str
    count: int


def tensor_changes(to: Pins, was: Pins, inputs: Sequence[TensorPlan]) -> tuple[TensorChange, ...]:
    """Rows of the inputs that change, in the order of the first of each."""
    alike: dict[tuple[str, str | None, str], list[int]] = defaultdict(list)
    for n, sharding in sorted(to.items()):
        tensor = inputs[n]
        alike[
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
        for (_, before, after), members in alike.items()
        for pattern, positions in collapse([inputs[n].path for n in members])
    )


def places(plan: Plan, origins: Collection[tuple[str, str]]) -> tuple[Place, ...]:
    """The values inside that a plan decides at some places, in the order of the program.

    Args:
        origins: modules, with the numbers of layers as stars, and primitives.
    """
    alike: dict[tuple[str, str, str, str], list[Decision]] = defaultdict(list)
    for one in plan.decisions:
        if one.kind == "activation" and (without_numbers(one.path), one.primitive) in origins:
            alike[f"{without_numbers(one.path)} {one.shape}", one.primitive, one.phase, str(one.sharding)].append(one)
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
        for members in alike.values()
    )
