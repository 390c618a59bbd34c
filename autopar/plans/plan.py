"""The plan: everything decided about one program on one mesh, as plain data.

In: filled by `planner`. Out: run by `execute`, told by `explain`, kept as JSON by `Plan.save` and
`saved_plans`. Reading a plan file never runs code: it is JSON, checked field by field. JAX is imported
only by the methods that speak its types, so that a saved plan is read and explained without it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from autopar.errors import PlanMismatchError
from autopar.ir.mesh import MeshShape
from autopar.ir.placement import Lies, Part
from autopar.plans.columnar_numbers import in_columns, reader, write_document
from autopar.plans.json_codec import as_it_is, decoder, encode, read_document, without
from autopar.plans.records import (
    Awaited,
    CollectiveUse,
    Constraint,
    Decision,
    Efficiency,
    ManualRegion,
    Microbatches,
    Outcome,
    Prediction,
    ProgramSignature,
    Recomputation,
    RejectedMesh,
    Replicated,
    Separate,
    TensorPlan,
    Tie,
    type_text,
)
from autopar.plans.step_trace import MemoryOverStep, StepTrace
from autopar.plans.validate import check_plan

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
        efficiency: what MFU and throughput are computed from; None in plans of older files.
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
    efficiency: Efficiency | None = None
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

    @property
    def num_microbatches(self) -> int:
        """Parts that the batch is split into over time; 1 where it is not."""
        return self.microbatches.count if self.microbatches else 1

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
            here = [type_text(leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(tree)]
            if len(here) != len(tensors):
                raise PlanMismatchError(self._mismatch(f"{len(tensors)} {kind} in the plan, {len(here)} here"))
            for tensor, text in zip(tensors, here, strict=True):
                if type_text(tensor.shape, tensor.dtype) != text:
                    planned = type_text(tensor.shape, tensor.dtype)
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
