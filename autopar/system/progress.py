"""What a first start waits for, announced on a terminal.

In: what is being done. Out: a line on standard error, where that is a terminal and it takes longer than `AFTER_S`; a debug
message of the `autopar.system.progress` logger always.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: Seconds before anything is said.
AFTER_S = 2.0

_log = logging.getLogger(__name__)


@contextmanager
def announced(what: str, *, shown: bool = True) -> Iterator[None]:
    """While entered, say what is being done.

    Args:
        shown: whether on a terminal, too: not where the user shows progress another way.
    """
    _log.debug(what)
    if not (shown and _is_terminal()):
        yield
        return
    timer = threading.Timer(AFTER_S, _say, [what])  # XLA compiles without Python's lock
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def announced_by_progress(what: str) -> Callable[[str, float], None] | None:
    """As `announced`, for what reports its progress: without a thread, for planning makes forks. None without a terminal."""
    _log.debug(what)
    if not _is_terminal():
        return None
    start, said = time.monotonic(), False

    def progress(stage: str, fraction: float) -> None:
        nonlocal said
        if not said and time.monotonic() - start >= AFTER_S and fraction < 1:
            said = True
            _say(f"{what}, {stage}")

    return progress


def _is_terminal() -> bool:
    return sys.stderr is not None and not sys.stderr.closed and sys.stderr.isatty()


def _say(what: str) -> None:
    sys.stderr.write(f"autopar: {what} …\n")
    sys.stderr.flush()
