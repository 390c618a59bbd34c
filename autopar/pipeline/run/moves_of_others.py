"""Stay in step with the moves between other processes.

In: moves in which no device of this process takes part.
Out: `MovesOfOthers`, which has the effect of these moves on this process, in few calls.

XLA numbers transfers between processes by counting them in each process, and sender and receiver must agree on the
number. So a process has to count the transfers of all others (XLA: `CreateNewTransferKey`). A call for an array without
shards counts only. How many numbers it takes depends on the backend, either one per device or one per pair of processes.
Both add up over calls that share neither devices nor pairs of processes, so such calls become one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.jax_interop import processes
from autopar.pipeline.run.transfers import Leg, devices_of, without_shards


@dataclass(slots=True)
class _Together:
    """Legs that one call counts: the devices of each end, in pairs."""

    senders: dict[Any, None] = field(default_factory=dict)
    receivers: dict[Any, None] = field(default_factory=dict)
    processes: set[tuple[int, int]] = field(default_factory=set)

    def takes(self, leg: Leg) -> bool:
        """Add a leg if it shares no sender, no receiver and no pair of processes with the others."""
        senders, receivers = (list(devices_of(end).flat) for end in leg)
        pairs = {(one.process_index, other.process_index) for one, other in zip(senders, receivers, strict=True)}
        known = any(one in self.senders for one in senders) or any(one in self.receivers for one in receivers)
        if known or pairs & self.processes:
            return False
        self.senders |= dict.fromkeys(senders)
        self.receivers |= dict.fromkeys(receivers)
        self.processes |= pairs
        return True

    def call(self) -> Callable[[], Any]:
        """The call that counts them."""
        source, target = (_along(list(devices)) for devices in (self.senders, self.receivers))
        copy = processes.copying_to(target)
        absent = without_shards((len(self.senders),), jnp.float32, source)
        return lambda: copy(absent)


class MovesOfOthers:
    """Counts moves of other processes.

    Args:
        legs: the legs of these moves.
        calls: the calls made before, by their devices, which equal ones share; this object adds its own.

    Attributes:
        num_legs: the number of legs.
        calls: the calls that count them.
    """

    def __init__(self, legs: Sequence[Leg], calls: dict[Any, Callable[[], Any]]) -> None:
        together: list[_Together] = []
        self.num_legs = len(legs)
        for leg in legs:
            if not any(one.takes(leg) for one in together):
                together.append(_Together())
                together[-1].takes(leg)
        self.calls: list[Callable[[], Any]] = []
        for one in together:
            key = tuple(one.senders), tuple(one.receivers)
            if key not in calls:
                calls[key] = one.call()
            self.calls.append(calls[key])

    def count(self) -> None:
        """Count them."""
        for call in self.calls:
            call()


def _along(devices: list[Any]) -> NamedSharding:
    return NamedSharding(Mesh(np.array(devices, dtype=object), ("device",)), PartitionSpec("device"))
