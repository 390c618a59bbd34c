"""Run Python's cyclic garbage collector less often while a step is traced or planned.

In: a function or a `with` block. Out: the same with higher thresholds of the collector. Graphs and problems are millions
of small objects that live until planning ends. Scanning them repeatedly takes a tenth of planning time and finds next
to nothing, because reference counting frees most garbage.
"""

from __future__ import annotations

import gc
import threading
from contextlib import ContextDecorator

#: Thresholds of the collector's generations: a hundred times Python's default for new objects, some 20 MB.
_THRESHOLD = (200_000, 20, 20)


class seldom_collect(ContextDecorator):
    """While any thread is inside, the collector runs less often; afterwards the user's thresholds are restored.

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
                if kind._before[0]:  # 0: collection is disabled
                    gc.set_threshold(*_THRESHOLD)
            kind._entered += 1

    def __exit__(self, *raised: object) -> None:
        kind = seldom_collect
        with kind._lock:
            kind._entered -= 1
            if kind._entered == 0:
                gc.set_threshold(*kind._before)
