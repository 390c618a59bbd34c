"""Record what the solver decided: the sharding of each input and activation, its cost, and the best other one.

In: a `Formulation`, the assembled parts of a plan. Out: `Decision`s, for reports.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autopar.formulate.decisions import Decision as Choice
from autopar.formulate.formulation import Formulation
from autopar.ir.graph import Node
from autopar.planner.collective_uses import collective_uses
from autopar.planner.plan_assembly import Assembled
from autopar.plans.records import Decision


def decision_records(f: Formulation, parts: Assembled) -> tuple[Decision, ...]:
    """The decisions on inputs, then on activations."""
    choices, inputs = parts.explicit.choices, parts.inputs
    _, caused_by = collective_uses(f, parts.explicit, parts.device.reassociated)
    prices = _local_prices(f, choices)
    updates = dict(f.graph.carried)
    out: list[Decision] = []
    for position, tensor in enumerate(inputs):
        if position not in f.input_decision:
            continue
        value = f.graph.inputs[position]
        node = f.input_decision[position]
        uses = f.graph.users.get(value)
        source = f.graph.nodes[uses[0][0]].source if uses else ""
        decision = _decision(f, choices, prices, node, value, tensor.path, tensor.role, None, source, caused_by)
        after = f.graph.outputs[updates[position]] if position in updates else None
        update = f.value_made[after][0] if after in f.value_made else node
        if update != node:  # the cost of a parameter includes its update and the reduction of its gradient
            positions = sorted({*decision.collectives, *caused_by.get(update, ())})
            cost = decision.cost_s + float(prices[update][choices[update]])
            decision = replace(decision, cost_s=cost, collectives=tuple(positions))
        out.append(decision)
    for node, choice in enumerate(f.decisions):
        if choice.kind != "group":
            continue
        shown = _representative(f, choice)
        if shown is not None:
            value, n = shown
            producer = f.graph.nodes[n]
            out.append(
                _decision(
                    f, choices, prices, node, value, producer.path, "activation", producer, producer.source, caused_by
                )
            )
    return tuple(out)


def _representative(f: Formulation, choice: Choice) -> tuple[int, int] | None:
    """The value that represents a group in the report, and its node: the largest value that leaves the group before the
    update."""
    group = f.groups[choice.group]
    candidates = [
        (f.graph.values[d.value].num_bytes, -d.node, d.value)
        for d in group.defines
        if d.value in f.written and f.graph.nodes[d.node].phase != "update"
    ]
    if not candidates:
        return None
    _, negative_node, value = max(candidates)
    return value, -negative_node


def _local_prices(f: Formulation, choices: Sequence[int]) -> list[np.ndarray]:
    """For each decision, the cost of each of its strategies while all other choices stay the same."""
    prices = [costs.astype(float).copy() for costs in f.problem.node_costs]
    for edge in f.problem.edges:
        prices[edge.source] += edge.costs[:, choices[edge.target]]
        prices[edge.target] += edge.costs[choices[edge.source], :]
    return prices


def _decision(
    f: Formulation,
    choices: Sequence[int],
    prices: Sequence[np.ndarray],
    node: int,
    value: int,
    path: str,
    kind: str,
    producer: Node | None,
    source: str,
    caused_by: dict[int, tuple[int, ...]],
) -> Decision:
    info = f.graph.values[value]
    _, shardings = f.value_made[value]
    chosen = choices[node]
    price = prices[node]
    others = [s for s in range(len(shardings)) if shardings[s] != shardings[chosen] and np.isfinite(price[s])]
    best = min(others, key=lambda s: float(price[s]), default=None)
    return Decision(
        path=path,
        kind=kind,  # type: ignore[arg-type]
        primitive=producer.primitive if producer else "",
        phase=producer.phase if producer else f.decisions[node].phase,
        source=source,
        shape=info.shape,
        dtype=info.dtype,
        sharding=shardings[chosen],
        cost_s=float(price[chosen]),
        runner_up=None if best is None else shardings[best],
        runner_up_extra_s=0.0 if best is None else float(price[best] - price[chosen]),
        collectives=caused_by.get(node, ()),
        value=value,
    )
