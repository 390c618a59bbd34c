"""Read weights in a background thread while programs compile.

In: a function that reads the weights. Out: `BackgroundLoad`, whose `result` waits for them. Progress is reported, and errors
are raised, in the thread of the caller.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

import jax

#: Called with a stage's name and the fraction done.
Progress = Callable[[str, float], None]
#: (shardings, callback) -> weights. It calls the callback with the bytes of each part that it has read.
Load = Callable[[Any, Callable[[int], None]], Any]

_REPORT_EVERY_S = 0.1


class BackgroundLoad:
    """Weights that a background thread reads. A context manager: leaving the block early cancels the load.

    Args:
        load: the function that reads the weights.
        shardings: the shardings to load into.
        num_bytes: the total size of the weights.
    """

    def __init__(self, load: Load, shardings: Any, num_bytes: int) -> None:
        self._load, self._shardings = load, shardings
        self._read, self._total = 0, num_bytes
        self._is_cancelled = threading.Event()
        self._uses_x64 = jax.config.jax_enable_x64  # JAX keeps this setting per thread
        self._pool = ThreadPoolExecutor(1, "autopar-read-weights")
        self._weights: Future[Any] = self._pool.submit(self._run)

    def __enter__(self) -> BackgroundLoad:
        return self

    def __exit__(self, *raised: object) -> None:
        self._is_cancelled.set()
        self._pool.shutdown()

    def _run(self) -> Any:
        with jax.enable_x64(self._uses_x64):
            return self._load(self._shardings, self._on_read)

    def _on_read(self, num_bytes: int) -> None:
        self._read += num_bytes
        if self._is_cancelled.is_set():
            raise InterruptedError

    def check(self) -> None:
        """Raise the error of the load, if it has failed."""
        if self._weights.done():
            self._weights.result()

    def result(self, progress: Progress | None = None) -> Any:
        """Wait for the weights and return them."""
        while progress is not None:
            try:
                return self._weights.result(_REPORT_EVERY_S)
            except FutureTimeoutError:
                progress("read weights", min(1.0, self._read / self._total))
        return self._weights.result()
