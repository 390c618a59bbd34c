"""Announce long operations of a first start on the terminal.

In: a description of the operation. Out: a debug message of the `autopar.system.progress` logger; and a line on standard
error if that is a terminal and the operation takes longer than `AFTER_S`.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: Seconds before an operation is announced.
AFTER_S = 2.0

_log = logging.getLogger(__name__)


@contextmanager
def announced(what: str, *, shown: bool = True) -> Iterator[None]:
    """Announce the operation inside the `with` block.

    Args:
        what: description of the operation.
        shown: whether to announce it on the terminal; False if the user displays progress another way.
    """
    _log.debug(what)
    if not (shown and _is_terminal()):
        yield
        return
    timer = threading.Timer(AFTER_S, _say, [what])  # XLA compiles without the GIL
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def announced_by_progress(what: str) -> Callable[[str, float], None] | None:
    """Like `announced`, as a progress callback: without a thread, because planning forks. None without a terminal."""
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
