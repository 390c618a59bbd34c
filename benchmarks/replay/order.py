"""Whether published runs come in the replay's order."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

from scipy.stats import kendalltau


def order(rows: Sequence[dict[str, Any]]) -> float:
    """Kendall's tau of published and replayed tokens per second: 1 if every pair of runs comes in the right order."""
    published, replayed = ([row[key] for row in rows] for key in ("published", "replayed"))
    found: Any = kendalltau(published, replayed)
    return float(found.statistic)


def reversed_pairs(rows: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Pairs of runs of which the replay has the slower one ahead."""
    return [
        (one["run"], two["run"])
        for one, two in combinations(rows, 2)
        if (one["published"] - two["published"]) * (one["replayed"] - two["replayed"]) < 0
    ]
