"""Price the slices of tokens of a planned stage.

In: the figures of a stage whose step is cut into slices of tokens. Out: seconds of each slice.
"""

from __future__ import annotations

import itertools

import numpy as np

from autopar.cost.kernel_time import op_seconds
from autopar.ir.device_program import Op
from autopar.pipeline.search.estimates import StageFigures


def slice_seconds(figures: StageFigures) -> tuple[tuple[float, float], ...]:
    """Seconds of the forward and the backward pass of each slice of tokens.

    A slice is a program of its own, so its matmuls are not merged with those of other slices, as in the device program
    of the stage: kernels count by the prices of their groups. Where several slices read one resharded value, such as a gathered
    parameter, each reshards it again.
    """
    found = np.zeros((figures.layout.num_slices, 2))
    equations, f, choices = (
        figures.layout.trace.equations,
        figures.candidate.formulation,
        figures.candidate.solution.choices,
    )
    columns = {"forward": 0, "backward": 1, "input": 1, "weight": 1}
    for decision, compute_s, chosen in zip(f.decisions, f.compute_s, choices, strict=True):
        nodes = f.groups[decision.group].nodes if decision.kind == "group" else ()
        first = next((n for n in nodes if n in figures.phases), None)
        if first is not None and compute_s[chosen] > 0:
            place = equations[first].token_slice, columns[figures.phases[first]]
            found[place] += compute_s[chosen] / f.graph.nodes[first].repeat + f.profile.kernel_launch_s
    for n, phase in itertools.product(range(figures.layout.num_slices), ("forward", "backward")):
        found[n, columns[phase]] += sum(op_seconds(op, f.mesh, f.profile) for op in _collectives(figures, phase, n))
    return tuple((float(forward), float(backward)) for forward, backward in found)


def _collectives(figures: StageFigures, phase: str, token_slice: int) -> list[Op]:
    """The collectives of a slice, with those of other slices whose results it reads."""
    equations = figures.layout.trace.equations
    makes = {b: op for one in ("forward", "backward") for op in figures.ops[one] if op.collective for b in op.writes}
    waiting = [op for op in figures.ops[phase] if equations[op.node].token_slice == token_slice]
    found = {id(op): op for op in waiting if op.collective}
    while waiting:
        for op in (makes[b] for b in waiting.pop().reads if b in makes):
            if id(op) not in found:
                found[id(op)] = op
                waiting.append(op)
    return list(found.values())
