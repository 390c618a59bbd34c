"""A traced step as the planner and the executor need it.

In: a user's step and its arguments. Out: `Program`: its trace and graph, what is carried and what is donated, and what
tells it from another.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from autopar.carried import carried_arguments, carried_leaves, donated_leaves
from autopar.factoring.rewrite import factor_dims
from autopar.graph.check import check
from autopar.graph.from_jaxpr import graph_of
from autopar.graph.ir import Graph
from autopar.jax_compat import shape_struct
from autopar.microbatch.rewrite import split_batch
from autopar.plan import Plan, ProgramSignature
from autopar.trace import Trace, argument_names, check_leaves, trace


@dataclass(frozen=True, slots=True)
class Program:
    """A traced step as the planner and the executor need it.

    Args:
        whole: where the trace sees dims as two, the same step with those dims as they were written.
        num_microbatches, own_statistics: how its batch is split over time.
        unsplit: where it is, the step as it was. split: where it is not, the steps in which it is, so far.
    """

    trace: Trace
    graph: Graph
    carried_arguments: tuple[int, ...]
    donated: tuple[int, ...]
    signature: ProgramSignature
    whole: Program | None = None
    num_microbatches: int = 1
    own_statistics: bool = False
    unsplit: Program | None = field(default=None, compare=False, repr=False)
    split: dict[tuple[int, bool], Program] = field(default_factory=dict, compare=False, repr=False)

    @property
    def forms(self) -> tuple[Program, ...]:
        """The forms that this step has; as it was written comes last."""
        return (self,) if self.whole is None else (self, self.whole)

    def of(self, plan: Plan) -> Program:
        """This step in the form that a plan is of."""
        form, told = self.unsplit or self, plan.microbatches
        if told is not None:
            form = form.in_microbatches(told.count, own_statistics=told.own_statistics)
        whole = form.whole
        return whole if whole is not None and plan.program.fingerprint == whole.signature.fingerprint else form

    def in_microbatches(self, count: int, *, own_statistics: bool = False) -> Program:
        """This step with its batch split over time into `count` parts.

        Raises:
            MicrobatchError: where it cannot be.
        """
        if count == 1:
            return self
        key = (count, own_statistics)
        if key not in self.split:
            whole = self.whole or self
            trace = split_batch(whole.trace, whole.graph, count, own_statistics=own_statistics)
            program = _program(trace, whole.graph.carried, self.carried_arguments, self.donated)
            about = {"num_microbatches": count, "own_statistics": own_statistics, "unsplit": self}
            within = None if program.whole is None else replace(program.whole, **about)
            self.split[key] = replace(program, whole=within, **about)
        return self.split[key]


def program_of(
    step: Callable[..., Any], args: Sequence[Any], *, carry: Sequence[str] | None, donate: Sequence[str] | None
) -> Program:
    """Trace a step and say what is carried and what is donated."""
    check_leaves(step, args)
    args = jax.tree.map(shape_struct, tuple(args))  # where an array lies now must not enter the trace
    traced = trace(step, args)
    names = argument_names(step, len(args))
    result = jax.tree.unflatten(traced.out_tree, _abstract_outputs(traced))
    carried = carried_arguments(args, result, names, carry)
    given = [names[i] for i in carried] if donate is None else donate
    donated = donated_leaves(args, names, given)
    return _program(traced, carried_leaves(args, carried), tuple(carried), donated)


def _program(
    traced: Trace, leaves: tuple[tuple[int, int], ...], carried: tuple[int, ...], donated: tuple[int, ...]
) -> Program:
    """A trace, and the same with dims that are cut into equal parts seen as two."""
    graph = graph_of(traced, leaves)
    check(graph)
    program = Program(traced, graph, carried, donated, _signature(traced, graph))
    factored = factor_dims(traced, graph)
    if factored is traced:
        return program
    graph = graph_of(factored, leaves)
    check(graph)
    return Program(factored, graph, carried, donated, _signature(factored, graph), whole=program)


def _abstract_outputs(traced: Trace) -> list[Any]:
    def abstract(output: Any) -> Any:
        aval = traced.avals[output] if isinstance(output, int) else output.value
        return jax.ShapeDtypeStruct(jax.numpy.shape(aval), aval.dtype)

    return [abstract(output) for output in traced.outputs]


def _signature(traced: Trace, graph: Graph) -> ProgramSignature:
    def tensors(paths: Sequence[str], values: Sequence[int | None]) -> tuple[tuple[str, tuple[int, ...], str], ...]:
        infos = [graph.values[v] if v is not None else None for v in values]
        return tuple(
            (path, info.shape if info else (), info.dtype if info else "literal")
            for path, info in zip(paths, infos, strict=True)
        )

    digest = hashlib.sha256()
    for node in graph.nodes:
        shapes = [graph.values[v].shape for v in node.results]
        what = (node.primitive, node.operands, node.results, shapes, sorted(node.params.items()), node.repeat)
        digest.update(repr(what).encode())
    return ProgramSignature(
        name=traced.name,
        inputs=tensors(graph.input_paths, graph.inputs),
        outputs=tensors(graph.output_paths, graph.outputs),
        primitives=dict(sorted(Counter(node.primitive for node in graph.nodes).items())),
        fingerprint=digest.hexdigest()[:32],
    )
