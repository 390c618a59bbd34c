"""Read and write cache files atomically, with a checksum, and refuse programs that other users may have written.

In: a path, and bytes to keep. Out: these bytes again, or an error that says why they cannot be used. There is no lock:
a reader finds the old file, the new one or none. `refuse_of_others` decides which files may be run.

    head    one line of JSON: name of the format, digest of the body, and further fields of the writer
    body    bytes
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read_kept(path: Path, format: str, *, runs: bool = False) -> tuple[dict[str, Any], bytes] | None:
    """Read the head and body of a file, and mark it as used; None if there is no file.

    Args:
        format: expected name of the format.
        runs: whether the body is a program; then a file that others may have written is refused.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is damaged, or others may have written it; the message says which.
    """
    try:
        with path.open("rb") as file:
            if runs:
                refuse_of_others(path, os.fstat(file.fileno()))
            data = file.read()
    except (FileNotFoundError, NotADirectoryError):  # writing reports the latter
        return None
    line, _, body = data.partition(b"\n")
    head = json.loads(line)
    if not isinstance(head, dict) or head.get("format") != format or head.get("sha256") != _sha256(body):
        raise ValueError("its checksum does not match")
    with contextlib.suppress(OSError):
        os.utime(path)
    return head, body


def refuse_of_others(path: Path, status: os.stat_result | None = None) -> None:
    """Refuse a program, or a folder of programs, that another user may have written or may replace.

    It must belong to the current user or root, and neither its group nor others may write it. The same holds for every
    folder above it, except that others may write sticky folders such as `/tmp`, where they cannot replace files.

    Args:
        status: status of the opened file; by default that of `path`.

    Raises:
        OSError: the status cannot be read.
        ValueError: it is refused; the message says why.
    """
    if not hasattr(os, "geteuid"):
        return
    refuse_status_of_others(path.stat() if status is None else status, "it")
    for folder in {*path.absolute().parents, *path.resolve().parents}:  # the parents of a link and of its target
        above = folder.stat()
        refuse_status_of_others(above, f"the folder {folder}", sticky_is_enough=True)


def refuse_status_of_others(status: os.stat_result, what: str, *, sticky_is_enough: bool = False) -> None:
    """Refuse one file or folder by its own status, regardless of the folders above it.

    Raises:
        ValueError: it is refused; the message says why.
    """
    if not hasattr(os, "geteuid"):
        return
    if status.st_uid not in (os.geteuid(), 0):
        raise ValueError(f"{what} belongs to another user, {status.st_uid}, so its content is not run")
    is_shared = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if is_shared and not (sticky_is_enough and status.st_mode & stat.S_ISVTX):
        raise ValueError(
            f"other users may write {what} (mode {stat.S_IMODE(status.st_mode):o}), so its content is not run: `chmod go-w`"
        )


def make_private(folder: Path) -> None:
    """Create a folder and its missing parents with access for this user only.

    Raises:
        OSError: it cannot be created.
    """
    for one in reversed([folder, *folder.parents]):  # `mkdir(parents=True)` applies its mode to the last folder only
        if not one.is_dir():
            one.mkdir(mode=0o700, exist_ok=True)


def write_kept(path: Path, format: str, body: bytes, about: Mapping[str, Any], most: int) -> None:
    """Write a file atomically, then delete the least recently used files of its folder.

    Args:
        about: further fields of the head.
        most: number of files of this suffix to keep.

    Raises:
        OSError: the file cannot be written; no temporary file is left.
    """
    head = {"format": format, "sha256": _sha256(body), **about}
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        make_private(path.parent)
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:  # noqa: PTH123
            file.write(json.dumps(head).encode() + b"\n" + body)
        temporary.replace(path)
        _prune(path.parent, path.suffix, most)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _prune(folder: Path, suffix: str, most: int) -> None:
    """Delete the least recently used files; another process may do the same concurrently."""
    entries = sorted(folder.glob(f"*{suffix}"), key=last_used)
    for entry in entries[: max(0, len(entries) - most)]:
        with contextlib.suppress(OSError):
            entry.unlink()


def last_used(path: Path) -> float:
    """The time of a file's last use; 0 if the file is gone."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
