"""Store vectors, or their codes, in inverted lists (IVF) of fixed-size blocks.

In: vectors, centroids, and the list of each vector. Out: `InvertedLists`, a pytree. A list is a run of blocks of equal
size; its last block is padded. Blocks hold vectors (`fill`, IVF-Flat) or codes (`fill_codes`, IVF-PQ). `ivf.search`
searches both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import register_dataclass

from autopar.vector_search.data.metrics import NO_ID, Metric, terms
from autopar.vector_search.ivf.product_quantization import Codebooks, encoded

#: Vectors gathered, and then encoded, at a time.
_ENCODE_CHUNK = 65536

#: Minimum slots per block. All slot counts are powers of two.
_MIN_SLOTS = 16

#: Maximum slots per block, and maximum fraction of the mean list length: padding then stays below a third.
_MAX_SLOTS, _MAX_FRACTION = 128, 0.6

#: Long lists have larger blocks, so that every device gets enough of a block that is sharded.
_MAX_LONG_SLOTS, _LONG_FRACTION = 1024, 1 / 8


@partial(
    register_dataclass,
    data_fields=["centroids", "first_block", "vectors", "terms", "positions", "codebooks"],
    meta_fields=["longest", "metric", "copies"],
)
@dataclass(frozen=True, slots=True)
class InvertedLists:
    """Inverted lists, each a run of blocks.

    Args:
        centroids: f32 `[num_lists, d]`.
        first_block: int32 `[num_lists + 1]`, offsets of the lists in blocks. Each list has at least one block.
        vectors: `[num_blocks, slots, d]`; or codes of the residuals from the list's centroid, uint8 `[num_blocks,
            slots, num_parts]`.
        terms: `[num_blocks, slots]`, as `metrics.terms`; None for inner products and codes.
        positions: int32 `[num_blocks, slots]`, positions in the corpus; `NO_ID` for padding.
        codebooks: codebooks of the codes; None for vectors.
        longest: total blocks of the longest 1, 2, 4, .. lists, and of all lists.
        copies: maximum number of lists per vector.
    """

    centroids: jax.Array
    first_block: jax.Array
    vectors: jax.Array
    terms: jax.Array | None
    positions: jax.Array
    longest: tuple[int, ...]
    metric: Metric = field(default="l2")
    copies: int = 1
    codebooks: Codebooks | None = None

    @property
    def num_lists(self) -> int:
        return self.centroids.shape[0]

    @property
    def dim(self) -> int:
        return self.centroids.shape[1]

    @property
    def num_blocks(self) -> int:
        return self.positions.shape[0]

    @property
    def slots(self) -> int:
        """Slots per block."""
        return self.positions.shape[1]

    def most_blocks(self, num_lists: int) -> int:
        """Maximum total blocks of any `num_lists` lists."""
        return self.longest[min((num_lists - 1).bit_length(), len(self.longest) - 1)]


def usual_slots(num_vectors: int, num_lists: int) -> int:
    """Slots per block."""
    mean = num_vectors / num_lists
    slots = max(_MIN_SLOTS, min(_MAX_SLOTS, _MAX_FRACTION * mean), min(_MAX_LONG_SLOTS, _LONG_FRACTION * mean))
    return 1 << (int(slots).bit_length() - 1)


def longest_of(num_blocks: np.ndarray) -> tuple[int, ...]:
    """`InvertedLists.longest` for lists with these numbers of blocks."""
    together = np.cumsum(np.sort(num_blocks)[::-1])
    counts = [2**n for n in range((len(together) - 1).bit_length())]
    return (*(int(together[count - 1]) for count in counts), int(together[-1]))


def worst_case(num_blocks: np.ndarray, num_vectors: int, slots: int) -> tuple[int, ...]:
    """Upper bounds of `longest_of`, the same for most lists of as many vectors: these share programs.

    Each list has at most a partial block, and the longest has a power of two of blocks.
    """
    most, each = -(-num_vectors // slots) + len(num_blocks), 1 << (int(num_blocks.max()) - 1).bit_length()
    return (*(min(most, each << n) for n in range((len(num_blocks) - 1).bit_length())), most)


def fill(
    vectors: np.ndarray,
    centroids: np.ndarray,
    lists: np.ndarray,
    metric: Metric,
    slots: int | None = None,
    shares_programs: bool = False,
) -> InvertedLists:
    """Fill inverted lists with vectors.

    Args:
        vectors: `[n, d]`.
        centroids: `[num_lists, d]`.
        lists: int `[n]`, the list of each vector; or `[n, copies]`, `NO_ID` for fewer lists.
        slots: slots per block; by default `usual_slots`.
        shares_programs: sizes are those of the worst case, so that lists of other vectors have the same.
    """
    layout = _slot_layout(lists, len(centroids), slots, shares_programs)
    positions = _gather_rows(layout.members, layout.places, NO_ID)
    contents = jnp.asarray(_gather_rows(vectors, positions, 0))
    return _assemble(layout, centroids, contents, terms(contents, metric), positions, metric, None)


def fill_codes(
    vectors: np.ndarray,
    centroids: np.ndarray,
    lists: np.ndarray,
    metric: Metric,
    codebooks: Codebooks,
    slots: int | None = None,
) -> InvertedLists:
    """Fill inverted lists with codes of the residuals from the centroids; arguments as in `fill`.

    For cosine pass unit vectors: only these are near their centroids.
    """
    layout = _slot_layout(lists, len(centroids), slots)
    wide_centroids = np.asarray(centroids, np.float32)
    codes = np.zeros((len(layout.members), codebooks.num_parts), np.uint8)
    for at in range(0, len(codes), _ENCODE_CHUNK):
        part = slice(at, at + _ENCODE_CHUNK)
        codes[part] = encoded(codebooks, vectors[layout.members[part]] - wide_centroids[layout.owners[part]])
    positions = _gather_rows(layout.members, layout.places, NO_ID)
    contents = jnp.asarray(_gather_rows(codes, layout.places, 0))
    return _assemble(layout, wide_centroids, contents, None, positions, metric, codebooks)


class _SlotLayout(NamedTuple):
    """The assignment of vectors to slots.

    Args:
        members: int32, positions of the vectors, list by list; repeated for a vector in several lists.
        owners: the list of each member.
        num_blocks: blocks of each list.
        longest: as `InvertedLists.longest`.
        places: `[num_blocks, slots]`, index into `members` of each slot; -1 for padding.
    """

    members: np.ndarray
    owners: np.ndarray
    num_blocks: np.ndarray
    longest: tuple[int, ...]
    places: np.ndarray
    copies: int


def _slot_layout(lists: np.ndarray, num_lists: int, slots: int | None, shares_programs: bool = False) -> _SlotLayout:
    lists = lists if lists.ndim == 2 else lists[:, None]
    member, column = np.nonzero(lists != NO_ID)
    owner = lists[member, column]
    by_list = np.argsort(owner, kind="stable")
    counts = np.bincount(owner, minlength=num_lists)
    start = np.cumsum(counts) - counts
    slots = slots or usual_slots(len(member), num_lists)
    num_blocks = np.maximum(1, -(-counts // slots))
    block_owner = np.repeat(np.arange(num_lists), num_blocks)
    block = np.arange(len(block_owner)) - (np.cumsum(num_blocks) - num_blocks)[block_owner]  # index within its list
    slot = block[:, None] * slots + np.arange(slots)
    places = np.where(slot < counts[block_owner, None], start[block_owner, None] + slot, -1)
    longest = longest_of(num_blocks)
    if shares_programs:
        longest = worst_case(num_blocks, len(member), slots)
        places = np.pad(places, ((0, longest[-1] - len(places)), (0, 0)), constant_values=-1)
    return _SlotLayout(member[by_list].astype(np.int32), owner[by_list], num_blocks, longest, places, lists.shape[1])


def _gather_rows(of: np.ndarray, which: np.ndarray, padding: int) -> np.ndarray:
    """`of[which]`, with `padding` where `which` is negative."""
    found = of[np.maximum(which, 0)]
    found[which < 0] = padding
    return found


def _assemble(
    layout: _SlotLayout,
    centroids: np.ndarray,
    contents: jax.Array,
    term: jax.Array | None,
    positions: np.ndarray,
    metric: Metric,
    codebooks: Codebooks | None,
) -> InvertedLists:
    first = np.concatenate([[0], np.cumsum(layout.num_blocks)]).astype(np.int32)
    return InvertedLists(
        jnp.asarray(centroids, jnp.float32),
        jnp.asarray(first),
        contents,
        term,
        jnp.asarray(positions),
        layout.longest,
        metric,
        layout.copies,
        codebooks,
    )


def members(index: InvertedLists) -> Sequence[np.ndarray]:
    """Positions of the vectors in each list, in the order of `centroids`; for inspection and tests."""
    rows = np.split(np.asarray(index.positions), np.asarray(index.first_block)[1:-1])
    return [row[row != NO_ID] for row in rows]


def lists_of(index: InvertedLists, num_vectors: int) -> np.ndarray:
    """int32 `[num_vectors, copies]`: the lists of each vector; `NO_ID` for fewer lists."""
    contents = members(index)
    owner = np.repeat(np.arange(len(contents), dtype=np.int32), [len(each) for each in contents])
    member = np.concatenate(contents)
    order = np.argsort(member, kind="stable")
    owner, member = owner[order], member[order]
    found = np.full((num_vectors, index.copies), NO_ID, np.int32)
    found[member, np.arange(len(member)) - np.searchsorted(member, member)] = owner
    return found
