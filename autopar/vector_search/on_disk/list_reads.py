"""Read the lists that a batch of queries probes: each page once, while the previous lists are scored.

In: lists. Out: their vectors and positions, in waves. The lists of a wave share no page with another wave. Adjacent
pages of a wave are one request. Each page is checked against its checksum before anything of it is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.vector_search.on_disk.page_checks import check, read_and_check
from autopar.vector_search.on_disk.page_file import damaged
from autopar.vector_search.on_disk.pages import PAGE_BYTES, PAYLOAD_BYTES, payloads
from autopar.vector_search.on_disk.readers import Reader, Run
from autopar.vector_search.on_disk.stored_lists import POSITION_BYTES, StoredLists

#: Pages of a wave, which are read at once; longer lists make larger waves.
WAVE_PAGES = 128


class Wave(NamedTuple):
    """Lists that are read together, in the order of their places, and the runs of their pages."""

    lists: NDArray[np.int64]
    runs: tuple[Run, ...]


class Entries(NamedTuple):
    """The contents of the lists of a wave, list by list.

    Args:
        lists: the lists.
        counts: vectors of each.
        vectors: `[m, d]`.
        positions: int32 `[m]`.
    """

    lists: NDArray[np.int64]
    counts: NDArray[np.int64]
    vectors: NDArray[Any]
    positions: NDArray[np.int32]


def waves_of(lists: StoredLists, which: NDArray[np.int64], wave_pages: int = WAVE_PAGES) -> list[Wave]:
    """Divide lists into waves of about `wave_pages` pages; empty lists are left out."""
    which = which[lists.counts[which] > 0]
    which = which[np.argsort(lists.starts[which], kind="stable")]
    firsts, lasts = lists.first_pages[which].tolist(), lists.last_pages[which].tolist()
    waves: list[Wave] = []
    begin, runs, num_pages = 0, [], 0
    for at, (first, last) in enumerate(zip(firsts, lasts, strict=True)):
        if runs and num_pages >= wave_pages and first > lasts[at - 1]:
            waves.append(Wave(which[begin:at], tuple(runs)))
            begin, runs, num_pages = at, [], 0
        end = runs[-1].first + runs[-1].num_pages if runs else -1
        first = max(first, end)  # a page shared with the list before
        num_pages += last + 1 - first
        if first == end:
            runs[-1] = Run(runs[-1].first, last + 1 - runs[-1].first)
        else:
            runs.append(Run(first, last + 1 - first))
    if runs:
        waves.append(Wave(which[begin:], tuple(runs)))
    return waves


def working_bytes(lists: StoredLists, num_queries: int) -> int:
    """Bytes that a search works with, about: two waves as pages, one as vectors, its scores, and the centroids' scores."""
    entries = max(WAVE_PAGES * PAYLOAD_BYTES // lists.entry_bytes, 1)
    pages = 3 * WAVE_PAGES * PAGE_BYTES + 2 * entries * lists.dim * 4
    return pages + num_queries * (3 * 4 * entries + 6 * 4 * lists.num_lists)


@dataclass(frozen=True, slots=True)
class ListReads:
    """Reads lists of one file.

    Args:
        path: the file, for errors.
        file_id: the random id that its checksums contain.
    """

    path: Path
    file_id: bytes
    lists: StoredLists
    reader: Reader

    def entries(self, which: NDArray[np.int64]) -> Iterator[Entries]:
        """The contents of some lists, in waves. The next wave is being read while the caller uses one.

        Raises:
            IndexFileError: a page cannot be read, or is damaged.
        """
        waves = waves_of(self.lists, which)
        pending = self.reader.start(waves[0].runs) if waves else None
        for at, wave in enumerate(waves):
            assert pending is not None
            pages, pending = pending.wait(), None
            if at + 1 < len(waves):
                pending = self.reader.start(waves[at + 1].runs)
            try:
                entries = self._decoded(wave, pages)
            except BaseException:
                if pending is not None:
                    pending.wait()
                raise
            yield entries

    def check(self, first: int, count: int) -> None:
        """Check all of these pages.

        Raises:
            IndexFileError: a page cannot be read, or is damaged.
        """
        read_and_check(self.reader, self.path, self.file_id, Run(first, count))

    def payloads_of(self, run: Run) -> NDArray[np.uint8]:
        """The payloads of some pages, which are checked.

        Raises:
            IndexFileError: a page cannot be read, or is damaged.
        """
        pages = self.reader.start([run]).wait()
        check(pages, self.path, self.file_id, (run,))
        return payloads(pages)

    # -- private ------------------------------------------------------------------------------

    def _decoded(self, wave: Wave, pages: NDArray[np.uint8]) -> Entries:
        check(pages, self.path, self.file_id, wave.runs)
        lists, stream = self.lists, payloads(pages)
        counts = lists.counts[wave.lists]
        run_firsts = np.array([run.first for run in wave.runs])
        run_starts = np.cumsum([0, *(run.num_pages for run in wave.runs)])[:-1]
        first_pages = lists.first_pages[wave.lists]
        run = np.searchsorted(run_firsts, first_pages, side="right") - 1
        begins = (run_starts[run] + first_pages - run_firsts[run]) * PAYLOAD_BYTES
        begins = (begins + lists.starts[wave.lists] % PAYLOAD_BYTES).tolist()
        middles = [begin + POSITION_BYTES * count for begin, count in zip(begins, counts.tolist(), strict=True)]
        ends = [begin + lists.entry_bytes * count for begin, count in zip(begins, counts.tolist(), strict=True)]
        positions = np.concatenate([stream[a:b] for a, b in zip(begins, middles, strict=True)]).view("<i4")
        vectors = np.concatenate([stream[a:b] for a, b in zip(middles, ends, strict=True)]).view(lists.dtype)
        if positions.min() < 0 or positions.max() >= lists.num_vectors:
            raise damaged(self.path, f"a list points outside the {lists.num_vectors:,} vectors")
        return Entries(wave.lists, counts, vectors.reshape(-1, lists.dim), positions.astype(np.int32, copy=False))
