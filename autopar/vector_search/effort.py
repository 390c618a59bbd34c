"""How much of the true neighbours a search finds, and the least effort with which it finds enough.

In: what was found of a sample and what is true; a recall to reach. Out: an effort, and what was measured on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from autopar.vector_search.metrics import NO_ID, Metric

#: Neighbours of which recall is the share that is found.
MEASURED_AT = 10

Distances = NDArray[Any]
Positions = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Measured:
    """effort: kept for searches that name none. recall: with it; None where nothing could be measured. tried: recall by
    effort."""

    effort: int
    recall: float | None
    tried: Mapping[int, float]

    @property
    def details(self) -> dict[str, Any]:
        """For `stats`."""
        return {"effort": self.effort, "recall": self.recall, "recall_by_effort": dict(sorted(self.tried.items()))}

    def saved(self) -> dict[str, Any]:
        """For a file, as JSON takes it."""
        return {"effort": self.effort, "recall": self.recall, "tried": [[e, r] for e, r in self.tried.items()]}

    @classmethod
    def loaded(cls, saved: Mapping[str, Any]) -> Measured:
        """Of what `saved` gave."""
        return cls(saved["effort"], saved["recall"], {int(e): float(r) for e, r in saved["tried"]})


def least_effort(efforts: Sequence[int], target: float, recall_at: Callable[[int], float]) -> Measured:
    """The first of rising efforts that reaches a recall. Where none does, the greatest, or the one after which more finds
    no more.

    Args:
        efforts: rising. recall_at: measures one.

    >>> least_effort((1, 2, 4, 8), 0.9, lambda effort: 1 - 0.3 / effort)
    Measured(effort=4, recall=0.925, tried={1: 0.7, 2: 0.85, 4: 0.925})
    >>> least_effort((1, 2, 4, 8), 0.9, lambda effort: min(effort, 2) / 4).effort
    2
    """
    tried: dict[int, float] = {}
    kept = efforts[0]
    for effort in efforts:
        tried[effort] = recall_at(effort)
        if effort != kept and tried[effort] <= tried[kept]:
            break
        kept = effort
        if tried[effort] >= target:
            break
    return Measured(kept, tried[kept], tried)


def recall_of(found: tuple[Distances, Positions], truth: tuple[Distances, Positions], metric: Metric) -> float:
    """The share of the true neighbours that is found. One as near as the last of them counts: of equal vectors
    any may be found.

    Args:
        found, truth: distances and positions, `[num_queries, k]`, best first.
    """
    (distances, positions), (best, nearest) = found, truth
    is_true = (positions[:, :, None] == nearest[:, None, :]).any(axis=-1)
    is_as_near = distances <= best[:, -1:] if metric == "l2" else distances >= best[:, -1:]
    return float(((is_true | is_as_near) & (positions != NO_ID)).mean())


def in_steps(first: int, last: int) -> tuple[int, ...]:
    """Rising numbers, two to each doubling, with the last.

    >>> in_steps(4, 20)
    (4, 6, 8, 12, 16, 20)
    """
    steps = [first]
    while steps[-1] < last:
        at = steps[-1]
        more = at * 3 // 2 if at & (at - 1) == 0 else at // 3 * 4
        steps.append(min(last, max(at + 1, more)))
    return tuple(steps)
