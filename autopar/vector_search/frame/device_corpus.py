"""Keep the arrays of a corpus on devices, in every layout that plans use.

In: arrays of the corpus and shardings. Out: the arrays in those shardings. A new layout is a further copy, made if the
memory budget allows; otherwise the plan has to use the first layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

Arrays = tuple[jax.Array, ...]


class DeviceCorpus:
    """A corpus on devices. It is the only mutable part of an index: it gains layouts.

    Args:
        arrays: arrays of the corpus, on the host or on any device.
        shardings: shardings of the first layout.
        budget_bytes: memory budget of one device.
    """

    def __init__(self, arrays: Sequence[Any], shardings: Sequence[NamedSharding], budget_bytes: float) -> None:
        self._budget = budget_bytes
        self.layouts: list[Arrays] = [tuple(map(jax.device_put, arrays, shardings))]
        self._largest = max(range(len(arrays)), key=lambda i: self.layouts[0][i].nbytes)
        self.specs = [shardings[self._largest].spec]  # spec of the vectors in each layout

    def in_layout(self, shardings: Sequence[NamedSharding], peak_bytes: float) -> Arrays | None:
        """Return the arrays in the given shardings; None if a further copy exceeds the memory budget.

        Args:
            peak_bytes: peak memory per device of the program that uses them, the arrays included.
        """
        for arrays in self.layouts:
            if all(a.sharding.is_equivalent_to(s, a.ndim) for a, s in zip(arrays, shardings, strict=True)):
                return arrays
        if self.device_bytes + peak_bytes > self._budget:
            return None
        self.layouts.append(tuple(map(jax.device_put, self.layouts[0], shardings)))
        self.specs.append(shardings[self._largest].spec)
        return self.layouts[-1]

    @property
    def device_bytes(self) -> int:
        """Bytes of all layouts on each device."""
        return sum(_device_bytes(arrays, [a.sharding for a in arrays]) for arrays in self.layouts)


def _device_bytes(arrays: Arrays, shardings: Sequence[Any]) -> int:
    return sum(
        int(np.prod(sharding.shard_shape(array.shape))) * array.dtype.itemsize
        for array, sharding in zip(arrays, shardings, strict=True)
    )
