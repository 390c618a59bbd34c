"""From a trace to the graph: the same equations in the same order, without JAX.

In: `Trace`. Out: `Graph`, whose node *n* is equation *n*.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from autopar import jax_compat
from autopar.graph.ir import Graph, Node, Value
from autopar.graph.params import plain_params
from autopar.trace import Equation, Trace


def graph_of(trace: Trace, carried: tuple[tuple[int, int], ...]) -> Graph:
    """Build the graph; `carried` pairs positions of inputs and outputs that hold one state."""
    nodes = tuple(_node(equation) for equation in trace.equations)
    if all(node.phase == "update" for node in nodes):  # nothing is differentiated: a forward pass
        nodes = tuple(dataclasses.replace(node, phase="forward") for node in nodes)
    return Graph(
        values=tuple(_value(aval) for aval in trace.avals),
        nodes=nodes,
        inputs=trace.inputs,
        input_paths=trace.input_paths,
        outputs=tuple(v if isinstance(v, int) else None for v in trace.outputs),
        output_paths=trace.output_paths,
        constants=tuple(v for v, _ in trace.constants),
        carried=carried,
    )


def _value(aval: Any) -> Value:
    if not hasattr(aval, "shape"):  # a token: it has an order, but no size
        return Value((), "token", 0.0)
    return Value(tuple(int(size) for size in aval.shape), str(aval.dtype), jax_compat.itemsize(aval))


def _node(equation: Equation) -> Node:
    return Node(
        primitive=equation.primitive,
        params=plain_params(equation.primitive, equation.source.params),
        operands=tuple(v if isinstance(v, int) else None for v in equation.operands),
        results=equation.results,
        path=equation.path,
        phase=equation.phase,
        source=_source(_Traceback(equation)),
        effect=bool(equation.source.effects),
    )


class _Traceback:
    """Hashes an equation by its traceback, which thousands of equations share."""

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
