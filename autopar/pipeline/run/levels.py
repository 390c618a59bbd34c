"""Compute when values sent between stages outside the microbatch loop are available.

In: the stages and their layouts.
Out: the level of each outer input of each stage. A value arrives one level after the level that produces it.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.pipeline.cut.pieces import Layout, Level, value_levels
from autopar.pipeline.cut.stage_programs import StageProgram


def levels_of(stages: Sequence[StageProgram], layouts: Sequence[Layout]) -> list[dict[int, Level]]:
    """For each stage, the level of each outer input, by the input's number in the stage's trace."""
    start: Level = (0, 0)
    at: dict[int, Level] = {}
    while True:
        given: list[dict[int, Level]] = []
        found: dict[int, Level] = {}
        for stage, layout in zip(stages, layouts, strict=True):
            inputs = zip(layout.trace.inputs, stage.inputs, strict=True)
            given.append({v: at.get(port.value, start) for v, port in inputs if port.kind == "outside"})
            known = value_levels(layout, given[-1])
            for port, value in zip(stage.outputs, layout.trace.outputs, strict=True):
                if port.kind == "outside" and isinstance(value, int):
                    phase, passed = known.get(value, start)
                    found[port.value] = (phase, passed + 1)
        if found == at:
            return given
        at = found
