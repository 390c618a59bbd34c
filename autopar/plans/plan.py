"""The plan: everything decided about one program on one mesh, as plain data.

In: filled by `planner`. Out: run by `execute`, told by `explain`, kept as JSON by `Plan.save` and
`saved_plans`. Reading a plan file never runs code: it is JSON, checked field by field. JAX is imported
only by the methods that speak its types, so that a saved plan is read and explained without it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from autopar.errors import PlanMismatchError
from autopar.ir.graph import Phase
from autopar.ir.mesh import MeshShape
from autopar.ir.placement import Lies, Part
from autopar.ir.sharding import TensorSharding
from autopar.plans.columnar_numbers import in_columns, reader, write_document
from autopar.plans.json_codec import MaybeInfinite, WrongFieldError, as_it_is, decoder, encode, read_document, without
from autopar.plans.step_trace import MemoryOverStep, StepTrace, check_trace

if TYPE_CHECKING:
    from jax.sharding import AbstractMesh, Mesh

#: What a plan file says it is.
FORMAT = "autopar-plan"
#: From each version of its fields to the next: 2 has `trace` and `memory`, which are None where they are not; 3 has no
#: times of this run, so that two runs write the same file; 4 has numbers in columns, which before stood in the records; 6
#: has `replicated` and `tie`.
#: Whoever changes a field of what a file holds adds one, and a file of the version before to `tests/plan_files/`.
MIGRATIONS = (as_it_is, without("solve_time_s", of="outcome"), as_it_is, as_it_is, as_it_is)
VERSION = len(MIGRATIONS) + 1

#: What an input or output is to the step. A parameter is carried state that the forward pass
#: reads; optimizer state is carried state that only the update reads; data is everything else.
Role = Literal["parameter", "optimizer", "data"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveUse:
    """One collective the plan pays for.

    Args:
        kind: all-reduce, all-gather, reduce-scatter, all-to-all or collective-permute.
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
    plan_types = {path: _type_text(shape, dtype) for path, shape, dtype in planned}
    here_types = {path: _type_text(shape, dtype) for path, shape, dtype in here}
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


def _type_text(shape: Sequence[int], dtype: str) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """Shardings to impose, one after the other, on one value of the replayed program.

    `node` and `operand` are None for a constraint at the value's definition; otherwise it holds for
    that operand of that node alone. The node after the last stands for the step's outputs.

    With `barrier` the value is read through an `optimization_barrier`. `at` is the place in words, as people and version
    control tell it from others.
    """

    at: str = ""
    value: int
    shardings: tuple[TensorSharding, ...]
    node: int | None = None
    operand: int | None = None
    barrier: bool = False


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


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything decided. `in_tree` / `out_tree` are JAX tree structures, absent from files.

    Args:
        dims_as_written: it was asked for so.
        trace, memory: a step over time; None in plans of files of version 1.
        merge_bytes: XLA's GPU compiler is told to merge collectives of a kind until their results are of so many
            bytes; None where its own limit does.
        awaited: what waits for reductions, so that they start early.
        separate: sums that get kernels of their own.
        replicated: what every device runs whole because it has no sharding rule, the longest first; nothing on one device.
        tie: a plan that is faster by next to nothing.
    """

    program: ProgramSignature
    mesh: MeshShape
    hardware: str
    memory_budget_bytes: float | None
    words: str
    inputs: tuple[TensorPlan, ...]
    outputs: tuple[TensorPlan, ...]
    carried: tuple[tuple[int, int], ...]
    donated: tuple[int, ...]
    constraints: tuple[Constraint, ...]
    decisions: tuple[Decision, ...]
    collectives: tuple[CollectiveUse, ...]
    prediction: Prediction
    outcome: Outcome
    rejected: tuple[RejectedMesh, ...] = ()
    regions: tuple[ManualRegion, ...] = ()
    microbatches: Microbatches | None = None
    recomputed: tuple[Recomputation, ...] = ()
    merge_bytes: int | None = None
    awaited: tuple[Awaited, ...] = ()
    separate: tuple[Separate, ...] = ()
    replicated: tuple[Replicated, ...] = ()
    tie: Tie | None = None
    trace: StepTrace | None = None
    memory: MemoryOverStep | None = None
    notes: tuple[str, ...] = ()
    pins: dict[str, str] = field(default_factory=dict)
    dims_as_written: bool = False
    versions: dict[str, str] = field(default_factory=dict)
    in_tree: Any = field(default=None, compare=False, repr=False)
    out_tree: Any = field(default=None, compare=False, repr=False)

    @property
    def num_devices(self) -> int:
        """That it runs on."""
        return self.mesh.num_devices

    def lies(self, position: int) -> Lies:
        """Where an input lies."""
        return (Part(self.inputs[position].sharding, self.mesh),)

    def in_shardings(self, mesh: Mesh | AbstractMesh) -> Any:
        """What `jax.jit(step, in_shardings=...)` takes: a tuple, one pytree of `NamedSharding` per argument.

        Raises:
            MeshError: where the mesh is not the planned one.
            PlanMismatchError: where the plan came from a file and does not know the step's pytrees.
        """
        return self._sharding_tree(self.inputs, self.in_tree, mesh)

    def out_shardings(self, mesh: Mesh | AbstractMesh) -> Any:
        """What `jax.jit(step, out_shardings=...)` takes; raises as `in_shardings`."""
        return self._sharding_tree(self.outputs, self.out_tree, mesh)

    def _sharding_tree(self, tensors: Sequence[TensorPlan], tree: Any, mesh: Mesh | AbstractMesh) -> Any:
        from autopar.jax_interop.partition_spec import check_mesh, named_shardings

        check_mesh(self.mesh, mesh)
        if tree is None:
            raise PlanMismatchError(
                f"the plan of `{self.program.name}` was read from a file, which does not hold the pytrees of its"
                " arguments and results. Attach them with `plan.for_step(step, *args)`, or run the step by"
                " `autopar.parallelize(step, plan=...)`."
            )
        return tree.unflatten(named_shardings((tensor.sharding for tensor in tensors), mesh))

    def for_step(self, step: Callable[..., Any], *args: Any) -> Plan:
        """The same plan with the pytrees of a step's arguments and results, which a file does not hold.

        Shapes and dtypes are compared, not the operations; `parallelize(..., plan=...)` compares all.

        Args:
            step: the planned function. args: arrays or `ShapeDtypeStruct`s, as it is called.

        Raises:
            PlanMismatchError: naming the first input or output that differs.
        """
        import jax

        from autopar.frontend.call import opened
        from autopar.frontend.step import Step

        with opened(Step.of(step), args, {}) as call:
            trees, out = jax.eval_shape(lambda *arrays: (arrays, call.function(*arrays)), *call.trees)
        for kind, tensors, tree in (("inputs", self.inputs, trees), ("outputs", self.outputs, out)):
            here = [_type_text(leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(tree)]
            if len(here) != len(tensors):
                raise PlanMismatchError(self._mismatch(f"{len(tensors)} {kind} in the plan, {len(here)} here"))
            for tensor, text in zip(tensors, here, strict=True):
                if _type_text(tensor.shape, tensor.dtype) != text:
                    planned = _type_text(tensor.shape, tensor.dtype)
                    raise PlanMismatchError(self._mismatch(f"`{tensor.path}`: {planned} in the plan, {text} here"))
        return replace(self, in_tree=jax.tree.structure(trees), out_tree=jax.tree.structure(out))

    def _mismatch(self, difference: str) -> str:
        return f"the plan was made for another program: {difference}. Plan this one anew."

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON types: what `save` writes. `in_tree` and `out_tree` are left out."""
        body = {f.name: encode(getattr(self, f.name)) for f in fields(self) if f.compare}
        return {"format": FORMAT, "version": VERSION, **in_columns(body)}

    @classmethod
    def from_json(cls, data: Any) -> Plan:
        """The inverse of `to_json`.

        Raises:
            PlanFileError: naming the field that is missing, unknown, ill-typed or inconsistent.
        """
        return read_document(data, FORMAT, MIGRATIONS, reader(decoder(cls), check_plan))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON, one record a line, made for version control.

        The file appears whole or not at all; an older one stays until then.

        Raises:
            PlanFileError: where it cannot be written.
        """
        write_document(self.to_json(), path)


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


def check_plan(plan: Plan) -> None:
    """Refuse what is well typed but points nowhere: axes, positions, ranks.

    Raises:
        WrongFieldError: naming the field.
    """
    for place, sharding, shape in _shardings(plan):
        check_sharding(sharding, plan.mesh, place)
        if shape is not None and len(sharding.dims) != len(shape):
            raise WrongFieldError(place, f"has {len(sharding.dims)} dims for a tensor of {len(shape)}")
    for name in (one.name for one in fields(plan.prediction)):
        found = getattr(plan.prediction, name)
        if any(number < 0 for number in (found.values() if isinstance(found, dict) else (found or 0.0,))):
            raise WrongFieldError(f"prediction.{name}", "must not be negative")
    check_positions(plan)
    check_trace(plan.trace, plan.memory)
    for number, index in [(n, index) for n, decision in enumerate(plan.decisions) for index in decision.collectives]:
        if not 0 <= index < len(plan.collectives):
            place = f"decisions[{number}].collectives"
            raise WrongFieldError(place, f"points at position {index} of a list of {len(plan.collectives)}")


def check_sharding(sharding: TensorSharding, mesh: MeshShape, place: str) -> None:
    """Refuse a sharding that cannot be on a mesh.

    Raises:
        WrongFieldError: naming the field, which is at `place`.
    """
    named = [axis for axes in (*sharding.dims, sharding.unreduced) for axis in axes]
    for axis in named:
        if axis not in mesh.axis_names:
            raise WrongFieldError(place, f"names the axis {axis!r}, which mesh {mesh.describe()} has not")
    if len(set(named)) != len(named):
        raise WrongFieldError(place, f"uses an axis twice: {sharding}")


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


def check_positions(plan: Placement) -> None:
    """Refuse a plan read from a file whose arguments and results are not those of its program.

    Raises:
        WrongFieldError: naming the field.
    """
    num_inputs, num_outputs = len(plan.inputs), len(plan.outputs)
    positions = [("donated", index, num_inputs) for index in plan.donated]
    positions += [("carried", index, num_inputs) for index, _ in plan.carried]
    positions += [("carried", index, num_outputs) for _, index in plan.carried]
    for place, index, size in positions:
        if not 0 <= index < size:
            raise WrongFieldError(place, f"points at position {index} of a list of {size}")
    for place, planned, signature in (
        ("inputs", num_inputs, plan.program.inputs),
        ("outputs", num_outputs, plan.program.outputs),
    ):
        if planned != len(signature):
            raise WrongFieldError(place, f"has {planned} entries, but `program.{place}` has {len(signature)}")


def _shardings(plan: Plan) -> Iterator[tuple[str, TensorSharding, tuple[int, ...] | None]]:
    for name, tensors in (("inputs", plan.inputs), ("outputs", plan.outputs)):
        for index, tensor in enumerate(tensors):
            yield f"{name}[{index}].sharding", tensor.sharding, tensor.shape
    for index, decision in enumerate(plan.decisions):
        yield f"decisions[{index}].sharding", decision.sharding, decision.shape
        if decision.runner_up is not None:
            yield f"decisions[{index}].runner_up", decision.runner_up, decision.shape
    for index, constraint in enumerate(plan.constraints):
        for sharding in constraint.shardings:
            yield f"constraints[{index}].shardings", sharding, None
    for index, region in enumerate(plan.regions):
        for sharding in (*region.operands, *region.results):
            yield f"regions[{index}]", sharding, None
    for index, use in enumerate(plan.collectives):
        yield f"collectives[{index}].axes", TensorSharding((use.axes,)), None
