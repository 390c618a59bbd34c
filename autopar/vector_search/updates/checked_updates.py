"""Check the vectors and metadata of an update."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autopar.errors import SearchError
from autopar.vector_search.data import inputs
from autopar.vector_search.data.metrics import is_integer
from autopar.vector_search.updates.records import Layout

#: Bytes of one operation in the log.
_MAX_BYTES = 2**31


def checked_new(vectors: ArrayLike, layout: Layout) -> NDArray[Any]:
    """Vectors to add, `[n, d]`, in the index's dtype; one vector may be `[d]`.

    Raises:
        SearchError: another d, NaN or infinity, or values that the dtype cannot hold.
    """
    array = np.asarray(vectors)
    array = array[None] if array.ndim == 1 and array.size else array
    if array.ndim != 2 or array.shape[1] != layout.dim:
        raise SearchError(f"`vectors` has shape {np.shape(vectors)}: expected `[n, {layout.dim}]`")
    checked = inputs.checked_vectors(array)
    if checked.dtype == layout.dtype:
        return checked
    if is_integer(layout.dtype) and not inputs.is_held(checked, layout.dtype):
        raise SearchError(
            f"the index has {layout.dtype} vectors, and these `vectors` of {array.dtype} have other values: scale and round them like"
            " the others"
        )
    return inputs.checked_vectors(checked.astype(layout.dtype))


def checked_metadata(metadata: ArrayLike | None, num: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Rows of metadata, `[n]`.

    Raises:
        SearchError: they are missing, or not of this dtype.
    """
    if not dtype.itemsize:
        if metadata is not None:
            raise SearchError("`metadata` is given, and the index has none: create it with `metadata=` a NumPy dtype")
        return np.zeros(num, dtype)
    if metadata is None:
        raise SearchError(f"`metadata` is missing: the index has {dtype} for each vector")
    try:
        array = np.atleast_1d(np.asarray(metadata, dtype))
    except (TypeError, ValueError) as error:
        raise SearchError(f"`metadata` does not convert to {dtype}: {error}") from None
    if array.shape != (num,):
        raise SearchError(f"`metadata` has shape {array.shape}: give one row for each of the {num:,} vectors")
    return array


def checked_rows(vectors: NDArray[Any], layout: Layout) -> None:
    """Check that an operation fits the log.

    Raises:
        SearchError: too many bytes.
    """
    row_bytes = 8 + layout.dim * layout.dtype.itemsize + layout.metadata.itemsize
    if len(vectors) * row_bytes > _MAX_BYTES:
        raise SearchError(
            f"`vectors` has {len(vectors):,} rows of {row_bytes:,} bytes: one operation holds at most {_MAX_BYTES:,} bytes."
            " Divide it"
        )
