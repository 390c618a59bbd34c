"""Serve a store from the process of one of its workers, which calls it directly."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from autopar.errors import StoreError
from autopar.versions.keys import Selected
from autopar.versions.remote.server import announce, answer
from autopar.versions.remote.wire import packed_update, unpacked_update
from autopar.versions.server_update import Update
from autopar.versions.store_values import Pulled

if TYPE_CHECKING:
    from autopar.versions.layout.layout import Layout
    from autopar.versions.store import VersionedStore


class OwnServer:
    """The server of this process, in a thread.

    Args:
        worker: the number of the worker of this process, and of its server.
        servers: the number of servers of the whole store.

    Raises:
        StoreError: there is no server of this number, or another process has it.
    """

    def __init__(self, store: VersionedStore, worker: int, servers: int, name: str, layout: Layout | None) -> None:
        if not isinstance(worker, int) or isinstance(worker, bool) or not 0 <= worker < servers:
            raise StoreError(
                f"`own` is served as server {worker!r}, the number of the worker, but `servers` is {servers}: give each worker with"
                " a store of its own one of the first numbers"
            )
        self._store, self._worker = store, worker
        store.at_worker(worker)
        channel = announce(store, name, worker, layout)
        others = [other for other in range(store.num_workers) if other != worker]
        self._failed: list[StoreError] = []

        def run() -> None:
            try:
                answer(store, channel, name, worker, others)
            except StoreError as error:
                self._failed.append(error)

        self._thread = threading.Thread(target=run, name=f"autopar store, server {worker}", daemon=True)
        self._thread.start()

    def pull(self, chosen: Selected, at_least_clock: int, timeout_s: float | None, *, newest: bool) -> Pulled:
        """As `StoreClient.pull`."""
        worker = None if newest else self._worker
        return self._store.pull(chosen, at_least_clock, worker=worker, timeout_s=timeout_s)

    def clock(self, update: Update) -> int:
        """Push an update, and finish the clock."""
        for keys, pushed in unpacked_update(*packed_update(update)):
            self._store.push(keys, pushed, worker=self._worker)
        return self._store.clock(worker=self._worker)

    def leave(self, error: BaseException | None) -> None:
        """End the worker's clocks, by an error or without."""
        if error is None:
            self._store.leave(self._worker)
        else:
            self._store.fail(self._worker, error)

    def wait(self) -> None:
        """Wait until all other workers have left.

        Raises:
            StoreError: some failed.
        """
        while self._thread.is_alive():
            self._thread.join(0.2)  # so that Ctrl-C is handled
        if self._failed:
            raise self._failed[0]
