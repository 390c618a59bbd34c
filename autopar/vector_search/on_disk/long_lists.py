"""Cut lists that are much longer than the mean into several with the same centroid.

In: the lists of all vectors. Out: lists of bounded length. Many equal vectors are nearest to one centroid, whatever
centroids there are. A vector goes to a part of its list by its position, so each part is a sample of the list.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.vector_search.data.metrics import NO_ID
from autopar.vector_search.on_disk.spill import AssignedLists

#: Maximum length of a list, in means, before it is cut; and vectors that are handled at a time.
LONGEST, _AT_ONCE = 8, 2**15


class Cut(NamedTuple):
    """The lists after the cuts.

    Args:
        lists: the lists of each vector.
        counts: vectors of each list.
        of: int64 `[num_lists]`, the list before the cuts that each is a part of.
    """

    lists: AssignedLists
    counts: NDArray[np.int64]
    of: NDArray[np.int64]


def cut_long_lists(lists: AssignedLists, counts: NDArray[np.int64], num_vectors: int, copies: int, folder: Path) -> Cut:
    """Cut lists longer than `LONGEST` means. The given lists are closed if others take their place.

    Raises:
        IndexFileError: temporary files cannot be written.
    """
    longest = max(1, LONGEST * -(-int(counts.sum()) // len(counts)))
    parts = np.maximum(1, -(-counts // longest))
    of = np.repeat(np.arange(len(counts)), parts)
    if len(of) == len(counts):
        return Cut(lists, counts, of)
    first, found = np.cumsum(parts) - parts, AssignedLists(copies, folder)
    cut_counts = np.zeros(len(of), np.int64)
    with closing(lists):
        for start in range(0, num_vectors, _AT_ONCE):
            some = lists.read(start, min(_AT_ONCE, num_vectors - start))
            safe = np.maximum(some, 0)
            part = np.arange(start, start + len(some))[:, None] % parts[safe]
            cut = np.where(some == NO_ID, NO_ID, first[safe] + part).astype(np.int32)
            found.append(cut)
            cut_counts += np.bincount(cut[cut != NO_ID], minlength=len(of))
    return Cut(found, cut_counts, of)
