"""Check the user's vectors, ids, queries and filters, and convert them to NumPy arrays.

In: anything that `numpy.asarray` accepts. Out: arrays of one of `DTYPES`, or a `SearchError` that names the
first wrong element.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray

from autopar.errors import SearchError
from autopar.vector_search.data.metrics import METRICS, Metric, is_integer, max_dim

#: Vector dtypes by name.
DTYPES = {name: np.dtype(getattr(jnp, name)) for name in ("float32", "bfloat16", "float16", "int8", "uint8")}

#: Maximum magnitude of an element of float16: differences are then finite, and so are doubled queries.
MAX_FLOAT16 = 32_752

#: Positions are int32.
MAX_VECTORS = 2**31 - 1


def checked_metric(metric: str) -> Metric:
    """Check the name of a metric.

    Raises:
        SearchError: an unknown name; the text lists all metrics.
    """
    for known in METRICS:
        if metric == known:
            return known
    raise SearchError(f"`metric` is {metric!r}: expected one of {', '.join(METRICS)}")


def checked_vectors(vectors: ArrayLike) -> NDArray[Any]:
    """Return the corpus, `[n, d]`, in one of `DTYPES`; f64 and other integers become f32.

    Raises:
        SearchError: not two dims, d of 0, NaN or infinity, a squared length that overflows f32, or too many vectors.
    """
    array = _numbers("vectors", vectors)
    if array.ndim != 2 or array.shape[1] < 1:
        raise SearchError(
            f"`vectors` has shape {array.shape}: expected `[n, d]`, one vector per row, with d at least 1"
        )
    if len(array) > MAX_VECTORS:
        raise SearchError(
            f"`vectors` has {len(array):,} rows: one index holds at most {MAX_VECTORS:,}. Build several indexes"
        )
    if is_integer(array.dtype) and array.shape[1] > max_dim(array.dtype):
        raise SearchError(
            f"`vectors` of {array.dtype} have {array.shape[1]:,} elements each: int32 scores are exact up to"
            f" {max_dim(array.dtype):,}. Convert them to float32"
        )
    array = array if array.dtype in DTYPES.values() else array.astype(np.float32)
    _check_finite("vectors", array)
    if array.dtype == np.float16:
        _check_float16("vectors", array)
    return array


def checked_queries(queries: ArrayLike, dim: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return queries as `[num_queries, d]` in the corpus's dtype.

    Raises:
        SearchError: another d, NaN or infinity, or values that the corpus's int8 or uint8 cannot hold.
    """
    array = _numbers("queries", queries)
    array = array[None] if array.ndim == 1 else array
    if array.ndim != 2 or array.shape[1] != dim:
        raise SearchError(f"`queries` has shape {np.shape(queries)}: expected `[num_queries, {dim}]` or `[{dim}]`")
    if is_integer(dtype):
        if array.dtype != dtype and not is_held(array, dtype):
            least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
            raise SearchError(
                f"an index of {dtype} vectors takes queries of integers from {least} to {most}, and these `queries` of"
                f" {array.dtype} have other values: scale and round them like the vectors"
            )
        return array.astype(dtype, copy=False)
    if dtype == np.float16:
        _check_float16("queries", array)
    array = array.astype(dtype, copy=False)
    _check_finite("queries", array)
    return array


def is_held(array: NDArray[Any], dtype: np.dtype[Any]) -> bool:
    """Whether all values of an array are integers that an integer dtype has."""
    least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
    wide = array if array.dtype.kind in "iu" else array.astype(np.float64)
    return bool(((wide >= least) & (wide <= most)).all()) and np.array_equal(wide.astype(dtype), wide)


def checked_ids(ids: ArrayLike | None, num_vectors: int) -> NDArray[np.int64]:
    """Return the user's ids as int64; positions by default.

    Raises:
        SearchError: the wrong number of ids, a duplicate, a value that is not a signed 64-bit integer, or -1.
    """
    if ids is None:
        return np.arange(num_vectors, dtype=np.int64)
    array = np.asarray(ids)
    if array.shape != (num_vectors,):
        raise SearchError(f"`ids` has shape {array.shape}, and there are {num_vectors:,} vectors: give one id for each")
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise SearchError(f"`ids` are {array.dtype}: give 64-bit integers")
    if array.size and int(array.max()) > np.iinfo(np.int64).max:
        raise SearchError(f"`ids` has {int(array.max())}: give signed 64-bit integers")
    array = array.astype(np.int64)
    order = np.argsort(array, kind="stable")
    repeated = np.flatnonzero(array[order][1:] == array[order][:-1])
    if repeated.size:
        first, second = order[repeated[0]], order[repeated[0] + 1]
        raise SearchError(f"`ids` repeats {array[first]}, at positions {first} and {second}: ids must be unique")
    if (array == -1).any():
        raise SearchError(
            f"`ids` has -1, at position {int(np.argmax(array == -1))}: -1 marks a missing result. Use another id"
        )
    return array


def checked_count(name: str, value: Any) -> int:
    """Check `k`, the number of neighbours, or `effort`, the search effort.

    Raises:
        SearchError: not an integer of at least 1.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise SearchError(f"`{name}` is {value!r}: give an integer of at least 1")
    return int(value)


def checked_filter(allowed: ArrayLike | None, num_vectors: int) -> NDArray[np.bool_] | None:
    """Return the mask of the vectors that may be returned, bool `[n]`.

    Raises:
        SearchError: not one bool for each vector.
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
        raise SearchError(f"`{name}` is not an array: its rows have different lengths. Give `[n, d]`") from None
    if (
        array.dtype in DTYPES.values()
        or np.issubdtype(array.dtype, np.floating)
        or np.issubdtype(array.dtype, np.integer)
    ):
        return array
    raise SearchError(f"`{name}` has dtype {array.dtype}: give {', '.join(DTYPES)}, or numbers that convert to float32")


def _check_float16(name: str, array: NDArray[Any]) -> None:
    """Check that differences of elements do not overflow float16."""
    if not array.size or np.abs(array).max() <= MAX_FLOAT16:
        return
    row, column = np.unravel_index(int(np.argmax(np.abs(array))), array.shape)
    if np.isfinite(array[row, column]):
        raise SearchError(
            f"`{name}` has {float(array[row, column]):g} at [{row}, {column}]: elements of a float16 index have a magnitude of at"
            f" most {MAX_FLOAT16:,}, so that no difference overflows. Convert the vectors to float32, or scale them down"
        )


def _check_finite(name: str, array: NDArray[Any]) -> None:
    """Check that every element is finite, and every |x|^2 too."""
    if is_integer(array.dtype):
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
            raise SearchError(f"{what}. Drop such rows, or replace the values")
        raise SearchError(
            f"row {start + row} of `{name}` has a squared length that overflows float32: scale the vectors and the"
            " queries down"
        )
