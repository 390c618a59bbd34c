"""Commit operations of many threads in groups: one thread writes what has queued up, and the others wait for it.

In: operations. Out: their results, when they are on the device. While a group is being written, the next one gathers, so
the number of waits for the device does not grow with the number of threads.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

#: Bytes of operations in a group, beyond one operation.
_GROUP_BYTES = 2**24


@dataclass(slots=True)
class Ticket:
    """An operation that waits.

    Args:
        operation: the operation.
        num_bytes: about its bytes in the log.
        result: what its caller gets.
        error: why it was refused.
    """

    operation: Any
    num_bytes: int
    is_done: bool = False
    result: Any = None
    error: BaseException | None = None


@dataclass(slots=True)
class CommitQueue:
    """The queue of operations.

    Args:
        commit: commits tickets as a group, and sets their results or errors. Never runs twice at a time.
        lock: held while it runs.
    """

    commit: Callable[[Sequence[Ticket]], None]
    lock: threading.RLock = field(default_factory=threading.RLock)
    _waiting: deque[Ticket] = field(default_factory=deque)

    def submit(self, operation: Any, num_bytes: int) -> Any:
        """Commit an operation, and return its result.

        Raises:
            AutoparError: it was refused, and has no effect.
        """
        ticket = Ticket(operation, num_bytes)
        self._waiting.append(ticket)
        with self.lock:
            while not ticket.is_done:
                self._next_group()
        if ticket.error is not None:
            raise ticket.error
        return ticket.result

    def _next_group(self) -> None:
        group = [self._waiting.popleft()]
        total = group[0].num_bytes
        while self._waiting and total + self._waiting[0].num_bytes <= _GROUP_BYTES:
            group.append(self._waiting.popleft())
            total += group[-1].num_bytes
        try:
            self.commit(group)
        except BaseException as error:
            for ticket in group:
                ticket.error = ticket.error or error
            raise
        finally:
            for ticket in group:
                ticket.is_done = True
