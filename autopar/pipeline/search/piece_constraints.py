"""Constrain what a stage's pieces need besides what one program needs, so that they run as they are priced.

In: the plan of a stage, and its figures. Out: `piece_constraints`, the constraints with those of deferred reductions:

- A plan leaves values inside a group open. The executor adds up the terms of each device only where it knows their
  sharding, so the plan has that of what is added up.
- One program may cast an accumulator before it reduce-scatters it. The executor reduces it where it leaves the loop, and
  XLA would all-reduce it there and cut the result of the cast. So it leaves the loop in the sharding to which the plan
  scatters it.
"""

from __future__ import annotations

from collections.abc import Iterator

from autopar.ir.sharding import TensorSharding
from autopar.pipeline.search.estimates import StageFigures
from autopar.pipeline.search.sent_dtypes import before_casts
from autopar.planner.constraints import with_constraints
from autopar.plans.plan import Plan
from autopar.plans.records import Constraint


def piece_constraints(plan: Plan, figures: StageFigures) -> tuple[Constraint, ...]:
    """The constraints of a plan and those of its deferred reductions."""
    if not figures.pieces.deferred:
        return plan.constraints
    scattered = dict(_scattered(figures))
    kept = [one for one in plan.constraints if one.node is not None or one.value not in scattered]
    made = [Constraint(value=value, shardings=(sharding,)) for value, sharding in scattered.items()]
    more = [*made, *_added_up(figures, (*kept, *made))]
    return with_constraints(figures.candidate.formulation.graph, kept, more) if more else plan.constraints


def _added_up(figures: StageFigures, known: tuple[Constraint, ...]) -> Iterator[Constraint]:
    """The shardings of what deferred reductions add up, where the plan has none."""
    equations = figures.layout.trace.equations
    defined = {one.value for one in known if one.node is None}
    at_operands = {(one.node, one.operand) for one in known}
    for one in figures.pieces.deferred.values():
        node = one.term[0]
        for operand, sharding in enumerate(one.operands):
            value = equations[node].operands[operand]
            if isinstance(value, int) and value not in defined and (node, operand) not in at_operands:
                yield Constraint(value=value, shardings=(sharding,), node=node, operand=operand)


def _scattered(figures: StageFigures) -> Iterator[tuple[int, TensorSharding]]:
    """The accumulators that one reduce-scatter reduces after a cast, and their casts, with the sharding after it."""
    explicit, graph = figures.candidate.parts.explicit, figures.candidate.formulation.graph
    equations = figures.layout.trace.equations
    leaving = {equations[one.leave].results[0] for one in figures.pieces.deferred.values()}
    read = {*explicit.reads.values(), *explicit.outputs}
    for op in explicit.communications:
        if op.kind != "reduce-scatter" or op.operand is None or op.result is None or op.operand in read:
            continue
        sharding, chain = explicit.arrays[op.result].sharding, list[int]()
        for value in before_casts(explicit.arrays[op.operand].value, graph):
            chain.append(value)
            if value in leaving:
                break
        is_one = len(explicit.sent_from[op.operand]) == 1 and not sharding.unreduced
        is_one = is_one and all(len(graph.users.get(value, ())) == 1 for value in chain[1:])
        if is_one and len(chain) > 1 and chain[-1] in leaving:
            yield from ((value, sharding) for value in chain)
