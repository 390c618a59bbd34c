"""Make templates of pipelines from plans in stages: what state each node holds, and how long a number of microbatches takes.

In: a `PipelinePlan` for each number of nodes. Out: `Template`s with one division of the state into cells.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from autopar.ir.placement import boxes
from autopar.pipeline.plan import PipelinePlan
from autopar.pipeline.templates.state import Cells
from autopar.pipeline.templates.templates import Template

#: The start and stop of each device's part of an array, int[devices, dims] each.
Boxes = tuple[np.ndarray, np.ndarray]


def templates_of(plans: Mapping[int, PipelinePlan], devices_per_node: int) -> tuple[dict[int, Template], Cells]:
    """The templates of plans of one step.

    Args:
        plans: by the number of nodes.
    """
    first = next(iter(plans.values()))
    num_bytes: list[np.ndarray] = []
    held: dict[int, list[np.ndarray]] = {size: [] for size in plans}
    state = [n for n, tensor in enumerate(first.inputs) if tensor.role != "data"]
    for position in state:
        tensor = first.inputs[position]
        of_plans = {size: boxes(tensor.shape, plan.parts_of(position)) for size, plan in plans.items()}
        cuts = _cuts(of_plans.values())
        sizes = functools.reduce(np.multiply.outer, [np.diff(cut) for cut in cuts])
        num_bytes.append(sizes.ravel() * tensor.itemsize(first.parts_of(position)))
        for size, one in of_plans.items():
            held[size].append(_cells(one, cuts, size, devices_per_node))
    cells = Cells(
        num_bytes=np.concatenate(num_bytes),
        array=np.repeat(np.arange(len(state)), [len(one) for one in num_bytes]),
        paths=tuple(first.inputs[n].path for n in state),
        synced=np.concatenate(
            [np.full(len(one), first.inputs[n].role == "parameter") for n, one in zip(state, num_bytes, strict=True)]
        ),
    )
    made = {
        size: Template(
            held=np.concatenate(held[size], axis=1),
            seconds=_seconds(plan),
            stages=stages_on_nodes(plan, size, devices_per_node),
            plan=plan,
        )
        for size, plan in plans.items()
    }
    return made, cells


def _cuts(of_plans: Iterable[Boxes]) -> list[np.ndarray]:
    """For each dim, where any device's part begins or ends."""
    starts, stops = (np.concatenate(ends) for ends in zip(*of_plans, strict=True))
    return [np.unique([*starts[:, dim], *stops[:, dim]]) for dim in range(starts.shape[1])]


def _cells(one: Boxes, cuts: Sequence[np.ndarray], num_nodes: int, devices_per_node: int) -> np.ndarray:
    """The cells that each node's devices hold, bool[nodes, cells]."""
    grid = np.zeros((num_nodes, *(len(cut) - 1 for cut in cuts)), bool)
    for device, (start, stop) in enumerate(zip(*one, strict=True)):
        inside = tuple(
            slice(int(np.searchsorted(cut, a)), int(np.searchsorted(cut, b)))
            for cut, a, b in zip(cuts, start, stop, strict=True)
        )
        grid[(device // devices_per_node, *inside)] = True
    return grid.reshape(num_nodes, -1)


def _seconds(plan: PipelinePlan) -> Callable[[int], float]:
    """The simulated seconds of a step by its number of microbatches."""

    @functools.cache
    def seconds(num_microbatches: int) -> float:
        return plan.with_first(num_microbatches).timeline().makespan_s

    return seconds


def stages_on_nodes(plan: PipelinePlan, num_nodes: int, devices_per_node: int) -> tuple[tuple[int, ...], ...]:
    """The stages on each node."""
    found: list[set[int]] = [set() for _ in range(num_nodes)]
    for number, stage in enumerate(plan.stages):
        for device in itertools.chain.from_iterable(submesh.devices for submesh in stage.places):
            found[device // devices_per_node].add(number)
    return tuple(tuple(sorted(one)) for one in found)
