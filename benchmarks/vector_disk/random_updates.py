"""Random operations on an updatable index, beside a dictionary that says what the index has to hold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.vector_search import UpdatableIndex

METADATA = np.dtype([("page", "<i4")])
DIM = 8

#: What an index holds: vector and page by id.
Held = dict[int, tuple[bytes, int]]


class Operation(NamedTuple):
    """An operation: "insert", "upsert", "delete" or "checkpoint"."""

    name: str
    ids: NDArray[np.int64]
    vectors: NDArray[np.float32]
    pages: NDArray[np.int32]


def operations(seed: int, most_ids: int = 2_000, most_rows: int = 40) -> Iterator[Operation]:
    """Endless random operations, the same ones for a seed. Ids are used again after a while, and vectors drift."""
    draw = np.random.default_rng(seed)
    number = 0
    while True:
        number += 1
        name = str(draw.choice(["insert", "upsert", "delete", "checkpoint"], p=[0.35, 0.33, 0.3, 0.02]))
        rows = int(draw.integers(1, most_rows))
        ids = draw.choice(most_ids, rows, replace=False).astype(np.int64)
        middle = 3 * np.sin(number / 200 + np.arange(DIM))
        vectors = (middle + draw.normal(size=(rows, DIM))).astype(np.float32)
        yield Operation(name, ids, vectors, draw.integers(0, 100, rows).astype(np.int32))


def fitting(operation: Operation, held: Held) -> Operation:
    """An operation whose inserts are of ids that are not held."""
    if operation.name != "insert":
        return operation
    is_new = np.array([int(each) not in held for each in operation.ids])
    return Operation("insert", operation.ids[is_new], operation.vectors[is_new], operation.pages[is_new])


def after(held: Held, operation: Operation) -> Held:
    """What an index holds after an operation."""
    found = dict(held)
    if operation.name in ("insert", "upsert"):
        for each, vector, page in zip(operation.ids.tolist(), operation.vectors, operation.pages.tolist(), strict=True):
            found[each] = (vector.tobytes(), page)
    elif operation.name == "delete":
        for each in operation.ids.tolist():
            found.pop(each, None)
    return found


def run(index: UpdatableIndex, operation: Operation) -> None:
    """Carry an operation out."""
    if operation.name == "checkpoint":
        index.checkpoint()
    elif operation.name == "delete":
        index.delete(operation.ids)
    else:
        change = index.insert if operation.name == "insert" else index.upsert
        change(operation.ids, operation.vectors, operation.pages.astype(METADATA))


def held_by(index: UpdatableIndex) -> Held:
    """What an index holds.

    Raises:
        AssertionError: it holds an id twice.
    """
    found: Held = {}
    for ids, vectors, metadata in index.items():
        for each, vector, row in zip(ids.tolist(), vectors, metadata, strict=True):
            assert each not in found, f"id {each} is there twice"
            found[each] = (vector.tobytes(), int(row["page"]))
    assert len(index) == len(found), f"the index says {len(index)} vectors, and has {len(found)}"
    return found


def wrong_results(index: UpdatableIndex, held: Held, queries: NDArray[np.float32], k: int) -> int:
    """Results of a search of all lists or nodes that differ from an exact search of what the index has to hold; and those
    of a usual search that are too few, doubled, or not held."""
    details = index.stats().details
    found = index.search(queries, k, effort=max(1, details.get("num_lists") or details.get("num_places", 0)))
    ids = np.array(sorted(held), np.int64)
    wrong = 0
    for row in index.search(queries, k).ids:
        some = row[row != -1]
        wrong += abs(len(some) - min(k, len(ids))) + len(some) - len(set(some.tolist()))
        wrong += int((~np.isin(some, ids)).sum())
    if not len(ids):
        return int((found.ids != -1).sum())
    vectors = np.stack([np.frombuffer(held[each][0], np.float32) for each in ids.tolist()]).astype(np.float64)
    squares = ((queries[:, None].astype(np.float64) - vectors[None]) ** 2).sum(axis=-1)
    best = np.sort(squares, axis=1)[:, :k]
    for row, (got, near) in enumerate(zip(found.ids, best, strict=True)):
        got = got[got != -1]
        wrong += abs(len(got) - len(near)) + len(got) - len(set(got.tolist()))
        place = np.searchsorted(ids, got)
        is_held = (place < len(ids)) & (ids[np.minimum(place, len(ids) - 1)] == got)
        wrong += int((~is_held).sum())
        if is_held.all() and len(got) == len(near):
            wrong += int((squares[row, place] > near + 1e-3).sum())
    return wrong


def start_graph(folder: Path, **options: Any) -> UpdatableIndex:
    """An empty index of a graph, of whose few vectors all were deleted."""
    from autopar.vector_search import build_graph_on_disk, make_updatable

    vectors, ids = np.random.default_rng(0).normal(size=(3, DIM)).astype(np.float32), np.arange(3)
    path = folder.with_name(f"{folder.name}.graph")
    with build_graph_on_disk(vectors, path, ids=ids, reader="mmap", progress=False) as built:
        settings: dict[str, Any] = {"metadata": np.zeros(3, METADATA), "background": False, "reader": "mmap"}
        index = make_updatable(built, folder, **(settings | options))
    path.unlink()
    index.delete(ids)
    return index


def start(folder: Any, **options: Any) -> UpdatableIndex:
    """An empty index that makes checkpoints often."""
    from autopar.vector_search import create_updatable

    settings: dict[str, Any] = {"metadata": METADATA, "delta_share": 0.05, "background": False, "reader": "mmap"}
    return create_updatable(folder, DIM, **(settings | options))
