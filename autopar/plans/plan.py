"""Define the plan: all decisions for one program on one mesh, as plain data.

In: filled by `planner`. Out: `Plan`, which `runtime` executes, `report` explains and `Plan.save` writes as JSON. Reading
a plan file never runs code from it. Only methods with JAX types import JAX, so that a saved plan can be read and
explained without it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from autopar.errors import PlanMismatchError
from autopar.ir.mesh import MeshShape
from autopar.ir.placement import Part, Parts
from autopar.plans.columnar_numbers import in_columns, reader, write_document
from autopar.plans.considered import Considered
from autopar.plans.json_codec import as_it_is, decoder, encode, read_document, renamed, reworded, without
from autopar.plans.records import (
    CollectiveUse,
    Constraint,
    Decision,
    EarlyReduction,
    Efficiency,
    ManualRegion,
    Microbatches,
    Outcome,
    Prediction,
    ProgramSignature,
    RejectedMesh,
    Rematerialization,
    Replicated,
    TensorPlan,
    Tie,
    UnfusedReduction,
    type_text,
)
from autopar.plans.step_trace import MemoryOverStep, StepTrace
from autopar.plans.validate import check_plan

if TYPE_CHECKING:
    from jax.sharding import AbstractMesh, Mesh

#: The `format` field of a plan file.
FORMAT = "autopar-plan"
#: Fields that version 7 renames, and a status of the solver that it rewords.
_RENAMED = {
    "words": "strategy",
    "awaited": "early_reductions",
    "separate": "unfused_reductions",
    "recomputed": "rematerialized",
    "merge_bytes": "combine_threshold_bytes",
    "again": "segment",
    "renewed": "regathered",
    "recomputes": "rematerializes",
}
_REWORDED = {
    "feasible, as close to the bound as was asked: lower `relative_gap` to close the gap": (
        "feasible, gap within the requested tolerance: lower `relative_gap` to close the gap"
    )
}
_rename_fields = renamed(_RENAMED, of=("rejected", "tie", "recomputed", "microbatches"))
_reword_status = reworded(_REWORDED, "status", of="outcome")


def sixth_to_seventh(body: dict[str, Any]) -> dict[str, Any]:
    """Rename fields, and reword the solver's status."""
    return _reword_status(_rename_fields(body))


#: Migrations from each version to the next. Version 2 adds `trace` and `memory`; 3 drops the solve time, so that two runs
#: write the same file; 4 moves numbers from records to columns; 6 adds `replicated` and `tie`; 7 renames fields, rewords
#: a status and adds `efficiency`. A change of a field adds a migration here and a file of the previous version to
#: `tests/plan_files/`.
MIGRATIONS = (as_it_is, without("solve_time_s", of="outcome"), as_it_is, as_it_is, as_it_is, sixth_to_seventh)
VERSION = len(MIGRATIONS) + 1
#: Fields newer than version 7 that most plans do not need. A file has them only where they are set.
_NEWER = ("prefetched_gathers", "attention_kernel", "considered")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All decisions for one program on one mesh.

    Args:
        carried: pairs (input position, output position) that hold the same state.
        donated: positions of donated inputs.
        combine_threshold_bytes: combine threshold for XLA's GPU compiler, in bytes of results per kind of collective; None for
            XLA's default.
        prefetched_gathers: number of all-gathers in scans for which XLA's GPU compiler runs one iteration ahead.
        early_reductions: barriers that make reductions start early.
        unfused_reductions: reductions that get their own kernels.
        replicated: operations without a sharding rule, which every device runs whole, longest first; empty on one device.
        available_devices: number of devices that the plan could use, if it uses a part of them.
        tie: fastest plan found, if a simpler one replaced it.
        efficiency: inputs of MFU and throughput; None in plans from older files.
        trace, memory: timeline of a step; None in plans from files of version 1.
        dims_as_written: option of the request not to view dims as two.
        attention_kernel: the fused kernel that replaces attention; None if the step runs as written.
        considered: with `everything="auto"`, this plan and the alternatives, each with the reason why it was not chosen.
        in_tree, out_tree: JAX tree structures of arguments and results; absent from files.
    """

    program: ProgramSignature
    mesh: MeshShape
    hardware: str
    memory_budget_bytes: float | None
    strategy: str
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
    rematerialized: tuple[Rematerialization, ...] = ()
    combine_threshold_bytes: int | None = None
    prefetched_gathers: int = 0
    early_reductions: tuple[EarlyReduction, ...] = ()
    unfused_reductions: tuple[UnfusedReduction, ...] = ()
    replicated: tuple[Replicated, ...] = ()
    tie: Tie | None = None
    available_devices: int | None = None
    efficiency: Efficiency | None = None
    trace: StepTrace | None = None
    memory: MemoryOverStep | None = None
    notes: tuple[str, ...] = ()
    pins: dict[str, str] = field(default_factory=dict)
    dims_as_written: bool = False
    attention_kernel: str | None = None
    considered: tuple[Considered, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    in_tree: Any = field(default=None, compare=False, repr=False)
    out_tree: Any = field(default=None, compare=False, repr=False)

    @property
    def num_devices(self) -> int:
        """Number of devices that it runs on."""
        return self.mesh.num_devices

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches for gradient accumulation; 1 without."""
        return self.microbatches.count if self.microbatches else 1

    def parts_of(self, position: int) -> Parts:
        """The layout of an input on the mesh."""
        return (Part(self.inputs[position].sharding, self.mesh),)

    def in_shardings(self, mesh: Mesh | AbstractMesh) -> Any:
        """The `in_shardings` argument of `jax.jit`: a tuple of one pytree of `NamedSharding` per argument.

        Raises:
            MeshError: the mesh differs from the planned one.
            PlanMismatchError: the plan was read from a file, which does not hold the step's pytrees.
        """
        return self._sharding_tree(self.inputs, self.in_tree, mesh)

    def out_shardings(self, mesh: Mesh | AbstractMesh) -> Any:
        """The `out_shardings` argument of `jax.jit`; raises the errors of `in_shardings`."""
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

        This compares shapes and dtypes, but not operations; `parallelize(..., plan=...)` compares everything.

        Args:
            step: the planned function.
            args: its arguments, as arrays or `ShapeDtypeStruct`s.

        Raises:
            PlanMismatchError: an input or output differs; the message names the first.
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
        return f"the plan was made for another program: {difference}. Plan this one again."

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON types, as `save` writes it, without `in_tree` and `out_tree`."""
        body = {f.name: encode(getattr(self, f.name)) for f in fields(self) if f.compare}
        for name in [name for name in _NEWER if not body[name]]:
            del body[name]
        for region in body["regions"]:
            if region.get("method", "") is None:  # equal regions share one object
                del region["method"]
        return {"format": FORMAT, "version": VERSION, **in_columns(body)}

    @classmethod
    def from_json(cls, data: Any) -> Plan:
        """The inverse of `to_json`.

        Raises:
            PlanFileError: a field is missing, unknown, ill-typed or inconsistent; the message names it.
        """
        return read_document(data, FORMAT, MIGRATIONS, reader(decoder(cls), check_plan))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON with one record per line, for version control.

        The write is atomic: an existing file stays until the new one is complete.

        Raises:
            PlanFileError: the file cannot be written.
        """
        write_document(self.to_json(), path)
