"""Record the gradient accumulation of a plan: microbatches, accumulators, notes.

In: a program whose batch is split into microbatches, a mesh. Out: `Microbatches`, notes.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.errors import MicrobatchError
from autopar.ir.mesh import MeshShape
from autopar.ir.sharding import replicated
from autopar.plans.records import Constraint, Microbatches
from autopar.transforms.microbatch.batch_dims import num_examples
from autopar.transforms.program import Program


def microbatches_of(program: Program, mesh: MeshShape, constraints: Sequence[Constraint]) -> Microbatches | None:
    """The microbatches of a program, and the accumulators of the loop over them; None without gradient accumulation."""
    source, graph = program.trace.microbatches, program.graph
    if source is None:
        return None
    loops = [region for region in program.trace.regions if region.kind in ("scan", "while")]
    # Where no loop is left, nothing is accumulated.
    loop = next((loop for loop, region in zip(graph.loops, loops, strict=True) if region.source is source), None)
    split = {one.value: one.shardings[-1] for one in constraints if one.node is None}
    carried = [graph.nodes[leave].results[0] for _, leave in (loop.carries if loop else ())]
    infos = [(graph.values[value], split.get(value, replicated(len(graph.values[value].shape)))) for value in carried]
    return Microbatches(
        count=program.num_microbatches,
        num_examples=_num_examples(program),
        accumulated_bytes=sum(info.itemsize * sharding.local_size(info.shape, mesh) for info, sharding in infos),
        num_accumulated=len(carried),
        own_statistics=program.own_statistics,
    )


def _num_examples(program: Program) -> int:
    """The number of examples in the batch; for a pipeline stage, in one microbatch. A microbatch of one example may have no
    batch dim."""
    try:
        return num_examples(program.graph)
    except MicrobatchError:
        if program.num_microbatches > 1:
            raise
        return 1


def microbatch_notes(program: Program, mesh: MeshShape) -> tuple[str, ...]:
    """A note if a mesh axis divides the batch but not a microbatch, which then cannot be sharded over the axis."""
    axes = [size for size in mesh.axis_sizes if size > 1]
    whole = num_examples(program.graph) if program.num_microbatches > 1 else 1
    each = whole // program.num_microbatches
    if not any(whole % size == 0 and each % size for size in axes):
        return ()
    return (
        f"a microbatch has {each} of {whole} examples, which not every axis of the mesh divides that divides the batch:"
        " fewer microbatches can be split better over devices",
    )
