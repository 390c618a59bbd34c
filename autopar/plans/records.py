"""Define the records of a plan: tensors, decisions, collectives and changes to the program.

In: filled by `planner` and its passes. Out: fields of `plan.Plan` and `pipeline.plan.PipelinePlan`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from autopar.ir.graph import Phase
from autopar.ir.mesh import MeshShape
from autopar.ir.placement import Parts
from autopar.ir.sharding import TensorSharding
from autopar.plans.json_codec import MaybeInfinite

#: The role of an input or output. A parameter is carried state that the forward pass reads; optimizer state is carried
#: state that only the update reads; data is everything else.
Role = Literal["parameter", "optimizer", "data"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveUse:
    """One collective of the plan.

    Args:
        kind: all-reduce, all-gather, reduce-scatter, all-to-all or collective-permute; or the name of a registered one.
        axes: mesh axes that it runs over.
        num_bytes: payload per device, by the convention of `cost.collectives`: the full (gathered or unscattered) local
            buffer.
        time_s: predicted seconds per step.
        cause: description of its purpose, e.g. "sum the gradient of `params/Dense_0/kernel`".
        path, source, phase: module, line of the user's code, and phase of the step.
        combinable: whether XLA merges it with others of its kind.
        num_times: number of runs per step; more than one inside a loop.
    """

    kind: str
    axes: tuple[str, ...]
    num_bytes: float
    time_s: float
    cause: str
    path: str
    source: str
    phase: Phase
    combinable: bool = False
    num_times: int = 1

    @property
    def bytes_per_step(self) -> float:
        """Payload of all its runs in a step."""
        return self.num_times * self.num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlan:
    """One input or output of the step.

    Args:
        path: path in the pytree, e.g. `state/params/Dense_0/kernel`.
        num_bytes: size of one device's part.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    role: Role
    sharding: TensorSharding
    num_bytes: float
    pinned: bool = False

    def itemsize(self, parts: Parts) -> float:
        """Bytes of one element, from the recorded bytes of the largest shard.

        Args:
            parts: where the tensor is.
        """
        local = (part.sharding.local_size(part.shape_of(self.shape), part.mesh) for part in parts)
        return self.num_bytes / max(1, *local)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The sharding of one tensor, with its cost and the runner-up.

    Args:
        path: path of an input, or module path of an activation.
        kind: `parameter`, `optimizer`, `data` or `activation`.
        primitive: producer of an activation (`dot_general`); "" for an input.
        sharding: chosen sharding; for an unreduced value, that before the pending reduction.
        cost_s: its own time plus that of the collectives next to it, in seconds.
        runner_up: next best sharding with all other decisions unchanged; None if there is no other.
        runner_up_extra_s: seconds that the runner-up adds to the step.
        collectives: positions in `Plan.collectives` of the collectives it causes.
        value: index of the value in the planned program; None in plans from files.
    """

    path: str
    kind: Literal["parameter", "optimizer", "data", "activation"]
    primitive: str
    phase: Phase
    source: str
    shape: tuple[int, ...]
    dtype: str
    sharding: TensorSharding
    cost_s: float
    runner_up: TensorSharding | None
    runner_up_extra_s: float
    collectives: tuple[int, ...] = ()
    value: int | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The predicted time and memory of a step. Bytes are per device, at peak memory.

    Args:
        step_time_s: step time by the device's own rates: `compute_s` plus all of `exposed_s`.
        exposed_s: exposed communication by kind of collective.
        collective_s: all communication by kind of collective, hidden or exposed.
        xla_step_time_s, xla_exposed_s: predicted output of XLA's latency estimator; None if the profile has no
            constants for it.
        temporary_bytes: temporaries: activations, gradients, gathered parameters.
        output_bytes: outputs that update no argument.
    """

    step_time_s: float
    compute_s: float
    exposed_s: dict[str, float]
    collective_s: dict[str, float]
    xla_step_time_s: float | None
    xla_exposed_s: dict[str, float] | None
    parameter_bytes: float
    optimizer_bytes: float
    data_bytes: float
    temporary_bytes: float
    output_bytes: float

    @property
    def peak_bytes(self) -> float:
        return self.parameter_bytes + self.optimizer_bytes + self.data_bytes + self.temporary_bytes + self.output_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """The inputs of MFU and throughput, and the bottlenecks of the step.

    Args:
        model_flops: FLOPs of the matmuls and convolutions in the user's step, on all devices.
        ideal_s: seconds of these at the peak rate of all devices.
        num_examples, num_tokens: size of the batch; 0 if unknown.
        bound_s: seconds of a device's step by bottleneck: matrix units, vector units, memory bandwidth, kernel
            launches, exposed communication; and what rows of matmuls add that are not aligned.
    """

    model_flops: float
    ideal_s: float
    num_examples: int = 0
    num_tokens: int = 0
    bound_s: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of the solve.

    Args:
        gap: (cost - lower bound) / cost.
        memory_bound: whether the plan would differ without the memory budget.
        solve_time_s: solve time of this run; None in plans from files.
    """

    cost_s: float
    lower_bound_s: float
    gap: float
    status: str
    num_nodes: int
    num_strategies: int
    solve_time_s: float | None = field(default=None, compare=False)
    memory_bound: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedMesh:
    """Another mesh that was planned; `step_time_s` is `inf` if nothing fits."""

    mesh: MeshShape
    step_time_s: MaybeInfinite
    peak_bytes: MaybeInfinite
    strategy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tie:
    """The fastest plan found, if a simpler and hardly slower plan replaced it.

    Args:
        mesh, strategy: mesh and strategy of the fastest plan.
        num_split: number of arguments that it splits.
        faster: relative time that it saves compared with the chosen plan.
    """

    mesh: MeshShape
    strategy: str
    num_split: int
    faster: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramSignature:
    """The signature of the planned program, detailed enough to describe a difference."""

    name: str
    inputs: tuple[tuple[str, tuple[int, ...], str], ...]  # path, shape, dtype
    outputs: tuple[tuple[str, tuple[int, ...], str], ...]
    primitives: dict[str, int]
    fingerprint: str

    def difference(
        self, other: ProgramSignature, *, of_planned: str = "in the plan", of_other: str = "here"
    ) -> str | None:
        """A description of the first difference between the planned program and `other`; None if they match.

        Names are not compared.

        Args:
            of_planned, of_other: phrases for the two programs.
        """
        sides = (of_planned, of_other)
        for kind, planned, here in (("input", self.inputs, other.inputs), ("output", self.outputs, other.outputs)):
            if planned != here:
                return _tensor_difference(kind, planned, here, sides)
        counts = [
            f"{name}: {self.primitives.get(name, 0)} {of_planned}, {other.primitives.get(name, 0)} {of_other}"
            for name in sorted({*self.primitives, *other.primitives})
            if self.primitives.get(name, 0) != other.primitives.get(name, 0)
        ]
        if counts:
            return "; ".join(counts[:4]) + (f"; and {len(counts) - 4} more primitives" if len(counts) > 4 else "")
        if self.fingerprint != other.fingerprint:
            return (
                "same inputs, outputs and primitives, but they are connected differently or use other constants"
                f" (fingerprint {self.fingerprint} {of_planned}, {other.fingerprint} {of_other})"
            )
        return None


_Tensors: TypeAlias = Sequence[tuple[str, tuple[int, ...], str]]


def _tensor_difference(kind: str, planned: _Tensors, here: _Tensors, sides: tuple[str, str]) -> str:
    """Describe the first tensor that is missing, new or of another type, and count the other differences."""
    of_planned, of_other = sides
    plan_types = {path: type_text(shape, dtype) for path, shape, dtype in planned}
    here_types = {path: type_text(shape, dtype) for path, shape, dtype in here}
    found = [f"{kind} `{path}` is {of_planned}, but not {of_other}" for path in plan_types if path not in here_types]
    found += [f"{kind} `{path}` is {of_other}, but not {of_planned}" for path in here_types if path not in plan_types]
    found += [
        f"{kind} `{path}`: {text} {of_planned}, {here_types[path]} {of_other}"
        for path, text in plan_types.items()
        if here_types.get(path, text) != text
    ]
    if not found:
        return f"the {kind}s come in another order"
    return found[0] + (f" (and {len(found) - 1} more {kind}s differ)" if len(found) > 1 else "")


def type_text(shape: Sequence[int], dtype: str) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """Sharding constraints to impose, one after the other, on one value of the replayed program.

    Args:
        at: name of the place that stays stable under version control.
        value: index of the value.
        shardings: shardings in order.
        node, operand: the use that it applies to; None for a constraint at the value's definition. The node after the
            last stands for the step's outputs.
        barrier: whether the value is read through an `optimization_barrier`.
        by: the registered collective that leads to each sharding, "" for XLA's own; empty if XLA makes all changes.
    """

    at: str = ""
    value: int
    shardings: tuple[TensorSharding, ...]
    node: int | None = None
    operand: int | None = None
    barrier: bool = False
    by: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyReduction:
    """Reductions that must finish before a node reads an operand, although it does not depend on them.

    XLA then starts them early, while kernels are left to overlap with them.

    Args:
        at: name of the place.
        node, operand: the use that waits.
        values: reduced values, with the sharding of their constraint at the definition.
    """

    at: str = ""
    node: int
    operand: int
    values: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfusedReduction:
    """A column reduction that gets its own kernel.

    XLA would fuse it with other users of its operands, which would then run in the reduction's few thread blocks.

    Args:
        at: name of the place.
        nodes: nodes that are computed again for it alone, from values in memory behind a barrier; the reduction is the
            nodes that no other of them reads.
    """

    at: str = ""
    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ManualRegion:
    """A node that runs under `jax.shard_map` on each device's part, because XLA's partitioner would not split it so.

    Args:
        node: position in the program.
        primitive, path: its primitive and module path.
        operands, results: their shardings; a literal has that of a scalar. A result may be unreduced.
        reduction: operator that combines the terms of an unreduced result.
        method: method of context parallelism, if it is an attention whose tokens are split (`cost.context_parallel`).
    """

    node: int
    primitive: str
    path: str
    operands: tuple[TensorSharding, ...]
    results: tuple[TensorSharding, ...]
    reduction: Literal["sum", "max", "min", "prod", "and", "or"] = "sum"
    method: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A number of microbatches that was planned; seconds and bytes are `inf` if nothing fits. `recomputes` says whether
    it uses rematerialization."""

    count: int
    step_time_s: MaybeInfinite
    peak_bytes: MaybeInfinite
    rematerializes: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatches:
    """Gradient accumulation over microbatches.

    Args:
        count: number of microbatches, run one after another.
        num_examples: size of the whole batch.
        accumulated_bytes, num_accumulated: size of the accumulators on one device, and their number.
        own_statistics: whether each microbatch uses its own batch statistics, unlike the step as written.
        tried: other numbers of microbatches that were planned.
    """

    count: int
    num_examples: int
    accumulated_bytes: float
    num_accumulated: int
    own_statistics: bool = False
    tried: tuple[Tried, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RematSegment:
    """Nodes of the program that are rematerialized in the backward pass.

    Args:
        nodes: their positions in order, all in one loop's body or in the step itself.
        before: node before which they run again: a later one of the same body, or one in the body of a later loop of
            equal trip count.
        regathered: values whose all-gathers are repeated.
        kept: values computed from these nodes that stay live. Their producers must run before the forward pass
            continues, because their operands are freed.
        onward: if a single value is kept, a value of the forward pass that waits for it.
        prompt: whether all gradients so far, with their reductions, finish first, which needs the least memory. Otherwise
            reductions of gradients since the previous rematerialization may run until the next.
    """

    nodes: tuple[int, ...]
    before: int
    regathered: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    onward: int | None = None
    prompt: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Rematerialization:
    """A rematerialization at one place of the backward pass.

    Args:
        segment: the rematerialized nodes.
        path: the module path of the nodes.
        saved_bytes: activation memory that it saves on one device.
        time_s: seconds that it adds to a step, including collectives.
    """

    segment: RematSegment
    path: str
    saved_bytes: float
    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicated:
    """An operation that every device runs whole, because it has no sharding rule.

    Args:
        name: name to register a rule for: a primitive, a Pallas kernel, or a custom call's target.
        count: number of such nodes.
        time_s: seconds of all of them per step, by the device's own rates.
        source: line of the user's code of the first.
    """

    name: str
    count: int
    time_s: float
    source: str


class Placement(Protocol):
    """The fields of any kind of plan that describe the arguments and results of a step."""

    @property
    def program(self) -> ProgramSignature: ...
    @property
    def inputs(self) -> tuple[TensorPlan, ...]: ...
    @property
    def outputs(self) -> tuple[TensorPlan, ...]: ...
    @property
    def carried(self) -> tuple[tuple[int, int], ...]: ...
    @property
    def donated(self) -> tuple[int, ...]: ...
    @property
    def in_tree(self) -> Any: ...
    def to_json(self) -> dict[str, Any]: ...


def num_split(tensors: Sequence[TensorPlan]) -> int:
    """Number of tensors that are split along some dim."""
    return sum(any(tensor.sharding.dims) for tensor in tensors)


def split_dims(constraints: Sequence[Constraint]) -> frozenset[tuple[int, int]]:
    """The (value, dim) pairs that constraints split."""
    return frozenset(
        (constraint.value, d)
        for constraint in constraints
        for sharding in constraint.shardings
        for d, axes in enumerate(sharding.dims)
        if axes
    )
