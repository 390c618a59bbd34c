"""Give lists as many copies of vectors as whole pages hold.

In: the lists that each vector may be in, and how far their centroids are. Out: lists that fill their pages. A page is
read as a whole, so a list that ends in the middle of one wastes the rest. The copies of a vector are what can vary: a
list takes the nearest ones that fit in its pages. It always has the vectors that are nearest to it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from autopar.vector_search.data.metrics import NO_ID
from autopar.vector_search.on_disk.spill import AssignedLists

#: Levels of the distance of a further centroid, relative to the nearest one; the last is the largest distance.
LEVELS = 64
#: Vectors that are handled at a time.
_AT_ONCE = 2**15


def levels_of(ratios: NDArray[np.float32], reach: float) -> NDArray[np.int32]:
    """The level of each distance, int32: 0 for the nearest list, the first column, and 1 to `LEVELS` for others.

    Args:
        ratios: `[m, copies]`, distance of a centroid relative to the nearest one.
        reach: the largest.

    >>> levels_of(np.array([[1, 1, 1.15, 1.3]], np.float32), 1.3).tolist()
    [[0, 1, 32, 64]]
    """
    found = np.ceil((ratios - 1) * (LEVELS / (reach - 1)) - 1e-3).clip(1, LEVELS).astype(np.int32)
    found[:, 0] = 0
    return found


def sizes_of(counts: NDArray[np.int32], per_page: float, most: float) -> NDArray[np.int64]:
    """The vectors that each list is to have, int64 `[num_lists]`.

    A list has as many pages as it would take, rounded, with all copies up to some level, which is the same for all lists.

    Args:
        counts: int32 `[num_lists, 1 + LEVELS]`, candidates of each list by level.
        per_page: vectors of a page.
        most: maximum vectors of all lists; at least those of level 0.
    """
    up_to = counts.cumsum(axis=1, dtype=np.int32)
    least = np.ceil(up_to[:, 0] / per_page)
    for level in range(LEVELS, -1, -1):
        pages = np.maximum(least, np.rint(up_to[:, level] / per_page))
        sizes = np.minimum(up_to[:, -1], np.floor(pages * per_page).astype(np.int64))
        if sizes.sum() <= most:
            return sizes
    fitting = (size for size in up_to.T if size.sum() <= most)  # no room for whole pages
    return max(fitting, key=lambda size: int(size.sum())).astype(np.int64)


def filled(
    lists: AssignedLists, levels: AssignedLists, counts: NDArray[np.int32], sizes: NDArray[np.int64], folder: Path
) -> AssignedLists:
    """The lists of each vector, `NO_ID` for those that do not take it: each list takes the candidates of the lowest
    levels; of one level, the first.

    Args:
        lists, levels: of each vector, `[n, copies]`.
        counts, sizes: as in `sizes_of`.

    Raises:
        IndexFileError: temporary files cannot be written.
    """
    up_to = counts.cumsum(axis=1, dtype=np.int32)
    edge = (up_to <= sizes[:, None]).sum(axis=1, dtype=np.int32)  # the level of which some are taken
    room = sizes - np.take_along_axis(up_to, np.maximum(edge - 1, 0)[:, None], axis=1)[:, 0]
    found = AssignedLists(lists.copies, folder)
    for start in range(0, int(counts[:, 0].sum()), _AT_ONCE):
        some, level = lists.read(start, _AT_ONCE), levels.read(start, _AT_ONCE)
        is_given = some != NO_ID
        edges = edge[np.maximum(some, 0)]
        is_taken = is_given & (level < edges)
        row, column = np.nonzero(is_given & (level == edges))
        order = np.argsort(some[row, column], kind="stable")
        row, column = row[order], column[order]
        owners = some[row, column]
        fits = np.arange(len(owners)) - np.searchsorted(owners, owners) < room[owners]
        is_taken[row[fits], column[fits]] = True
        room -= np.bincount(owners[fits], minlength=len(room))
        found.append(np.where(is_taken, some, NO_ID).astype(np.int32))
    return found
