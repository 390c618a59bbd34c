"""Write the notes of a plan: unknown primitives, side effects, unknown trip counts, undivided dims, frozen parameters.

In: a graph, the primitives without a rule, the plan's inputs. Out: notes for the user.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from autopar.ir.graph import UNKNOWN_TRIP_COUNT, Graph, Node
from autopar.ir.mesh import MeshShape
from autopar.planner.plan_assembly import frozen_inputs
from autopar.plans.records import Role, TensorPlan
from autopar.rules.node_view import NodeView
from autopar.rules.user_rules import called, needs_local, template
from autopar.system.units import human_bytes

#: Primitives that contain a whole program, which no rule describes.
_PROGRAMS = frozenset(["call_hi_primitive"])


def plan_notes(graph: Graph, mesh: MeshShape, unknown: Counter[str], inputs: Sequence[TensorPlan]) -> tuple[str, ...]:
    """All notes of a program's plan.

    Args:
        unknown: number of uses of each primitive without a usable sharding rule.
    """
    return (
        *_unknown(graph, unknown),
        *_effects(graph),
        *_unknown_trip_counts(graph),
        *_undivided(mesh, inputs),
        *_frozen(graph, inputs),
    )


def _unknown(graph: Graph, unknown: Counter[str]) -> Iterator[str]:
    for name, count in sorted(unknown.items()):
        if count:
            problem = f"`{name}` has {_problem(graph, name)}: its {count} uses run replicated, and are priced so"
            yield f"{problem}{_way_out(graph, name)}"


def _effects(graph: Graph) -> Iterator[str]:
    effects = Counter(node.primitive for node in graph.nodes if node.effect)
    for name, count in sorted(effects.items()):
        yield f"`{name}` has a side effect: each of its {count} uses runs once per step, on whole values"


def _unknown_trip_counts(graph: Graph) -> Iterator[str]:
    loops = [node for node in graph.nodes if node.primitive == "predicate"]
    if loops:
        yield (
            f"the trip count of a `while` loop is unknown before it runs: each of {len(loops)} is priced for"
            f" {UNKNOWN_TRIP_COUNT:g} iterations. The first is at {loops[0].source or 'an unknown line'}"
        )


def _undivided(mesh: MeshShape, inputs: Sequence[TensorPlan]) -> Iterator[str]:
    axes = [(a, s) for a, s in mesh.size_of.items() if s > 1]
    undivided: dict[int, list[str]] = {}
    for tensor in inputs:
        whole = tensor.role == "data" and tensor.shape and tensor.shape[0] > 1 and not any(tensor.sharding.dims)
        if whole and axes and all(tensor.shape[0] % size for _, size in axes):
            undivided.setdefault(tensor.shape[0], []).append(tensor.path)
    for size, paths in undivided.items():
        named = ", ".join(f"{a}={s}" for a, s in axes)
        yield (
            f"the leading dim of {', '.join(f'`{p}`' for p in paths[:3])} is {size}, which no mesh axis ({named})"
            f" divides, so that it is replicated; a multiple of {axes[-1][1]} can be sharded"
        )


def _frozen(graph: Graph, inputs: Sequence[TensorPlan]) -> Iterator[str]:
    """The parameters that the step does not change, if it trains others."""
    roles: list[Role] = [tensor.role for tensor in inputs]
    kept, num_parameters = frozen_inputs(graph, roles), roles.count("parameter")
    if 0 < len(kept) < num_parameters:
        num_bytes = sum(graph.values[graph.inputs[i]].num_bytes for i in kept)
        yield (
            f"{len(kept)} of {num_parameters} parameters ({human_bytes(num_bytes)}) are frozen: they have no gradient"
            " and no optimizer state"
        )


def _first_use(graph: Graph, name: str) -> tuple[Node, NodeView]:
    views = ((node, NodeView.of(node, graph)) for node in graph.nodes if not node.effect)
    return next((node, view) for node, view in views if called(view) == name)


def _problem(graph: Graph, name: str) -> str:
    _, view = _first_use(graph, name)
    return "a sharding rule without `local`, which runs a part of it" if needs_local(view) else "no sharding rule"


def _way_out(graph: Graph, name: str) -> str:
    """The source line that first uses a primitive without a rule, and the call that registers a rule."""
    node, view = _first_use(graph, name)
    what = f", a `{node.primitive}`," if name != node.primitive else ""
    where = f". The first{what} is at {node.source or 'an unknown line'}"
    if node.primitive in _PROGRAMS:
        return where
    if needs_local(view):
        return f"{where}. To split it, give `register_rule` a function of one device's operands as `local`"
    return f"{where}. To split it, name the loops instead of the dots: `{template(view)}`"
