"""Compile loops with numba, cached on disk and run without the GIL.

Importing numba takes most of a second, and the first compilation several. Modules that import this one are therefore
imported only once a problem is large enough.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from numba import njit

Loop = TypeVar("Loop", bound=Callable[..., object])


def compiled(loop: Loop) -> Loop:
    """Compile a function at its first call; its arguments are numbers, arrays or named tuples of them."""
    try:
        return cast(Loop, njit(cache=True, nogil=True)(loop))
    except RuntimeError:  # no cache: neither the package's folder nor the user's is writable
        return cast(Loop, njit(nogil=True)(loop))
