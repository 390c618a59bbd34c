"""Whether published runs come in the replay's order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scipy.stats import kendalltau


def order(rows: Sequence[dict[str, Any]]) -> float:
    """Kendall's tau of published and replayed tokens per second: 1 if every pair of runs comes in the right order."""
    published, replayed = ([row[key] for row in rows] for key in ("published", "replayed"))
    found: Any = kendalltau(published, replayed)
    return float(found.statistic)
