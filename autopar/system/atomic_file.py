"""Files that appear whole or not at all. In: a text and a path. Out: the file; an older one stays until then."""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path


def write_whole(text: str, path: str | os.PathLike[str]) -> None:
    """Write a text beside the path, then put it in its place.

    Raises:
        OSError: where it cannot be written; nothing is left behind.
    """
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with temporary.open("x", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
