"""Predict the effort of a search for a recall, from measured searches.

In: an index kind, a recall@10, the number of vectors. Out: lists that a query probes, or nodes of its beam. Measured on
FAISS's synthetic set, of which recall is harder than of most embeddings (docs/decisions/0101-choose-among-all-kinds.md);
between the measured recalls and beyond, and for other numbers of vectors, the logarithm of the effort is linear in those of
the missed share and of the number of vectors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

#: Measured recalls, and vectors; the largest recall that efforts are predicted for.
RECALLS, NUM_VECTORS, MAX_RECALL = (0.8, 0.9, 0.95, 0.98), 50_000, 0.995


class Measured(NamedTuple):
    """Efforts of a kind.

    Args:
        efforts: for `RECALLS`, at `NUM_VECTORS`.
        growth: power of the number of vectors that the effort grows with.
    """

    efforts: tuple[float, ...]
    growth: float


#: Efforts by kind. Read-only.
MEASURED: Mapping[str, Measured] = MappingProxyType(
    {
        "ivf": Measured((11.2, 21.4, 34.9, 60.3), 0.0),
        "graph": Measured((10.0, 20.1, 42.9, 103.3), 0.09),
        "ivfdisk": Measured((10.9, 20.4, 33.4, 57.3), 0.05),
        "graphdisk": Measured((10.0, 14.3, 20.8, 30.8), 0.09),
    }
)


def effort_of(kind: str, recall: float, num_vectors: int) -> int:
    """The effort that a recall needs.

    >>> effort_of("graph", 0.9, 50_000) < effort_of("graph", 0.95, 50_000) < effort_of("graph", 0.95, 5_000_000)
    True

    Args:
        recall: at most `MAX_RECALL`; a larger one has its effort.
    """
    known = MEASURED[kind]
    missed = -math.log(1 - min(recall, MAX_RECALL))
    at = [-math.log(1 - each) for each in RECALLS]
    first = max(0, min(len(at) - 2, sum(each <= missed for each in at) - 1))
    low, high = (math.log(each) for each in known.efforts[first : first + 2])
    share = (missed - at[first]) / (at[first + 1] - at[first])
    return max(1, round(math.exp(low + share * (high - low)) * (num_vectors / NUM_VECTORS) ** known.growth))
