"""Read a corpus in chunks, several times: an array, or a function that returns an iterator over arrays.

In: the user's vectors. Out: checked chunks of bounded size, as often as the build needs them. A corpus that yields other
vectors in a later pass is refused.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autopar.errors import SearchError
from autopar.vector_search.data import inputs

#: An array `[n, d]`, or a function that returns an iterator over arrays `[rows, d]`, anew in each call.
Source = ArrayLike | Callable[[], Iterable[ArrayLike]]


class Chunks:
    """The chunks of a corpus.

    Args:
        source: the corpus. An `np.memmap` is read in chunks too.
        max_rows: maximum vectors of a chunk.
    """

    def __init__(self, source: Source, max_rows: int) -> None:
        self._source, self.max_rows = source, max_rows
        self.num_vectors, self.dim = 0, 0
        self.dtype: np.dtype[Any] = np.dtype(np.float32)
        self._known: tuple[int, int] | None = None

    def __iter__(self) -> Iterator[tuple[int, NDArray[Any]]]:
        """The position of the first vector of each chunk, and the chunk.

        Raises:
            SearchError: invalid vectors; or the corpus has other vectors than in the first pass.
        """
        start, checksum, is_first = 0, 0, self._known is None
        for given in self._parts():
            for chunk in self._cut(given):
                if is_first and not start:
                    self.dim, self.dtype = chunk.shape[1], chunk.dtype
                elif (chunk.shape[1], chunk.dtype) != (self.dim, self.dtype):
                    raise SearchError(
                        f"the chunk of `vectors` from row {start:,} is {chunk.dtype} of {chunk.shape[1]} elements, and the"
                        f" first is {self.dtype} of {self.dim}: give all chunks one dtype and one d"
                    )
                checksum = zlib.crc32(np.ascontiguousarray(chunk).view(np.uint8).reshape(-1), checksum)
                yield start, chunk
                start += len(chunk)
        if is_first:
            self._known, self.num_vectors = (start, checksum), start
        elif self._known != (start, checksum):
            raise SearchError(
                f"`vectors` had {self.num_vectors:,} rows in the first pass, and {start:,} rows or other values in a later"
                " one: give a function that returns the same chunks in each call"
            )

    def _parts(self) -> Iterable[ArrayLike]:
        if isinstance(self._source, Callable):
            return self._source()
        if isinstance(self._source, Iterator):
            raise SearchError(
                "`vectors` is an iterator, which can be read only once: give a function that returns an iterator"
            )
        return (self._source,)

    def _cut(self, given: ArrayLike) -> Iterator[NDArray[Any]]:
        array = given if isinstance(given, np.ndarray) else np.asarray(given)
        if array.ndim != 2:
            inputs.checked_vectors(array)  # raises, with the shape
        for start in range(0, len(array), self.max_rows):
            try:
                yield inputs.checked_vectors(array[start : start + self.max_rows])
            except SearchError as error:
                if not start:
                    raise
                raise SearchError(f"{error}. Rows count from row {start:,} of this array") from None
