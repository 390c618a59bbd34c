"""Names of source files that are the same on every machine: so plans with lines in them can be compared, and reviewed.

In: a path. Out: the path below the checkout that the file is in, or below the folder that libraries are installed in.
"""

from __future__ import annotations

import functools
from pathlib import Path

#: The folder of this package.
PACKAGE = Path(__file__).resolve().parents[1]
_INSTALLED = ("/site-packages/", "/dist-packages/")


@functools.lru_cache(maxsize=1024)
def portable_path(path: str) -> str:
    """A file's name, as everyone has it who has the same checkout or the same library; of a file in neither, below the
    working folder, or as it is.

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
