"""Files of a cache: each there whole or not at all, with a digest that finds what a disk has damaged.

In: a path, and bytes to keep. Out: these bytes again, or an error that says why they cannot be used. No lock is taken:
whoever reads finds the old file, the new one or none.

    head    one line of JSON: the format's name, the digest of the body, and whatever the writer says besides
    body    bytes
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read_kept(path: Path, format: str, *, runs: bool = False) -> tuple[dict[str, Any], bytes] | None:
    """Head and body of a file, which counts as used now; None where there is none.

    Args:
        format: what the head has to say it is.
        runs: the body is a program: it must belong to who runs this, or to root, and nobody else may write it.

    Raises:
        OSError: it cannot be read. ValueError: it is damaged, or others may have written it; it says so.
    """
    try:
        with path.open("rb") as file:
            if runs:
                _refuse_of_others(os.fstat(file.fileno()))
            data = file.read()
    except (FileNotFoundError, NotADirectoryError):  # the latter is said when it is to be written
        return None
    line, _, body = data.partition(b"\n")
    head = json.loads(line)
    if not isinstance(head, dict) or head.get("format") != format or head.get("sha256") != _sha256(body):
        raise ValueError("its checksum is another")
    with contextlib.suppress(OSError):
        os.utime(path)
    return head, body


def _refuse_of_others(status: os.stat_result) -> None:
    if not hasattr(os, "geteuid"):
        return
    if status.st_uid not in (os.geteuid(), 0):
        raise ValueError(f"it belongs to another user, {status.st_uid}, and is not run")
    if status.st_mode & 0o022:
        raise ValueError(f"other users may write it (mode {status.st_mode & 0o777:o}), so it is not run")


def write_kept(path: Path, format: str, body: bytes, about: Mapping[str, Any], most: int) -> None:
    """Write a file beside its place and move it there; then drop what was used longest ago.

    Args:
        about: more for the head. most: files of this suffix that the folder keeps.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    head = {"format": format, "sha256": _sha256(body), **about}
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:  # noqa: PTH123
            file.write(json.dumps(head).encode() + b"\n" + body)
        temporary.replace(path)
        _prune(path.parent, path.suffix, most)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _prune(folder: Path, suffix: str, most: int) -> None:
    """Another process may do the same at this moment."""
    entries = sorted(folder.glob(f"*{suffix}"), key=last_used)
    for entry in entries[: max(0, len(entries) - most)]:
        with contextlib.suppress(OSError):
            entry.unlink()


def last_used(path: Path) -> float:
    """When a file was read or written; 0 where it is gone."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
