"""Take everything that changes in a store as arrays and JSON, and load it into one that was made with the same arguments.

In: a `StoreState`, and what workers have not finished. Out: `Snapshot`. Loading checks names, shapes and numbers, so that a damaged
snapshot leaves the store as it was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from autopar.errors import StoreError
from autopar.jax_interop.compat import retyped, shape_struct
from autopar.versions.consistency.board import Board
from autopar.versions.consistency.clocks import Clocks
from autopar.versions.consistency.policy import Pending
from autopar.versions.factors import SufficientFactors
from autopar.versions.held import Held
from autopar.versions.progress import Progress
from autopar.versions.server_update import Pushed, Update
from autopar.versions.store_state import StoreState

#: The name of an array: what it is, then workers, clocks and keys.
Name = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a store, or a step around it, holds at one time.

    Args:
        arrays: by name; typed PRNG keys as their raw data.
        about: all else, as JSON types.
    """

    arrays: Mapping[Name, Any]
    about: Mapping[str, Any]

    def within(self, part: str) -> dict[Name, Any]:
        """The arrays whose names begin with a word, by the rest of the names."""
        return {name[1:]: array for name, array in self.arrays.items() if name[:1] == (part,)}


def taken(state: StoreState, progress: Progress) -> Snapshot:
    """The snapshot of a store."""
    arrays: dict[Name, Any] = {}
    for number, shard in enumerate(state.shards):
        arrays |= {("weights", number, key): raw(array) for key, array in shard.weights.items()}
        arrays |= {("state", number, n): raw(leaf) for n, leaf in enumerate(jax.tree.leaves(shard.state))}
    for (worker, clock), update in state.pending.items():
        arrays |= _parts(("pending", worker, clock), update)
    for worker, held in enumerate(state.held):
        arrays |= _parts(("held", worker), held.update)
    for worker, (number, update) in enumerate(progress.opened):
        arrays |= _parts(("open", worker), update if number == state.iterations[worker] else {})
    for worker, before in enumerate(progress.before):
        arrays |= {("before", worker, key): raw(array) for key, (array, _) in before.items()}
    board = state.board
    about = {
        "policy": board.policy.name,
        "versions": [shard.version for shard in state.shards],
        "clocks": list(board.clocks.vector),
        "version": board.clocks.version,
        "applied": board.clocks.applied,
        "read_versions": list(board.read_versions),
        "has_read": list(board.has_read),
        "pending": [[one.worker, one.clock, one.read_version] for one in board.pending],
        "reached": board.reached,
        "num_discarded": board.num_discarded,
        "iterations": list(state.iterations),
        "held": [dict(held.num_clocks) for held in state.held],
        "open": [number for number, _ in progress.opened],
        "before": [
            {key: sorted(map(list, versions.items())) for key, (_, versions) in before.items()}
            for before in progress.before
        ],
        "staleness": [sorted(map(list, counts.items())) for counts in progress.staleness],
        "waits_s": list(progress.waits_s),
    }
    return Snapshot(arrays, about)


def loaded(snapshot: Snapshot, like: StoreState, targets: Mapping[str, tuple[int, Any]]) -> tuple[StoreState, Progress]:
    """The inverse of `taken`.

    Args:
        like: the state of a store that was made with the same keys, update, policy and workers.
        targets: for each part or term of a push, its shard and where the shard takes it.

    Raises:
        StoreError: the snapshot is of another store, or damaged.
    """
    try:
        return _loaded(snapshot, like, targets)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        if isinstance(error, StoreError):
            raise
        raise StoreError(f"the snapshot of a store is damaged: {type(error).__name__}: {error}") from error


def _loaded(
    snapshot: Snapshot, like: StoreState, targets: Mapping[str, tuple[int, Any]]
) -> tuple[StoreState, Progress]:
    about, board = snapshot.about, like.board
    if about["policy"] != board.policy.name or len(about["clocks"]) != board.clocks.num_workers:
        raise StoreError(
            f"the snapshot is of {len(about['clocks'])} workers under {about['policy']!r}, and the store has"
            f" {board.clocks.num_workers} under {board.policy.name!r}: make it as it was when it was saved"
        )
    weights, states = snapshot.within("weights"), snapshot.within("state")
    missing = {(n, key) for n, shard in enumerate(like.shards) for key in shard.weights} ^ set(weights)
    if missing:
        raise StoreError(
            f"the snapshot and the store differ in the key {min(map(str, (name[-1] for name in missing)))!r}"
        )
    shards = []
    for number, (shard, version) in enumerate(zip(like.shards, about["versions"], strict=True)):
        leaves, structure = jax.tree.flatten(shard.state)
        state = [as_like(states[number, n], leaf, f"state {n} of shard {number}") for n, leaf in enumerate(leaves)]
        new = {key: as_like(weights[number, key], array, repr(key)) for key, array in shard.weights.items()}
        shards.append(replace(shard, weights=new, state=jax.tree.unflatten(structure, state), version=int(version)))
    clocks = Clocks(
        tuple(None if clock is None else int(clock) for clock in about["clocks"]),
        int(about["version"]),
        int(about["applied"]),
    )
    pending = tuple(Pending(*map(int, one)) for one in about["pending"])
    of_board = Board(
        board.policy,
        clocks,
        tuple(map(int, about["read_versions"])),
        tuple(map(bool, about["has_read"])),
        pending,
        int(about["reached"]),
        int(about["num_discarded"]),
    )
    workers = range(clocks.num_workers)
    everything, held, opened = snapshot.within("pending"), snapshot.within("held"), snapshot.within("open")
    state = replace(
        like,
        board=of_board,
        shards=tuple(shards),
        pending={
            (one.worker, one.clock): {
                key: pushed.moved(targets[key][1])
                for key, pushed in _update(_below(everything, one.worker, one.clock)).items()
            }
            for one in pending
        },
        iterations=tuple(map(int, about["iterations"])),
        held=tuple(Held(_update(_below(held, w)), dict(about["held"][w])) for w in workers),
    )
    pulled = {name: np.asarray(array) for name, array in snapshot.within("before").items()}
    progress = Progress(
        opened=[(int(about["open"][w]), _update(_below(opened, w))) for w in workers],
        before=[
            {
                key: (jax.numpy.asarray(pulled[w, key]), {int(shard): int(version) for shard, version in versions})
                for key, versions in about["before"][w].items()
            }
            for w in workers
        ],
        staleness=[Counter({int(value): int(count) for value, count in counts}) for counts in about["staleness"]],
        waits_s=[float(seconds) for seconds in about["waits_s"]],
    )
    of_each = (state.iterations, progress.staleness, progress.waits_s, of_board.has_read, of_board.read_versions)
    if any(len(figures) != clocks.num_workers for figures in of_each):
        raise ValueError("it has figures of another number of workers")
    return state, progress


def _parts(name: Name, update: Update) -> dict[Name, Any]:
    """The arrays of an update."""
    found: dict[Name, Any] = {}
    for key, pushed in update.items():
        if pushed.whole is not None:
            found[*name, key, "whole", 0] = raw(pushed.whole)
        for n, (rows, values) in enumerate(pushed.rows):
            found |= {(*name, key, "rows", n): rows, (*name, key, "values", n): raw(values)}
        for n, one in enumerate(pushed.factors):
            found |= {(*name, key, "left", n): raw(one.left), (*name, key, "right", n): raw(one.right)}
    return found


def _below(arrays: Mapping[Name, Any], *first: int) -> dict[Name, Any]:
    return {name[len(first) :]: array for name, array in arrays.items() if name[: len(first)] == first}


def _update(arrays: Mapping[Name, Any]) -> dict[str, Pushed]:
    """The inverse of `_parts`, on the host: what is added to it decides the device."""
    keys = dict.fromkeys(str(name[0]) for name in arrays)
    made: dict[str, Pushed] = {}
    for key in keys:
        of_key: dict[Name, Any] = {name[1:]: np.asarray(array) for name, array in arrays.items() if name[0] == key}
        count = {kind: sum(name[0] == kind for name in of_key) for kind in ("rows", "left")}
        whole = of_key.get(("whole", 0))
        rows = tuple((of_key["rows", n], of_key["values", n]) for n in range(count["rows"]))
        factors = tuple(SufficientFactors(of_key["left", n], of_key["right", n]) for n in range(count["left"]))
        made[key] = Pushed(whole, rows, factors)
    return made


def raw(array: Any) -> Any:
    """An array that any file can hold: the raw data of typed PRNG keys."""
    is_key = isinstance(array, jax.Array) and jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(array) if is_key else array


def as_like(array: Any, like: Any, name: str) -> Any:
    """An array of a snapshot with the type and the place of another.

    Raises:
        StoreError: it has another shape or dtype.
    """
    if not isinstance(like, jax.Array):
        return type(like)(np.asarray(array).item())
    expected = raw(like)
    if (tuple(array.shape), array.dtype) != (expected.shape, expected.dtype):
        raise StoreError(
            f"the snapshot has {name} as {array.dtype}{tuple(array.shape)}, and it is {like.dtype}{like.shape}"
        )
    value = jax.numpy.array(array, copy=True)
    if expected is not like or like.weak_type:
        value = retyped(value, shape_struct(like))
    return jax.device_put(value, like.sharding)
