"""Define PipeMare's corrections of an asynchronous pipeline, and read the name of one.

In: the name of an asynchronous pipeline with its numbers, as "pipedream" or "pipemare(2000, 0.1)".
Out: `Consistency`: the entry of the schedule table, and the `Corrections` of updates and of backward passes.

The formulas are those of Yang et al., PipeMare: Asynchronous Pipeline Parallel DNN Training, MLSys 2021, arXiv 1910.05124,
techniques 1 and 2. Delays are those of the order of tasks here, counted in updates.
"""

from __future__ import annotations

import ast
import math
from dataclasses import dataclass

from autopar.errors import OptionError
from autopar.pipeline.schedule.asynchronous import AMPNET, ASYNCHRONOUS, PIPEMARE
from autopar.pipeline.schedule.kind import ScheduleKind

#: The number of updates over which the step size of a stage grows to the whole one, unless the user gives one.
_ANNEALING = 1000
#: exp(-2), with which the correction cancels the mismatch of a quadratic loss to first order.
_DECAY = 0.135

_CORRECTED = "pipemare"


@dataclass(frozen=True, slots=True)
class Corrections:
    """PipeMare's two corrections.

    Args:
        annealing: K, the number of updates over which step sizes grow to whole ones; 0 for whole ones from the start.
        decay: D in (0, 1); None for backward passes that read the latest weights as they are.
    """

    annealing: int = _ANNEALING
    decay: float | None = _DECAY

    def scale(self, delay: float, update: int) -> float:
        """The factor of the step size of a stage: tau^-p with p = 1 - min(k / K, 1). A delay under one update leaves the step whole.

        Args:
            delay: tau, the mean delay of the gradients of the stage, in updates.
            update: k, the number of updates before this one.

        >>> Corrections(annealing=10).scale(4, 5)
        0.5
        """
        if not self.annealing or delay <= 1:
            return 1.0
        return float(delay ** -(1 - min(update / self.annealing, 1)))

    def is_scaled(self, delay: float) -> bool:
        """Whether a stage with this delay ever has another step size."""
        return delay > 1 and self.annealing > 0

    def kept(self, distance: float) -> float | None:
        """gamma = D^(1 / distance), the factor of the old velocity in the new one; None if a stage needs no velocity.

        Args:
            distance: the mean number of updates between the versions that forward and backward pass of a microbatch read.
        """
        return None if self.decay is None or distance == 0 else self.decay ** (1 / distance)


@dataclass(frozen=True, slots=True)
class Consistency:
    """An asynchronous pipeline as the user names it.

    Args:
        corrections: None for schedules without.
    """

    kind: ScheduleKind
    corrections: Corrections | None = None


def is_asynchronous(consistency: object) -> bool:
    """Whether this names an asynchronous pipeline, with or without numbers."""
    return isinstance(consistency, str) and consistency.split("(")[0].strip() in ASYNCHRONOUS


def find_consistency(consistency: str) -> Consistency:
    """The asynchronous pipeline of this name.

    Without the second correction no stage keeps a velocity, so the schedule is AMPNet's.

    Args:
        consistency: a name of `ASYNCHRONOUS`; "pipemare(annealing, decay)" has numbers, of which the last may be left out.

    Raises:
        OptionError: the numbers are not ones that it is defined for.

    >>> find_consistency("pipemare(500, None)").kind.name
    'ampnet'
    """
    name, bracket, rest = (part.strip() for part in consistency.partition("("))
    if not bracket:
        return Consistency(ASYNCHRONOUS[name], Corrections() if name == _CORRECTED else None)
    if name != _CORRECTED:
        raise OptionError(f"`consistency` is {consistency!r}, but {name!r} takes no numbers: leave them out")
    try:
        numbers = ast.literal_eval(f"({rest.removesuffix(')')},)") if rest.rstrip(") ") else ()
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        numbers = None
    if not rest.endswith(")") or numbers is None or len(numbers) > 2:
        raise OptionError(
            f'`consistency` is {consistency!r}, which cannot be read: give "pipemare(annealing, decay)", as'
            ' "pipemare(2000, 0.1)"; None as the decay leaves backward passes as they are'
        )
    found = Corrections(*numbers)
    count, decay = found.annealing, found.decay
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise OptionError(
            f"`consistency` is {consistency!r}, and its annealing {count!r}: give a number of updates, 0 for none"
        )
    if decay is not None and not (isinstance(decay, float) and math.isfinite(decay) and 0 < decay < 1):
        raise OptionError(
            f"`consistency` is {consistency!r}, and its decay {decay!r}: give a number between 0 and 1, or None for no correction"
            " of backward passes"
        )
    return Consistency(AMPNET if decay is None else PIPEMARE, found)
