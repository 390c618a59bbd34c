"""Write the state of a store as JSON and arrays, for a new replica.

In: a `Snapshot`, and the weights of the clock before. Out: a message with arrays, and back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from autopar.errors import StoreError
from autopar.versions.server_update import Weights
from autopar.versions.snapshot import Snapshot

if TYPE_CHECKING:
    from autopar.versions.store import VersionedStore

Before = tuple[int, Weights] | None


def packed_snapshot(snapshot: Snapshot, before: Before) -> tuple[dict[str, Any], list[Any]]:
    """A snapshot as a message."""
    names = [list(name) for name in snapshot.arrays]
    message: dict[str, Any] = {"names": names, "about": dict(snapshot.about)}
    if before is None:
        return message, list(snapshot.arrays.values())
    message["before"] = [before[0], list(before[1])]
    return message, [*snapshot.arrays.values(), *before[1].values()]


def unpacked_snapshot(
    message: dict[str, Any], arrays: Sequence[np.ndarray], store: VersionedStore
) -> tuple[Snapshot, Before]:
    """The inverse of `packed_snapshot`.

    Raises:
        StoreError: it is of another store.
    """
    names = [tuple(name) for name in message["names"]]
    own, rest = arrays[: len(names)], arrays[len(names) :]
    before: Before = None
    if "before" in message:
        clock, keys = message["before"]
        if list(keys) != list(store.keys):
            raise StoreError(
                "the replica that sends its state has other keys: make all replicas with the same arguments"
            )
        before = int(clock), {key: jax.numpy.array(one) for key, one in zip(keys, rest, strict=True)}
    return Snapshot(dict(zip(names, own, strict=True)), message["about"]), before
