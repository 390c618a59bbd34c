"""Define the page of a page file: 4,096 bytes, of which the last four are a checksum.

In: payloads of up to 4,092 bytes. Out: pages, and the payloads of pages that match their checksum. The checksum is the
CRC-32 of the file's id, the page number and the payload, so a page of another file or of another place does not match
either. docs/vector-search-on-disk.md has the file format, byte by byte.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

PAGE_BYTES = 4096
#: Bytes of a page before its checksum.
PAYLOAD_BYTES = PAGE_BYTES - 4

#: Bytes of the random id of a file.
ID_BYTES = 8


def num_pages_of(num_bytes: int) -> int:
    """The number of pages whose payloads hold `num_bytes`."""
    return -(-num_bytes // PAYLOAD_BYTES)


def sealed(stream: NDArray[np.uint8], file_id: bytes, first_page: int) -> NDArray[np.uint8]:
    """Pages, uint8 `[num_pages, PAGE_BYTES]`, with the bytes of `stream` as payloads, padded with zeros.

    Args:
        first_page: number of the first page.
    """
    pages = np.zeros((num_pages_of(stream.size), PAGE_BYTES), np.uint8)
    whole = stream.size // PAYLOAD_BYTES
    pages[:whole, :PAYLOAD_BYTES] = stream[: whole * PAYLOAD_BYTES].reshape(whole, PAYLOAD_BYTES)
    rest = stream[whole * PAYLOAD_BYTES :]
    if rest.size:
        pages[whole, : rest.size] = rest
    checksums = [_checksum(page, file_id, first_page + at) for at, page in enumerate(pages)]
    pages[:, PAYLOAD_BYTES:] = np.array(checksums, "<u4").view(np.uint8).reshape(-1, 4)
    return pages


def first_damaged(pages: NDArray[np.uint8], file_id: bytes, numbers: NDArray[Any]) -> int | None:
    """The number of the first page that does not match its checksum; None if all match.

    Args:
        pages: `[num_pages, PAGE_BYTES]`.
        numbers: page number of each.
    """
    stored = np.ascontiguousarray(pages[:, PAYLOAD_BYTES:]).view("<u4").reshape(-1)
    for page, number, checksum in zip(pages, numbers.tolist(), stored.tolist(), strict=True):
        if _checksum(page, file_id, number) != checksum:
            return number
    return None


def payloads(pages: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The payloads of consecutive pages as one stream of bytes."""
    return np.ascontiguousarray(pages[:, :PAYLOAD_BYTES]).reshape(-1)


def _checksum(page: NDArray[np.uint8], file_id: bytes, number: int) -> int:
    return zlib.crc32(page[:PAYLOAD_BYTES], zlib.crc32(file_id + number.to_bytes(8, "little")))
