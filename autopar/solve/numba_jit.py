"""Loops compiled by numba, kept on disk, and run without Python's lock.

Importing numba takes most of a second, and compiling takes several the first time: whoever needs the modules that
import this one imports them when a problem is large enough.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from numba import njit

Loop = TypeVar("Loop", bound=Callable[..., object])


def compiled(loop: Loop) -> Loop:
    """The function, compiled when it is first called; it takes numbers, arrays and named tuples of them."""
    try:
        return cast(Loop, njit(cache=True, nogil=True)(loop))
    except RuntimeError:  # nowhere to keep it: neither the package's folder nor the user's can be written to
        return cast(Loop, njit(nogil=True)(loop))
