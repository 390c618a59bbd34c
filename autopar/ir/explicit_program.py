"""The planned step with each communication as an operation of its own.

In: built by `formulate.explicit` from a graph and an assignment. Out: `ExplicitProgram`: the graph's nodes and, between them,
every collective, slice, halo exchange and extension by a halo, over numbered arrays. What a plan reports and what one device runs (`xla_model`) are
read off it.
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

#: Why something is sent. `reshard`: a node reads a value otherwise than it is made. `halo`: it reads beyond its part of one.
#: `region`: it runs as a manual region, and joins what its parts have found. `reduction`: a few elements are summed where they
#: are made. `program`: the user's program sends it.
Cause = Literal["reshard", "halo", "region", "reduction", "program"]


@dataclass(frozen=True, slots=True)
class Array:
    """What a device holds of a value: as much as its sharding leaves, a partial sum along the axes it is unreduced over."""

    value: int
    sharding: TensorSharding


@dataclass(frozen=True, slots=True)
class Compute:
    """A node of the graph, with the arrays that it reads; None for a literal."""

    node: int
    operands: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Strip:
    """What a device gets of one neighbour: elements of a value split so, along a dim. Two nodes that read the same
    strip share it: XLA sends it once.

    Args:
        after: whether it is of the neighbour after, or of the one before.
        shape: of the strip.
    """

    value: int
    sharding: TensorSharding
    dim: int
    after: bool
    shape: tuple[int, ...]
    itemsize: float

    @property
    def kind(self) -> Change:
        """What sends it."""
        return "collective-permute"

    @property
    def axes(self) -> tuple[str, ...]:
        return self.sharding.dims[self.dim]

    @property
    def num_bytes(self) -> float:
        return math.prod(self.shape) * self.itemsize


@dataclass(frozen=True, slots=True)
class Extend:
    """A kernel that extends, or cuts, one dim of one operand of a node to what a device reads of it.

    Args:
        strips: what is put beside a device's own part.
        window: what of that it reads; equal ones are one kernel.
        shape: of what it reads.
        num_times: how often a step runs it.
    """

    node: int
    operand: int
    strips: tuple[Strip, ...]
    window: Hashable
    shape: tuple[int, ...]
    itemsize: float
    num_times: float

    @property
    def num_bytes(self) -> float:
        """Of what the device then reads."""
        return math.prod(self.shape) * self.itemsize


@dataclass(frozen=True, slots=True)
class Communicate:
    """One collective, or a slice, of one array.

    Args:
        kind: the change of a sharding that it makes; a `cut` takes a part and sends nothing.
        node: for which it is done; the number of nodes where it is for an output.
        operand: the array that is sent; None for what the program itself sends.
        result: the array it gives; None where only its node sees that.
        axes: it runs over.
        num_bytes: its payload, by the convention of `cost.collectives`.
        num_times: how often a step runs it.
        combinable: whether nothing waits for it alone, so that XLA may merge it with others.
        reduction: what a `reduction` does with parts: `sum`, `max`, ...
        is_inner: it gathers or scatters a dim that others are around (`resharding_paths.is_inner`).
        decisions: of the formulation, those that it follows from.
        flows: of the formulation, those that pass through it, of a `reshard`.
        num_elements: that a `region` joins, of all its tensors.
        by: the registered collective that makes the change; empty where the built-in one does, which has the change's name.
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
        """The name of the one that runs."""
        return self.by or self.kind


Operation = Compute | Communicate | Extend


@dataclass(frozen=True)
class ExplicitProgram:
    """Operations in the order they run.

    Args:
        choices: the assignment that it follows from.
        made: of each value, the array that it is computed as.
        outputs: of each of the graph's outputs the array; None for a literal.
    """

    choices: tuple[int, ...]
    arrays: tuple[Array, ...]
    ops: tuple[Operation, ...]
    made: Mapping[int, int]
    outputs: tuple[int | None, ...]

    @cached_property
    def extended(self) -> Mapping[int, tuple[Extend, ...]]:
        """Of each node, how its operands are extended, in this order."""
        found: dict[int, list[Extend]] = defaultdict(list)
        for op in self.ops:
            if isinstance(op, Extend):
                found[op.node].append(op)
        return {node: tuple(ops) for node, ops in found.items()}

    @cached_property
    def communications(self) -> tuple[Communicate, ...]:
        """What is sent, and what is cut."""
        return tuple(op for op in self.ops if isinstance(op, Communicate))

    @cached_property
    def beside(self) -> Mapping[int, tuple[Communicate, ...]]:
        """Of each node, what it sends itself: not to have its operands as it wants them."""
        found: dict[int, list[Communicate]] = defaultdict(list)
        for op in self.communications:
            if op.cause in ("region", "reduction", "program"):
                found[op.node].append(op)
        return {node: tuple(ops) for node, ops in found.items()}

    @cached_property
    def reads(self) -> Mapping[tuple[int, int], int]:
        """Of each node and operand, the array that it reads."""
        computed = (op for op in self.ops if isinstance(op, Compute))
        return {(op.node, i): a for op in computed for i, a in enumerate(op.operands) if a is not None}

    @cached_property
    def sent_as(self) -> Mapping[int, Communicate]:
        """Of each array that a communication gives, that communication."""
        return {op.result: op for op in self.communications if op.result is not None}
