"""What an index is to be built from, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.errors import SearchError
from autopar.vector_search.data.metrics import Metric
from autopar.vector_search.data.placement import Place
from autopar.vector_search.data.progress import Report


@dataclass(frozen=True, slots=True)
class Asked:
    """What an index is built from, checked.

    Args:
        recall_target: the share of the true neighbours that a search is to find.
        settings: of this kind alone.
        why: this kind was chosen, if it was not asked for.
        queries: `[num_queries, d]`, checked: a sample of the user's own, to measure recall by; None: of the vectors.
    """

    vectors: NDArray[Any]
    ids: NDArray[np.int64]
    metric: Metric
    recall_target: float
    place: Place
    settings: Mapping[str, Any]
    report: Report
    why: str = ""
    queries: NDArray[Any] | None = None

    def whole_numbers(self, kind: str, known: Mapping[str, int]) -> dict[str, int]:
        """The settings of a kind that takes whole numbers of at least 1.

        Args:
            known: its settings, and what each is where it is not given.

        Raises:
            SearchError: a setting that it has not, or that is no such number.
        """
        for name, value in self.settings.items():
            if name not in known:
                has = f"it has {', '.join(known)}" if known else "it has none"
                raise SearchError(f"an index of kind {kind!r} has no setting {name!r}: {has}")
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
                raise SearchError(f"`{name}` is {value!r}: give a whole number of at least 1")
        return {name: int(self.settings.get(name, value)) for name, value in known.items()}
