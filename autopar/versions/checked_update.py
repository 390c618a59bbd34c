"""Check what a worker pushes against the arrays of the store.

In: an update as a user passes it, and the keys and rows that it is for. Out: `Pushed` by key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from autopar.errors import StoreError
from autopar.versions.factors import SufficientFactors
from autopar.versions.keys import Keys, Selected, shown
from autopar.versions.server_update import Pushed

#: Shape and dtype by key.
Kinds = Mapping[str, tuple[tuple[int, ...], np.dtype]]


def checked(update: Any, keys: Keys, chosen: Selected, kinds: Kinds) -> dict[str, Pushed]:
    """The update of each key.

    Args:
        chosen: what `keys` selects.
        kinds: of the arrays in the store.

    Raises:
        StoreError: keys without an array or arrays without a key, or an array of another shape or dtype.
    """
    if not isinstance(update, Mapping):
        if not isinstance(keys, str):
            raise StoreError(f"`update` is a {type(update).__name__}: give an array by key, as {{'kernel': gradient}}")
        update = {keys: update}
    if update.keys() != chosen.keys():
        missing = [shown(key) for key in chosen if key not in update]
        extra = [shown(key) for key in update if key not in chosen]
        words = [f"has no array for {', '.join(missing[:5])}"] if missing else []
        words += [f"has arrays for {', '.join(extra[:5])}, which `keys` does not name"] if extra else []
        raise StoreError(f"`update` {' and '.join(words)}: give one array for each key")
    return {key: _pushed(key, update[key], rows, *kinds[key]) for key, rows in chosen.items()}


def _pushed(key: str, value: Any, rows: np.ndarray | None, shape: tuple[int, ...], dtype: np.dtype) -> Pushed:
    if isinstance(value, SufficientFactors):
        return _smaller(key, value, rows, shape, dtype)
    if not isinstance(value, jax.Array | np.ndarray | np.generic):
        raise StoreError(f"the update of {shown(key)} is a {type(value).__name__}, not an array")
    if rows is not None:
        shape = (len(rows), *shape[1:])
    if value.shape != shape or value.dtype != dtype:
        what = shown(key) if rows is None else f"{len(rows)} rows of {shown(key)}"
        way_out = f": use `.astype({str(dtype)!r})`" if value.shape == shape else ""
        raise StoreError(
            f"the update of {what} is {value.dtype}{value.shape}, and the store takes {dtype}{shape}{way_out}"
        )
    return Pushed(_owned(value)) if rows is None else Pushed(rows=((rows, _owned(value)),))


def _smaller(
    key: str, factors: SufficientFactors, rows: np.ndarray | None, shape: tuple[int, ...], dtype: np.dtype
) -> Pushed:
    """Factors as they are or as a matrix, whichever has fewer bytes."""
    if rows is not None or len(shape) != 2:
        raise StoreError(f"the update of {shown(key)} is a product of factors, which is for a whole matrix")
    left, right = factors.left, factors.right
    for side, array, size in (("left", left, shape[0]), ("right", right, shape[1])):
        if (
            not isinstance(array, jax.Array | np.ndarray)
            or array.dtype != dtype
            or array.shape != (*left.shape[:1], size)
        ):
            kind = f"{array.dtype}{array.shape}" if hasattr(array, "dtype") else type(array).__name__
            raise StoreError(
                f"the {side} factor for {shown(key)} is {kind}; for a matrix of {dtype}{shape} it is {dtype} of shape"
                f" (K, {size}), with the same K on both sides"
            )
    own = SufficientFactors(_owned(left), _owned(right))
    matrix_bytes = shape[0] * shape[1] * dtype.itemsize
    return Pushed(factors=(own,)) if own.num_bytes < matrix_bytes else Pushed(own.product())


def _owned(value: Any) -> jax.Array:
    """An array whose memory nobody else changes: JAX would share that of a NumPy array."""
    return value if isinstance(value, jax.Array) else np.array(value)  # pyright: ignore[reportReturnType]
