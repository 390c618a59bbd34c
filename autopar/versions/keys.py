"""Read which keys and rows a pull or push names.

In: None for all keys, a key, a list of keys, a range of keys as `slice("a", "b")`, or rows by key.
Out: for each key, its rows, or None for the whole array.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from autopar.errors import StoreError

#: What a call may name. A range of keys is in the order of strings and excludes its end; rows are whole numbers.
Keys = str | slice | Sequence[str] | Mapping[str, Any] | None
#: For each key its rows, or None for all of them.
Selected = dict[str, np.ndarray | None]


def selected(keys: Keys, shapes: Mapping[str, tuple[int, ...]]) -> Selected:
    """The keys and rows that a call names, in its order.

    Args:
        shapes: the shape of each key of the store, in the order of the keys.

    Raises:
        StoreError: a key that the store does not have, or rows that its array does not have.
    """
    if keys is None:
        return dict.fromkeys(shapes)
    if isinstance(keys, str):
        if keys not in shapes:
            raise _unknown(keys, shapes)
        return {keys: None}
    if isinstance(keys, slice):
        return _in_range(keys, shapes)
    if isinstance(keys, Mapping):
        return {key: None if rows is None else _rows(key, rows, shapes) for key, rows in keys.items()}
    if not isinstance(keys, Sequence):
        raise StoreError(f"`keys` is {shown(keys)}: give a key, a list of keys, a `slice` of keys, or rows by key")
    for key in keys:
        if not isinstance(key, str) or key not in shapes:
            raise _unknown(key, shapes)
    return dict.fromkeys(keys)


def _in_range(keys: slice, shapes: Mapping[str, tuple[int, ...]]) -> Selected:
    for bound in (keys.start, keys.stop):
        if bound is not None and not isinstance(bound, str):
            raise StoreError(f"a range of keys is from one string to another, not {shown(keys)}")
    if keys.step is not None:
        raise StoreError(f"a range of keys has no step; got {shown(keys)}")
    return {
        key: None
        for key in shapes
        if (keys.start is None or keys.start <= key) and (keys.stop is None or key < keys.stop)
    }


def _rows(key: str, rows: Any, shapes: Mapping[str, tuple[int, ...]]) -> np.ndarray:
    """The rows of one key as numbers, checked: JAX itself would drop or clamp those that are not there."""
    if not isinstance(key, str) or key not in shapes:
        raise _unknown(key, shapes)
    if not shapes[key]:
        raise StoreError(f"{shown(key)} is a single number and has no rows: pull or push it whole")
    try:
        found = np.asarray(rows)
    except Exception as error:
        raise StoreError(f"the rows of {shown(key)} are {shown(rows)}, not whole numbers ({error})") from None
    if found.size == 0:
        return np.zeros((0,), np.int32)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise StoreError(
            f"the rows of {shown(key)} are {found.dtype} of shape {found.shape}: give a list of whole numbers"
        )
    least, most, size = int(found.min()), int(found.max()), shapes[key][0]
    if least < 0 or most >= size:
        wrong = least if least < 0 else most
        raise StoreError(f"{shown(key)} has rows 0 to {size - 1}; got row {wrong}")
    return found.astype(np.int32)


def _unknown(key: object, shapes: Mapping[str, tuple[int, ...]]) -> StoreError:
    close = difflib.get_close_matches(str(key)[:200], shapes, n=2, cutoff=0.6)
    meant = f" Did you mean {' or '.join(map(shown, close))}?" if close else ""
    known = ", ".join(shown(name) for name in list(shapes)[:5]) + (
        f" and {len(shapes) - 5} more" if len(shapes) > 5 else ""
    )
    return StoreError(f"the store has no key {shown(key)}.{meant} Its keys are {known}")


def shown(value: object) -> str:
    """A value as messages show it."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"
