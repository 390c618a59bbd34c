"""Compare two plans: the shardings that differ, and the bytes that each device must fetch to change from one to the
other.

In: two plans, fresh or from files. Out: `diff(before, after)`, a `PlanDiff` that prints as plain text, renders on a
console and converts to JSON types. It reads only the plans; it uses no device and moves no data.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from autopar.ir.placement import Move, move
from autopar.ir.sharding import TensorSharding
from autopar.pipeline.plan import AnyPlan, PipelinePlan
from autopar.plans.plan import Plan
from autopar.plans.records import Decision, TensorPlan, type_text
from autopar.report.diff_text import render_diff
from autopar.system.text_tables import finite, plain_text
from autopar.system.units import human_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorChange:
    """An input of both plans whose sharding differs on some device.

    Args:
        num_bytes: the bytes of the whole tensor.
        local_bytes_before, local_bytes: the bytes of its largest shard in the first and in the second plan.
        fetched_bytes: the most bytes that any device must fetch.
        total_fetched_bytes: the bytes that all devices must fetch together.
    """

    path: str
    role: Literal["parameter", "optimizer", "data"]
    shape: tuple[int, ...]
    dtype: str
    before: TensorSharding
    after: TensorSharding
    num_bytes: float
    local_bytes_before: float
    local_bytes: float
    fetched_bytes: float
    total_fetched_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationChange:
    """An activation whose sharding differs; between different meshes, one that is sharded along other dims.

    Args:
        path: the path of its module.
        source: the source line that produced it.
    """

    path: str
    primitive: str
    phase: str
    source: str
    shape: tuple[int, ...]
    dtype: str
    before: TensorSharding
    after: TensorSharding


@dataclass(frozen=True, slots=True, repr=False)
class PlanDiff:
    """The differences between two plans. It prints as plain text.

    Args:
        before, after: the plans.
        state: carried inputs of both plans whose sharding differs, the most fetched first.
        data: other inputs of both plans whose sharding differs. They are fed again in every step, so nothing is
            fetched.
        activations: activations whose sharding differs.
        num_state: the number of carried inputs in both plans.
        num_activations: the number of activations in both plans.
        num_state_unlike: the number of carried inputs that one plan lacks or has with another shape or dtype.
        unlike: a sentence for each input that one plan lacks or has with another shape or dtype.
        held_bytes: the bytes of state on each device of the second plan, which a restore from a checkpoint reads.
        fetched_bytes: the part of these bytes that the device of the same number does not have in the first plan; it
            must be sent if the state stays in memory.
    """

    before: AnyPlan
    after: AnyPlan
    state: tuple[TensorChange, ...]
    data: tuple[TensorChange, ...]
    activations: tuple[ActivationChange, ...]
    num_state: int
    num_activations: int
    num_state_unlike: int
    unlike: tuple[str, ...]
    held_bytes: tuple[float, ...]
    fetched_bytes: tuple[float, ...]

    @property
    def same_state(self) -> bool:
        """Whether every device has the same shards of the state, so that a state of one plan is one of the other."""
        return not self.state and not self.num_state_unlike

    @property
    def summary(self) -> str:
        """The difference of the state in one line."""
        before, after = (_layout(plan) for plan in (self.before, self.after))
        meshes = after if before == after else f"{before} -> {after.removeprefix('mesh ')}"
        if self.same_state:
            return f"{meshes}: all {self.num_state} tensors of the state keep their sharding"
        most, total = max(self.fetched_bytes, default=0.0), sum(self.fetched_bytes)
        return (
            f"{meshes}: {len(self.state)} of {self.num_state} tensors of the state change sharding; a device holds"
            f" {human_bytes(max(self.held_bytes, default=0.0))} of it and must fetch at most {human_bytes(most)},"
            f" {human_bytes(total)} on all devices"
        )

    def __str__(self) -> str:
        return plain_text(lambda console: render_diff(self, console))

    __repr__ = __str__

    def to_json(self) -> dict[str, Any]:
        """All rows as JSON types: seconds and bytes as numbers, infinite ones as null."""
        document = {
            "format": "autopar-diff",
            "version": 2,
            "summary": self.summary,
            "same_state": self.same_state,
            "before": _side_json(self.before),
            "after": _side_json(self.after),
            "num_state": self.num_state,
            "state": [_change_json(change) for change in self.state],
            "data": [_change_json(change) for change in self.data],
            "num_activations": self.num_activations,
            "activations": [_change_json(change) for change in self.activations],
            "unlike": list(self.unlike),
            "held_bytes": list(self.held_bytes),
            "fetched_bytes": list(self.fetched_bytes),
        }
        return finite(document)


def diff(before: AnyPlan, after: AnyPlan) -> PlanDiff:
    """Compare two plans: `print(autopar.diff(plan_a, plan_b))`.

    Args:
        before, after: plans of one program on any meshes. For two programs, only inputs that both have are compared.
    """
    earlier = {tensor.path: tensor for tensor in before.inputs}
    later = {tensor.path: tensor for tensor in after.inputs}
    earlier_parts = {tensor.path: before.parts_of(position) for position, tensor in enumerate(before.inputs)}
    later_parts = {tensor.path: after.parts_of(position) for position, tensor in enumerate(after.inputs)}
    unlike = [f"`{path}` is only in the first plan" for path in earlier if path not in later]
    unlike += [f"`{path}` is only in the second plan" for path in later if path not in earlier]
    state_unlike = sum(earlier[path].role != "data" for path in earlier if path not in later)
    state_unlike += sum(later[path].role != "data" for path in later if path not in earlier)
    held_bytes = [0.0] * after.num_devices
    fetched_bytes = [0.0] * after.num_devices
    state: list[TensorChange] = []
    data: list[TensorChange] = []
    num_state = 0
    for path, new in later.items():
        old = earlier.get(path)
        if old is None:
            continue
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            unlike.append(
                f"`{path}` is {type_text(old.shape, old.dtype)} in the first plan, {type_text(new.shape, new.dtype)} in the second"
            )
            state_unlike += new.role != "data"
            continue
        moved, itemsize = move(new.shape, earlier_parts[path], later_parts[path]), new.itemsize(later_parts[path])
        if new.role != "data":
            num_state += 1
            for device in range(len(moved.held)):
                held_bytes[device] += itemsize * moved.held[device]
                fetched_bytes[device] += itemsize * moved.fetched[device]
        if not moved.same:
            (data if new.role == "data" else state).append(_change(old, new, moved, itemsize))
    activations, num_activations = _activations(before, after)
    return PlanDiff(
        before=before,
        after=after,
        state=tuple(sorted(state, key=lambda change: (-change.total_fetched_bytes, -change.local_bytes))),
        data=tuple(data),
        activations=activations,
        num_state=num_state,
        num_activations=num_activations,
        num_state_unlike=state_unlike,
        unlike=tuple(unlike),
        held_bytes=tuple(held_bytes),
        fetched_bytes=tuple(fetched_bytes),
    )


def _change(old: TensorPlan, new: TensorPlan, moved: Move, itemsize: float) -> TensorChange:
    return TensorChange(
        path=new.path,
        role=new.role,
        shape=new.shape,
        dtype=new.dtype,
        before=old.sharding,
        after=new.sharding,
        num_bytes=itemsize * math.prod(new.shape),
        local_bytes_before=old.num_bytes,
        local_bytes=new.num_bytes,
        fetched_bytes=itemsize * max(moved.fetched),
        total_fetched_bytes=itemsize * sum(moved.fetched),
    )


def _layout(plan: AnyPlan) -> str:
    """The mesh or the stages of a plan."""
    if isinstance(plan, PipelinePlan):
        return f"{len(plan.stages)} stages on {plan.cluster}"
    return f"mesh {plan.mesh}"


def _activations(before: AnyPlan, after: AnyPlan) -> tuple[tuple[ActivationChange, ...], int]:
    """Compare the decisions on activations of the same module, primitive and type, in order; and count the pairs. Plans
    with stages are not compared."""
    if isinstance(before, PipelinePlan) or isinstance(after, PipelinePlan):
        return (), 0
    earlier: dict[tuple[Any, ...], list[Decision]] = defaultdict(list)
    for one in _activation_decisions(before):
        earlier[_pairing_key(one)].append(one)
    num_paired: Counter[tuple[Any, ...]] = Counter()
    changes: list[ActivationChange] = []
    num_both = 0
    for new in _activation_decisions(after):
        key = _pairing_key(new)
        if num_paired[key] >= len(earlier[key]):
            continue
        old = earlier[key][num_paired[key]]
        num_paired[key] += 1
        num_both += 1
        if not _is_same_sharding(old.sharding, new.sharding, same_mesh=before.mesh == after.mesh):
            about = {name: getattr(new, name) for name in ("path", "primitive", "phase", "source", "shape", "dtype")}
            changes.append(ActivationChange(**about, before=old.sharding, after=new.sharding))
    return tuple(sorted(changes, key=lambda change: -math.prod(change.shape))), num_both


def _is_same_sharding(before: TensorSharding, after: TensorSharding, *, same_mesh: bool) -> bool:
    """Whether two shardings are equal; between different meshes, whether they shard the same dims."""
    if same_mesh:
        return before == after
    dims = [tuple(map(bool, sharding.dims)) for sharding in (before, after)]
    return dims[0] == dims[1] and bool(before.unreduced) == bool(after.unreduced)


def _activation_decisions(plan: Plan) -> Iterator[Decision]:
    return (decision for decision in plan.decisions if decision.kind == "activation")


def _pairing_key(one: Decision) -> tuple[Any, ...]:
    return one.path, one.primitive, one.phase, one.shape, one.dtype


# -- JSON ------------------------------------------------------------------------------------


def _side_json(plan: AnyPlan) -> dict[str, Any]:
    about = {
        "program": plan.program.name,
        "fingerprint": plan.program.fingerprint,
        "hardware": plan.hardware,
        "strategy": plan.strategy,
        "prediction": asdict(plan.prediction) | {"peak_bytes": plan.prediction.peak_bytes},
        "versions": plan.versions,
    }
    if isinstance(plan, PipelinePlan):
        stages = [{"devices": list(stage.devices), "mesh": stage.plan.mesh.size_of} for stage in plan.stages]
        return about | {"stages": stages, "schedule": plan.schedule, "num_microbatches": plan.num_microbatches}
    return about | {
        "mesh": plan.mesh.size_of,
        "num_microbatches": plan.num_microbatches,
        "rematerialized": len(plan.rematerialized),
        "collectives": len(plan.collectives),
    }


def _change_json(change: TensorChange | ActivationChange) -> dict[str, Any]:
    return asdict(change) | {"before": str(change.before), "after": str(change.after)}
