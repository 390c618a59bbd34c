"""Weights read by a thread of their own, while programs are compiled.

In: what reads them. Out: `Reading`, which is asked for them later. Whoever opens a model is told how far it is by their own
thread, and an error in there is theirs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from typing import Any

import jax

#: Called with a stage's name and the fraction done.
Progress = Callable[[str, float], None]
#: Reads weights into shardings, and calls with the bytes of each part that has been read.
Load = Callable[[Any, Callable[[int], None]], Any]

_TELL_EVERY_S = 0.1


class Reading:
    """A reading under way. As `with`: whatever ends the block early ends the reading too.

    Args:
        load: reads. shardings: where the weights are to lie. num_bytes: of all.
    """

    def __init__(self, load: Load, shardings: Any, num_bytes: int) -> None:
        self._load, self._shardings = load, shardings
        self._read, self._total = 0, num_bytes
        self._is_unwanted = threading.Event()
        self._uses_x64 = jax.config.jax_enable_x64  # which JAX has for each thread by itself
        self._pool = ThreadPoolExecutor(1, "autopar-read-weights")
        self._weights: Future[Any] = self._pool.submit(self._run)

    def __enter__(self) -> Reading:
        return self

    def __exit__(self, *raised: object) -> None:
        self._is_unwanted.set()
        self._pool.shutdown()

    def _run(self) -> Any:
        with jax.enable_x64(self._uses_x64):
            return self._load(self._shardings, self._part_read)

    def _part_read(self, num_bytes: int) -> None:
        self._read += num_bytes
        if self._is_unwanted.is_set():
            raise InterruptedError

    def check(self) -> None:
        """Raise what has gone wrong so far."""
        if self._weights.done():
            self._weights.result()

    def weights(self, progress: Progress | None = None) -> Any:
        """All of them; waits."""
        while progress is not None:
            try:
                return self._weights.result(_TELL_EVERY_S)
            except NotYet:
                progress("read weights", min(1.0, self._read / self._total))
        return self._weights.result()
