"""Serve a store: one thread for each worker reads its requests in order, and calls the store for it.

In: a `VersionedStore` of this process; requests of worker processes. Out: answers. Consistency, waiting and checks are those
of the store.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax

from autopar.errors import AutoparError, ProcessError, StoreError
from autopar.versions.consistency.table import find
from autopar.versions.remote.channel import Channel, open_channel
from autopar.versions.remote.wire import unpacked_keys, unpacked_update

if TYPE_CHECKING:
    from autopar.versions.layout.layout import Layout
    from autopar.versions.store import VersionedStore


def serve(store: VersionedStore, name: str, server: int, layout: Layout | None) -> None:
    """Answer requests until every worker has left or failed.

    Raises:
        StoreError: the policy works in the workers' processes and is not in the table; or workers failed: the message names them.
    """
    answer(store, announce(store, name, server, layout), name, server, range(store.num_workers))


def announce(store: VersionedStore, name: str, server: int, layout: Layout | None) -> Channel:
    """Tell the workers what a server has.

    Raises:
        StoreError: the policy works in the workers' processes and is not in the table, the layout gives the server something else, or there is such a
            server.
    """
    held_by = _held_by_workers(store)
    rows = rows_of(store, server, layout)
    channel = open_channel(name, f"server {server}")
    channel.beat()
    kinds = {key: [list(shape), str(dtype), *rows[key]] for key, (shape, dtype) in store.kinds.items()}
    hello = {
        "kinds": kinds,
        "workers": store.num_workers,
        "shards": store.num_shards,
        "held_by": held_by,
        "takes": _terms(store),
    }
    try:
        channel.send(f"{server}/hello", hello)
    except ProcessError as error:
        raise StoreError(
            f"a store {name!r} with a server {server} is served already, or process 0 is gone: give each store a `name`, and"
            f" its servers the numbers from 0 ({error})"
        ) from error
    return channel


def _held_by_workers(store: VersionedStore) -> str:
    """Leave it to the workers to add up and to hold back what they push. Returns the policy by which they do; empty if by none."""
    policy = store.policy
    if policy.period == 1 and policy.send is None:
        return ""
    try:
        find(policy.name)
    except StoreError as error:
        raise StoreError(
            f"the policy {policy.name!r} holds updates back in the worker's process, which knows only policies of the table: serve"
            " one of them, or one without `period` and `send`"
        ) from error
    store._state = replace(store._state, holds=False)
    return policy.name


def _terms(store: VersionedStore) -> dict[str, Any]:
    """For each term that workers push in place of updates, its shape and dtype, and whether it is never held back; empty if they push
    updates."""
    if store._taken.keys() == store.kinds.keys():
        return {}
    at_once = store._state.sent_at_once
    return {key: [list(shape), str(dtype), key in at_once] for key, (shape, dtype) in store._taken.items()}


def rows_of(store: VersionedStore, server: int, layout: Layout | None) -> dict[str, tuple[int, int]]:
    """For each key, the first of the rows that the server has, and the rows of the whole array."""
    have = {key: shape[0] if shape else 1 for key, (shape, _) in store.kinds.items()}
    if layout is None:
        return {key: (0, rows) for key, rows in have.items()}
    pieces = layout.keys_of(server)
    if {key: piece.num_rows for key, piece in pieces.items()} != have:
        raise StoreError(
            f"the layout gives server {server} other keys or rows than its store has: make the store of"
            f" `layout.part(values, {server})`"
        )
    return {key: (piece.first_row, sum(one.num_rows for one in layout.pieces[key])) for key, piece in pieces.items()}


def answer(store: VersionedStore, channel: Channel, name: str, server: int, workers: Collection[int]) -> None:
    """Answer requests until these workers have left or failed.

    Raises:
        StoreError: workers failed: the message names them.
    """
    failures: dict[int, BaseException] = {}
    threads = [
        threading.Thread(target=_answer_all, args=(store, channel, server, worker, failures), daemon=True)
        for worker in workers
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(0.2)  # so that Ctrl-C is handled
    finally:
        channel.over.set()
    if failures:
        named = "; ".join(f"worker {worker}: {error}" for worker, error in sorted(failures.items()))
        raise StoreError(f"workers of the store {name!r} failed: {named}")


def _answer_all(
    store: VersionedStore, channel: Channel, server: int, worker: int, failures: dict[int, BaseException]
) -> None:
    """Answer one worker's requests until it leaves, fails or dies."""
    number = 0
    try:
        while True:
            request, arrays = channel.receive(f"{server}/{worker}/request/{number}", f"worker {worker}")
            if request["call"] == "leave":
                store.leave(worker)
                channel.send(f"{server}/{worker}/answer/{number}", {})
                return
            if request["call"] == "fail":
                raise StoreError(request["error"])
            try:
                answer, values = _answered(store, worker, request, arrays)
            except AutoparError as error:
                answer, values = {"error": str(error)}, []
            except Exception as error:  # of a user's update function
                answer, values = {"error": f"server {server} of the store: {type(error).__name__}: {error}"}, []
            channel.send(f"{server}/{worker}/answer/{number}", answer, values)
            number += 1
    except Exception as error:
        failures[worker] = error
        store.fail(worker, error)


def _answered(
    store: VersionedStore, worker: int, request: dict[str, Any], arrays: Sequence[jax.Array]
) -> tuple[dict[str, Any], list[jax.Array]]:
    if request["call"] == "clock":
        for keys, update in unpacked_update(request["update"], arrays):
            store.push(keys, update, worker=worker)
        return {"clock": store.clock(worker=worker)}, []
    keys = unpacked_keys(request["keys"], arrays)
    reader = None if request["newest"] else worker
    pulled = store.pull(keys, request["at_least_clock"], worker=reader, timeout_s=request["timeout_s"])
    answer = {"clock": pulled.clock, "versions": list(pulled.versions.items()), "keys": list(pulled.values)}
    return answer, list(pulled.values.values())
