"""Ten rounds in which a tenth of 50,000 int8 vectors of 100 elements goes out, and as many come in.

`same`: deleted at random, and drawn from the set of the corpus (FAISS's synthetic set). `drift`: the oldest are deleted,
and those that come in are farther from the corpus in each round: an own synthetic set, whose share grows by a tenth per
round. After each round, 400 queries of what the corpus then consists of are searched one by one; a rebuild is
`build_on_disk` of the vectors that live then, for the same recall target of 0.95, in the same number of lists per vector
(`space`). `graph`: as `same`, with a graph of degree 64, and
`build_graph_on_disk` after the fifth and the tenth round, which takes longest. Worst of the ten rounds. Write amplification is the bytes written to the log and to the lists or the graph
per byte of the vectors inserted; a graph has no gate for it. Pages are means per query.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from autopar import vector_search
from benchmarks.synthetic_vectors import faiss_synthetic

Row = dict[str, Any]

NUM_VECTORS, DIM, NUM_QUERIES, K, ROUNDS = 50_000, 100, 400, 10, 10
RECALL, SPACE = 0.95, 1.5


#: Figures of `stats().details`.
_OF_LISTS = {"lists": "num_lists", "lists split": "splits", "lists merged": "merges", "vectors reassigned": "moved"}
_OF_GRAPH = {
    "nodes whose edges changed": "patched_nodes",
    "of these, pruned": "pruned_nodes",
    "nodes that no edge led to": "unreached_nodes",
    "entry points": "num_entries",
}
_Figure = tuple[str, float, float | str, bool | str]


def measure(which: str, num_vectors: int = NUM_VECTORS, rounds: int = ROUNDS) -> list[Row]:
    """The rows of `same`, `drift` or `graph`."""
    share = num_vectors // 10
    corpus, queries = _set(21, num_vectors + rounds * share, NUM_QUERIES)
    other, other_queries = _set(77, rounds * share, NUM_QUERIES)
    draw = np.random.default_rng(0)
    vectors = {each: corpus[each] for each in range(num_vectors)}
    behind, longest, deleted, pages, rebuilt_pages, recalls = [], [], 0, [], [], []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        built = _built(which, corpus[:num_vectors], path / "built")
        index = vector_search.make_updatable(built, path / "index", space=SPACE, background=False)
        built.close()
        gone: set[int] = set()
        for number in range(rounds):
            far = (number + 1) * share // rounds if which == "drift" else 0
            out = _out(which, draw, vectors, share)
            ids = num_vectors + number * share + np.arange(share)
            come = np.concatenate([corpus[ids[far:]], other[number * share : number * share + far]])
            _change(index, out, ids, come)
            vectors = {each: row for each, row in vectors.items() if each not in set(out.tolist())}
            vectors |= dict(zip(ids.tolist(), come, strict=True))
            gone |= set(out.tolist())
            mixed = np.where(draw.random(NUM_QUERIES)[:, None] < far / share, other_queries, queries)
            truth = _nearest(np.stack(list(vectors.values())), mixed)
            own, own_pages, ids_found = _searched(index, vectors, mixed, truth)
            recalls.append(own)
            deleted += int(np.isin(ids_found, list(gone)).sum())
            pages.append(own_pages)
            if which == "graph" and number % 5 != 4 and number != rounds - 1:
                continue
            rebuilt = _built(which, np.stack(list(vectors.values())), path / "rebuilt", np.array(list(vectors)))
            new, new_pages, _ = _searched(rebuilt, vectors, mixed, truth)
            rebuilt.close()
            behind.append(new - own)
            if which != "graph":
                lengths = _live_lengths(index)
                longest.append(lengths.max() / lengths.mean())
            rebuilt_pages.append(new_pages)
        details = index.stats().details
        index.close()
    case = f"{which}, {num_vectors:,} vectors"
    written = details["written_bytes"] / details["inserted_bytes"]
    figures: list[_Figure] = [
        ("recall@10 behind a rebuild", max(behind), 0.01, max(behind) <= 0.01),
        ("recall@10, lowest", min(recalls), "", ""),
        ("deleted ids in results", deleted, 0, deleted == 0),
        ("pages per query", pages[-1], "", ""),
        ("pages per query of a rebuild", rebuilt_pages[-1], "", ""),
        ("checkpoints", details["checkpoints"], "", ""),
    ]
    if which == "graph":
        figures += [("bytes written per byte inserted", written, "", "")]
        figures += [(figure, details[name], "", "") for figure, name in _OF_GRAPH.items()]
        figures += [("places per vector", details["num_places"] / len(vectors), "", "")]
    else:
        figures += [
            ("longest list, of the mean", max(longest), 2.0, max(longest) <= 2.0),
            ("bytes written per byte inserted", written, 12, written <= 12),
            ("entries per vector", details["entries"] / len(vectors), "", ""),
        ]
        figures += [(figure, details[name], "", "") for figure, name in _OF_LISTS.items()]
    return [
        {
            "case": case,
            "figure": figure,
            "measured": float(measured),
            "gate": gate,
            "met": met if met == "" else bool(met),
        }
        for figure, measured, gate, met in figures
    ]


def _built(which: str, vectors: np.ndarray, path: Path, ids: np.ndarray | None = None) -> Any:
    """A new index on disk."""
    if which == "graph":
        return vector_search.build_graph_on_disk(vectors, path, ids=ids, recall_target=RECALL, progress=False)
    return vector_search.build_on_disk(vectors, path, ids=ids, recall_target=RECALL, space=SPACE, progress=False)


def _set(seed: int, num_vectors: int, num_queries: int) -> tuple[np.ndarray, np.ndarray]:
    data = faiss_synthetic(DIM, 0, num_vectors, num_queries, seed)
    corpus, queries = (np.clip(np.round(each * 127), -127, 127).astype(np.int8) for each in (data.corpus, data.queries))
    return corpus, queries


def _out(which: str, draw: np.random.Generator, vectors: dict[int, np.ndarray], num: int) -> np.ndarray:
    ids = np.array(list(vectors))
    return np.sort(ids)[:num] if which == "drift" else draw.choice(ids, num, replace=False)


def _change(index: vector_search.UpdatableIndex, out: np.ndarray, ids: np.ndarray, come: np.ndarray) -> None:
    """Delete and insert in turns, a hundredth of the round at a time."""
    for some, new, rows in zip(*(np.array_split(each, 100) for each in (out, ids, come)), strict=True):
        index.delete(some)
        index.insert(new, rows)


def _nearest(corpus: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """Squared distance of the last neighbour of each query."""
    wide = corpus.astype(np.float32)
    squares = (wide**2).sum(axis=1)
    some = queries.astype(np.float32)
    found = (some**2).sum(axis=1)[:, None] + squares[None] - 2 * some @ wide.T
    return np.partition(found, K - 1, axis=1)[:, K - 1]


def _searched(
    index: Any, vectors: dict[int, np.ndarray], queries: np.ndarray, last: np.ndarray
) -> tuple[float, float, np.ndarray]:
    """Recall (of vectors at equal distance, any counts), pages per query, and the ids found."""
    before = index.reads().pages
    ids = np.stack([index.search(query, K).ids for query in queries])
    pages = (index.reads().pages - before) / len(queries)
    hits = 0
    for row, query, far in zip(ids, queries, last, strict=True):
        found = np.stack([vectors.get(int(each), np.full(DIM, 127)) for each in row if each >= 0]).astype(np.int64)
        hits += int((((found - query.astype(np.int64)) ** 2).sum(axis=1) <= far).sum())
    return hits / (K * len(queries)), pages, ids


def _live_lengths(index: vector_search.UpdatableIndex) -> np.ndarray:
    """Entries that live, of each list on disk."""
    with index._state.readers.reading() as snapshot:
        from autopar.vector_search.updates.contents import Contents
        from autopar.vector_search.updates.list_map import ListMap

        every = np.full(snapshot.num_slots, np.iinfo(np.int64).max)
        lists = snapshot.stored
        assert isinstance(lists, ListMap)
        contents = Contents(index._store, lists, every, 0)
        found = np.zeros(lists.num_lists, np.int64)
        for entries in contents.scan():
            owners = np.repeat(lists.owners[entries.lists], entries.counts)
            found += np.bincount(owners, snapshot.is_live(entries.positions), len(found)).astype(np.int64)
    return found
