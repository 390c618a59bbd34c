"""Hold the checked arguments of `build`: vectors, metric, recall target, placement, settings."""

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
class BuildRequest:
    """The checked arguments of one index build.

    Args:
        recall_target: fraction of the true nearest neighbours that a search has to find.
        settings: settings of this index kind only.
        why: reason for the choice of this kind; empty if the user named it.
        queries: `[num_queries, d]`, checked; the user's sample for measuring recall; None: sample the corpus.
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
        """Return the settings of a kind whose settings are all integers of at least 1.

        Args:
            known: the kind's settings and their defaults.

        Raises:
            SearchError: an unknown setting, or a value that is not such an integer.
        """
        for name, value in self.settings.items():
            if name not in known:
                has = f"its settings are {', '.join(known)}" if known else "it has no settings"
                raise SearchError(f"an index of kind {kind!r} has no setting {name!r}: {has}")
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
                raise SearchError(f"`{name}` is {value!r}: give an integer of at least 1")
        return {name: int(self.settings.get(name, value)) for name, value in known.items()}
