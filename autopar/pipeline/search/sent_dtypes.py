"""Find the collectives of a stage that send another dtype than the plan counts.

In: the explicit program of a stage, and the accumulators that the executor reduces after the microbatch loop. Out:
`sent_shares`, by collective the bytes that it sends over those that the plan counts.

- XLA casts before it gathers, where a cast to a narrower dtype is all that reads the result (its `CollectiveQuantizer`).
- One program may cast the terms of a gradient before it reduces them. The executor reduces an accumulator in its own
  dtype, which is float32 for the sums of narrower values.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from autopar.cost.collectives import collective
from autopar.ir.explicit_program import Communicate, ExplicitProgram
from autopar.ir.graph import Graph, Node
from autopar.rules.table import traits_of

#: A collective: the value, kind, mesh axes, and payload.
Sent = tuple[int, str, tuple[str, ...], float]


def sent_shares(explicit: ExplicitProgram, graph: Graph, accumulators: Mapping[int, float]) -> dict[Sent, float]:
    """The share of its payload that a collective sends, where it is not 1.

    Args:
        accumulators: the values that leave the loop as terms of a reduction, with the bytes of an element.
    """
    readers: dict[int, list[int]] = defaultdict(list)
    for (node, _), array in explicit.reads.items():
        readers[array].append(node)
    found: dict[Sent, float] = {}
    for op in explicit.communications:
        if op.operand is None or op.result is None or op.kind == "cut":
            continue
        value = explicit.arrays[op.operand].value
        if collective(op.collective).is_sum:
            sent = _accumulated(value, graph, accumulators)
        else:
            is_read = op.result not in explicit.sent_from and op.result not in explicit.outputs
            sent = _cast(graph, value, readers[op.result]) if is_read else None
        if sent is not None:
            found[_sent_by(op, value)] = sent / graph.values[value].itemsize
    return {key: share for key, share in found.items() if share != 1.0}


def in_sent_dtypes(explicit: ExplicitProgram, shares: Mapping[Sent, float]) -> ExplicitProgram:
    """The program whose collectives have the bytes that they send."""
    ops = list(explicit.ops)
    for i, op in enumerate(ops):
        if isinstance(op, Communicate) and op.operand is not None:
            share = shares.get(_sent_by(op, explicit.arrays[op.operand].value), 1.0)
            ops[i] = replace(op, num_bytes=share * op.num_bytes)
    return replace(explicit, ops=tuple(ops))


def _sent_by(op: Communicate, value: int) -> Sent:
    return value, op.collective, op.axes, op.num_bytes


def _cast(graph: Graph, value: int, readers: Sequence[int]) -> float | None:
    """Bytes per element after the cast that is all that reads a value, perhaps transposed; None if it is not narrower."""
    casts = [one for n in readers if (one := _first_cast(graph, graph.nodes[n])) is not None]
    sizes = {(made.dtype, made.itemsize) for made in (graph.values[one.results[0]] for one in casts)}
    if len(casts) < len(readers) or len(sizes) != 1:
        return None
    ((_, size),) = sizes
    return size if size < graph.values[value].itemsize else None


def _first_cast(graph: Graph, node: Node) -> Node | None:
    """The cast that a node is, or that alone reads what the node transposes; None if several nodes read the cast, as where
    a convolution's kernel is also reversed for its gradient: XLA casts it for each."""
    while traits_of(node.primitive).permutes and _has_one_user(graph, node):
        node = graph.nodes[graph.users[node.results[0]][0][0]]
    return node if _is_cast(node) and _has_one_user(graph, node) else None


def _has_one_user(graph: Graph, node: Node) -> bool:
    return len(graph.users.get(node.results[0], ())) == 1 and node.results[0] not in graph.outputs


def _accumulated(value: int, graph: Graph, accumulators: Mapping[int, float]) -> float | None:
    """Bytes per element of the accumulator that a value is, perhaps after casts."""
    return next((accumulators[v] for v in before_casts(value, graph) if v in accumulators), None)


def before_casts(value: int, graph: Graph) -> Iterator[int]:
    """A value, and each value that it is cast from."""
    yield value
    node = graph.producer(value)
    while node is not None and _is_cast(node) and node.operands[0] is not None:
        yield node.operands[0]
        node = graph.producer(node.operands[0])


def _is_cast(node: Node) -> bool:
    return traits_of(node.primitive).casts
