"""What users give: vectors, ids, queries and filters, checked, as NumPy arrays.

In: whatever `numpy.asarray` takes. Out: arrays of one of the three dtypes, or a `SearchError` that names the first
element which is wrong.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray

from autopar.errors import SearchError
from autopar.vector_search.data.metrics import MAX_INT8_DIM, METRICS, Metric

#: Dtypes of vectors, by name.
DTYPES = {name: np.dtype(getattr(jnp, name)) for name in ("float32", "bfloat16", "int8")}

#: Positions are 32-bit integers.
MAX_VECTORS = 2**31 - 1


def checked_metric(metric: str) -> Metric:
    """One of the metrics.

    Raises:
        SearchError: with all of them.
    """
    for known in METRICS:
        if metric == known:
            return known
    raise SearchError(f"`metric` is {metric!r}: give one of {', '.join(METRICS)}")


def checked_vectors(vectors: ArrayLike) -> NDArray[Any]:
    """The corpus, `[n, d]`, of f32, bf16 or int8; f64, f16 and whole numbers of other dtypes become f32.

    Raises:
        SearchError: it has not two dims, no element a vector, NaN or infinity, a length whose square is no f32, or too
            many vectors.
    """
    array = _numbers("vectors", vectors)
    if array.ndim != 2 or array.shape[1] < 1:
        raise SearchError(f"`vectors` has shape {array.shape}: give `[n, d]`, one vector a row, with d at least 1")
    if len(array) > MAX_VECTORS:
        raise SearchError(f"`vectors` are {len(array):,}: one index takes at most {MAX_VECTORS:,}. Build several")
    if array.dtype == np.int8 and array.shape[1] > MAX_INT8_DIM:
        raise SearchError(
            f"`vectors` of int8 have {array.shape[1]:,} elements each: their products are exact in 32 bits up to"
            f" {MAX_INT8_DIM:,}. Give them as float32"
        )
    array = array if array.dtype in DTYPES.values() else array.astype(np.float32)
    _check_finite("vectors", array)
    return array


def checked_queries(queries: ArrayLike, dim: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Queries as `[num_queries, d]`, of the corpus's dtype.

    Raises:
        SearchError: they have another d, NaN or infinity, or are no int8 where the corpus is.
    """
    array = _numbers("queries", queries)
    array = array[None] if array.ndim == 1 else array
    if array.ndim != 2 or array.shape[1] != dim:
        raise SearchError(
            f"`queries` has shape {np.shape(queries)}: the index takes `[num_queries, {dim}]`, or `[{dim}]`"
        )
    if dtype == np.int8 and array.dtype != np.int8:
        whole = array.astype(np.int8)
        if not np.array_equal(whole, array):
            raise SearchError(
                f"`queries` of {array.dtype} are not all whole numbers from -128 to 127, which an index of int8 vectors"
                " takes: scale and round them as the vectors were"
            )
        return whole
    array = array.astype(dtype, copy=False)
    _check_finite("queries", array)
    return array


def checked_ids(ids: ArrayLike | None, num_vectors: int) -> NDArray[np.int64]:
    """The user's ids, int64; by default positions.

    Raises:
        SearchError: there are not as many as vectors, one stands twice, is no 64-bit integer, or is -1.
    """
    if ids is None:
        return np.arange(num_vectors, dtype=np.int64)
    array = np.asarray(ids)
    if array.shape != (num_vectors,):
        raise SearchError(f"`ids` has shape {array.shape}, and there are {num_vectors:,} vectors: give one id for each")
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise SearchError(f"`ids` are {array.dtype}: give 64-bit integers")
    if array.size and int(array.max()) > np.iinfo(np.int64).max:
        raise SearchError(f"`ids` has {int(array.max())}: give 64-bit integers with a sign")
    array = array.astype(np.int64)
    order = np.argsort(array, kind="stable")
    again = np.flatnonzero(array[order][1:] == array[order][:-1])
    if again.size:
        first, second = order[again[0]], order[again[0] + 1]
        raise SearchError(
            f"`ids` has {array[first]} twice, at positions {first} and {second}: each vector needs an id of its own"
        )
    if (array == -1).any():
        raise SearchError(
            f"`ids` has -1, at position {int(np.argmax(array == -1))}: that marks a result that is missing. Give another"
        )
    return array


def checked_count(name: str, value: Any) -> int:
    """`k`, how many neighbours; or `effort`, how hard to search.

    Raises:
        SearchError: it is no whole number of at least 1.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise SearchError(f"`{name}` is {value!r}: give a whole number of at least 1")
    return int(value)


def checked_filter(allowed: ArrayLike | None, num_vectors: int) -> NDArray[np.bool_] | None:
    """Of each vector whether it may be returned.

    Raises:
        SearchError: it is not one bool for each vector.
    """
    if allowed is None:
        return None
    array = np.asarray(allowed)
    if array.dtype != np.bool_ or array.shape != (num_vectors,):
        raise SearchError(
            f"`filter` is {array.dtype} of shape {array.shape}: give one bool for each of the {num_vectors:,} vectors, in"
            " the order in which the index was built"
        )
    return array


def _numbers(name: str, given: ArrayLike) -> NDArray[Any]:
    try:
        array = np.asarray(given)
    except ValueError:
        raise SearchError(f"`{name}` is no array: its rows have different lengths. Give `[n, d]`") from None
    if (
        array.dtype in DTYPES.values()
        or np.issubdtype(array.dtype, np.floating)
        or np.issubdtype(array.dtype, np.integer)
    ):
        return array
    raise SearchError(f"`{name}` are {array.dtype}: give {', '.join(DTYPES)}, or numbers that can become float32")


def _check_finite(name: str, array: NDArray[Any]) -> None:
    """Every element a number, and every |x|^2, too."""
    if array.dtype == np.int8:
        return
    rows = max(1, 2**22 // array.shape[1])
    for start in range(0, len(array), rows):
        part = array[start : start + rows].astype(np.float32, copy=False)
        with np.errstate(over="ignore", invalid="ignore"):
            squares = np.einsum("nd,nd->n", part, part)
        if np.isfinite(squares).all():
            continue
        row = int(np.argmin(np.isfinite(squares)))
        wrong = np.flatnonzero(~np.isfinite(part[row]))
        if wrong.size:
            what = f"`{name}` has {part[row, wrong[0]]} at [{start + row}, {wrong[0]}]: every element must be finite"
            raise SearchError(f"{what}. Leave such rows out, or fill them in")
        raise SearchError(
            f"`{name}` has a row, {start + row}, whose squared length is no float32: scale the vectors down, and the"
            " queries alike"
        )
