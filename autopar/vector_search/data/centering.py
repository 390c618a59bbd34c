"""What is subtracted of a corpus, so that its scores keep their digits: distances do not change by it.

In: vectors, `[n, d]`. Out: the vectors less a centre, and that centre, `[d]`, both of their dtype, of which they can be made
again to the last bit: an element of the centre is near the mean of its column, or 0 where a difference from it would be
rounded. So nothing is held twice, and what is saved is what was given.

2 q.x - |x|^2 has as many digits less than |q - x|^2 as the vectors' distance from the origin is larger than that between
them. Where a column spans magnitudes, as with a few values near 0 beside large ones, it is not centred: a search then
finds out that it is not certain (`exact`), and looks again.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from autopar.vector_search.data.metrics import Metric

#: Vectors that the mean is taken of, and elements that are centred at a time.
_SAMPLE, _AT_ONCE = 65_536, 2**22


def is_centred(dtype: Any, metric: Metric) -> bool:
    """Whether a corpus has a centre: not of integers, whose scores are exact, nor of cosines, which it would change."""
    return metric != "cosine" and dtype != jnp.int8


def centre_struct(dim: int, dtype: Any, metric: Metric) -> jax.ShapeDtypeStruct | None:
    """The shape of a centre, where there is one."""
    return jax.ShapeDtypeStruct((dim,), dtype) if is_centred(dtype, metric) else None


def centred(vectors: NDArray[Any], metric: Metric) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """`[n, d]` from their centre, and the centre, `[d]`; the vectors themselves, and None, where there is none.

    Args:
        vectors: `[n, d]`, checked.
    """
    dtype = vectors.dtype
    if not is_centred(dtype, metric):
        return vectors, None
    centre = _near_mean(vectors).astype(dtype)
    wide = centre.astype(np.float32)
    less = np.empty_like(vectors, order="C")
    is_same = np.ones(len(centre), bool)
    rows = max(1, _AT_ONCE // len(centre))
    for start in range(0, len(vectors), rows):
        part = vectors[start : start + rows].astype(np.float32, copy=False)
        less[start : start + rows] = part - wide
        again = less[start : start + rows].astype(np.float32, copy=False) + wide
        is_same &= (again == part).all(axis=0)
    less[:, ~is_same] = vectors[:, ~is_same]
    return less, np.where(is_same, centre, np.zeros((), dtype))


def moved(vectors: NDArray[Any], metric: Metric) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """As `centred`, for searches that tell distances of the moved vectors: of l2 alone; None where nothing moves."""
    if metric != "l2":
        return vectors, None
    less, centre = centred(vectors, metric)
    return (vectors, None) if centre is None or not centre.any() else (less, centre)


def less_centre(vectors: NDArray[Any], centre: NDArray[Any] | None) -> NDArray[Any]:
    """Vectors or queries, `[m, d]`, from a centre that is known."""
    if centre is None:
        return vectors
    return (vectors.astype(np.float32) - centre.astype(np.float32)).astype(vectors.dtype)


def whole(less: NDArray[Any], centre: NDArray[Any] | None) -> NDArray[Any]:
    """The vectors again, of what `centred` gave."""
    if centre is None:
        return less
    return (less.astype(np.float32) + centre.astype(np.float32)).astype(less.dtype)


def vectors_of(less: jax.Array, centre: jax.Array) -> jax.Array:
    """The same within a program, f32."""
    return less.astype(jnp.float32) + centre.astype(jnp.float32)


def queries_from(queries: jax.Array, centre: jax.Array | None, metric: Metric) -> jax.Array:
    """Queries to score centred vectors by, `[..., d]`: of l2 from the centre too; a product shifts all scores alike."""
    if centre is None or metric != "l2":
        return queries
    return (queries.astype(jnp.float32) - centre.astype(jnp.float32)).astype(queries.dtype)


def _near_mean(vectors: NDArray[Any]) -> NDArray[np.float64]:
    """`[d]`: multiples of a power of two that is small beside the spread of their column: of whole numbers, for example,
    differences from it then are whole numbers."""
    some = vectors[:: max(1, len(vectors) // _SAMPLE)].astype(np.float64)
    if not len(some):
        return np.zeros(vectors.shape[1])
    mean = some.mean(axis=0)
    spread = np.abs(some - mean).mean(axis=0)
    _, exponent = np.frexp(spread)
    grid = np.where(spread > 0, np.ldexp(1.0, np.clip(exponent, -1000, 1000) - 4), 1)
    return np.where(spread > 0, np.round(mean / grid) * grid, some[0])
