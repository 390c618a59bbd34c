"""Fewer collections of cyclic garbage while a step is traced or planned.

In: a function. Out: the same, slower to collect. Graphs and problems are millions of small objects that live until their
plan is found; Python's collector looks at all of them again and again, which takes a tenth of planning, and finds next to
nothing: what is no longer of use is freed at once, by its references.
"""

from __future__ import annotations

import gc
import threading
from contextlib import ContextDecorator

#: New objects between two collections, and collections of the young between two of the older: a hundred times as many as
#: Python's own, some 20 MB.
_THRESHOLD = (200_000, 20, 20)


class seldom_collect(ContextDecorator):
    """While it is entered, by whatever thread, the collector looks seldom; what users set is set again afterwards.

    >>> before = gc.get_threshold()
    >>> with seldom_collect():
    ...     gc.get_threshold() == _THRESHOLD
    True
    >>> gc.get_threshold() == before
    True
    """

    _lock = threading.Lock()
    _entered = 0
    _before = (0, 0, 0)

    def __enter__(self) -> None:
        kind = seldom_collect
        with kind._lock:
            if kind._entered == 0:
                kind._before = gc.get_threshold()
                if kind._before[0]:  # 0: collecting is switched off
                    gc.set_threshold(*_THRESHOLD)
            kind._entered += 1

    def __exit__(self, *raised: object) -> None:
        kind = seldom_collect
        with kind._lock:
            kind._entered -= 1
            if kind._entered == 0:
                gc.set_threshold(*kind._before)
