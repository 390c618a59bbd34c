"""Lists of unequal length as a few arrays: which length each list is padded to.

In: how many vectors each list has. Out: `SizeClasses`, at most a given number of lengths, of all the ones that pad
least: a dynamic program over the lists sorted by length.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

#: Lengths are multiples of this, so that the best of a group of slots can be taken first.
LENGTH_MULTIPLE = 16

#: The dynamic program looks at no more different lengths than this: those of very long lists are rounded up further.
_MOST_LENGTHS = 512


@dataclass(frozen=True, slots=True)
class SizeClasses:
    """`order`: the lists, shortest first. Of each class: how many of `order` are in it, and what they are padded to."""

    order: np.ndarray
    num_lists: tuple[int, ...]
    lengths: tuple[int, ...]


def size_classes(counts: np.ndarray, most: int = 4) -> SizeClasses:
    """The classes, at most `most`, that hold all lists in the fewest slots.

    Args:
        counts: `[num_lists]`: vectors in each list.
    """
    multiple = LENGTH_MULTIPLE * max(1, -(-int(counts.max(initial=0)) // (LENGTH_MULTIPLE * _MOST_LENGTHS)))
    padded = np.maximum(-(-counts // multiple), 1) * multiple
    lengths, members = np.unique(padded, return_counts=True)
    until = np.concatenate([[0], np.cumsum(members)])
    # slots[j]: the fewest that hold the lists of lengths[:j] in as many classes as rounds have gone by
    slots = np.where(until > 0, np.inf, 0.0)
    cuts: list[np.ndarray] = []
    for _ in range(min(most, len(lengths))):
        # [i, j]: lengths[i:j] as the last class, all padded to lengths[j - 1]
        last = (until[None, 1:] - until[:, None]) * lengths[None, :].astype(float)
        total = np.where(until[None, 1:] > until[:, None], slots[:, None] + last, np.inf)
        cuts.append(np.argmin(total, axis=0))
        slots = np.concatenate([[0.0], total.min(axis=0)])
    ends = _ends(cuts, lengths, until)
    starts = [0, *ends[:-1]]
    return SizeClasses(
        np.argsort(padded, kind="stable"),
        tuple(int(until[end] - until[start]) for start, end in zip(starts, ends, strict=True)),
        tuple(int(lengths[end - 1]) for end in ends),
    )


def _ends(cuts: list[np.ndarray], lengths: np.ndarray, until: np.ndarray) -> list[int]:
    """Where each class ends in `lengths`, followed back from the last one."""
    ends: list[int] = []
    end = len(lengths)
    for cut in reversed(cuts):
        if end == 0:
            break
        ends.append(end)
        end = int(cut[end - 1])
    return ends[::-1]
