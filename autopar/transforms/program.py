"""A traced step as the planner and the executor need it.

In: a user's step and its arguments. Out: `Program`: the step's trace and graph, its carried and donated inputs, and a
signature that identifies it.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from autopar.frontend.call import Call, opened
from autopar.frontend.carried_state import carried_arguments, carried_leaves, donated_leaves
from autopar.frontend.from_jaxpr import graph_of
from autopar.frontend.kernel_flops import EFFICIENCY, WORK
from autopar.frontend.kernel_loops import LOOPS
from autopar.frontend.sharding_metadata import Annotation
from autopar.frontend.step import Step
from autopar.frontend.trace import Trace
from autopar.frontend.tracing import trace
from autopar.ir.graph import Graph
from autopar.ir.verifier import check
from autopar.jax_interop.compat import shape_struct
from autopar.plans.plan import Plan
from autopar.plans.records import ProgramSignature, RematSegment
from autopar.system.gc_pause import seldom_collect
from autopar.transforms.attention.cones import find_cones
from autopar.transforms.attention.formula import Formula, formula_of
from autopar.transforms.attention.rewrite import with_kernels
from autopar.transforms.attention.sections import Sections
from autopar.transforms.microbatch.rewrite import split_batch
from autopar.transforms.remat.rewrite import recompute
from autopar.transforms.split_dims.rewrite import factor_dims


@dataclass(frozen=True, slots=True)
class Fused:
    """A step with attention by a fused kernel.

    Args:
        program: the step; None if the kernel can replace nothing.
        count: the number of attentions that it replaces.
        reasons: why the kernel cannot replace others, with their number.
    """

    program: Program | None
    count: int
    reasons: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Program:
    """A traced step as the planner and the executor need it.

    Args:
        signature: identifies the step as the user wrote it, before rematerialization.
        whole: the same step with its dims as written, if the trace splits dims in two.
        num_microbatches, own_statistics: how the batch is split into microbatches.
        unsplit: the step with the whole batch, if this one runs in microbatches.
        split: if this one does not, its versions in microbatches that have been built so far.
        recomputed: the rematerialized segments of the trace.
        before: the same step without rematerialization, if the trace has any.
        annotations: the sharding in the metadata of each argument, by input path.
        attention_kernel: the fused kernel that replaces attention in this step; None if it is as the user wrote it.
        fused: the same step with a fused kernel, by the kernel's name, as far as built.
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
    recomputed: tuple[RematSegment, ...] = ()
    before: Program | None = None
    annotations: Mapping[str, Annotation] = field(default_factory=dict, compare=False, repr=False)
    attention_kernel: str | None = None
    fused: dict[str, Fused] = field(default_factory=dict, compare=False, repr=False)

    @property
    def forms(self) -> tuple[Program, ...]:
        """The forms of this step; the form with dims as written comes last."""
        return (self,) if self.whole is None else (self, self.whole)

    @property
    def as_traced(self) -> Program:
        """This step before gradient accumulation and rematerialization."""
        first = self.before or self
        return first.unsplit or first

    @property
    def as_written(self) -> Program:
        """This step as traced, with its dims as written."""
        return self.as_traced.forms[-1]

    def of(self, plan: Plan) -> Program:
        """This step in the form that a plan was made for, with the plan's microbatches and rematerialized segments."""
        if plan.attention_kernel != self.attention_kernel and plan.attention_kernel is not None:
            fused = self.with_attention(plan.attention_kernel).program
            return self.as_traced if fused is None else fused.of(plan)
        agains, split = tuple(one.segment for one in plan.rematerialized), plan.microbatches
        if (self.signature.fingerprint, self.recomputed) == (plan.program.fingerprint, agains):
            return self
        first = self.as_traced
        if split is not None:
            first = first.in_microbatches(split.count, own_statistics=split.own_statistics)
        same = (form for form in first.forms if form.signature.fingerprint == plan.program.fingerprint)
        form = next(same, None)
        if form is None:  # the plan is of another program; the caller refuses it
            return first
        return replace(recomputing(form, agains), before=first) if agains else form

    def attention(self) -> Sequence[Formula]:
        """The attention that this step, as traced, writes as softmax(QK^T)V."""
        sections = Sections(self.as_written.trace)
        found = (formula_of(sections, cone) for cone in find_cones(sections))
        return [formula for formula in found if formula is not None]

    def with_attention(self, kernel: str) -> Fused:
        """This step, as traced, with attention by a fused kernel."""
        traced = self.as_traced
        if kernel not in traced.fused:
            whole = self.as_written
            made = with_kernels(whole.trace, kernel)
            program = None
            if made.formulas:
                program = program_of_trace(made.trace, whole.graph.carried, traced.carried_arguments, traced.donated)
                about = {"annotations": traced.annotations, "attention_kernel": kernel}
                within = None if program.whole is None else replace(program.whole, **about)
                program = replace(program, whole=within, **about)
            traced.fused[kernel] = Fused(program, len(made.formulas), made.reasons)
        return traced.fused[kernel]

    def in_microbatches(self, count: int, *, own_statistics: bool = False) -> Program:
        """This step, as traced, with its batch split into `count` microbatches.

        Raises:
            MicrobatchError: the batch cannot be split.
        """
        traced, key = self.as_traced, (count, own_statistics)
        if count == 1:
            return traced
        if key not in traced.split:
            whole = self.as_written
            trace = split_batch(whole.trace, whole.graph, count, own_statistics=own_statistics)
            program = program_of_trace(trace, whole.graph.carried, traced.carried_arguments, traced.donated)
            about = {"num_microbatches": count, "own_statistics": own_statistics, "unsplit": traced}
            about["attention_kernel"] = traced.attention_kernel
            within = None if program.whole is None else replace(program.whole, **about)
            traced.split[key] = replace(program, whole=within, **about)
        return traced.split[key]


def recomputing(program: Program, agains: Sequence[RematSegment]) -> Program:
    """The step with some of its forward values recomputed in the backward pass."""
    if not agains:
        return program
    rewritten = recompute(program.trace, agains)
    graph = graph_of(rewritten, program.graph.carried)
    check(graph)
    return replace(program, trace=rewritten, graph=graph, whole=None, recomputed=tuple(agains), before=program)


@seldom_collect()
def program_of(
    step: Callable[..., Any],
    args: Sequence[Any],
    *,
    carry: Sequence[str] | None,
    donate: Sequence[str] | None,
    kwargs: Mapping[str, Any] | None = None,
    static_argnames: str | Sequence[str] | None = None,
) -> Program:
    """Trace a step, and find which inputs it carries and which it donates."""
    with opened(Step.of(step, static_argnames), args, kwargs or {}) as call:
        return program_of_call(call, carry=carry, donate=donate)


def program_of_call(call: Call, *, carry: Sequence[str] | None, donate: Sequence[str] | None) -> Program:
    """Trace a call of a step, and find which inputs it carries and which it donates.

    The state of an object argument is carried if the step changes it. Any other argument is carried if the result
    returns it.
    """
    args = jax.tree.map(shape_struct, call.trees)  # the arrays' current shardings must not enter the trace
    traced = trace(call.function, args, step=call.step, names=call.names, hint=call.hint())
    outputs = jax.tree.unflatten(traced.out_tree, _abstract_outputs(traced))
    traced = replace(traced, output_paths=call.output_paths(outputs))
    requested = None if carry is None else [name for name in carry if name not in call.changed]
    carried = carried_arguments(args, call.result_of(outputs), call.names, requested, call.changed)
    given = [*call.renewed, *(call.names[i] for i in carried)] if donate is None else donate
    leaves = sorted((*call.updated_from(outputs), *carried_leaves(args, carried)))
    positions = sorted((*carried, *map(call.names.index, call.changed)))
    program = program_of_trace(traced, tuple(leaves), tuple(positions), donated_leaves(args, call.names, given))
    return replace(program, annotations=call.annotations())


def program_of_trace(
    traced: Trace, leaves: tuple[tuple[int, int], ...], carried: tuple[int, ...], donated: tuple[int, ...]
) -> Program:
    """Build a program from a trace; dims that are cut into equal parts become two dims.

    Args:
        leaves: pairs (input, output) of positions that hold the same state.
        carried: positions of the arguments that hold it.
        donated: positions of the donated inputs.
    """
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
        if isinstance(output, int):
            return jax.ShapeDtypeStruct(jax.numpy.shape(traced.avals[output]), traced.avals[output].dtype)
        return jax.ShapeDtypeStruct((), jax.numpy.result_type(output.value))  # a scalar of JAX or of Python

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
        params = sorted((name, value) for name, value in node.params.items() if name not in (WORK, EFFICIENCY, LOOPS))
        what = (node.primitive, node.operands, node.results, shapes, params, node.repeat)
        digest.update(repr(what).encode())
    return ProgramSignature(
        name=traced.name,
        inputs=tensors(graph.input_paths, graph.inputs),
        outputs=tensors(graph.output_paths, graph.outputs),
        primitives=dict(sorted(Counter(node.primitive for node in graph.nodes).items())),
        fingerprint=digest.hexdigest()[:32],
    )
