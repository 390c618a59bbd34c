"""Trace a step that workers run, and take its calls apart into state, data and results.

In: the first call of a step. Out: `TracedStep`: which leaves of the arguments are state, and how the state and the
rest of the results are put together again.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from autopar.errors import StepSignatureError
from autopar.frontend.call import Call, Results
from autopar.frontend.pytrees import Kept, put_together
from autopar.frontend.step import Step
from autopar.frontend.trace_builder import flat_border
from autopar.jax_interop.compat import shape_struct
from autopar.transforms.microbatch.batch_dims import leading_dim
from autopar.transforms.microbatch.rewrite import check_divides
from autopar.transforms.program import Program, program_of_call, program_of_trace


@dataclass(frozen=True, slots=True)
class TracedStep:
    """A traced step.

    Args:
        names: of the arguments that hold arrays. kept: their static parts. spans: their leaves.
        state_names: of the arguments that are state.
        result: the static part of the result.
        pairs: positions of input and output leaves that hold the same state.
    """

    program: Program
    names: tuple[str, ...]
    kept: tuple[Kept, ...]
    structures: tuple[Any, ...]
    spans: tuple[range, ...]
    state_names: tuple[str, ...]
    result: Kept
    pairs: tuple[tuple[int, int], ...]

    @property
    def paths(self) -> tuple[str, ...]:
        """The path of each leaf of the arguments."""
        return self.program.as_written.trace.input_paths

    def state_leaves(self, leaves: Sequence[Any]) -> dict[str, Any]:
        """The leaves of the state by path, from those of all arguments."""
        return {self.paths[position]: leaves[position] for position, _ in self.pairs}

    def state(self, leaves: Sequence[Any]) -> Any:
        """The state arguments with these leaves of all arguments; a tuple of several."""
        found: list[Any] = []
        for name, kept, structure, span in zip(self.names, self.kept, self.structures, self.spans, strict=True):
            if name in self.state_names:
                found.append(put_together(kept, jax.tree.unflatten(structure, [leaves[n] for n in span])))
        return found[0] if len(found) == 1 else tuple(found)

    def whole_result(self, outputs: Sequence[Any]) -> Any:
        """The step's result from all its arrays."""
        return put_together(self.result, jax.tree.unflatten(self.program.trace.out_tree, list(outputs)))

    def rest(self, outputs: Sequence[Any]) -> Any:
        """What the step returns apart from its state, from all its arrays (None for those of the state): what is left of a tuple or dict
        without the state, by itself if it is one value."""
        tree = self.program.trace.out_tree
        carried = {output for _, output in self.pairs}
        whole = jax.tree.unflatten(tree, list(outputs))
        if type(whole) not in (tuple, list, dict):
            return None if len(carried) == tree.num_leaves else whole
        left: list[Any] = []
        start = 0
        for name, child in zip(
            sorted(whole) if isinstance(whole, dict) else range(len(whole)), tree.children(), strict=True
        ):
            span = range(start, start + child.num_leaves)
            start = span.stop
            if not span or not carried.issuperset(span):
                left.append((name, whole[name]))
        if len(left) == 1:
            return left[0][1]
        return (dict(left) if isinstance(whole, dict) else tuple(value for _, value in left)) if left else None


def traced_step(call: Call, carry: Sequence[str] | None) -> TracedStep:
    """Trace an open call.

    Raises:
        StepSignatureError: the step changes objects in place, returns no state, or returns more than arrays.
    """
    check_is_plain(call, "workers need")
    program = program_of_call(call, carry=carry, donate=())
    return taken_apart(call, program, program.as_written.graph.carried)


def check_is_plain(call: Call, who: str) -> None:
    """Refuse a step that changes objects in place.

    Args:
        who: what needs the state as a value.

    Raises:
        StepSignatureError: it is one.
    """
    if call.held:
        raise StepSignatureError(
            f"`{call.step.name}` takes objects that it changes in place, and {who} the state as a value: write it as a function from"
            " a state to a new one, with `nnx.split` and `nnx.merge`"
        )


def taken_apart(
    call: Call, program: Program, pairs: Sequence[tuple[int, int]], results: Results | None = None
) -> TracedStep:
    """The parts of a traced step.

    Args:
        pairs: positions of input and output leaves that hold the same state.
        results: what the step returns, where an earlier call has traced it.

    Raises:
        StepSignatureError: the step returns no state, or more than arrays.
    """
    name = call.step.name
    if not pairs:
        raise StepSignatureError(
            f"`{name}` returns none of its arguments updated, so there are no weights to keep: return the new state first, as"
            " `(state, batch) -> (state, loss)`"
        )
    results = results or call.results
    assert results is not None, "it has been traced"
    if not results.is_plain:
        raise StepSignatureError(f"`{name}` returns more than arrays: with `consistency`, return arrays only")
    structures = tuple(map(jax.tree.structure, call.trees))
    stops = list(itertools.accumulate(structure.num_leaves for structure in structures))
    spans = tuple(map(range, [0, *stops], stops))
    inputs = {position for position, _ in pairs}
    of_state = tuple(one for one, span in zip(call.names, spans, strict=True) if inputs.intersection(span))
    return TracedStep(program, call.names, call.kept, structures, spans, of_state, results.result, tuple(pairs))


def on_shares(call: Call, traced: TracedStep, num_workers: int, carry: Sequence[str] | None) -> Program:
    """The step for one worker's share of the batch, with flat arguments and results.

    Raises:
        MicrobatchError: the number of workers does not divide the batch.
    """
    graph = traced.program.as_written.graph
    check_divides(graph, num_workers, "shares of workers")
    batch = set(leading_dim(graph)[1])
    leaves = [shape_struct(leaf) for leaf in jax.tree.leaves(call.trees)]
    shares = [
        jax.ShapeDtypeStruct((leaf.shape[0] // num_workers, *leaf.shape[1:]), leaf.dtype) if i in batch else leaf
        for i, leaf in enumerate(leaves)
    ]
    trees = jax.tree.unflatten(jax.tree.structure(call.trees), shares)
    program = program_of_call(replace(call, trees=trees), carry=carry, donate=()).as_written
    trace, pairs = program.trace, program.graph.carried
    if pairs != traced.pairs:
        raise StepSignatureError(
            f"`{call.step.name}` returns another state for a share of the batch than for the whole"
        )
    border = flat_border(
        list(zip(trace.inputs, trace.input_paths, strict=True)),
        list(zip(trace.outputs, trace.output_paths, strict=True)),
    )
    return program_of_trace(replace(trace, **border), pairs, tuple(i for i, _ in pairs), ())


def state_arguments_of(step: Step, state: Any, others: Mapping[str, Any]) -> tuple[Any, ...]:
    """The first arguments of a step, which are state: a tuple is several, unless the step takes two, the state and a batch.

    Args:
        others: arguments that are given by name.
    """
    left = [name for name in step.required if name not in others]
    return state if type(state) is tuple and len(left) != 2 else (state,)


def arguments_of(step: Step, state: Sequence[Any], batch: Any, others: Mapping[str, Any]) -> tuple[Any, ...]:
    """The positional arguments of a call in a stream.

    Args:
        batch: the argument after the state; a tuple of all of them if there are several.
        others: arguments that are given by name.

    Raises:
        StepSignatureError: the batch has another number of arguments.
    """
    left = [name for name in step.required[len(state) :] if name not in others]
    if len(left) == 1 or not step.required:
        return (*state, batch)
    if isinstance(batch, tuple) and len(batch) == len(left):
        return (*state, *batch)
    raise StepSignatureError(
        f"`{step.name}` takes {', '.join(step.parameters)}: with the state first, each batch is a tuple of"
        f" {', '.join(left) or 'nothing'}; give other arguments by name"
    )


def check_state_first(traced: TracedStep, call: Call, count: int) -> None:
    """Refuse a stream whose first `count` arguments are not the state.

    Raises:
        StepSignatureError: they are not.
    """
    given = call.all_names[:count]
    if traced.state_names != given:
        raise StepSignatureError(
            f"the state of `{call.step.name}` is {', '.join(traced.state_names)}, and `stream` was given {', '.join(given)} as the"
            " state: where several arguments are state, give a tuple of them; where one is taken for state by mistake, name the"
            f" state in `carry={[*given]}`"
        )


def of_all_processes(call: Call, num_workers: int, carry: Sequence[str] | None) -> Call:
    """The call with the batch of all processes, from that with the share of this one; shapes in place of arrays.

    Raises:
        MicrobatchError: the step has no batch.
    """
    batch = set(leading_dim(program_of_call(call, carry=carry, donate=()).as_written.graph)[1])
    leaves = [shape_struct(leaf) for leaf in jax.tree.leaves(call.trees)]
    whole = [
        jax.ShapeDtypeStruct((leaf.shape[0] * num_workers, *leaf.shape[1:]), leaf.dtype) if i in batch else leaf
        for i, leaf in enumerate(leaves)
    ]
    return replace(call, trees=jax.tree.unflatten(jax.tree.structure(call.trees), whole))
