"""Choose the lists of a query by the neighbours that a `HitModel` expects in them, per page.

In: a sample with known neighbours. Out: `HitRule`: a query probes, of its `width` nearest lists, those with at least
`least` expected neighbours per page, which no nearer list holds; and always the nearest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.vector_search.frame.recall_tuning import Recall, lowest_recall
from autopar.vector_search.on_disk.hit_model import HitModel, Lists, first_hits, fitted, why_invalid
from autopar.vector_search.on_disk.pages import PAYLOAD_BYTES
from autopar.vector_search.on_disk.probing import Nearest

#: Steps of the bisection for `least`; minimum pages of a list; weight of whole pages in its price.
_STEPS, _LEAST_PAGES, _WHOLE = 24, 0.3, 0.7


@dataclass(frozen=True, slots=True)
class HitRule:
    """A rule.

    Args:
        radii: f32 `[num_lists]`, rms distance of a list's vectors from its centroid.
        width: nearest lists of a query that are considered.
        least: minimum expected neighbours per page.
    """

    model: HitModel
    radii: NDArray[np.float32]
    width: int
    least: float

    def is_probed(
        self, nearest: Nearest, centroids: NDArray[np.float32], counts: NDArray[np.int64], entry_bytes: int
    ) -> NDArray[np.bool_]:
        """bool `[num_queries, width]`: which of the nearest lists are probed.

        Args:
            centroids: `[num_lists, d]`.
            counts: vectors of each list.
            entry_bytes: bytes of a vector in a list.
        """
        lists = Lists(centroids, counts, self.radii)
        values = _per_page(self.model.hits(nearest, lists), nearest, lists, entry_bytes)
        is_probed = values >= self.least
        is_probed[:, 0] = True
        return is_probed

    @property
    def arrays(self) -> dict[str, NDArray[Any]]:
        """Arrays for the page file."""
        return {"radii": self.radii, "hit_edges": self.model.edges, "hit_factors": self.model.factors}

    def saved(self) -> dict[str, Any]:
        """Settings for the page file."""
        return {"width": self.width, "least": self.least}

    def why_invalid(self, num_lists: int) -> str | None:
        """Why the rule of a file contradicts its lists, as text."""
        if self.radii.dtype != np.float32 or self.radii.shape != (num_lists,):
            return f"`radii` is {self.radii.dtype} of shape {list(self.radii.shape)}, expected float32 of shape [{num_lists}]"
        if type(self.width) is not int or not 1 <= self.width <= num_lists:
            return f"its rule considers {self.width!r} of {num_lists:,} lists"
        return why_invalid(self.model)


def loaded_rule(saved: Mapping[str, Any] | None, arrays: Mapping[str, NDArray[Any]]) -> HitRule | None:
    """The rule of a page file; None if it has none.

    Raises:
        LookupError, TypeError, ValueError: an invalid or missing setting or array.
    """
    if saved is None:
        return None
    model = HitModel(arrays["hit_edges"], arrays["hit_factors"])
    return HitRule(model, arrays["radii"], saved["width"], float(saved["least"]))


def tuned_rule(
    nearest: Nearest,
    ranks: NDArray[np.int32],
    lists: Lists,
    entry_bytes: int,
    recall_target: float,
    samples: Sequence[slice] = (slice(None),),
) -> tuple[HitRule, Recall, float] | None:
    """The rule that reaches a recall target on a sample, its recall, and the mean pages' worth of bytes; None if none
    does. Recall and pages are those of models that do not know the query (`hit_model.fitted`).

    Args:
        nearest: the nearest lists of the sample's queries, `width` of them.
        ranks: int32 `[num_queries, k, copies]`, ranks of the lists that hold each neighbour, `width` for others; -1
            where there is no neighbour.
        entry_bytes: bytes of a vector in a list.
        samples: queries of each sample; each has to reach the target.
    """
    width = nearest.lists.shape[1]
    is_known = (ranks >= 0).any(axis=2)
    wanted = is_known.sum(axis=1)
    held = np.where(ranks < 0, width, ranks)
    model, expected = fitted(nearest, lists, first_hits(np.where(is_known, held.min(axis=2), width), width))
    values = _per_page(expected, nearest, lists, entry_bytes)
    values[:, 0] = np.inf
    best = np.take_along_axis(
        np.append(values, np.full((len(values), 1), -np.inf, np.float32), axis=1)[:, None], held, axis=2
    ).max(axis=2)

    def recall(least: float) -> Recall:
        hits = ((best >= least) & is_known).sum(axis=1)
        return lowest_recall(hits, wanted, samples, recall_target)

    low, high = 0.0, float(values[:, 1:].max(initial=0)) + 1
    if recall(low).at_least < recall_target:
        return None
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if recall(middle).at_least >= recall_target else (low, middle)
    cost = float((_pages(nearest, lists, entry_bytes) * (values >= low)).sum(axis=1).mean())
    return HitRule(model, lists.radii, width, low), recall(low), cost


def _per_page(hits: NDArray[np.float32], nearest: Nearest, lists: Lists, entry_bytes: int) -> NDArray[np.float32]:
    """Expected neighbours per page, f32 `[num_queries, width]`."""
    return (hits / np.maximum(_pages(nearest, lists, entry_bytes), _LEAST_PAGES)).astype(np.float32)


def _pages(nearest: Nearest, lists: Lists, entry_bytes: int) -> NDArray[np.float32]:
    """The pages of each list, which do not depend on where it lies: between those that it takes alone, and those that its
    bytes fill, since it may share the first and the last one."""
    filled = lists.counts * (entry_bytes / PAYLOAD_BYTES)
    return (_WHOLE * np.ceil(filled) + (1 - _WHOLE) * filled).astype(np.float32)[nearest.lists]
