"""Lists on disk: equal to lists in memory, whatever reads the file; damaged files, streams, interrupted builds."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nearest import exact_nearest, exact_scores, recall

from autopar import vector_search
from autopar.errors import IndexFileError, SearchError
from autopar.vector_search.data.metrics import NO_ID
from autopar.vector_search.ivf import search as list_search
from autopar.vector_search.ivf.lists import fill
from autopar.vector_search.on_disk import direct_reader, layout
from autopar.vector_search.on_disk.list_reads import waves_of
from autopar.vector_search.on_disk.page_file import PageFileWriter, open_page_file
from autopar.vector_search.on_disk.pages import PAGE_BYTES, PAYLOAD_BYTES
from autopar.vector_search.on_disk.reader_table import READERS, open_reader
from autopar.vector_search.on_disk.readers import Run
from autopar.vector_search.on_disk.spill import Spill
from autopar.vector_search.on_disk.uring_reader import why_no_read
from benchmarks.synthetic_vectors import faiss_synthetic

NUM, DIM, NUM_LISTS = 1500, 16, 40
DATA = faiss_synthetic(DIM, 0, NUM, 60)
OWN_IDS = np.arange(NUM)[::-1] * 3 + 2**40
CASES = [("cosine", "float16"), ("inner_product", "uint8"), ("l2", "int8")]
build_on_disk = partial(vector_search.build_on_disk, progress=False, num_lists=NUM_LISTS, reader="mmap")


def data(dtype: str) -> tuple[np.ndarray, np.ndarray]:
    scale, offset = (100 if dtype in ("int8", "uint8") else 1), (100 if dtype == "uint8" else 0)
    corpus, queries = ((scale * each + offset).astype(getattr(jnp, dtype)) for each in (DATA.corpus, DATA.queries))
    return corpus, queries


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[vector_search.DiskIndex]:
    path = tmp_path_factory.mktemp("disk") / "index"
    with build_on_disk(DATA.corpus, path, ids=OWN_IDS) as made:
        yield made


def positions(found: vector_search.Found) -> np.ndarray:
    return np.where(found.ids == NO_ID, NO_ID, NUM - 1 - (found.ids - 2**40) // 3)


def in_memory(index: vector_search.DiskIndex, corpus: np.ndarray) -> Any:
    """The same lists in memory, and the centre of their vectors."""
    lists = index._lists
    assigned = np.full((len(corpus), lists.copies), NO_ID, np.int32)
    for entries in index.searches.reads.entries(np.arange(lists.num_lists)):
        for which, members in zip(
            entries.lists, np.split(entries.positions, np.cumsum(entries.counts)[:-1]), strict=True
        ):
            free = (assigned[members] == NO_ID).argmax(axis=1)
            assigned[members, free] = which
        np.testing.assert_array_equal(entries.vectors, corpus[entries.positions])
    centred = corpus if lists.centre is None else corpus - lists.centre
    return fill(centred, lists.centroids, assigned, lists.metric), lists.centre


# -- searches --------------------------------------------------------------------------------


def test_results_equal_those_of_the_same_lists_in_memory(index: vector_search.DiskIndex) -> None:
    lists, centre = in_memory(index, DATA.corpus)
    best = jax.jit(list_search.search, static_argnums=(2, 3))(lists, jnp.asarray(DATA.queries - centre), 10, 7)
    np.testing.assert_array_equal(positions(index.search(DATA.queries, 10, effort=7)), best.positions)
    found = positions(index.search(DATA.queries, 10))
    assert recall(found, exact_nearest(DATA.queries, DATA.corpus, 10)) >= 0.92
    assert index.stats().details["space"] <= 2.5


@pytest.mark.slow
@pytest.mark.parametrize(("metric", "dtype"), CASES)
def test_results_of_other_metrics_equal_those_in_memory(tmp_path: Path, metric: str, dtype: str) -> None:
    corpus, queries = data(dtype)
    with build_on_disk(corpus, tmp_path / "index", metric=metric) as index:
        lists, centre = in_memory(index, corpus)
        centred = queries if centre is None else queries - centre
        best = jax.jit(list_search.search, static_argnums=(2, 3))(lists, jnp.asarray(centred), 10, 7)
        found = index.search(queries, 10, effort=7)
        truth = exact_scores(queries, corpus, metric)
        own = np.take_along_axis(truth, found.ids, axis=1)
        np.testing.assert_allclose(own, np.take_along_axis(truth, np.asarray(best.positions), axis=1), rtol=1e-6)
        assert recall(index.search(queries, 10).ids, exact_nearest(queries, corpus, 10, metric)) >= 0.92
        stats = index.stats()
        assert (stats.kind, stats.metric, stats.dtype, stats.num_vectors) == ("ivfdisk", metric, dtype, NUM)
        assert stats.reached is True


def test_all_lists_are_exact_and_few_are_not(index: vector_search.DiskIndex) -> None:
    truth = exact_nearest(DATA.queries, DATA.corpus, 10)
    found = index.search(DATA.queries, 10, effort=10**6)
    np.testing.assert_array_equal(positions(found), truth)
    distances = -np.take_along_axis(exact_scores(DATA.queries, DATA.corpus, "l2"), truth, axis=1)
    np.testing.assert_allclose(found.distances, distances, rtol=1e-4, atol=1e-5)
    assert recall(positions(index.search(DATA.queries, 10, effort=1)), truth) < 0.9
    one = index.search(DATA.queries[0], 10)
    np.testing.assert_array_equal(one.ids, index.search(DATA.queries[:1], 10).ids[0])
    assert index.search(DATA.queries[:0], 3).ids.shape == (0, 3)


@pytest.mark.parametrize("num_allowed", [0, 7, NUM // 3])
def test_filter_and_k_beyond_the_corpus(index: vector_search.DiskIndex, num_allowed: int) -> None:
    queries = DATA.queries[:5]
    which = np.sort(np.random.default_rng(0).permutation(NUM)[:num_allowed])
    found = positions(index.search(queries, 10, filter=np.isin(np.arange(NUM), which)))
    truth = which[exact_nearest(queries, DATA.corpus[which], 10)] if num_allowed else np.zeros((5, 0), int)
    assert (found[:, truth.shape[1] :] == NO_ID).all()
    assert (found[:, : truth.shape[1]] != NO_ID).all()
    if num_allowed:
        assert recall(found, truth) >= (1 if num_allowed < 10 else 0.9)
    else:
        every = positions(index.search(queries[:2], NUM + 5))
        assert np.sort(every[:, :NUM], axis=1).tolist() == [list(range(NUM))] * 2
        assert (every[:, NUM:] == NO_ID).all()


def test_a_batch_reads_each_page_once(index: vector_search.DiskIndex) -> None:
    before = index.reads()
    index.search(np.repeat(DATA.queries[:1], 50, axis=0), 10, effort=5)
    batch = index.reads()
    index.search(DATA.queries[:1], 10, effort=5)
    one = index.reads()
    assert batch.pages - before.pages == one.pages - batch.pages > 0
    assert batch.used_bytes - before.used_bytes == one.used_bytes - batch.used_bytes <= one.num_bytes - batch.num_bytes
    lists = index._lists
    waves = waves_of(lists, np.arange(lists.num_lists), wave_pages=3)
    pages = [page for wave in waves for run in wave.runs for page in range(run.first, run.first + run.num_pages)]
    assert len(waves) > 2
    assert len(set(pages)) == len(pages)
    assert sorted(which for wave in waves for which in wave.lists) == np.flatnonzero(lists.counts).tolist()


def test_pruning_reads_fewer_lists(index: vector_search.DiskIndex) -> None:
    index_of = index.measured.effort
    before = index.reads().used_bytes
    index.search(DATA.queries, 10)
    pruned = index.reads().used_bytes
    index.search(DATA.queries, 10, effort=index_of)
    assert pruned - before <= index.reads().used_bytes - pruned


@pytest.mark.slow
def test_few_and_equal_vectors(tmp_path: Path) -> None:
    build = partial(vector_search.build, index="ivfdisk", path=tmp_path / "index", progress=False)
    assert build(np.ones((1, 4)), ids=[7]).search(np.zeros(4), 2).ids.tolist() == [7, NO_ID]
    five = build(np.eye(5, 4)).search(np.eye(5, 4), 3)
    assert five.ids[:4, 0].tolist() == [0, 1, 2, 3]
    assert (five.ids >= 0).all()
    equal = build(np.ones((60, 4), np.int8), num_lists=4).search(np.ones(4, np.int8), 10)
    assert len(set(equal.ids.tolist()) - {NO_ID}) == 10


def test_wrong_settings(tmp_path: Path) -> None:
    build = partial(vector_search.build, index="ivfdisk", path=tmp_path / "index", progress=False)
    with pytest.raises(SearchError, match="at least one vector"):
        build(np.zeros((0, 4)))
    with pytest.raises(SearchError, match="`path` is None: give its path"):
        vector_search.build(np.eye(4), index="ivfdisk")
    with pytest.raises(SearchError, match=r"`space` is 0\.5"):
        build(np.eye(4), space=0.5)
    with pytest.raises(SearchError, match="no setting 'degree'"):
        build(np.eye(4), degree=4)


# -- readers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", READERS)
def test_reader_returns_the_pages_and_counts_them(tmp_path: Path, name: str) -> None:
    why_not = READERS[name].why_not()
    if why_not:
        with pytest.raises(SearchError, match=f"`reader` is '{name}', and"):
            open_reader(name, tmp_path)
        pytest.skip(why_not)
    path, num_pages = tmp_path / "pages", 600
    content = np.random.default_rng(0).integers(0, 256, num_pages * PAGE_BYTES).astype(np.uint8)
    with path.open("wb") as file:
        file.write(content.tobytes())
        os.fsync(file.fileno())
    try:
        _, reader = open_reader(name, path)
    except IndexFileError as error:
        pytest.skip(str(error))
    pages = content.reshape(num_pages, PAGE_BYTES)
    runs = [Run(0, 1), Run(3, 4), Run(10, 300), *(Run(at, 1) for at in range(400, 600, 2))]
    before = _read_bytes()
    first, second = reader.start(runs), reader.start([Run(599, 1)])
    np.testing.assert_array_equal(second.wait()[0], pages[599])
    np.testing.assert_array_equal(first.wait(), np.concatenate([pages[a : a + n] for a, n in runs]))
    assert (reader.counts.requests, reader.counts.pages) == (105, 406)
    if name != "mmap" and before:
        assert _read_bytes() - before == pytest.approx(reader.counts.num_bytes, rel=0.01)
    with pytest.raises(IndexFileError, match="at pages 599 to 600: the file ends"):
        reader.start([Run(599, 2), Run(0, 1)]).wait()
    assert reader.start([]).wait().shape == (0, PAGE_BYTES)
    reader.close()
    with pytest.raises(IndexFileError, match="cannot be opened"):
        open_reader(name, tmp_path / "missing")


#: Stands for the wheel; `TROUBLE` is run where a ring is made.
_WHEEL = """
import os, signal
class Ring:
    def __init__(self): TROUBLE
class Cqe:
    def __getitem__(self, at): return self
class Entry: pass
entry = Entry()
def io_uring_queue_init(depth, ring): pass
def io_uring_get_sqe(ring): return entry
def io_uring_prep_read(entry, handle, buffer, offset): entry.read = (handle, [buffer], offset)
def io_uring_submit(ring): entry.res = os.preadv(*entry.read)
def io_uring_wait_cqe(ring, done): done.user_data, done.res = entry.user_data, entry.res
def io_uring_cqe_seen(ring, completion): pass
def io_uring_queue_exit(ring): pass
"""


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="io_uring is Linux's")
@pytest.mark.parametrize(
    ("trouble", "text"),
    [
        ("pass", ""),
        ("os.kill(os.getpid(), signal.SIGILL)", "the installed liburing needs a newer processor than this one"),
        (
            "raise PermissionError(1, 'Operation not permitted')",
            "io_uring does not work here (PermissionError: [Errno 1] Oper",
        ),
        ("os._exit(3)", "io_uring does not work here (exit status 3)"),
    ],
)
def test_a_wheel_that_does_not_run_here_ends_another_process(tmp_path: Path, trouble: str, text: str) -> None:
    (tmp_path / "liburing.py").write_text(_WHEEL.replace("TROUBLE", trouble))
    found = why_no_read(str(tmp_path))
    assert (found[: len(text)], found == "") == (text, trouble == "pass")
    assert not found or found.endswith("use reader='direct'")


def test_io_uring_is_used_where_processor_and_kernel_have_it() -> None:
    """The wheel is built for AVX-512."""
    cpu = Path("/proc/cpuinfo")
    if not cpu.exists() or "avx512vl" not in cpu.read_text() or importlib.util.find_spec("liburing") is None:
        pytest.skip("the processor has no AVX-512, or liburing is not installed")
    io_uring_setup, ring = 425, ctypes.create_string_buffer(120)
    handle = ctypes.CDLL(None).syscall(io_uring_setup, 2, ring)
    if handle < 0:
        pytest.skip("the kernel does not allow io_uring")
    os.close(handle)
    assert READERS["uring"].why_not() == ""


def _read_bytes() -> int:
    """Bytes that this process has read from devices; 0 if the system does not tell."""
    try:
        return int(Path("/proc/self/io").read_text().split("read_bytes: ")[1].split()[0])
    except (OSError, IndexError):
        return 0


def test_searches_with_all_readers_agree(index: vector_search.DiskIndex) -> None:
    found = index.search(DATA.queries, 10)
    for name in ("auto", *(name for name in READERS if not READERS[name].why_not())):
        try:
            loaded = vector_search.load(index.path, reader=name)
        except IndexFileError as error:
            assert "O_DIRECT" in str(error)
            continue
        np.testing.assert_array_equal(loaded.search(DATA.queries, 10).ids, found.ids)
        assert loaded.stats().details["recall"] == index.stats().details["recall"]
    with pytest.raises(SearchError, match="`reader` is 'tape': expected one of auto, uring, direct, mmap"):
        vector_search.load(index.path, reader="tape")


def test_device_error_names_the_pages(index: vector_search.DiskIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        loaded = vector_search.load(index.path, reader="direct")
    except (SearchError, IndexFileError) as error:
        pytest.skip(str(error))

    def broken(*of: Any) -> int:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(direct_reader.os, "preadv", broken)
        with pytest.raises(IndexFileError, match=r"at pages \d+ to \d+: Input/output error"):
            loaded.search(DATA.queries, 10)
    assert (loaded.search(DATA.queries, 10).ids >= 0).all()  # it works again with the disk


# -- files -----------------------------------------------------------------------------------


def test_every_flipped_bit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "index"
    build_on_disk(DATA.corpus[:40], path, num_lists=2).close()
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    places = [*range(64), *rng.integers(0, len(whole), 150), *range(PAGE_BYTES - 4, len(whole), PAGE_BYTES)]
    for place in places:
        flipped = bytearray(whole)
        flipped[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(flipped)
        with pytest.raises(IndexFileError, match=str(path)):
            _use(path)
    for size in [*rng.integers(0, len(whole), 30), PAGE_BYTES, len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(IndexFileError, match=str(path)):
            _use(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(IndexFileError, match="its superblock says"):
        _use(path)
    path.write_bytes(whole)
    _use(path)


def _use(path: Path) -> None:
    loaded = vector_search.load(path, reader="mmap")
    assert isinstance(loaded, vector_search.DiskIndex)
    with loaded:
        loaded.verify()


def test_search_refuses_a_damaged_page_that_it_reads(index: vector_search.DiskIndex, tmp_path: Path) -> None:
    path = tmp_path / "index"
    index.save(path)
    with path.open("r+b") as file:
        file.seek(PAGE_BYTES + 40)
        byte = file.read(1)[0]
        file.seek(PAGE_BYTES + 40)
        file.write(bytes([byte ^ 1]))
    loaded = vector_search.load(path, reader="mmap")
    with pytest.raises(IndexFileError, match="page 1 does not match its checksum"):
        loaded.search(DATA.queries, 10, effort=NUM_LISTS)
    path.write_bytes(path.read_bytes()[: 3 * PAGE_BYTES])  # cut while it is open
    with pytest.raises(IndexFileError):
        loaded.search(DATA.queries, 10, effort=NUM_LISTS)


def test_other_versions_and_hostile_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "index"
    build_on_disk(DATA.corpus[:40], path, num_lists=2).close()
    pages = open_page_file(path)
    hostile: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"num_vectors": -1}, {}),
        ({"copies": 10**12}, {}),
        ({"dtype": "object"}, {}),
        ({"measured": None}, {}),
        ({"measured": {**pages.settings["measured"], "effort": 10**9}}, {}),
        ({}, {"starts": pages.arrays["starts"] + 2**40}),
        ({}, {"counts": pages.arrays["counts"] * 2**50}),
        ({}, {"centroids": pages.arrays["centroids"][:1]}),
        ({}, {"centroids": pages.arrays["centroids"] * np.float32(np.nan)}),
    ]
    for changed, arrays in hostile:
        with PageFileWriter(path) as writer:
            writer.append(np.zeros(10 * PAYLOAD_BYTES, np.uint8))
            writer.finish(pages.kind, {**pages.settings, **changed}, {**pages.arrays, **arrays})
        with pytest.raises(IndexFileError, match=f"{path} is damaged"):
            _use(path)
    monkeypatch.setattr("autopar.vector_search.on_disk.page_file.VERSION", 2)
    with PageFileWriter(path) as writer:
        writer.finish(pages.kind, pages.settings, pages.arrays)
    monkeypatch.undo()
    with pytest.raises(IndexFileError, match=r"has version 2 .* reads version 1"):
        _use(path)


def test_save_close_and_wrong_use(index: vector_search.DiskIndex, tmp_path: Path) -> None:
    index.save(index.path)
    index.save(tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == index.path.read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]
    copy = vector_search.load(tmp_path / "copy")
    assert isinstance(copy, vector_search.DiskIndex)
    copy.close()
    copy.close()
    with pytest.raises(SearchError, match="is closed: load it again"):
        copy.search(DATA.queries, 1)
    with pytest.raises(IndexFileError, match="cannot be written"):
        index.save(tmp_path / "missing" / "index")
    with pytest.raises(SearchError, match="its folder does not exist"):
        build_on_disk(DATA.corpus, tmp_path / "missing" / "index")
    vector_search.build(DATA.corpus[:50], index="exact").save(tmp_path / "exact")
    with pytest.raises(SearchError, match="is not an index on disk"):
        vector_search.load(tmp_path / "exact", reader="mmap")


@pytest.mark.parametrize("has_unnamed_files", [True, False])
def test_interrupted_build_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_unnamed_files: bool
) -> None:
    path = tmp_path / "index"
    path.write_bytes(b"before")

    def interrupted(handle: int) -> None:
        raise KeyboardInterrupt

    def refused(folder: Path) -> int:
        raise OSError

    if not has_unnamed_files:
        monkeypatch.setattr("autopar.vector_search.on_disk.page_file.open_unnamed", refused)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("os.fsync", interrupted)
        build_on_disk(DATA.corpus[:40], path, num_lists=2)
    assert [each.name for each in tmp_path.iterdir()] == ["index"]
    assert path.read_bytes() == b"before"
    build_on_disk(DATA.corpus[:40], path, num_lists=2).close()
    assert [each.name for each in tmp_path.iterdir()] == ["index"]


def test_full_disk_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "index"
    path.write_bytes(b"before")

    def full(*of: Any, **options: Any) -> Any:
        raise OSError(28, "No space left on device")

    for name in ("os.fsync", "tempfile.TemporaryFile"):
        with monkeypatch.context() as patched, pytest.raises(IndexFileError, match="written: No space left on device"):
            patched.setattr(name, full)
            build_on_disk(DATA.corpus[:40], path, num_lists=2)
    assert [each.name for each in tmp_path.iterdir()] == ["index"]
    assert path.read_bytes() == b"before"


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "O_TMPFILE"), reason="this system has no unnamed files")
def test_killed_build_leaves_nothing(tmp_path: Path) -> None:
    program = """
        import os, signal, sys
        from importlib import import_module
        import numpy as np
        from autopar import vector_search
        page_file = import_module("autopar.vector_search.on_disk.page_file")
        page_file.PageFileWriter.finish = lambda *of: os.kill(os.getpid(), signal.SIGKILL)
        vector_search.build_on_disk(np.eye(50, 8), sys.argv[1], num_lists=2, progress=False)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program), str(tmp_path / "index")], check=False)
    assert done.returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


# -- streams ---------------------------------------------------------------------------------


def test_chunks_make_the_same_index_as_an_array(tmp_path: Path, index: vector_search.DiskIndex) -> None:
    parts = np.split(DATA.corpus, [1, 2, 700])
    with build_on_disk(lambda: iter(parts), tmp_path / "index", ids=OWN_IDS) as streamed:
        assert streamed.measured == index.measured
        for effort in (None, 3):
            found = streamed.search(DATA.queries, 10, effort=effort)
            np.testing.assert_array_equal(found.ids, index.search(DATA.queries, 10, effort=effort).ids)


@pytest.mark.slow
def test_memory_maps_and_small_budgets(
    tmp_path: Path, index: vector_search.DiskIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_disk = np.memmap(tmp_path / "corpus", np.float32, "w+", shape=DATA.corpus.shape)
    on_disk[:] = DATA.corpus
    ranges: list[int] = []

    class Counted(Spill):
        def __init__(self, starts: Any, counts: Any, entry_bytes: int, end: int, most: int, folder: Path) -> None:
            super().__init__(starts, counts, entry_bytes, end, min(most, 40_000), folder)
            ranges.append(len(self._begins))

    monkeypatch.setattr("autopar.vector_search.on_disk.build.Spill", Counted)
    with build_on_disk(on_disk, tmp_path / "index", ids=OWN_IDS, memory_budget_bytes=3.2e7) as mapped:
        every = mapped.search(DATA.queries, 10, effort=NUM_LISTS)
        np.testing.assert_array_equal(every.ids, index.search(DATA.queries, 10, effort=NUM_LISTS).ids)
        assert mapped.stats().reached is True
        mapped.verify()
    assert ranges[0] > 3
    assert sorted(each.name for each in tmp_path.iterdir()) == ["corpus", "index"]


def test_streams_that_cannot_be_indexed(tmp_path: Path) -> None:
    corpus, path = DATA.corpus[:40], tmp_path / "index"
    build = partial(build_on_disk, path=path, num_lists=2)
    rng = np.random.default_rng(0)
    with pytest.raises(SearchError, match="40 rows in the first pass, and 40 rows or other values"):
        build(lambda: [rng.normal(size=(40, 16))])
    with pytest.raises(SearchError, match="is an iterator, which can be read only once"):
        build(iter([corpus]))
    with pytest.raises(SearchError, match="from row 40 is float32 of 8 elements, and the first is float32 of 16"):
        build(lambda: [corpus, corpus[:, :8]])
    with pytest.raises(SearchError, match="`vectors` is empty"):
        build(list)
    with pytest.raises(SearchError, match="memory_budget_bytes` is 1,000"):
        build(corpus, memory_budget_bytes=1000)
    with pytest.raises(SearchError, match="`num_lists` is 41: give at most"):
        build(corpus, num_lists=41)
    with pytest.raises(SearchError, match="`ids` has shape"):
        build(corpus, ids=np.arange(7))
    with pytest.raises(SearchError, match="`queries` has shape"):
        build(corpus, queries=np.zeros((3, 5)))
    with pytest.raises(SearchError, match=r"has nan at \[0, 1\]"):
        build(np.where(np.arange(16) == 1, np.nan, corpus))
    assert list(tmp_path.iterdir()) == []


# -- layout ----------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 3 * PAYLOAD_BYTES), min_size=1, max_size=30), st.integers(0, 100))
def test_lists_cross_as_few_pages_as_they_can(sizes: list[int], seed: int) -> None:
    num_bytes, order = np.array(sizes), np.random.default_rng(seed).permutation(len(sizes))
    starts, end = layout.packed(num_bytes, order)
    assert (starts[order] + num_bytes[order] <= np.append(starts[order][1:], end)).all()
    used = num_bytes > 0
    pages = (starts + num_bytes - 1) // PAYLOAD_BYTES + 1 - starts // PAYLOAD_BYTES
    assert (pages[used] == -(-num_bytes[used] // PAYLOAD_BYTES)).all()


def test_order_keeps_near_centroids_together(monkeypatch: pytest.MonkeyPatch) -> None:
    centroids = np.random.default_rng(0).normal(size=(300, 4)).astype(np.float32)
    between = lambda order: np.linalg.norm(np.diff(centroids[order], axis=0), axis=1).mean()  # noqa: E731
    chained = layout.order_of(centroids)
    monkeypatch.setattr(layout, "_MAX_CHAIN", 50)
    bisected = layout.order_of(centroids)
    for order in (chained, bisected):
        assert sorted(order.tolist()) == list(range(300))
        assert between(order) < 0.6 * between(np.arange(300))


def test_expected_page_reads_are_those_of_searches(index: vector_search.DiskIndex) -> None:
    """What `pin` and `divide` count: the lists that searches read, by the learned choice."""
    assert index.lists.rule is not None
    for query in DATA.queries[:10]:
        before = index.reads().pages
        index.search(query, 10)
        assert (index.searches.page_reads(query[None], 10**4) > 0).sum() == index.reads().pages - before
