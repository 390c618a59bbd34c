"""Choose free pages for new content.

In: which pages are in use; groups of pages that have to be consecutive. Out: a page number for each group. Groups are
placed in order, in the first free runs that hold them, so groups that follow each other mostly stay adjacent; what fits
nowhere goes to the end of the file.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class FreePages:
    """Pages that may be written.

    Args:
        is_used: bool `[num_pages]`, pages whose content has to stay.
    """

    def __init__(self, is_used: NDArray[np.bool_]) -> None:
        edges = np.flatnonzero(np.diff(np.concatenate([[True], is_used, [True]]).astype(np.int8)))
        self._firsts, self._ends = edges[::2].tolist(), edges[1::2].tolist()
        self.num_pages = len(is_used)

    def take(self, sizes: Sequence[int]) -> NDArray[np.int64]:
        """The first page of each group, int64 `[num_groups]`.

        Args:
            sizes: consecutive pages of each group, at least 1.
        """
        placed, at = np.zeros(len(sizes), np.int64), 0
        for group, size in enumerate(sizes):
            while at < len(self._firsts) and self._ends[at] - self._firsts[at] < size:
                at += 1
            if at == len(self._firsts):
                rest = self.num_pages
                if self._ends and self._ends[-1] == self.num_pages:  # a free run at the end of the file grows
                    rest = self._firsts.pop()
                    self._ends.pop()
                    at = len(self._firsts)
                placed[group] = rest
                self.num_pages = rest + size
                continue
            placed[group] = self._firsts[at]
            self._firsts[at] += size
            if self._firsts[at] == self._ends[at]:
                del self._firsts[at], self._ends[at]
        return placed
