"""Check pages that were read against their checksums, before anything of them is used."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from autopar.vector_search.on_disk.page_file import damaged
from autopar.vector_search.on_disk.pages import first_damaged
from autopar.vector_search.on_disk.readers import MAX_REQUEST_PAGES, Reader, Run


def check(pages: NDArray[np.uint8], path: Path, file_id: bytes, runs: Sequence[Run]) -> None:
    """Check the pages of some runs, `[num_pages, PAGE_BYTES]`.

    Raises:
        IndexFileError: a page is damaged.
    """
    numbers = np.concatenate([np.arange(run.first, run.first + run.num_pages) for run in runs])
    wrong = first_damaged(pages, file_id, numbers)
    if wrong is not None:
        raise damaged(path, f"page {wrong} does not match its checksum")


def read_and_check(reader: Reader, path: Path, file_id: bytes, run: Run) -> None:
    """Read a run of any length, and check its pages.

    Raises:
        IndexFileError: a page cannot be read, or is damaged.
    """
    for at in range(run.first, run.first + run.num_pages, MAX_REQUEST_PAGES):
        part = Run(at, min(MAX_REQUEST_PAGES, run.first + run.num_pages - at))
        check(reader.start([part]).wait(), path, file_id, [part])
