"""Constrain the values of a replayed trace to the plan's shardings.

In: a `Plan`, a `Trace`, a mesh, and the values computed so far (`Scope`). Out: `PlannedShardings`: values resharded as their users
want them. A value that several users want in the same sharding gets one constraint.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from autopar.frontend.equations import Equation, LiteralOperand
from autopar.frontend.trace import Trace
from autopar.ir.sharding import TensorSharding
from autopar.jax_interop import compat as jax_compat
from autopar.jax_interop.partition_spec import partition_spec
from autopar.plans.plan import Plan
from autopar.plans.records import UnfusedReduction
from autopar.rules.table import traits_of
from autopar.runtime.registered_collectives import RegisteredResharding, steps_of
from autopar.transforms.split_dims.undo import seen_whole

Path = tuple[TensorSharding, ...]
Steps = tuple[TensorSharding | RegisteredResharding, ...]


@dataclass(slots=True)
class Scope:
    """The known values inside one loop body, branch or the step, and their resharded versions."""

    values: dict[int, Any]
    resharded: dict[int, dict[Steps, Any]] = field(default_factory=lambda: defaultdict(dict))
    forgets: bool = True  # drop values after their last use
    #: For each separate reduction: its inputs in memory behind a barrier, and the values computed from them.
    behind: dict[UnfusedReduction, dict[Any, Any]] = field(default_factory=lambda: defaultdict(dict))

    def inner(self) -> Scope:
        """A nested scope with all values of this one; values traced in it stay in it."""
        known = defaultdict(dict, {v: dict(known) for v, known in self.resharded.items()})
        return Scope(dict(self.values), known, self.forgets)


class PlannedShardings:
    """The shardings of a step's values, by definition and by operand.

    Attributes:
        at_definition: value -> shardings that it goes through where it is defined.
        at_operand: (equation, operand) -> shardings that the value goes through for this operand.
        scattered: value with a deferred wait -> the sharding that all users want.
    """

    def __init__(self, plan: Plan, trace: Trace, mesh: Mesh | AbstractMesh) -> None:
        self.plan, self.trace, self.mesh = plan, trace, mesh
        self.at_definition: dict[int, Path] = {}
        self.at_operand: dict[tuple[int, int], Steps] = {}
        for constraint in plan.constraints:
            if constraint.node is None or constraint.operand is None:
                self.at_definition[constraint.value] = constraint.shardings
            else:
                self.at_operand[constraint.node, constraint.operand] = steps_of(constraint)
        self.barriers = {constraint.value for constraint in plan.constraints if constraint.barrier}
        self.scattered = _scattered_as_read(plan)

    def constrain_swapped_results(self, kept: Set[int]) -> None:
        """Constrain the transpose of a matmul's result instead of the result, where it alone reads the result and swaps the
        free dims of both operands, as in the gradient of a weight. Then XLA swaps the operands of the matmul. A constraint
        between the two keeps it from that, and it copies a transposed operand.

        Args:
            kept: equations whose results keep their constraints.
        """
        waited = {value for one in self.plan.early_reductions for value in one.values}
        remain = {*waited, *self.barriers, *(value for value in self.trace.outputs if isinstance(value, int))}
        for value in [value for value in self.at_definition if value not in remain]:
            made, users = self.trace.producers.get(value), self.trace.users.get(value, [])
            if made is None or len(users) != 1 or not kept.isdisjoint((made, *users)):
                continue
            permutation, read = _swap(self.trace, made, users[0]), (users[0], 0)
            steps = (*self.at_definition[value], *self.at_operand.get(read, ()))
            shardings = [step for step in steps if isinstance(step, TensorSharding)]
            if permutation is None or len(shardings) < len(steps):
                continue
            del self.at_definition[value]
            self.at_operand.pop(read, None)
            path = tuple(TensorSharding(tuple(one.dims[d] for d in permutation)) for one in shardings)
            (swapped,) = self.trace.equations[users[0]].results
            then = self.at_definition.get(swapped, ())
            self.at_definition[swapped] = (*path, *(then[1:] if then[:1] == path[-1:] else then))

    def traced_operand(self, scope: Scope, node: int, index: int, atom: int | LiteralOperand) -> Any:
        """An operand in its traced shape; the value may have another shape if a dim is seen as two."""
        value = self.operand(scope, node, index, atom)
        if isinstance(atom, LiteralOperand) or value.shape == self.trace.avals[atom].shape:
            return value
        return jax.lax.reshape(value, self.trace.avals[atom].shape)

    def operand(self, scope: Scope, node: int, index: int, atom: int | LiteralOperand) -> Any:
        """An operand with its planned sharding."""
        if isinstance(atom, LiteralOperand):
            return atom.value
        return self.resharded(scope, atom, self.at_operand.get((node, index), ()))

    def resharded(self, scope: Scope, atom: int, path: Steps) -> Any:
        """A value taken through the shardings of a path."""
        value = scope.values[atom]
        known = scope.resharded[atom]
        for length in range(1, len(path) + 1):  # one constraint per value and target, shared by all users
            prefix = path[:length]
            if prefix not in known:
                known[prefix] = self._constrain(atom, value, prefix[-1:])
            value = known[prefix]
        return value

    def define(self, scope: Scope, equation: Equation, values: Sequence[Any]) -> None:
        """Record the results of an equation with the shardings of their definition."""
        for position, value in zip(equation.results, values, strict=True):
            scope.values[position] = self.defined(position, value, self.at_definition.get(position, ()))

    def defined(self, position: int, value: Any, path: Path) -> Any:
        """A value taken through the shardings of its definition, behind a barrier if the plan has one."""
        value = self._constrain(position, value, path)
        return jax.lax.optimization_barrier(value) if position in self.barriers else value

    def _constrain(self, position: int, value: Any, steps: Steps) -> Any:
        shape = self.trace.avals[position].shape if steps else ()
        for sharding in steps:
            if isinstance(sharding, RegisteredResharding):
                value = sharding.run(value if value.shape == shape else jax.lax.reshape(value, shape), self.mesh)
                continue
            whole = sharding if value.shape == shape else seen_whole(sharding, shape, value.shape)
            value = jax.lax.with_sharding_constraint(value, NamedSharding(self.mesh, partition_spec(whole)))
        return value

    def as_carried(self, n: int, value: Any) -> Any:
        """A value with the traced dtype, even if it is a literal, and with its planned sharding in the loop."""
        equation = self.trace.equations[n]
        if not equation.results:
            return value
        value = jax_compat.as_typed(value, self.trace.avals[equation.results[0]])
        if equation.stacks:  # the stack of all iterations has another rank
            return value
        (position,) = equation.results
        return self._constrain(position, value, self.at_definition.get(position, ())[-1:])


def _swap(trace: Trace, matmul: int, transpose: int) -> tuple[int, ...] | None:
    """The permutation of a transpose that swaps the free dims of a matmul's operands; None if these are no such operations."""
    one, other = trace.equations[matmul], trace.equations[transpose]
    first = one.operands[0] if one.primitive == "dot_general" and traits_of(other.primitive).permutes else None
    if not isinstance(first, int):
        return None
    (contracted, _), (batch, _) = one.source.params["dimension_numbers"]
    num_first, num_dims = len(trace.avals[first].shape) - len(contracted), len(trace.avals[one.results[0]].shape)
    swapped = (*range(num_first, num_dims), *range(num_first))
    return swapped if not batch and tuple(other.source.params["permutation"]) == swapped else None


def _scattered_as_read(plan: Plan) -> dict[int, Path]:
    """For values that a barrier waits for: the sharding that all users need, if it has more axes than the one at the
    definition. XLA then makes one reduce-scatter."""
    early_reductions = {value for one in plan.early_reductions for value in one.values}
    made, wanted = dict[int, set[str]](), defaultdict[int, set[TensorSharding]](set)
    for constraint in plan.constraints:
        if constraint.value not in early_reductions:
            continue
        if constraint.node is None:
            made[constraint.value] = _axes(constraint.shardings[-1])
        else:
            wanted[constraint.value].add(constraint.shardings[0])
    paths = {value: tuple(one) for value, one in wanted.items() if len(one) == 1}
    return {value: path for value, path in paths.items() if value in made and made[value] < _axes(path[0])}


def _axes(sharding: TensorSharding) -> set[str]:
    return {axis for axes in sharding.dims for axis in axes}
