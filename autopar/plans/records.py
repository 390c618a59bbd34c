"""The parts of a plan: a record for each tensor, decision, collective and change to the program.

In: filled by `planner` and its passes. Out: fields of `plan.Plan`, and of a `pipeline.plan.PipelinePlan`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from autopar.ir.graph import Phase
from autopar.ir.mesh import MeshShape
from autopar.ir.sharding import TensorSharding
from autopar.plans.json_codec import MaybeInfinite

#: What an input or output is to the step. A parameter is carried state that the forward pass
#: reads; optimizer state is carried state that only the update reads; data is everything else.
Role = Literal["parameter", "optimizer", "data"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveUse:
    """One collective the plan pays for.

    Args:
        kind: all-reduce, all-gather, reduce-scatter, all-to-all or collective-permute; or the name of a registered one.
        axes: mesh axes it runs over.
        num_bytes: payload per device, by the convention of `cost.collectives`: the full
            (gathered / unscattered) local buffer.
        time_s: predicted seconds in a step.
        cause: what it is for, in words, e.g. "sum the gradient of `params/Dense_0/kernel`".
        path / source / phase: where in the model, where in the user's code, when.
        combinable: XLA merges it with its like, so many count as one.
        num_times: how often a step runs it: more than once inside a loop.
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
        """Its payload, as often as a step runs it."""
        return self.num_times * self.num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlan:
    """One input or output of the step. `path` is like `state/params/Dense_0/kernel`; `num_bytes` is
    of one device's part."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    role: Role
    sharding: TensorSharding
    num_bytes: float
    pinned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Why one tensor is split as it is.

    Args:
        path: input path, or module path of an activation.
        kind: `parameter`, `optimizer`, `data` or `activation`.
        primitive: what made an activation (`dot_general`); "" for an input.
        sharding: the choice. For a value made unreduced, what it is before the pending sum is taken.
        cost_s: seconds it is charged: its own time and the collectives next to it.
        runner_up: the next best choice for this tensor with all others as they are; None where
            there is no other.
        runner_up_extra_s: what that would add to the step, in seconds.
        collectives: positions in `Plan.collectives` of those it causes.
        value: its number in the planned program, where the plan was made in this process: no file holds it.
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
    """What the cost model expects of a step. Bytes are per device and at the peak instant.

    Args:
        step_time_s: by the device's own rates: `compute_s` and all of `exposed_s`.
        exposed_s: by kind of collective, what no kernel hides.
        collective_s: by kind, what they take, hidden or not.
        xla_step_time_s, xla_exposed_s: what XLA's latency estimator is expected to say of it; None where the profile
            has no figures of that.
        temporary_bytes: what is live between inputs and outputs: activations, gradients, gathered parameters.
        output_bytes: of outputs that renew no argument.
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
    """What MFU and throughput are computed from, and what bounds the step.

    Args:
        model_flops: of the matmuls and convolutions of the step as its user wrote it, on all devices.
        ideal_s: seconds of these at the peak rate of all devices.
        num_examples, num_tokens: of the batch; 0 where it has none.
        bound_s: seconds of a device's step by what limits them: matrix units, vector units, memory bandwidth, kernel
            launches, exposed communication.
    """

    model_flops: float
    ideal_s: float
    num_examples: int = 0
    num_tokens: int = 0
    bound_s: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How sure the solver is: `gap` is (cost - lower bound) / cost. `memory_bound`: without its memory budget the plan
    would be another. `solve_time_s` is of this run: no file holds it."""

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
    """Another mesh that was planned; `step_time_s` is `inf` where nothing fitted."""

    mesh: MeshShape
    step_time_s: MaybeInfinite
    peak_bytes: MaybeInfinite
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tie:
    """The fastest plan found, where a simpler one was taken since it is hardly slower.

    Args:
        mesh, words: of the fastest.
        num_split: how many arguments of the step the fastest splits.
        faster: by what part of the taken plan's time it is faster, by what plans are compared.
    """

    mesh: MeshShape
    words: str
    num_split: int
    faster: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramSignature:
    """What a plan was made for, in enough detail to say what differs."""

    name: str
    inputs: tuple[tuple[str, tuple[int, ...], str], ...]  # path, shape, dtype
    outputs: tuple[tuple[str, tuple[int, ...], str], ...]
    primitives: dict[str, int]
    fingerprint: str

    def difference(
        self, other: ProgramSignature, *, of_planned: str = "in the plan", of_other: str = "here"
    ) -> str | None:
        """What sets the program at hand (`other`) apart from the planned one, in words; None where
        they are the same. A name alone is no difference.

        Args:
            of_planned, of_other: how the words speak of the two.
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
    """The first tensor that is missing, new or of another type, and how many more there are."""
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
    """Shardings to impose, one after the other, on one value of the replayed program.

    `node` and `operand` are None for a constraint at the value's definition; otherwise it holds for
    that operand of that node alone. The node after the last stands for the step's outputs.

    `by` names, of each sharding, the registered collective that leads to it from the one before; "" where XLA's partitioner
    finds the way, and nothing at all where it finds all of them.

    With `barrier` the value is read through an `optimization_barrier`. `at` is the place in words, as people and version
    control tell it from others.
    """

    at: str = ""
    value: int
    shardings: tuple[TensorSharding, ...]
    node: int | None = None
    operand: int | None = None
    barrier: bool = False
    by: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Awaited:
    """Reductions that have to be over before a node reads one of its operands, though it needs none of them: so that XLA
    starts them early, with kernels left to hide them.

    `values` are read as their constraint at the definition has them. `at` is the place in words.
    """

    at: str = ""
    node: int
    operand: int
    values: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Separate:
    """A sum that gets a kernel of its own, perhaps with another: XLA would join it with what reads the same, which then
    had to do with the few thread blocks of a sum down columns.

    `nodes` are computed for it alone, from what lies in memory, behind a barrier; it is those that none of them reads.
    `at` is the place in words.
    """

    at: str = ""
    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ManualRegion:
    """A node of which each device runs its own part, under `jax.shard_map`, because XLA's partitioner would not run
    it so.

    Args:
        node: position in the program.
        primitive / path: what it is, and where in the model.
        operands, results: how they are split; a literal's is that of a scalar. A result may be unreduced.
        reduction: what combines its terms.
    """

    node: int
    primitive: str
    path: str
    operands: tuple[TensorSharding, ...]
    results: tuple[TensorSharding, ...]
    reduction: Literal["sum", "max", "min", "prod", "and", "or"] = "sum"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A number of microbatches that was planned; seconds and bytes are `inf` where nothing fitted. `recomputes`: it
    computed values again to fit."""

    count: int
    step_time_s: MaybeInfinite
    peak_bytes: MaybeInfinite
    recomputes: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatches:
    """The batch split over time.

    Args:
        count: how many parts, run one after another.
        num_examples: in the whole batch.
        accumulated_bytes, num_accumulated: what is summed from part to part, on one device; and how many tensors.
        own_statistics: where the batch fed back, each part takes its own, which the step as written does not.
        tried: other numbers that were planned.
    """

    count: int
    num_examples: int
    accumulated_bytes: float
    num_accumulated: int
    own_statistics: bool = False
    tried: tuple[Tried, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Again:
    """Nodes of the program that run again in the backward pass.

    Args:
        nodes: their positions, in order; all of one loop's body, or of the step itself.
        before: the node before which they run: a later one of the same body, or one of the body of a later loop that
            runs as often.
        renewed: values that are in memory by then, but are read anew: sent again where they are split.
        kept: values that are made of those of the nodes, and held: what makes them must have run before the forward
            pass goes on, for what it reads is dropped.
        onward: where one value alone is kept, one that the forward pass goes on with, and that waits for it.
        prompt: whether all gradients made by then are finished first, and summed over devices, which holds least; else
            those made since the last nodes that ran again have until the next to be summed.
    """

    nodes: tuple[int, ...]
    before: int
    renewed: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    onward: int | None = None
    prompt: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputation:
    """What is computed again at one place of the backward pass, because it would not fit in memory until then.

    Args:
        path: module path of what is computed again.
        saved_bytes: on one device, what is not held from the forward to the backward pass.
        time_s: seconds that it adds to a step, collectives included.
    """

    again: Again
    path: str
    saved_bytes: float
    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicated:
    """An operation that every device runs whole, because nothing says how to split it.

    Args:
        name: what a rule would be registered by: a primitive, a Pallas kernel, or a custom call's target.
        count: how many of the program's nodes it is.
        time_s: seconds that all of them take in a step, by the device's own rates.
        source: of the first, in the user's code.
    """

    name: str
    count: int
    time_s: float
    source: str


class Placement(Protocol):
    """What plans of any kind say of the arguments and results of a step."""

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
    """How many of these are split at all."""
    return sum(any(tensor.sharding.dims) for tensor in tensors)


def split_dims(constraints: Sequence[Constraint]) -> frozenset[tuple[int, int]]:
    """Values of the planned program and their dims that constraints split."""
    return frozenset(
        (constraint.value, d)
        for constraint in constraints
        for sharding in constraint.shardings
        for d, axes in enumerate(sharding.dims)
        if axes
    )
