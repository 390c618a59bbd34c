"""Encode what routers and servers send each other: arrays in NumPy's format, in a zip archive without pickles."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.vector_search.data.inputs import DTYPES


def encoded(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """The bytes of some arrays; bfloat16 as uint16."""
    out = io.BytesIO()
    plain = {name: each.view(np.uint16) if each.dtype.name == "bfloat16" else each for name, each in arrays.items()}
    np.savez(out, allow_pickle=False, **plain)  # pyright: ignore[reportArgumentType]
    return out.getvalue()


def decoded(content: bytes) -> dict[str, NDArray[Any]]:
    """The arrays of some bytes.

    Raises:
        ValueError, OSError, KeyError: no such arrays.
    """
    with np.load(io.BytesIO(content), allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


def of_dtype(array: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """An array that was sent as `encoded` sends this dtype."""
    return array.view(dtype) if dtype == DTYPES["bfloat16"] and array.dtype == np.uint16 else array
