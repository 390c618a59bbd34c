"""Choose the replica that a request goes to.

In: the replicas of a model, each with the work that is queued on its devices. Out: the one with the shortest expected latency.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Choice(NamedTuple):
    """A replica that a request may go to. Both numbers have one unit: seconds, or the time of a token.

    Args:
        queued: the work of all requests on the replica's devices that have not ended, those of other models included.
        latency: the time of this request if it were alone there.
    """

    queued: float
    latency: float


def choose_replica(choices: Sequence[Choice]) -> int:
    """The number of the replica with the least queued work and latency together; of equal ones the first.

    >>> choose_replica([Choice(0.5, 1.0), Choice(0.0, 1.2), Choice(0.2, 1.0)])
    1
    """
    return min(range(len(choices)), key=lambda number: sum(choices[number]))
