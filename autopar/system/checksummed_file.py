"""Files of a cache: each there whole or not at all, with a digest that finds what a disk has damaged.

In: a path, and bytes to keep. Out: these bytes again, or an error that says why they cannot be used. No lock is taken:
whoever reads finds the old file, the new one or none. And the one rule of what may be run: `refuse_of_others`.

    head    one line of JSON: the format's name, the digest of the body, and whatever the writer says besides
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
    """Head and body of a file, which counts as used now; None where there is none.

    Args:
        format: what the head has to say it is.
        runs: the body is a program, so a file that others may have written is refused.

    Raises:
        OSError: it cannot be read. ValueError: it is damaged, or others may have written it; it says so.
    """
    try:
        with path.open("rb") as file:
            if runs:
                refuse_of_others(path, os.fstat(file.fileno()))
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


def refuse_of_others(path: Path, status: os.stat_result | None = None) -> None:
    """Refuse a program, or a folder of programs, that another user may have written or may put another in the place of.

    It belongs to who runs this, or to root, and nobody else may write it, be it as one of a group. The same holds of every
    folder above it, but that others may write where they cannot replace what is not theirs (a sticky one, as `/tmp` is).

    Args:
        status: of the file as it was opened; by default of what stands there now.

    Raises:
        OSError: it cannot be looked at. ValueError: it is refused; it says why.
    """
    if not hasattr(os, "geteuid"):
        return
    refuse_status_of_others(path.stat() if status is None else status, "it")
    for folder in {*path.absolute().parents, *path.resolve().parents}:  # those of a link, and of what it leads to
        above = folder.stat()
        refuse_status_of_others(above, f"the folder {folder}", sticky_is_enough=True)


def refuse_status_of_others(status: os.stat_result, what: str, *, sticky_is_enough: bool = False) -> None:
    """Refuse one file or folder, whatever it stands in.

    Raises:
        ValueError: it says why.
    """
    if not hasattr(os, "geteuid"):
        return
    if status.st_uid not in (os.geteuid(), 0):
        raise ValueError(f"{what} belongs to another user, {status.st_uid}, and what is in it is not run")
    is_shared = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if is_shared and not (sticky_is_enough and status.st_mode & stat.S_ISVTX):
        raise ValueError(
            f"other users may write {what} (mode {stat.S_IMODE(status.st_mode):o}), so what is in it is not run: `chmod go-w`"
        )


def make_private(folder: Path) -> None:
    """Make a folder, and those above it that are not there, for this user alone.

    Raises:
        OSError: it cannot be made.
    """
    for one in reversed([folder, *folder.parents]):  # `mkdir(parents=True)` gives its mode to the last alone
        if not one.is_dir():
            one.mkdir(mode=0o700, exist_ok=True)


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
        make_private(path.parent)
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
