"""Define how graph nodes lie in pages: as many whole nodes per page as fit, or a node over several pages.

In: vectors, edges and positions. Out: bytes of the stream of page payloads, and the nodes of blocks that were read. A
*block* is the unit of a read: a page, or the pages of one node that is larger. A node of number v is in block
`v // per_block`, at place `v % per_block`; its bytes are

    int32 position in the corpus, -1 for an empty place | vector | zeros up to a multiple of 4 | int32 edges, -1 for none
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.vector_search.on_disk.pages import PAYLOAD_BYTES, num_pages_of

_WORD_BYTES = 4
#: The page of the first block.
FIRST_PAGE = 1


class Nodes(NamedTuple):
    """The nodes of some blocks.

    Args:
        positions: int32 `[num_blocks, per_block]`, `NO_ID` for an empty place.
        vectors: `[num_blocks, per_block, d]`.
        edges: int32 `[num_blocks, per_block, degree]`, node numbers; `NO_ID` for none.
    """

    positions: NDArray[np.int32]
    vectors: NDArray[Any]
    edges: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class NodeBlocks:
    """The format of the nodes of one index.

    Args:
        dim, dtype: of the vectors.
        degree: edges per node.
        most: maximum nodes of a block; None: as many as fit.
    """

    dim: int
    dtype: np.dtype[Any]
    degree: int
    most: int | None = None

    @property
    def vector_bytes(self) -> int:
        return self.dim * self.dtype.itemsize

    @property
    def node_bytes(self) -> int:
        """Bytes of a node.

        >>> NodeBlocks(100, np.dtype(np.int8), 64).node_bytes
        360
        """
        return _WORD_BYTES * (1 + -(-self.vector_bytes // _WORD_BYTES) + self.degree)

    @property
    def per_block(self) -> int:
        """Nodes per block.

        >>> NodeBlocks(100, np.dtype(np.int8), 64).per_block
        11
        """
        return min(max(1, PAYLOAD_BYTES // self.node_bytes), self.most or PAYLOAD_BYTES)

    @property
    def pages_per_block(self) -> int:
        return num_pages_of(self.node_bytes) if self.node_bytes > PAYLOAD_BYTES else 1

    @property
    def block_bytes(self) -> int:
        """Payload bytes of a block."""
        return self.pages_per_block * PAYLOAD_BYTES

    def stream(self, nodes: Nodes) -> NDArray[np.uint8]:
        """The bytes of some blocks."""
        num, per_block = nodes.positions.shape
        stream = np.zeros((num, self.block_bytes), np.uint8)
        places = stream[:, : per_block * self.node_bytes].reshape(num, per_block, self.node_bytes)
        parts = (nodes.positions[..., None].astype("<i4"), nodes.vectors, nodes.edges.astype("<i4"))
        for part, (begin, end) in zip(parts, self._fields, strict=True):
            places[..., begin:end] = np.ascontiguousarray(part).view(np.uint8).reshape(num, per_block, -1)
        return stream.reshape(-1)

    def nodes(self, payloads: NDArray[np.uint8]) -> Nodes:
        """The nodes of blocks, from their payloads, `[num_blocks * block_bytes]`."""
        blocks = payloads.reshape(-1, self.block_bytes)[:, : self.per_block * self.node_bytes]
        places = blocks.reshape(len(blocks), self.per_block, self.node_bytes)
        positions, vectors, edges = (np.ascontiguousarray(places[..., begin:end]) for begin, end in self._fields)
        return Nodes(positions.view("<i4")[..., 0], vectors.view(self.dtype), edges.view("<i4"))

    @property
    def _fields(self) -> tuple[tuple[int, int], ...]:
        """First and last byte of position, vector and edges."""
        end = _WORD_BYTES + self.vector_bytes
        return (0, _WORD_BYTES), (_WORD_BYTES, end), (self.node_bytes - _WORD_BYTES * self.degree, self.node_bytes)
