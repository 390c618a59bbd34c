"""Write files atomically. In: a text and a path. Out: the complete file, or the previous one."""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path


def write_whole(text: str, path: str | os.PathLike[str]) -> None:
    """Write a text to a temporary file next to `path`, then rename it.

    Raises:
        OSError: the file cannot be written; no temporary file is left.
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
