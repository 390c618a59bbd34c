"""The arrays of a corpus on devices, in each of the layouts that plans have asked for.

In: arrays of the corpus, and where a plan wants each. Out: the same arrays, lying there. A layout that is not held is
made as one copy more, if the devices have room for it by the budget; else the plan has to do with the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

Arrays = tuple[jax.Array, ...]


class Held:
    """A corpus on devices. The one mutable thing of an index: it grows by layouts.

    Args:
        arrays: the corpus's, on the host or anywhere.
        shardings: of the first layout. budget_bytes: of one device.
    """

    def __init__(self, arrays: Sequence[Any], shardings: Sequence[NamedSharding], budget_bytes: float) -> None:
        self._budget = budget_bytes
        self.layouts: list[Arrays] = [tuple(map(jax.device_put, arrays, shardings))]
        self._largest = max(range(len(arrays)), key=lambda i: self.layouts[0][i].nbytes)
        self.specs = [shardings[self._largest].spec]  # of the vectors, in each layout

    def at(self, shardings: Sequence[NamedSharding], peak_bytes: float) -> Arrays | None:
        """The arrays as they are to lie; None where a copy more would be more than the devices may hold.

        Args:
            peak_bytes: that a device needs for the program that asks for them, they among them.
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
        """That each device holds."""
        return sum(_device_bytes(arrays, [a.sharding for a in arrays]) for arrays in self.layouts)


def _device_bytes(arrays: Arrays, shardings: Sequence[Any]) -> int:
    return sum(
        int(np.prod(sharding.shard_shape(array.shape))) * array.dtype.itemsize
        for array, sharding in zip(arrays, shardings, strict=True)
    )
