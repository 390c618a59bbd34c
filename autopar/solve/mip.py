"""Define a mixed integer programme as arrays, and the outcome of solving it.

This module does without OR-Tools, which takes a third of a second to import and which running a saved plan must not
need. Solvers import `highs.py` where they call it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import numpy as np

#: HiGHS's tolerance of reduced costs is 1e-7, but of the LP as it has scaled it: errors of 9e-7 were seen.
_TOLERANCE = 1e-6
#: Relative rounding error: 1e-11 was seen.
_ROUNDED = 1e-9
Report = Callable[[float, float], None]


@dataclass(frozen=True, slots=True)
class Programme:
    """minimise objective @ x  subject to  row_least <= A x <= row_most,  0 <= x <= 1.

    Args:
        objective: float[columns].
        integer: bool[columns].
        rows, columns, coefficients: the non-zeros of A, in any order, none twice.
        row_least, row_most: float[rows].
    """

    objective: np.ndarray
    integer: np.ndarray
    rows: np.ndarray
    columns: np.ndarray
    coefficients: np.ndarray
    row_least: np.ndarray
    row_most: np.ndarray


class End(Enum):
    """How a run ended."""

    OPTIMAL = "optimal"
    INFEASIBLE = "infeasible"
    STOPPED = "stopped before either was proven"
    INTERRUPTED = "stopped by Ctrl-C"


@dataclass(frozen=True, slots=True)
class MipOutcome:
    """The column `values` (None: no solution), and a lower bound of the objective (`-inf`: none)."""

    end: End
    values: np.ndarray | None
    bound: float


def bound_error(num_terms: int, size: float) -> float:
    """The most by which HiGHS's bound may exceed the optimum.

    Args:
        num_terms: costs that an assignment adds up.
        size: size of the optimum.
    """
    return _TOLERANCE * num_terms + _ROUNDED * size
