"""Define the planned step with every communication as an explicit operation.

In: built by `formulate.explicit` from a graph and an assignment. Out: `ExplicitProgram`: the graph's nodes and, between
them, every collective, slice, halo exchange and extension by a halo, over numbered arrays. A plan's report and the
program of one device (`xla_model`) derive from it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from autopar.ir.sharding import TensorSharding
from autopar.ir.sharding_changes import Change

#: The cause of a communication. `reshard`: a node reads a value in another sharding than its producer's. `halo`: a node
#: reads beyond its part of a value. `region`: a node runs as a manual region and combines the results of its parts.
#: `reduction`: a reduction to a few elements is resolved at its producer. `program`: the user's program communicates.
Cause = Literal["reshard", "halo", "region", "context", "reduction", "program"]


@dataclass(frozen=True, slots=True)
class Array:
    """A device's part of a value under a sharding; a partial sum along unreduced axes."""

    value: int
    sharding: TensorSharding


@dataclass(frozen=True, slots=True)
class Compute:
    """A node of the graph.

    Args:
        operands: arrays that it reads; None for a literal.
        cause: `rematerialization` where it computes a forward value again in the backward pass, else `program`.
        num_times: number of runs per step.
    """

    node: int
    operands: tuple[int | None, ...]
    cause: Literal["program", "rematerialization"] = "program"
    num_times: float = 1.0


@dataclass(frozen=True, slots=True)
class HaloSlice:
    """A halo slice: the elements of a value that a device receives from one neighbour along a dim.

    Nodes that read the same slice share it: XLA sends it once.

    Args:
        after: whether it comes from the next neighbour rather than the previous one.
        shape: shape of the slice.
    """

    value: int
    sharding: TensorSharding
    dim: int
    after: bool
    shape: tuple[int, ...]
    itemsize: float

    @property
    def kind(self) -> Change:
        """The collective that sends it."""
        return "collective-permute"

    @property
    def axes(self) -> tuple[str, ...]:
        return self.sharding.dims[self.dim]

    @property
    def num_bytes(self) -> float:
        return math.prod(self.shape) * self.itemsize


@dataclass(frozen=True, slots=True)
class Extend:
    """A kernel that extends one dim of a node's operand by its halo, and slices it to what the device reads.

    Args:
        slices: halo slices concatenated with the device's own part.
        window: the part that the device reads; operations with equal windows are one kernel.
        shape: shape that the device reads.
        num_times: number of runs per step.
    """

    node: int
    operand: int
    slices: tuple[HaloSlice, ...]
    window: Hashable
    shape: tuple[int, ...]
    itemsize: float
    num_times: float

    @property
    def num_bytes(self) -> float:
        """Bytes of the extended operand, which the device reads."""
        return math.prod(self.shape) * self.itemsize


@dataclass(frozen=True, slots=True)
class Communicate:
    """One collective, or a slice, of one array.

    Args:
        kind: change of sharding that it makes; a `cut` takes a slice and sends nothing.
        cause: reason for the communication.
        node: node that needs it; the number of nodes for an output of the step.
        operand: array that it sends; None for a communication of the user's program.
        result: array that it produces; None if only its node reads the result.
        axes: mesh axes that it runs over.
        num_bytes: payload, by the convention of `cost.collectives`.
        num_times: number of runs per step.
        combinable: whether XLA may merge it with others, because no operation waits for it alone.
        reduction: operator of a `reduction`: `sum`, `max`, ...
        is_inner: whether it gathers or scatters an inner dim (`resharding_paths.is_inner`).
        decisions: decisions of the formulation that cause it.
        flows: flows of the formulation that pass through a `reshard`.
        num_elements: number of elements of all tensors that a `region` combines.
        by: name of the registered collective that makes the change; empty for the built-in one.
    """

    kind: Change
    cause: Cause
    node: int
    operand: int | None
    result: int | None
    axes: tuple[str, ...]
    num_bytes: float
    num_times: float
    combinable: bool = False
    reduction: str = ""
    is_inner: bool = False
    decisions: tuple[int, ...] = ()
    flows: tuple[int, ...] = ()
    num_elements: float = 0.0
    by: str = ""

    @property
    def collective(self) -> str:
        """The name of the collective that runs."""
        return self.by or self.kind


Operation = Compute | Communicate | Extend


@dataclass(frozen=True)
class ExplicitProgram:
    """Operations in the order they run.

    Args:
        choices: assignment that it realizes.
        made: array that each value is computed as.
        outputs: array of each output of the graph; None for a literal.
    """

    choices: tuple[int, ...]
    arrays: tuple[Array, ...]
    ops: tuple[Operation, ...]
    made: Mapping[int, int]
    outputs: tuple[int | None, ...]

    @cached_property
    def extended(self) -> Mapping[int, tuple[Extend, ...]]:
        """The extensions of each node's operands, in order."""
        found: dict[int, list[Extend]] = defaultdict(list)
        for op in self.ops:
            if isinstance(op, Extend):
                found[op.node].append(op)
        return {node: tuple(ops) for node, ops in found.items()}

    @cached_property
    def communications(self) -> tuple[Communicate, ...]:
        """All collectives and cuts."""
        return tuple(op for op in self.ops if isinstance(op, Communicate))

    @cached_property
    def own_communications(self) -> Mapping[int, tuple[Communicate, ...]]:
        """The communications that belong to each node itself rather than to the resharding of its operands."""
        found: dict[int, list[Communicate]] = defaultdict(list)
        for op in self.communications:
            if op.cause in ("region", "context", "reduction", "program"):
                found[op.node].append(op)
        return {node: tuple(ops) for node, ops in found.items()}

    @cached_property
    def reads(self) -> Mapping[tuple[int, int], int]:
        """The array that each (node, operand) reads."""
        computed = (op for op in self.ops if isinstance(op, Compute))
        return {(op.node, i): a for op in computed for i, a in enumerate(op.operands) if a is not None}

    @cached_property
    def sent_as(self) -> Mapping[int, Communicate]:
        """The communication that produces each array, for arrays that one produces."""
        return {op.result: op for op in self.communications if op.result is not None}

    @cached_property
    def sent_from(self) -> Mapping[int, tuple[Communicate, ...]]:
        """The communications that send each array, in order."""
        found: dict[int, list[Communicate]] = defaultdict(list)
        for op in self.communications:
            if op.operand is not None:
                found[op.operand].append(op)
        return {array: tuple(ops) for array, ops in found.items()}
