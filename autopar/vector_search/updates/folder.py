"""Create, open and lock the folder of an updatable index: a file of pages, and logs.

    pages      the lists or the graph, and what a search keeps in memory, as of the last checkpoint
    log-N      the operations since checkpoint N; while checkpoint N + 1 is being written, log-(N + 1) has the newest

A folder appears when it is complete. Opening it applies the operations of the logs that the last checkpoint does not
contain.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.errors import IndexFileError
from autopar.vector_search.frame.recall_tuning import Measured
from autopar.vector_search.on_disk.page_file import damaged
from autopar.vector_search.on_disk.probe_tuning import Tuned
from autopar.vector_search.updates import log as logs
from autopar.vector_search.updates.files import Files
from autopar.vector_search.updates.log import Log
from autopar.vector_search.updates.page_store import PageStore, opened_store
from autopar.vector_search.updates.records import Record, decoded
from autopar.vector_search.updates.settings import Settings
from autopar.vector_search.updates.slots import Slots
from autopar.vector_search.updates.snapshot import Stored
from autopar.vector_search.updates.stored_kinds import LISTS, kind_named

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

PAGES = "pages"


class Opened(NamedTuple):
    """A folder that is open.

    Args:
        records: operations that its last checkpoint does not contain, with their sequence numbers.
        dead: int64 `[num_lists]`, entries of each list that are known to be dead.
        num_changes: vectors changed since the last census.
        queries: the user's sample.
    """

    store: PageStore
    log: Log
    settings: Settings
    slots: Slots
    stored: Stored
    tuned: Tuned
    records: list[tuple[int, Record]]
    dead: NDArray[np.int64]
    num_changes: int
    queries: NDArray[Any] | None


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a folder, as of all indexes only an updatable one is."""
    return os.path.isdir(path)  # noqa: PTH112 - `Path.is_dir` raises where a folder above may not be read


def complete(path: Path, fill: Callable[[Path], None], files: Files) -> None:
    """Create a folder under another name, fill it, and give it its name.

    Raises:
        IndexFileError: it exists, or cannot be written.
    """
    if path.exists():
        raise IndexFileError(f"{path} exists: give a path where nothing is, or load the index that is there")
    try:
        folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    except OSError as error:
        raise IndexFileError(
            f"{path} cannot be created: {error.strerror or error}. Give a path in a writable folder"
        ) from None
    try:
        fill(folder)
        files.sync_folder(folder)
        folder.rename(path)
        files.sync_folder(path.parent)
    except OSError as error:
        raise IndexFileError(
            f"{path} cannot be written: {error.strerror or error}. Free space, or check the disk"
        ) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def opened(path: Path, files: Files) -> Opened:
    """Open a folder for reading and writing, which one process at a time can.

    Raises:
        IndexFileError: it is no index, damaged, or open in another process.
    """
    try:
        if not (path / PAGES).is_file():
            raise IndexFileError(f"{path} is no updatable index: it has no file `{PAGES}`")
        store = opened_store(path / PAGES, files)
        try:
            _lock(store, path)
            return _opened(path, store, files)
        except BaseException:
            store.close()
            raise
    except OSError as error:
        raise IndexFileError(
            f"{path} cannot be opened: {error.strerror or error}. Check permissions, and the disk"
        ) from None


def _lock(store: PageStore, path: Path) -> None:
    """Keep other processes away until the file is closed; the system releases the lock of a process that ends."""
    if fcntl is None:
        return
    try:
        fcntl.flock(store.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise IndexFileError(f"{path} is open in another process, or twice in this one: close it there first") from None


def _opened(path: Path, store: PageStore, files: Files) -> Opened:
    saved, arrays = store.state.settings, {name: each.array for name, each in store.state.arrays.items()}
    try:
        settings = Settings.loaded(saved)
        layout, ids = settings.layout, arrays.get("ids", np.zeros(0, np.int64))
        metadata = arrays.get("metadata", np.zeros(len(ids), layout.metadata))
        is_live = np.unpackbits(arrays["is_live"], count=len(ids)).astype(bool) if len(ids) else np.zeros(0, bool)
        if metadata.dtype != layout.metadata or len(metadata) != len(ids):
            raise ValueError("`metadata` does not match `ids`")
        stored = kind_named(str(saved.get("kind", LISTS.name))).loaded(arrays, settings, saved, len(ids))
        dead = arrays.get("dead", np.zeros(stored.num_lists, np.int64))
        queries = arrays.get("queries")
        if queries is not None and layout.dtype.name == "bfloat16":
            queries = queries.view(layout.dtype)
        measured, pruning = Measured.loaded(saved["measured"]), saved["pruning"]
        tuned = Tuned(measured, None if pruning is None else float(pruning))
        pages, num_changes = stored.data_pages, int(saved["num_changes"])
        if (len(pages) and not 2 <= pages.min() <= pages.max() < store.state.num_pages) or dead.shape != (
            stored.num_lists,
        ):
            raise ValueError("a list or a block lies outside the file")
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise damaged(store.path, f"its settings are invalid ({error!r})") from None
    store.adopt(store.state, pages)
    slots = Slots.of(ids.copy(), metadata.copy(), is_live)
    log, records = _replayed(path, store, files)
    try:
        operations = [(each.sequence, decoded(each.body, layout)) for each in records]
    except ValueError as error:
        log.close()
        raise damaged(log.path, f"an operation is invalid ({error})") from None
    return Opened(store, log, settings, slots, stored, tuned, operations, dead, num_changes, queries)


def _replayed(path: Path, store: PageStore, files: Files) -> tuple[Log, list[logs.Sequenced]]:
    """The log to append to, and the records that the last checkpoint does not contain."""
    generation, sequence = store.state.generation, store.state.sequence
    found = logs.all_in(path)
    for each in list(found):
        if each < logs.path_of(path, generation):  # the checkpoint contains it
            files.remove(each)
            found.remove(each)
    if len(found) > 1 and not logs.has_header(found[-1]):  # its creation was interrupted
        files.remove(found.pop())
    expected = [logs.path_of(path, generation + place) for place in range(len(found))]
    if not found or len(found) > 2 or found != expected:
        raise damaged(
            store.path,
            f"its state is of checkpoint {generation}, and the logs are {', '.join(each.name for each in found) or 'missing'}",
        )
    log, records = logs.opened(found[-1], files, store.file_id, generation + len(found) - 1, True)
    if len(found) == 2 and not records:  # nothing was acknowledged since it was created, or its creation was given up
        log.close()
        files.remove(found.pop())
        log, records = logs.opened(found[0], files, store.file_id, generation, True)
    elif len(found) == 2:
        before, older = logs.opened(found[0], files, store.file_id, generation, False)
        before.close()
        if records[0].sequence != before.next_sequence:
            log.close()
            raise damaged(log.path, f"it starts with operation {records[0].sequence}, and the one before is missing")
        records = older + records
    first = records[0].sequence if records else log.next_sequence
    if first > sequence + 1 or log.next_sequence <= sequence:
        log.close()
        raise damaged(
            log.path, f"its operations start with {first}, and the checkpoint contains those up to {sequence}"
        )
    return log, [one for one in records if one.sequence > sequence]
