"""Tune how queries choose their lists: effort and pruning, and the rule by expected neighbours.

In: a sample of queries, and the lists that hold their true neighbours. Out: `Choice`. An index that is built and one that
is changed tune in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.vector_search.data.metrics import Metric
from autopar.vector_search.frame.recall_tuning import Measured
from autopar.vector_search.on_disk.hit_model import Lists
from autopar.vector_search.on_disk.hit_rule import HitRule, tuned_rule
from autopar.vector_search.on_disk.list_scores import power_of_two
from autopar.vector_search.on_disk.probe_tuning import Tuned, ranks_of, tuned
from autopar.vector_search.on_disk.probing import Nearest

#: Lists near each query that the tuning considers, before it takes all.
_TUNED_LISTS = 4096
#: Maximum lists of a query that the rule by expected neighbours considers.
RULE_LISTS = 512


class Choice(NamedTuple):
    """Effort and pruning; the rule by expected neighbours, None if there is none."""

    found: Tuned
    rule: HitRule | None


def tuned_choice(
    nearest: Callable[[slice, int], Nearest],
    held: NDArray[np.int32],
    lists: Lists,
    pages: NDArray[np.int64],
    entry_bytes: int,
    metric: Metric,
    recall_target: float,
    few: slice = slice(None),
    samples: Sequence[slice] = (slice(None),),
) -> Choice:
    """The choice that reaches the recall target on each of some samples.

    Args:
        nearest: a function that returns so many nearest lists of some of the queries.
        held: int32 `[num_queries, k, copies]`, the lists that hold each true neighbour; `NO_ID` for fewer.
        pages: int64 `[num_lists]`, pages of each list.
        entry_bytes: bytes of a vector in a list.
        few: queries that effort and pruning are tuned with; all are used for the rule.
        samples: queries of each sample; with one, all.
    """
    num_lists = len(pages)
    near = nearest(few, min(_TUNED_LISTS, num_lists))
    found = tuned(near, held[few], pages, num_lists, recall_target, samples)
    if metric == "inner_product":  # which has no ratios
        found = found._replace(pruning=None)
    width = min(num_lists, 2 * power_of_two(found.measured.effort))
    if width > RULE_LISTS:
        return Choice(found, None)
    near = nearest(slice(None), width)
    ruled = tuned_rule(near, ranks_of(near, held), lists, entry_bytes, recall_target, samples)
    if ruled is None:
        return Choice(found, None)
    rule, recall, _ = ruled
    known = found.measured
    measured = Measured(known.effort, recall.found, known.tried, recall_target, recall.at_least)
    return Choice(found._replace(measured=measured), rule)
