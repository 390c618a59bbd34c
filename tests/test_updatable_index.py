"""`autopar.vector_search.updates`: what was acknowledged is there, searches see one state, lists stay short."""

from __future__ import annotations

import dataclasses
import errno
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autopar import vector_search
from autopar.errors import IndexFileError, SearchError
from autopar.vector_search.data.inputs import DTYPES
from autopar.vector_search.on_disk.pages import PAGE_BYTES
from autopar.vector_search.updates import log as logs
from autopar.vector_search.updates.assign import closure, halves
from autopar.vector_search.updates.commit import CommitQueue, Ticket
from autopar.vector_search.updates.free_pages import FreePages
from autopar.vector_search.updates.list_map import ListMap
from autopar.vector_search.updates.maintenance import Maintenance
from autopar.vector_search.updates.slots import Slots
from autopar.vector_search.updates.snapshot import Delta
from benchmarks.vector_disk import crashes, rounds
from benchmarks.vector_disk.faulty_files import FaultyFiles
from benchmarks.vector_disk.random_updates import (
    DIM,
    METADATA,
    Operation,
    after,
    fitting,
    held_by,
    operations,
    run,
    start,
)

ROOT = Path(__file__).resolve().parent.parent


def drawn(num: int, seed: int = 0, dim: int = DIM) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(num, dim)).astype(np.float32)


def loaded(path: Path, **options: Any) -> vector_search.UpdatableIndex:
    index = vector_search.load(path, **options)
    assert isinstance(index, vector_search.UpdatableIndex)
    return index


def rows(num: int) -> np.ndarray:
    return (np.arange(num, dtype=np.int32) % 7).astype(METADATA)


@pytest.fixture
def index(tmp_path: Path) -> vector_search.UpdatableIndex:
    return start(tmp_path / "index")


# -- what a user sees ------------------------------------------------------------------------


def test_changes_are_seen_at_once_and_after_a_checkpoint(index: vector_search.UpdatableIndex) -> None:
    vectors = drawn(300)
    index.insert(np.arange(300), vectors, rows(300))
    assert index.upsert([5, 1000], vectors[[6, 7]] + 50, rows(2)) == 1
    assert index.delete([0, 1, 12345]) == 2
    for _ in range(2):
        assert len(index) == 299
        assert index.search(vectors[2], 1).ids.tolist() == [2]
        assert index.search(vectors[6] + 50, 2).ids.tolist() == [5, 1000]
        assert not np.isin(index.search(vectors, 299).ids, [0, 1]).any()
        assert index.search(vectors[0], 400).ids.tolist().count(-1) == 101
        assert index.metadata([1000])["page"].tolist() == [1]
        index.checkpoint()
    index.close()


def test_filters_are_ids_or_functions_of_metadata(index: vector_search.UpdatableIndex) -> None:
    vectors = drawn(200)
    index.insert(np.arange(200), vectors, rows(200))
    index.checkpoint()
    index.delete([3])
    of_page = index.search(vectors[:5], 30, filter=lambda metadata: metadata["page"] == 3).ids
    assert set(of_page[of_page >= 0] % 7) == {3} and (of_page >= 0).sum() == 5 * 28 and not (of_page == 3).any()
    assert set(index.search(vectors[0], 5, filter=[3, 4, 5, 9999]).ids.tolist()) == {4, 5, -1}
    with pytest.raises(SearchError, match="`filter` returned int32 of shape"):
        index.search(vectors[0], 1, filter=lambda metadata: metadata["page"])
    with pytest.raises(SearchError, match="`filter` is float64"):
        index.search(vectors[0], 1, filter=[0.5])
    index.close()


def test_a_closed_index_is_opened_as_it_was(tmp_path: Path, index: vector_search.UpdatableIndex) -> None:
    vectors = drawn(500)
    index.insert(np.arange(400), vectors[:400], rows(400))
    index.checkpoint()
    index.insert(np.arange(400, 500), vectors[400:], rows(100))
    index.delete([7])
    held, usual, whole = held_by(index), index.search(vectors[:20], 10), index.search(vectors[:20], 10, effort=9)
    with pytest.raises(IndexFileError, match="open in another process, or twice"):
        vector_search.load(index.path)
    index.close()
    with pytest.raises(SearchError, match="is closed"):
        index.search(vectors[0], 1)
    with pytest.raises(SearchError, match="is closed"):
        index.delete([1])
    for reader in ("mmap", "direct"):
        with loaded(index.path, reader=reader) as again:
            assert held_by(again) == held
            # a copy has all in lists, and so has the index afterwards: its usual searches are others
            if reader == "mmap":
                np.testing.assert_array_equal(again.search(vectors[:20], 10).ids, usual.ids)
            np.testing.assert_array_equal(again.search(vectors[:20], 10, effort=9).ids, whole.ids)
            again.save(tmp_path / f"copy-{reader}")
        with loaded(tmp_path / f"copy-{reader}") as copy:
            assert held_by(copy) == held
    with pytest.raises(IndexFileError, match="exists: give a path where nothing is"):
        vector_search.create_updatable(index.path, 4)


@pytest.mark.slow
@pytest.mark.parametrize(("metric", "dtype"), [("l2", "int8"), ("cosine", "float32"), ("inner_product", "bfloat16")])
def test_an_index_on_disk_becomes_updatable(tmp_path: Path, metric: str, dtype: str) -> None:
    given = np.round(20 * drawn(900, dim=6))
    vectors = given.astype(DTYPES[dtype])
    built = vector_search.build_on_disk(vectors[:600], tmp_path / "built", metric=metric, progress=False, reader="mmap")
    pages = np.arange(600).astype([("page", "i4")])
    index = vector_search.make_updatable(built, tmp_path / "index", metadata=pages, reader="mmap", background=False)
    np.testing.assert_array_equal(
        index.search(vectors[:50], 5, effort=built.lists.num_lists).ids,
        built.search(vectors[:50], 5, effort=built.lists.num_lists).ids,
    )
    index.insert(np.arange(600, 900), vectors[600:], np.arange(600, 900).astype(pages.dtype))
    index.delete(np.arange(0, 300))
    index.checkpoint()
    exact = vector_search.build(vectors[300:], metric=metric, index="exact", ids=np.arange(300, 900), progress=False)
    found, truth = index.search(vectors[:50], 5, effort=10_000), exact.search(vectors[:50], 5)
    np.testing.assert_allclose(
        found.distances.astype(np.float32), truth.distances.astype(np.float32), rtol=2e-2, atol=1e-2
    )
    assert index.metadata([700])["page"].tolist() == [700]
    index.close()
    built.close()


def test_build_makes_a_folder_that_can_be_changed(tmp_path: Path) -> None:
    vectors = drawn(300, dim=6)
    index = vector_search.build(vectors, index="updatable", path=tmp_path / "made", reader="mmap", progress=False)
    assert isinstance(index, vector_search.UpdatableIndex) and len(index) == 300
    index.upsert([7], vectors[:1] + 9)
    index.close()
    with vector_search.load(tmp_path / "made", reader="mmap") as again:  # pyright: ignore[reportGeneralTypeIssues]
        assert again.search(vectors[0] + 9, 1).ids.tolist() == [7]
    empty = vector_search.build(vectors[:0], updates_per_s=2, path=tmp_path / "empty", reader="mmap", progress=False)
    assert len(empty) == 0 and empty.stats().dim == 6  # pyright: ignore[reportArgumentType]
    empty.close()  # pyright: ignore[reportAttributeAccessIssue]
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({"path": tmp_path / "made"}, "exists: give a path where nothing is"),
        ({"path": tmp_path / "no" / "folder"}, "cannot be created"),
        ({"path": None}, "give its path as `path=`"),
        ({"path": tmp_path / "x", "space": "y"}, "`space` is 'y'"),
        ({"path": tmp_path / "x", "degree": 3}, "has no setting 'degree'"),
    )
    for options, text in refused:
        with pytest.raises((SearchError, IndexFileError), match=text):
            vector_search.build(vectors, index="updatable", progress=False, **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "made"]


@pytest.mark.slow
def test_a_new_distribution_reaches_the_recall(tmp_path: Path) -> None:
    """A tenth of the vectors lies elsewhere, in more dims: the choice of lists is learned for these too."""
    draw = np.random.default_rng(0)
    easy = draw.normal(size=(6_000, 2)) @ draw.normal(size=(2, 24))
    hard = 40 + draw.normal(size=(1_200, 24))
    vectors = np.concatenate([easy, hard]).astype(np.float32)
    with vector_search.create_updatable(tmp_path / "index", dim=24, background=False, reader="mmap") as index:
        index.insert(np.arange(6_000), vectors[:6_000])
        index.checkpoint()
        index.insert(np.arange(6_000, 7_000), vectors[6_000:7_000])
        index.checkpoint()
        assert index.stats().reached
        found = index.search(vectors[7_000:], 10).ids
        truth = vector_search.build(vectors[:7_000], index="exact", progress=False).search(vectors[7_000:], 10).ids
        assert np.mean([np.isin(a, b).mean() for a, b in zip(found, truth, strict=True)]) >= 0.93
        with index._state.readers.reading() as snapshot:
            assert isinstance(snapshot.stored, ListMap) and snapshot.stored.rule is not None
    with loaded(tmp_path / "index", reader="mmap") as again:
        np.testing.assert_array_equal(again.search(vectors[7_000:], 10).ids, found)


def test_what_is_invalid_is_refused_and_changes_nothing(tmp_path: Path, index: vector_search.UpdatableIndex) -> None:
    vectors = drawn(10)
    index.insert(np.arange(10), vectors, rows(10))
    held = held_by(index)
    for change, text in (
        (lambda: index.insert([99, 3], vectors[:2], rows(2)), "`ids` has 3, and the index has a vector of that id"),
        (lambda: index.insert([50, 50], vectors[:2], rows(2)), "`ids` repeats 50"),
        (lambda: index.insert([50], vectors[:1] * np.nan, rows(1)), "`vectors` has nan"),
        (lambda: index.insert([50], vectors[:1, :3], rows(1)), r"expected `\[n, 8\]`"),
        (lambda: index.insert([50], vectors[:1]), "`metadata` is missing"),
        (lambda: index.insert([50], vectors[:1], rows(2)), "give one row for each of the 1 vectors"),
        (lambda: index.delete([0.5]), "`ids` are float64"),
        (lambda: index.metadata([77]), "`ids` has 77, and no vector"),
        (lambda: vector_search.create_updatable(tmp_path / "no", 4, dtype="float64"), "`dtype` is 'float64'"),
        (lambda: vector_search.create_updatable(tmp_path / "no", 4, metadata="i4"), "with named fields"),
        (
            lambda: vector_search.create_updatable(tmp_path / "no", 4, metadata=[("t", "U20000")]),
            "80,000 bytes per vector",
        ),
        (lambda: vector_search.create_updatable(tmp_path / "no", 4, space=0.5), "`space` is 0.5"),
        (lambda: vector_search.create_updatable(tmp_path / "no", 4, delta_share=0), "`delta_share` is 0"),
    ):
        with pytest.raises(SearchError, match=text):
            change()
    assert held_by(index) == held
    assert index.delete([]) == 0
    index.insert(np.zeros(0, np.int64), np.zeros((0, DIM)), rows(0))
    index.close()
    assert not (tmp_path / "no").exists()


def test_an_empty_index_is_searched(index: vector_search.UpdatableIndex) -> None:
    assert index.search(drawn(2), 3).ids.tolist() == [[-1] * 3] * 2
    index.checkpoint()
    index.insert([4], drawn(1), rows(1))
    assert index.delete([4]) == 1
    index.checkpoint()
    assert index.search(drawn(1)[0], 1).ids.tolist() == [-1]
    index.close()


# -- lists -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_lists_stay_short_while_a_corpus_grows_and_drifts(tmp_path: Path) -> None:
    index = start(tmp_path / "index", delta_share=0.1)
    vectors = drawn(6_000) + np.repeat(np.arange(6), 1_000)[:, None].astype(np.float32)
    for at in range(0, 6_000, 500):
        index.insert(np.arange(at, at + 500), vectors[at : at + 500], rows(500))
        if at >= 2_000:
            index.delete(np.arange(at - 2_000, at - 1_500))
    index.checkpoint()
    details = index.stats().details
    with index._state.readers.reading() as snapshot:
        assert isinstance(snapshot.stored, ListMap)
        lengths = snapshot.stored.lengths
    assert details["splits"] > 10 and details["merges"] > 0
    assert lengths.max() <= 2.0 * lengths.mean()
    assert details["written_bytes"] <= 14 * details["inserted_bytes"]
    queries = vectors[-200:] + 0.01
    best = index.search(queries, 10, effort=10_000).ids
    recall = np.mean([np.isin(a, b).mean() for a, b in zip(index.search(queries, 10).ids, best, strict=True)])
    assert recall >= 0.93
    index.close()


def test_equal_vectors_are_divided() -> None:
    is_second, means = halves(np.ones((100, 3), np.float32))
    assert 35 <= is_second.sum() <= 65
    assert means.tolist() == [[1, 1, 1]] * 2


def test_the_lists_of_a_vector_are_those_of_the_builder() -> None:
    import jax.numpy as jnp

    from autopar.vector_search.ivf import closure as compiled

    vectors, centroids = drawn(200), drawn(40, 1)
    found = closure(vectors, centroids, 4, 1.2)
    squares = ((vectors[:, None] - centroids[None]) ** 2).sum(axis=-1)
    own = jnp.asarray(squares.argmin(axis=1).astype(np.int32))
    there = np.asarray(compiled.closure(jnp.asarray(vectors), jnp.asarray(centroids), own, 4, 1.2))
    np.testing.assert_array_equal(np.sort(found, axis=1), np.sort(there, axis=1))


def test_free_pages_are_used_before_the_file_grows() -> None:
    free = FreePages(np.array([1, 1, 0, 0, 1, 0, 1, 0], bool))
    assert free.take([1, 1, 1, 3]).tolist() == [2, 3, 5, 7]
    assert free.num_pages == 10
    assert FreePages(np.ones(2, bool)).take([4, 1]).tolist() == [2, 6]


# -- many threads ----------------------------------------------------------------------------


def test_operations_of_many_threads_are_committed_in_groups() -> None:
    groups: list[int] = []
    gate = threading.Event()

    def commit(tickets: Sequence[Ticket]) -> None:
        gate.wait()
        groups.append(len(tickets))
        for ticket in tickets:
            ticket.result = ticket.operation

    queue = CommitQueue(commit)
    results: list[int] = []
    threads = [threading.Thread(target=lambda n=n: results.append(queue.submit(n, 1))) for n in range(20)]
    for thread in threads:
        thread.start()
    while len(queue._waiting) < 19:
        pass
    gate.set()
    for thread in threads:
        thread.join()
    assert sorted(results) == list(range(20))
    assert sum(groups) == 20 and len(groups) <= 3


@pytest.mark.slow
def test_searches_see_one_state_while_threads_change_it(tmp_path: Path) -> None:
    """Each id is replaced again and again, never deleted: a search finds each once, and both halves of a replacement."""
    index = start(tmp_path / "index", background=True)
    vectors = drawn(60)
    index.insert(np.arange(60), vectors, rows(60))
    is_done, failures = threading.Event(), []

    def change(part: int) -> None:
        draw = np.random.default_rng(part)
        for _ in range(60):
            ids = part * 20 + draw.permutation(20)[:10]
            index.upsert(ids, vectors[ids] + draw.normal(size=(10, DIM)), rows(10))

    def look() -> None:
        while not is_done.is_set():
            ids = index.search(vectors[0], 60, effort=10_000).ids
            if sorted(ids.tolist()) != list(range(60)):
                failures.append(ids)

    writers, reader = (
        [threading.Thread(target=change, args=(part,)) for part in range(3)],
        threading.Thread(target=look),
    )
    for thread in (*writers, reader):
        thread.start()
    for _ in range(5):
        index.checkpoint()
    for thread in writers:
        thread.join()
    is_done.set()
    reader.join()
    assert not failures
    index.close()


# -- accidents -------------------------------------------------------------------------------


@pytest.mark.slow
def test_random_operations_agree_with_a_dictionary() -> None:
    assert crashes.oracle(150, background=False) == 0


def test_a_machine_that_stops_loses_nothing_acknowledged() -> None:
    assert crashes.torn(2) == 0


def test_failures_of_the_disk_are_refused_and_lose_nothing() -> None:
    assert crashes.faults(2) == 0


@pytest.mark.slow
def test_many_accidents() -> None:
    """200 stops and failures, 10,000 operations."""
    assert crashes.torn() == 0
    assert crashes.faults() == 0
    assert crashes.oracle() == 0


@pytest.mark.slow
@pytest.mark.parametrize("which", ["same", "drift"])
def test_rounds_of_updates(which: str) -> None:
    """The gates of the benchmark but recall, which so few vectors do not show."""
    rows = {row["figure"]: row for row in rounds.measure(which, 6_000, 3)}
    assert rows["longest list, of the mean"]["met"] and rows["deleted ids in results"]["met"], rows
    assert rows["recall@10, lowest"]["measured"] > 0.85, rows


@pytest.mark.slow
def test_killed_processes_lose_nothing_acknowledged() -> None:
    """200 SIGKILLs, in a process without JAX's threads, because it forks."""
    program = "from benchmarks.vector_disk.crashes import killed; print(killed())"
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.stdout.split() == ["0"], done.stderr[-3000:]


def test_a_full_disk_is_refused_and_the_rest_works(tmp_path: Path) -> None:
    start(tmp_path / "index").close()
    files = FaultyFiles(np.random.default_rng(0))
    index = vector_search.UpdatableIndex(tmp_path / "index", "mmap", files, background=False)
    index.insert([1], drawn(1), rows(1))
    files.fails_at, files.error, files.times = files.num_operations + 1, errno.ENOSPC, 1
    with pytest.raises(
        IndexFileError, match=r"No space left on device.: the operation has no effect, and nothing is lost"
    ):
        index.insert([2], drawn(1), rows(1))
    index.insert([3], drawn(1), rows(1))
    files.fails_at, files.error = files.num_operations + 6, errno.EIO
    with pytest.raises(IndexFileError, match="nothing is lost, and the operations stay in the log"):
        index.checkpoint()
    index.checkpoint()
    assert set(held_by(index)) == {1, 3}
    index.close()


def damaged_at(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def test_damage_is_found(tmp_path: Path) -> None:
    held = {}
    index = start(tmp_path / "index")
    for operation, _ in zip(operations(3), range(30), strict=False):
        run(index, one := fitting(operation, held))
        held = after(held, one)
    index.checkpoint()
    index.delete([1])
    first = index._state.log.size
    index.delete([2])
    index.close()
    (log,) = index.path.glob("log-*")
    pages, records = (index.path / "pages").read_bytes(), log.read_bytes()
    damaged_at(log, first - 3)  # of a group that a later one follows
    with pytest.raises(IndexFileError, match="does not match its checksum, and later ones do"):
        vector_search.load(index.path)
    log.write_bytes(records[:20])
    with pytest.raises(IndexFileError, match="its header does not match"):
        vector_search.load(index.path)
    log.rename(log.with_name("log-000000000099"))
    with pytest.raises(IndexFileError, match="its state is of checkpoint"):
        vector_search.load(index.path)
    log.with_name("log-000000000099").unlink()
    log.write_bytes(records[:-2])  # was being written when the machine stopped
    with loaded(index.path) as again:
        assert len(again) == len(held) - (1 in held)
    log.write_bytes(records)
    refused = 0
    for page in range(len(pages) // PAGE_BYTES):
        damaged_at(index.path / "pages", page * PAGE_BYTES + 11)
        try:
            with loaded(index.path) as again:
                again.verify()
                assert held_by(again) == after(after(held, _delete(1)), _delete(2))  # a page that is free
        except IndexFileError:
            refused += 1
        (index.path / "pages").write_bytes(pages)
    assert refused > 3
    with pytest.raises(IndexFileError, match="cannot be read"):
        vector_search.load(tmp_path / "nothing")


def test_files_of_other_names_stay(tmp_path: Path) -> None:
    with vector_search.create_updatable(tmp_path / "index", DIM, background=False) as made:
        made.insert([1], drawn(1))
        made.checkpoint()
    others = ["log-", "log-!", "log-000000000000.old", "log-1", "log-z"]
    for name in others:
        (tmp_path / "index" / name).write_text("mine")
    with loaded(tmp_path / "index") as index:
        assert len(index) == 1
        index.save(tmp_path / "copy")
    assert {each.name for each in (tmp_path / "index").iterdir()} >= set(others)
    assert not {each.name for each in (tmp_path / "copy").iterdir()} & set(others)


def test_a_folder_that_is_no_index_or_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(IndexFileError, match="is no updatable index: it has no file `pages`"):
        vector_search.load(tmp_path)
    start(tmp_path / "index").close()

    def denied(path: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", denied)  # root may read everything
    with pytest.raises(IndexFileError, match=r"index cannot be opened: Permission denied\. Check permissions"):
        vector_search.load(tmp_path / "index")


def _delete(which: int) -> Operation:
    return next(each for each in operations(0) if each.name == "delete")._replace(ids=np.array([which]))


def test_a_log_holds_what_was_appended(tmp_path: Path) -> None:
    from autopar.vector_search.updates.files import FILES

    log = logs.created(tmp_path, FILES, b"12345678", 4, 10)
    assert log.append([b"a", b"", b"ccc"]) == 12
    assert log.append([b"d"]) == 13
    log.close()
    again, records = logs.opened(log.path, FILES, b"12345678", 4, True)
    assert [each.sequence for each in records] == [10, 11, 12, 13]
    assert [each.body for each in records] == [b"a", b"", b"ccc", b"d"]
    again.close()
    with pytest.raises(IndexFileError, match="belongs to another index"):
        logs.opened(log.path, FILES, b"87654321", 4, True)


def failing(monkeypatch: pytest.MonkeyPatch, of: type, name: str) -> None:
    """Let a method fail at its next call, as if memory ran out."""
    own = getattr(of, name)

    def fail(*given: Any, **named: Any) -> Any:
        monkeypatch.setattr(of, name, own)
        raise MemoryError

    monkeypatch.setattr(of, name, fail)


@pytest.mark.parametrize("name", ["add", "kill"])
def test_an_operation_that_cannot_be_applied_is_taken_out_of_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    index = start(tmp_path / "index")
    index.insert([1, 2], drawn(2), rows(2))
    failing(monkeypatch, Slots, name)
    with pytest.raises(IndexFileError, match=r"cannot be applied \(MemoryError\): they have no effect"):
        index.upsert([2, 3], drawn(2), rows(2))
    assert set(held_by(index)) == {1, 2} and set(index.search(drawn(1), 5).ids.ravel().tolist()) == {1, 2, -1}
    for change in (lambda: index.insert([4], drawn(1), rows(1)), index.checkpoint):
        with pytest.raises(IndexFileError, match="they have no effect"):
            change()
    index.close()
    with loaded(tmp_path / "index") as again:
        assert set(held_by(again)) == {1, 2}
        again.insert([3], drawn(1), rows(1))
        assert set(held_by(again)) == {1, 2, 3}


def test_without_memory_for_an_operation_nothing_is_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = start(tmp_path / "index")
    failing(monkeypatch, Delta, "with_room")
    with pytest.raises(MemoryError):
        index.insert([1], drawn(1), rows(1))
    index.insert([2], drawn(1), rows(1))
    index.close()
    with loaded(tmp_path / "index") as again:
        assert set(held_by(again)) == {2}


def test_a_checkpoint_that_cannot_be_used_stops_all_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = start(tmp_path / "index")
    index.insert([1, 2], drawn(2), rows(2))
    failing(monkeypatch, Delta, "without_first")
    with pytest.raises(MemoryError):
        index.checkpoint()
    for change in (lambda: index.insert([3], drawn(1), rows(1)), index.checkpoint):
        with pytest.raises(
            IndexFileError, match=r"is on the device, and cannot be used \(MemoryError\): nothing is lost"
        ):
            change()
    assert set(index.search(drawn(1), 5).ids.ravel().tolist()) == {1, 2, -1}
    index.close()
    with loaded(tmp_path / "index") as again:
        assert set(held_by(again)) == {1, 2}


def test_a_checkpoint_that_fails_does_not_fail_the_operation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = start(tmp_path / "index", delta_share=1e-9)
    index._maintenance._settings = dataclasses.replace(index.settings, delta_vectors=1)
    failing(monkeypatch, Maintenance, "_frozen")
    index.insert([1], drawn(1), rows(1))
    failing(monkeypatch, Maintenance, "_frozen")
    with pytest.raises(MemoryError):
        index.insert([2], drawn(1), rows(1))
    index.insert([3], drawn(1), rows(1))
    assert set(held_by(index)) == {1, 3} and index.stats().details["checkpoints"] >= 1
    index.close()
