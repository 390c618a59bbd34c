"""Correct the updates of a stage's weights as PipeMare does.

In: the layout of a stage, its weights, and factors by its delay.
Out: `CorrectedUpdates`: what the pieces after the loop read and make besides.

With the step size alpha of the step itself, scaling the change of a weight, w + s (w' - w), is a step of size s alpha wherever the
change is proportional to alpha: SGD, Adam, AdamW, Lion, LAMB, with weight decay and any schedule of alpha.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from autopar.pipeline.cut.pieces import Layout, Piece, Slot
from autopar.runtime.replay import Part

SCALE = Slot("scale", 0)


@dataclass(frozen=True, slots=True)
class CorrectedUpdates:
    """How updates of a stage are corrected.

    Args:
        weights: the value that each weight is updated to, and the value of its argument.
        is_scaled: whether updates are scaled by a factor, which each update gets.
        moved: the arguments that backward passes read moved back, which have velocities.
        kept: gamma, the factor of the old velocity in the new one.
    """

    layout: Layout
    weights: Mapping[int, int]
    is_scaled: bool
    moved: frozenset[int] = frozenset()
    kept: float = 0.0

    def slots(self, piece: Piece) -> tuple[list[Slot], list[Slot]]:
        """What a piece reads and makes besides, for the weights that it updates."""
        updated = [self.weights[v] for what, *span in piece.steps if what == "run" for v in self._made(*span)]
        velocities = [Slot("velocity", old) for old in updated if old in self.moved]
        return velocities + [SCALE] * (self.is_scaled and bool(updated)), velocities

    def after(self, part: Part, start: int, stop: int, given: Mapping[Slot, Any]) -> Iterator[tuple[Slot, Any]]:
        """Correct the weights that some equations have updated, and give their velocities.

        Args:
            given: the velocities before, and the factor.
        """
        for value in self._made(start, stop):
            old, new = part.value(self.weights[value]), part.value(value)
            if self.is_scaled:
                scale = given[SCALE].astype(new.dtype)
                # A whole step has the numbers of one that is not scaled.
                new = jnp.where(scale == 1, new, old + scale * (new - old))
                part.replace(value, new)
            if self.weights[value] in self.moved:
                slot = Slot("velocity", self.weights[value])
                yield slot, self.kept * given[slot] + (1 - self.kept) * (new - old)

    def _made(self, start: int, stop: int) -> Sequence[int]:
        equations = self.layout.trace.equations[start:stop]
        return [v for equation in equations for v in equation.results if v in self.weights]
