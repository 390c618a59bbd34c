"""Append operations to a log, in groups that are on the device before they are acknowledged, and read them back.

    header     magic, version, file id, generation, first sequence number, CRC-32
    groups     length, CRC-32, first sequence number, number of records; then each record: its length, its bytes

A group is written when the one before is on the device. So a damaged group that an intact one follows was acknowledged,
and the log is refused; a damaged last one was being written when the process or the machine stopped, and is cut off.
"""

from __future__ import annotations

import os
import re
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from autopar.errors import IndexFileError
from autopar.vector_search.on_disk.page_file import damaged
from autopar.vector_search.on_disk.pages import ID_BYTES
from autopar.vector_search.updates.files import Files, why

MAGIC = b"autopar log\n\0\0\0\0"
VERSION = 1
#: Magic, version, file id, generation, first sequence number; a CRC-32 follows.
_HEADER = struct.Struct(f"<{len(MAGIC)}sI{ID_BYTES}sQQ")
HEADER_BYTES = _HEADER.size + 4
#: Bytes of the records, CRC-32, first sequence number, number of records.
_GROUP = struct.Struct("<IIQI")
_LENGTH = struct.Struct("<I")
#: Names of logs, as `path_of` gives them.
_NAME = re.compile("log-[0-9]{12}")


class Sequenced(NamedTuple):
    """The bytes of a record, and its sequence number."""

    sequence: int
    body: bytes


@dataclass(slots=True)
class Log:
    """A log that is open for appending. Not thread-safe.

    Args:
        handle: the file.
        size: bytes of the header and of the groups that are on the device.
        next_sequence: the sequence number of the next record.
    """

    path: Path
    files: Files
    file_id: bytes
    handle: int
    size: int
    next_sequence: int

    def append(self, bodies: Sequence[bytes]) -> int:
        """Write records as one group, and wait until they are on the device. Return the last sequence number.

        Raises:
            OSError: the group cannot be written; it is not in the log.
            IndexFileError: the group cannot be written and not be removed either: the log must be opened again.
        """
        records = b"".join(_LENGTH.pack(len(body)) + body for body in bodies)
        tail = _tail(self.next_sequence, len(bodies))
        group = _GROUP.pack(len(records), _checksum(self.file_id, tail + records), self.next_sequence, len(bodies))
        try:
            self.files.write(self.handle, group + records, self.size)
            self.files.sync(self.handle)
        except (Exception, KeyboardInterrupt) as error:
            self._cut(error)
            raise
        self.size += len(group) + len(records)
        self.next_sequence += len(bodies)
        return self.next_sequence - 1

    def take_back(self, size: int, num_records: int, error: BaseException) -> None:
        """Remove the last group.

        Args:
            size: bytes of the log before it.
            num_records: its records.
            error: why.

        Raises:
            IndexFileError: it cannot be removed.
        """
        self.size, self.next_sequence = size, self.next_sequence - num_records
        self._cut(error)

    def close(self) -> None:
        """Close the file."""
        os.close(self.handle)

    def _cut(self, error: BaseException) -> None:
        """Remove a group that was not acknowledged."""
        try:
            self.files.truncate(self.handle, self.size)
            self.files.sync(self.handle)
        except Exception as second:
            raise IndexFileError(
                f"{self.path} cannot be written ({why(error)}), and the rest of the write cannot be removed"
                f" ({why(second)}): the operation may or may not be there after the index is opened again."
                " Check the disk, and open it again"
            ) from error


def all_in(folder: Path) -> list[Path]:
    """The logs of a folder, oldest first."""
    return sorted(each for each in folder.iterdir() if _NAME.fullmatch(each.name))


def path_of(folder: Path, generation: int) -> Path:
    """The log with the operations after the checkpoint of this generation."""
    return folder / f"log-{generation:012d}"


def created(folder: Path, files: Files, file_id: bytes, generation: int, next_sequence: int) -> Log:
    """Create an empty log, and wait until it is on the device.

    Raises:
        OSError: it cannot be written; there is no such file then.
    """
    path = path_of(folder, generation)
    header = _HEADER.pack(MAGIC, VERSION, file_id, generation, next_sequence)
    handle = files.open(path)
    try:
        files.truncate(handle, 0)
        files.write(handle, header + _LENGTH.pack(zlib.crc32(header)), 0)
        files.sync(handle)
        files.sync_folder(folder)
    except (Exception, KeyboardInterrupt):
        os.close(handle)
        files.remove(path)
        raise
    return Log(path, files, file_id, handle, HEADER_BYTES, next_sequence)


def has_header(path: Path) -> bool:
    """Whether a log has a whole header; one whose creation was interrupted has none, and no records."""
    with path.open("rb") as file:
        header = file.read(HEADER_BYTES)
    return len(header) == HEADER_BYTES and _LENGTH.unpack(header[-4:])[0] == zlib.crc32(header[:-4])


def opened(path: Path, files: Files, file_id: bytes, generation: int, is_last: bool) -> tuple[Log, list[Sequenced]]:
    """Open a log, and read its records. A group that was being written is cut off.

    Args:
        is_last: whether no later log exists; only then can a group be incomplete.

    Raises:
        IndexFileError: the log is damaged, or of another index.
        OSError: it cannot be read, or not be cut off.
    """
    content = path.read_bytes()
    if not has_header(path):
        raise damaged(path, "its header does not match its checksum")
    magic, version, own_id, own_generation, sequence = _HEADER.unpack_from(content)
    if magic != MAGIC or version != VERSION:
        raise IndexFileError(
            f"{path} is no log of version {VERSION} of autopar: open it with the autopar that wrote it"
        )
    if own_id != file_id or own_generation != generation:
        raise damaged(path, "it belongs to another index, or to another state of this one")
    records, at = [], HEADER_BYTES
    while True:
        bodies = _group_at(content, at, file_id, sequence)
        if bodies is None:
            break
        records += [Sequenced(sequence + place, body) for place, body in enumerate(bodies)]
        sequence += len(bodies)
        at += _GROUP.size + sum(_LENGTH.size + len(body) for body in bodies)
    if at < len(content) and (not is_last or _has_later_group(content, at + 1, file_id, sequence)):
        raise damaged(path, f"the group of operations at byte {at:,} does not match its checksum, and later ones do")
    handle = files.open(path)
    log = Log(path, files, file_id, handle, at, sequence)
    if at < len(content):
        try:
            files.truncate(handle, at)
            files.sync(handle)
        except OSError:
            log.close()
            raise
    return log, records


def _group_at(content: bytes, at: int, file_id: bytes, sequence: int) -> list[bytes] | None:
    """The records of the group at a place; None if there is no intact group that starts with this number."""
    if at + _GROUP.size > len(content):
        return None
    length, checksum, first, count = _GROUP.unpack_from(content, at)
    end = at + _GROUP.size + length
    if first != sequence or end > len(content):
        return None
    records = content[at + _GROUP.size : end]
    if _checksum(file_id, _tail(first, count) + records) != checksum:
        return None
    bodies, place = [], 0
    while place < length:
        (size,) = _LENGTH.unpack_from(records, place)
        bodies.append(records[place + _LENGTH.size : place + _LENGTH.size + size])
        place += _LENGTH.size + size
    return bodies if len(bodies) == count else None


def _has_later_group(content: bytes, at: int, file_id: bytes, sequence: int) -> bool:
    """Whether an intact group with a larger sequence number starts at or after a place."""
    for place in range(at, len(content) - _GROUP.size + 1):
        length, _, first, count = _GROUP.unpack_from(content, place)
        is_possible = sequence < first < sequence + 2**32 and 0 < count <= length // _LENGTH.size
        if is_possible and _group_at(content, place, file_id, first) is not None:
            return True
    return False


def _tail(sequence: int, count: int) -> bytes:
    return struct.pack("<QI", sequence, count)


def _checksum(file_id: bytes, content: bytes) -> int:
    return zlib.crc32(content, zlib.crc32(file_id))
