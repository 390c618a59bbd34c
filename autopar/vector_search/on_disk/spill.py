"""Sort a corpus by list within a memory budget: entries go to temporary files by range of lists, then each is sorted.

In: chunks of vectors with their lists. Out: the lists of each vector; and the bytes of the lists, range by range, in the
order of their places. The temporary files have no names, so a killed process leaves none.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.errors import IndexFileError, SearchError
from autopar.vector_search.data.metrics import NO_ID
from autopar.vector_search.on_disk.pages import PAYLOAD_BYTES
from autopar.vector_search.on_disk.stored_lists import POSITION_BYTES

#: Maximum temporary files, which are open together.
_MAX_RANGES = 256
#: Bytes of a list number.
_LIST_BYTES = 4


class AssignedLists:
    """The lists of each vector, int32 `[n, copies]`, in a temporary file.

    Raises:
        IndexFileError: the file cannot be written.
    """

    def __init__(self, copies: int, folder: Path) -> None:
        self.copies, self._folder = copies, folder
        try:
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed by `close`
        except OSError as error:
            raise _refused(folder, error) from None

    def append(self, lists: NDArray[np.int32]) -> None:
        """Add the lists of the next vectors, `[m, copies]`."""
        try:
            self._file.write(memoryview(np.ascontiguousarray(lists, "<i4").reshape(-1).view(np.uint8)))
            self._file.flush()
        except OSError as error:
            raise _refused(self._folder, error) from None

    def read(self, start: int, count: int) -> NDArray[np.int32]:
        """The lists of `count` vectors from position `start`, or of all that are left."""
        self._file.seek(4 * self.copies * start)
        return np.frombuffer(self._file.read(4 * self.copies * count), "<i4").reshape(-1, self.copies)

    def close(self) -> None:
        """Delete the file."""
        with suppress(OSError):  # of a full disk, which `append` has reported
            self._file.close()


class Spill:
    """Entries on disk, by range of lists.

    Args:
        starts, counts: place in the stream and vectors of each list, as in `StoredLists`.
        entry_bytes: bytes of a vector and its position.
        end: length of the stream.
        max_bytes: maximum bytes of a range, which is sorted in memory.
        folder: folder of the temporary files.

    Raises:
        SearchError: a list, or a range if there may be no more, is longer than `max_bytes`.
    """

    def __init__(
        self,
        starts: NDArray[np.int64],
        counts: NDArray[np.int64],
        entry_bytes: int,
        end: int,
        max_bytes: int,
        folder: Path,
    ) -> None:
        self._starts, self._counts, self._entry_bytes = starts, counts, entry_bytes
        self._folder = folder
        longest = int(counts.max()) * entry_bytes
        needed = max(longest, -(-end // _MAX_RANGES))
        if needed > max_bytes:
            what = f"a list of {longest:,} bytes" if longest == needed else f"{end:,} bytes of lists"
            raise SearchError(
                f"`memory_budget_bytes` is too small for {what}: sorting needs {needed:,} bytes at a time, and an eighth of"
                f" the budget is {max_bytes:,}. Give a larger budget, or more lists (`num_lists`)"
            )
        # a range begins where a list starts a page
        order = np.argsort(starts, kind="stable")
        order = order[counts[order] > 0]
        aligned = order[starts[order] % PAYLOAD_BYTES == 0]
        begins, ends = [0], starts[order] + counts[order] * entry_bytes
        for at, begin in enumerate(starts[aligned].tolist()):
            following = int(starts[aligned[at + 1]]) if at + 1 < len(aligned) else int(ends[-1])
            if following - begins[-1] > max_bytes and begin > begins[-1]:
                begins.append(begin)
        self._begins = np.array(begins, np.int64)
        self._ends = np.append(self._begins[1:], end)
        self._files: list[Any] = []
        try:
            self._files = [tempfile.TemporaryFile(dir=folder) for _ in begins]  # noqa: SIM115 - closed by `close`
        except OSError as error:
            raise _refused(folder, error) from None

    def add(self, vectors: NDArray[Any], first_position: int, lists: NDArray[np.int32]) -> None:
        """Add the vectors `[m, d]` at consecutive positions, with their lists, `[m, copies]`."""
        member, column = np.nonzero(lists != NO_ID)
        owner = lists[member, column]
        records = np.empty((len(member), _LIST_BYTES + self._entry_bytes), np.uint8)
        records[:, :4] = owner.astype("<i4")[:, None].view(np.uint8)
        records[:, 4:8] = (member + first_position).astype("<i4")[:, None].view(np.uint8)
        records[:, 8:] = np.ascontiguousarray(vectors).view(np.uint8).reshape(len(vectors), -1)[member]
        where = np.searchsorted(self._begins, self._starts[owner], side="right") - 1
        order = np.argsort(where, kind="stable")
        bounds = np.searchsorted(where[order], np.arange(len(self._begins) + 1))
        try:
            for at in np.unique(where).tolist():
                self._files[at].write(memoryview(records[order[bounds[at] : bounds[at + 1]]].reshape(-1)))
                self._files[at].flush()
        except OSError as error:
            raise _refused(self._folder, error) from None

    def streams(self) -> Iterator[NDArray[np.uint8]]:
        """The bytes of each range, which start at a page."""
        for file, begin, end in zip(self._files, self._begins.tolist(), self._ends.tolist(), strict=True):
            file.seek(0)
            records = np.frombuffer(file.read(), np.uint8).reshape(-1, _LIST_BYTES + self._entry_bytes)
            file.close()
            owner = np.ascontiguousarray(records[:, :4]).view("<i4").reshape(-1)
            order = np.argsort(owner, kind="stable")
            owner = owner[order]
            stream = np.zeros(end - begin, np.uint8)
            which, first = np.unique(owner, return_index=True)
            for one, low, high in zip(which.tolist(), first, [*first[1:], len(owner)], strict=True):
                some, at = records[order[low:high]], int(self._starts[one]) - begin
                middle = at + POSITION_BYTES * len(some)
                stream[at:middle] = some[:, 4:8].reshape(-1)
                stream[middle : at + self._entry_bytes * len(some)] = some[:, 8:].reshape(-1)
            yield stream

    def close(self) -> None:
        """Delete the temporary files."""
        for file in self._files:
            with suppress(OSError):  # of a full disk, which `add` has reported
                file.close()


def _refused(folder: Path, error: OSError) -> IndexFileError:
    return IndexFileError(
        f"temporary files in {folder} cannot be written: {error.strerror or error}. Give a path in a writable folder with"
        " free space for twice the index"
    )
