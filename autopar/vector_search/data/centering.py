"""Subtract a centre from a corpus, so that float scores lose fewer digits; distances do not change.

In: vectors, `[n, d]`. Out: the vectors minus a centre, and the centre, `[d]`, both in the corpus's dtype. Adding the
centre restores every vector to the last bit, so only the centred copy is stored. An element of the centre is close to
the mean of its column, or 0 where the subtraction would round.

The score 2 q.x - |x|^2 cancels: it loses as many digits of |q - x|^2 as the distance of the vectors from the origin
exceeds the distance between them. A column that spans magnitudes, such as a few values near 0 next to large ones, is
not centred. A search then detects that its result is uncertain (`kernels.exact_top_k`) and retries
(`frame.exact_retry`).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from autopar.vector_search.data.metrics import Metric, is_integer

#: Vectors in the sample for the mean; elements centred per chunk.
_SAMPLE, _AT_ONCE = 65_536, 2**22


def is_centred(dtype: Any, metric: Metric) -> bool:
    """Whether a corpus has a centre. Integer scores are exact without one, and a centre would change cosines."""
    return metric != "cosine" and not is_integer(dtype)


def centre_struct(dim: int, dtype: Any, metric: Metric) -> jax.ShapeDtypeStruct | None:
    """The shape and dtype of the centre, or None if there is none."""
    return jax.ShapeDtypeStruct((dim,), dtype) if is_centred(dtype, metric) else None


def centre_corpus(vectors: NDArray[Any], metric: Metric) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """Return the centred vectors, `[n, d]`, and the centre, `[d]`; or the vectors unchanged and None.

    Args:
        vectors: `[n, d]`, checked.
    """
    dtype = vectors.dtype
    if not is_centred(dtype, metric):
        return vectors, None
    centre = _near_mean(vectors).astype(dtype)
    wide = centre.astype(np.float32)
    centred = np.empty_like(vectors, order="C")
    is_exact = np.ones(len(centre), bool)
    rows = max(1, _AT_ONCE // len(centre))
    for start in range(0, len(vectors), rows):
        part = vectors[start : start + rows].astype(np.float32, copy=False)
        centred[start : start + rows] = part - wide
        restored = centred[start : start + rows].astype(np.float32, copy=False) + wide
        is_exact &= (restored == part).all(axis=0)
    centred[:, ~is_exact] = vectors[:, ~is_exact]
    return centred, np.where(is_exact, centre, np.zeros((), dtype))


def centre_for_l2(vectors: NDArray[Any], metric: Metric) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """Centre a corpus whose distances are those of the centred vectors: l2 only; otherwise the centre is None."""
    if metric != "l2":
        return vectors, None
    centred, centre = centre_corpus(vectors, metric)
    return (vectors, None) if centre is None or not centre.any() else (centred, centre)


def subtract_centre(vectors: NDArray[Any], centre: NDArray[Any] | None) -> NDArray[Any]:
    """Subtract a known centre from vectors or queries, `[m, d]`."""
    if centre is None:
        return vectors
    return (vectors.astype(np.float32) - centre.astype(np.float32)).astype(vectors.dtype)


def restore_vectors(centred: NDArray[Any], centre: NDArray[Any] | None) -> NDArray[Any]:
    """Restore the vectors that `centre_corpus` centred, bit for bit."""
    if centre is None:
        return centred
    return (centred.astype(np.float32) + centre.astype(np.float32)).astype(centred.dtype)


def restore_in_f32(centred: jax.Array, centre: jax.Array) -> jax.Array:
    """Restore centred vectors inside a program, in float32."""
    return centred.astype(jnp.float32) + centre.astype(jnp.float32)


def centre_queries(queries: jax.Array, centre: jax.Array | None, metric: Metric) -> jax.Array:
    """Centre queries, `[..., d]`, for scores of centred vectors. Inner products need none: all scores shift equally."""
    if centre is None or metric != "l2":
        return queries
    return (queries.astype(jnp.float32) - centre.astype(jnp.float32)).astype(queries.dtype)


def _near_mean(vectors: NDArray[Any]) -> NDArray[np.float64]:
    """Column means, `[d]`, rounded to a small power of two, so that differences of integer columns stay integers."""
    some = vectors[:: max(1, len(vectors) // _SAMPLE)].astype(np.float64)
    if not len(some):
        return np.zeros(vectors.shape[1])
    mean = some.mean(axis=0)
    spread = np.abs(some - mean).mean(axis=0)
    _, exponent = np.frexp(spread)
    grid = np.where(spread > 0, np.ldexp(1.0, np.clip(exponent, -1000, 1000) - 4), 1)
    return np.where(spread > 0, np.round(mean / grid) * grid, some[0])
