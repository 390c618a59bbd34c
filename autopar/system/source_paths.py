"""Make paths of source files independent of the machine, so that plans that quote lines can be compared.

In: a path. Out: the path relative to the file's checkout or to the folder of installed libraries.
"""

from __future__ import annotations

import functools
from pathlib import Path

#: The folder of this package.
PACKAGE = Path(__file__).resolve().parents[1]
_INSTALLED = ("/site-packages/", "/dist-packages/")


@functools.lru_cache(maxsize=1024)
def portable_path(path: str) -> str:
    """A file's path relative to its checkout or to the folder of installed libraries.

    A path outside both is relative to the working folder if it is inside it, else unchanged.

    >>> portable_path("/venv/lib/python3.13/site-packages/flax/linen/linear.py")
    'flax/linen/linear.py'
    """
    for installed in _INSTALLED:
        _, found, within = path.replace("\\", "/").rpartition(installed)
        if found:
            return within
    file = Path(path)
    roots = (folder for folder in file.parents if (folder / ".git").exists())
    root = next(roots, Path.cwd())
    return file.relative_to(root).as_posix() if file.is_relative_to(root) else path
