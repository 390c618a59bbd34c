"""Convert a trace to a graph with the same equations in the same order, without JAX.

In: a `Trace`.
Out: a `Graph`, whose node *n* is equation *n*.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from autopar.frontend.accumulators import sums_of
from autopar.frontend.equations import Equation, Region
from autopar.frontend.kernel_flops import EFFICIENCY, WORK, counted_work, kernel_efficiency
from autopar.frontend.kernel_loops import LOOPS, loops_of
from autopar.frontend.trace import Trace
from autopar.frontend.user_shardings import constraint_params, shard_map_params
from autopar.ir.graph import UNKNOWN_TRIP_COUNT, Graph, Loop, Node, Value
from autopar.ir.params import plain_params
from autopar.jax_interop import compat as jax_compat


def graph_of(trace: Trace, carried: tuple[tuple[int, int], ...]) -> Graph:
    """Build the graph. `carried` has pairs of input and output positions that hold the same state."""
    nodes = tuple(_node(equation) for equation in trace.equations)
    if all(node.phase == "update" for node in nodes):  # no gradients: all is a forward pass
        nodes = tuple(dataclasses.replace(node, phase="forward") for node in nodes)
    else:
        nodes = _before_gradients(nodes, trace)
    return Graph(
        values=tuple(_value(aval, repeat) for aval, repeat in zip(trace.avals, trace.repeats, strict=True)),
        nodes=nodes,
        inputs=trace.inputs,
        input_paths=trace.input_paths,
        outputs=tuple(v if isinstance(v, int) else None for v in trace.outputs),
        output_paths=trace.output_paths,
        constants=tuple(v for v, _ in trace.constants),
        carried=carried,
        loops=_loops(trace),
        barriers=tuple(region.enter for region in trace.regions if region.kind == "barrier"),
    )


def _before_gradients(nodes: tuple[Node, ...], trace: Trace) -> tuple[Node, ...]:
    """Move floating-point work outside the gradient to the forward pass if the forward or backward pass reads its results.

    JAX does not name the gradient's transformation there: casts of frozen weights, or of all weights before
    `jax.grad`, and the forward pass of a frozen model, such as a teacher.
    """
    phased, read = list(nodes), set[int]()
    for n in range(len(nodes) - 1, -1, -1):
        node = nodes[n]
        if node.phase == "update":
            floats = [v for v in node.results if "float" in str(getattr(trace.avals[v], "dtype", ""))]
            if read.isdisjoint(floats):
                continue
            phased[n] = dataclasses.replace(node, phase="forward")
        read.update(v for v in node.operands if v is not None)
    return tuple(phased)


def _value(aval: Any, repeat: float) -> Value:
    if not hasattr(aval, "shape"):  # a token, which has an order but no size
        return Value((), "token", 0.0)
    return Value(tuple(int(size) for size in aval.shape), str(aval.dtype), jax_compat.itemsize(aval), repeat)


def _loops(trace: Trace) -> tuple[Loop, ...]:
    return tuple(_loop(trace, region) for region in trace.regions if region.kind in ("scan", "while"))


def _loop(trace: Trace, region: Region) -> Loop:
    trip_count = float(region.source.params.get("length", UNKNOWN_TRIP_COUNT))
    stacks = tuple(n for n in range(*region.exit) if trace.equations[n].stacks)
    carries = region.carries(trace.equations)
    return Loop(region.enter[0], region.exit[0], trip_count, carries, stacks, sums_of(trace, region))


def _node(equation: Equation) -> Node:
    return Node(
        primitive=equation.primitive,
        params={} if equation.piece else node_params(equation.source),
        operands=tuple(v if isinstance(v, int) else None for v in equation.operands),
        results=equation.results,
        path=equation.path,
        phase=equation.phase,
        source=_source(_Traceback(equation)),
        effect=equation.effects,
        repeat=equation.repeat,
        rematerialized=equation.is_rematerialized,
    )


def node_params(equation: Any) -> dict[str, Any]:
    """The parameters of a JAX equation that determine its results' shapes; the shardings that it specifies; the counted
    work and the loops of a kernel."""
    name = equation.primitive.name
    if name == "sharding_constraint":
        return constraint_params(equation)
    if name == "shard_map":
        return shard_map_params(equation)
    derived = {WORK: counted_work(equation), EFFICIENCY: kernel_efficiency(equation), LOOPS: loops_of(equation)}
    params = plain_params(name, equation.params)
    return params | {key: value for key, value in derived.items() if value is not None}


class _Traceback:
    """A key for an equation's traceback, which thousands of equations share."""

    def __init__(self, equation: Equation) -> None:
        self.equation = equation.source
        self.traceback = equation.source.source_info.traceback

    def __hash__(self) -> int:
        return hash(id(self.traceback))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Traceback) and self.traceback is other.traceback


@functools.lru_cache(maxsize=1024)
def _source(key: _Traceback) -> str:
    return jax_compat.user_source(key.equation)
