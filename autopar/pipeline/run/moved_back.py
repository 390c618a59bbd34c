"""Move the weights that backward passes read back to the version of their forward pass, along the velocity of the weights.

In: the stages of an asynchronous pipeline. Out: `MovingBack`: for each weight and number of updates a program of the weight and its
velocity.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from autopar.pipeline.cut.pieces import Piece, Slot
from autopar.pipeline.run.piece_programs import PieceProgram, StagePieces


class MovingBack:
    """The programs that move weights back. Equal requests get the same one."""

    def __init__(self, stages: Sequence[StagePieces]) -> None:
        self._stages = stages
        self._programs: dict[tuple[int, Slot, int], PieceProgram] = {}

    def program(self, s: int, slot: Slot, distance: int) -> PieceProgram:
        """The program u = w - distance delta (Yang et al., 2021, technique 2).

        Args:
            slot: the weight, an argument of stage s.
            distance: the number of updates.
        """
        key = s, slot, distance
        if key not in self._programs:
            velocity = Slot("velocity", slot.value)
            self._programs[key] = PieceProgram(
                piece=Piece("moved back", (), (slot, velocity), (slot,), ()),
                takes=(slot, velocity),
                gives=(slot,),
                counts=((1, 1), (1,)),
                kept=(self._stages[s].argument_sharding(slot.value),),
                sends=(),
                results=(),
                mesh=self._stages[s].stage.mesh,
                arrivals={},
                function=_moving_back(distance),
                compiler_options=None,
            )
        return self._programs[key]


def _moving_back(distance: int) -> Callable[..., list[Any]]:
    def moved_back(weight: Any, velocity: Any) -> list[Any]:
        return [weight - distance * velocity]

    return moved_back
