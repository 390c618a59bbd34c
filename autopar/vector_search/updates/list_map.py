"""Know where each list lies: a list is one extent, or several since vectors were added to it.

In: centroids and extents. Out: `ListMap`, immutable, and its arrays for the page store. An extent is stored like a list
of an index on disk: int32 slots, then vectors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.vector_search.data.metrics import Metric
from autopar.vector_search.on_disk.hit_rule import HitRule, loaded_rule
from autopar.vector_search.on_disk.stored_lists import StoredLists


@dataclass(frozen=True)
class ListMap:
    """Lists and their extents.

    Args:
        centroids: f32 `[num_lists, d]`.
        centre: f32 `[d]`, subtracted from vectors; None: not centred.
        owners: int32 `[num_extents]`, the list of each extent, ascending; of a list, the oldest extent first.
        starts: int64 `[num_extents]`, offset in the stream of page payloads.
        counts: int64 `[num_extents]`, entries of each extent.
        dtype: dtype of the vectors.
        num_slots: slots are below.
        rule: chooses the lists of a query; None: by distance.
    """

    centroids: NDArray[np.float32]
    centre: NDArray[np.float32] | None
    owners: NDArray[np.int32]
    starts: NDArray[np.int64]
    counts: NDArray[np.int64]
    dtype: np.dtype[Any]
    metric: Metric
    num_slots: int
    rule: HitRule | None = None

    @classmethod
    def empty(cls, dim: int, dtype: np.dtype[Any], metric: Metric) -> ListMap:
        """No lists."""
        none = np.zeros(0, np.int64)
        return cls(np.zeros((0, dim), np.float32), None, none.astype(np.int32), none, none, dtype, metric, 0)

    @property
    def num_lists(self) -> int:
        return len(self.centroids)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """int64 `[num_lists]`, entries of each list, dead ones too."""
        return np.bincount(self.owners, self.counts, self.num_lists).astype(np.int64)

    @cached_property
    def extents(self) -> StoredLists:
        """The extents, in the form in which lists of an index on disk are read."""
        return StoredLists(
            self.centroids,
            self.starts,
            self.counts,
            self.centre,
            None,
            self.dtype,
            self.metric,
            max(1, self.num_slots),
            1,
        )

    @cached_property
    def firsts(self) -> NDArray[np.int64]:
        """int64 `[num_lists + 1]`, the first extent of each list."""
        return np.searchsorted(self.owners, np.arange(self.num_lists + 1))

    def extents_of(self, which: int) -> range:
        """The extents of a list."""
        return range(int(self.firsts[which]), int(self.firsts[which + 1]))

    @property
    def data_pages(self) -> NDArray[np.int64]:
        """The pages of all extents; a page appears once for each."""
        firsts, lasts = self.extents.first_pages, self.extents.last_pages
        sizes = lasts + 1 - firsts
        begins = np.repeat(firsts, sizes)
        return begins + np.arange(len(begins)) - np.repeat(np.cumsum(sizes) - sizes, sizes)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the arrays."""
        return self.centroids.nbytes + self.owners.nbytes + self.starts.nbytes + self.counts.nbytes

    def saved(self) -> dict[str, NDArray[Any]]:
        """Arrays for the page store."""
        arrays = {"centroids": self.centroids, "owners": self.owners, "starts": self.starts, "counts": self.counts}
        arrays |= {} if self.rule is None else self.rule.arrays
        return arrays if self.centre is None else arrays | {"centre": self.centre}

    @classmethod
    def loaded(
        cls,
        arrays: Mapping[str, NDArray[Any]],
        dim: int,
        dtype: np.dtype[Any],
        metric: Metric,
        num_slots: int,
        rule: Mapping[str, Any] | None = None,
    ) -> ListMap:
        """Parse what `saved` returned.

        Args:
            rule: what `HitRule.saved` returned.

        Raises:
            ValueError: arrays that contradict each other.
            KeyError: a missing array.
        """
        found = cls(
            arrays["centroids"],
            arrays.get("centre"),
            arrays["owners"],
            arrays["starts"],
            arrays["counts"],
            dtype,
            metric,
            num_slots,
            loaded_rule(rule, arrays),
        )
        num = len(found.owners)
        is_of_form = (
            found.centroids.dtype == np.float32
            and found.centroids.shape[1:] == (dim,)
            and bool(np.isfinite(found.centroids).all())
            and found.owners.dtype == np.int32
            and found.starts.dtype == found.counts.dtype == np.int64
            and found.owners.shape == found.starts.shape == found.counts.shape == (num,)
        )
        if not is_of_form or (found.centre is not None and found.centre.shape != (dim,)):
            raise ValueError("arrays of lists that do not match")
        if num and (
            min(found.counts.min(), found.starts.min(), found.owners.min()) < 0
            or found.owners.max() >= found.num_lists
            or (np.diff(found.owners) < 0).any()
        ):
            raise ValueError("extents of lists that do not exist")
        if found.rule is not None and (why := found.rule.why_invalid(found.num_lists)):
            raise ValueError(why)
        return found
