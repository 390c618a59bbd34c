"""Update weights that are in host memory: on the device, one shard at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from autopar.versions.host_memory.memory_kinds import HOST
from autopar.versions.server_update import Pushed, ServerUpdate, Weights


@dataclass(frozen=True, slots=True)
class UpdateInHostMemory:
    """Another update, with weights and state that are in host memory between two versions.

    Args:
        update: for weights in the memory of the device.
    """

    update: ServerUpdate

    def init(self, weights: Weights) -> Any:
        return _moved(self.update.init(_moved(weights, "device")), HOST)

    def apply(self, weights: Weights, state: Any, updates: Sequence[Mapping[str, Pushed]]) -> tuple[Weights, Any]:
        there = _moved(weights, "device")
        places = {key: array.sharding for key, array in there.items()}
        pushed = [{key: one.moved(places[key]) for key, one in update.items()} for update in updates]
        after, state = self.update.apply(there, _moved(state, "device"), pushed)
        return weights if after is there else _moved(after, HOST), _moved(state, HOST)


def _moved(tree: Any, kind: str) -> Any:
    def move(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        wanted = next(iter(leaf.sharding.device_set)).default_memory().kind if kind == "device" else kind
        return jax.device_put(leaf, leaf.sharding.with_memory_kind(wanted))

    return jax.tree.map(move, tree)
