"""Measure how fast this worker's own devices are, by a small program that is the same on every worker and needs no other.

In a synchronous step all workers take equally long, since each waits for the slowest: only a program without collectives shows which
devices are slow. It runs between two steps, for at most a hundredth of the time.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from typing import Any

import jax
import jax.numpy as jnp

#: Rows of the square matrix that is multiplied with itself, and how often; probes of which the median counts.
_ROWS, _REPEATS, _KEPT = 384, 8, 5
#: Time between two probes over the time of one.
_SELDOM = 100.0


class DeviceProbe:
    """The probe of this process's devices. It compiles at the first call of `seconds`."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=_KEPT)
        self._due_s = 0.0
        self._matrices: list[jax.Array] = []
        self._product = jax.jit(lambda x: x @ x / _ROWS)

    def seconds(self, in_flight: Any = None) -> float:
        """Seconds that the slowest device needs, the median of the last probes; 0 if there were too few yet.

        Args:
            in_flight: what the devices still compute; a probe waits for it.
        """
        if time.monotonic() >= self._due_s:
            jax.block_until_ready(in_flight)
            if not self._matrices:
                ones = jnp.ones((_ROWS, _ROWS), jnp.float32)
                self._matrices = [jax.device_put(ones, device) for device in jax.local_devices()]
                jax.block_until_ready([self._product(one) for one in self._matrices])
            start_s = time.monotonic()
            values = self._matrices
            for _ in range(_REPEATS):
                values = [self._product(one) for one in values]
            jax.block_until_ready(values)
            end_s = time.monotonic()
            self._last.append(end_s - start_s)
            self._due_s = end_s + _SELDOM * (end_s - start_s)
        return statistics.median(self._last) if len(self._last) == _KEPT else 0.0
