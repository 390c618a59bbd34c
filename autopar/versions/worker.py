"""Define one worker's view of a store."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopar.versions.keys import Keys
    from autopar.versions.layout_choice import Place
    from autopar.versions.store import Pulled, VersionedStore


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker of a store, as a context: it leaves the clocks at the end. After an error, pulls of others that wait for it
    raise.

    Args:
        to: its device or sharding, where its pulls go; None leaves arrays where they are.
    """

    store: VersionedStore
    index: int
    to: Place | None = None

    def pull(self, keys: Keys = None, at_least_clock: int = 0, *, timeout_s: float | None = None) -> Pulled:
        """As `VersionedStore.pull`."""
        return self.store.pull(keys, at_least_clock, worker=self.index, to=self.to, timeout_s=timeout_s)

    def push(self, keys: Keys, update: Any) -> None:
        """As `VersionedStore.push`."""
        self.store.push(keys, update, worker=self.index)

    def clock(self) -> int:
        """As `VersionedStore.clock`."""
        return self.store.clock(worker=self.index)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.store.report().clocks[self.index] is None:  # it has left before
            return
        if error is None:
            self.store.leave(self.index)
        else:
            self.store.fail(self.index, error)
