"""Search of inverted lists from the lists' side: each list is read once, for all queries that probe it.

In: `InvertedLists` and queries. Out: the best k of the lists that each query probes. One program:

    probes = the lists nearest to each query
    rows   = each probe's row among those of its list                      (seats)
    block  = queries in rows x vectors of the list: batched products of padded matrices, one for each class of lists
    best   = the best groups of slots by the maximum of each, then the best slots of these groups

No product is chosen by looking at less: k groups by their maxima hold the best k slots. In the first pass every list
has the same number of rows; probes beyond these sit in tiles of some rows, of as few lists as need them, in further
passes until every probe has been served. Few queries go to tiles at once: they would leave most lists' rows empty.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from autopar.vector_search.best import Best, better, distinct, nothing
from autopar.vector_search.inverted_lists import InvertedLists, ListClass
from autopar.vector_search.metrics import NO_ID, Metric, scores, worst_score
from autopar.vector_search.product_quantisation import Codebooks, decode
from autopar.vector_search.seats import Seats, Tiles, seats, tiles
from autopar.vector_search.size_classes import LENGTH_MULTIPLE

#: Rows of a list in the first pass, in mean numbers of probes: what is beyond is served in tiles.
_ROOM = 1.25

#: With fewer probes a list on average than this, nothing is multiplied but in tiles.
_FEW_PROBES = 4.0


@dataclass(frozen=True, slots=True)
class Passes:
    """How a batch is served. rows: of every list in the first pass; 0: there is none. tile: rows of one tile.
    num_tiles: in one pass, of each class of lists."""

    rows: int
    tile: int
    num_tiles: tuple[int, ...]


def passes(index: InvertedLists, num_queries: int, num_probes: int) -> Passes:
    """By how many probes a list has on average."""
    mean = num_queries * num_probes / index.num_lists
    sizes = [each.positions.shape[0] for each in index.classes]
    if mean < _FEW_PROBES:
        num = num_queries * num_probes
        return Passes(0, min(8, num_queries), tuple(min(size, 2 * -(-num * size // index.num_lists)) for size in sizes))
    rows = min(num_queries, 8 * math.ceil(_ROOM * mean / 8))
    return Passes(rows, max(8, 8 * (rows // 24)), tuple(-(-size // 4) for size in sizes))


def search(
    index: InvertedLists,
    queries: jax.Array,
    k: int,
    num_probes: int,
    allowed: jax.Array | None = None,
    how: Passes | None = None,
) -> Best:
    """The best k of the vectors in the `num_probes` lists nearest to each query.

    Args:
        queries: `[num_queries, d]`, of the vectors' dtype.
        allowed: bool `[n]`: by position, which vectors may be found; all, where it is not given. Lists that hold none of
            these are not probed, as long as there are others.
        how: the passes; `passes` of this batch, where it is not given. It changes no result.
    """
    nearest = scores(queries.astype(jnp.float32), index.centroids, index.metric)
    if allowed is not None:
        holds_some = jnp.concatenate([jnp.any(_is_allowed(each, allowed), axis=1) for each in index.classes])
        nearest = jnp.where(holds_some, nearest, -jnp.inf)
    probes = lax.top_k(nearest, min(num_probes, index.num_lists))[1].astype(jnp.int32)
    return search_lists(index, queries, k, probes, allowed, how)


def search_lists(
    index: InvertedLists,
    queries: jax.Array,
    k: int,
    probes: jax.Array,
    allowed: jax.Array | None = None,
    how: Passes | None = None,
) -> Best:
    """The same in lists that are known: `probes`, int32 `[num_queries, num_probes]`, none twice for a query."""
    num_queries, num_probes = probes.shape
    if index.codebooks is not None:
        queries = queries.astype(jnp.float32)
    how = how or passes(index, num_queries, num_probes)
    seating = seats(probes, index.num_lists)
    classes = index.classes if allowed is None else tuple(_without(each, allowed) for each in index.classes)
    wanted = k * index.copies
    best = nothing(num_queries, wanted, queries.dtype, index.metric)
    if how.rows:
        parts = [_Part(each, index.codebooks, how.rows) for each in classes]
        row = jnp.where(seating.seat < how.rows, probes * how.rows + seating.seat, -1)
        best = _one_pass(parts, queries, row, wanted, index.metric)
    best = _further(index, classes, queries, probes, seating, best, how)
    return best if index.copies == 1 else distinct(best, k)


def _without(lists: ListClass, allowed: jax.Array) -> ListClass:
    """With the slots that are not allowed made padding."""
    return replace(lists, positions=jnp.where(_is_allowed(lists, allowed), lists.positions, NO_ID))


def _is_allowed(lists: ListClass, allowed: jax.Array) -> jax.Array:
    """bool `[num_lists, length]`."""
    return (lists.positions != NO_ID) & allowed[jnp.maximum(lists.positions, 0)]


def _further(
    index: InvertedLists,
    classes: tuple[ListClass, ...],
    queries: jax.Array,
    probes: jax.Array,
    seating: Seats,
    best: Best,
    how: Passes,
) -> Best:
    """Passes over tiles, until no probe is left."""
    cut: list[Tiles] = []
    first = 0
    for each in classes:
        size = each.positions.shape[0]
        cut.append(tiles(lax.slice_in_dim(seating.taken, first, first + size), how.rows, how.tile))
        first += size
    last = jnp.max(jnp.stack([-(-one.num_tiles // num) for one, num in zip(cut, how.num_tiles, strict=True)]))
    # each probe's tile, counted within its class, and the rows and the tiles a pass has before its class
    before = jnp.concatenate([one.before[:-1] for one in cut])
    sizes = [each.positions.shape[0] for each in classes]
    class_of = jnp.repeat(jnp.arange(len(classes)), jnp.array(sizes), total_repeat_length=index.num_lists)[probes]
    per_pass = jnp.array(how.num_tiles)[class_of]
    offset = jnp.array([sum(how.num_tiles[:i]) for i in range(len(classes))])[class_of]
    beyond = seating.seat - how.rows
    tile = before[probes] + beyond // how.tile

    def one_more(state: tuple[jax.Array, Best]) -> tuple[jax.Array, Best]:
        number, best = state
        is_now = (beyond >= 0) & (tile // per_pass == number)
        row = jnp.where(is_now, (offset + tile % per_pass) * how.tile + beyond % how.tile, -1)
        parts: list[_Part] = []
        for lists, one, num in zip(classes, cut, how.num_tiles, strict=True):
            which = one.lists(number * num, num)
            parts.append(_Part(jax.tree.map(lambda array, which=which: array[which], lists), index.codebooks, how.tile))
        found = _one_pass(parts, queries, row, best.scores.shape[1], index.metric)
        return number + 1, better(best, found)

    return lax.while_loop(lambda state: state[0] < last, one_more, (jnp.zeros((), last.dtype), best))[1]


class _Part(NamedTuple):
    """Lists, what their codes stand for, and how many rows each has in this pass."""

    lists: ListClass
    codebooks: Codebooks | None
    rows: int

    @property
    def num_rows(self) -> int:
        return self.lists.positions.shape[0] * self.rows


def _one_pass(parts: list[_Part], queries: jax.Array, row: jax.Array, k: int, metric: Metric) -> Best:
    """The best k of each query in the lists where it has a row.

    Args:
        row: int32 `[num_queries, num_probes]`: counted over all parts; -1: none in this pass.
    """
    num_queries, num_probes = row.shape
    num_rows = sum(part.num_rows for part in parts)
    longest = max(part.lists.positions.shape[1] for part in parts)
    group = _group(num_probes * longest, k)
    asks = jnp.broadcast_to(jnp.arange(num_queries, dtype=jnp.int32)[:, None], row.shape)
    seated = jnp.where(row < 0, num_rows, row)
    asked = jnp.zeros(num_rows, jnp.int32).at[seated].set(asks, mode="drop", unique_indices=True)
    blocks: list[jax.Array] = []
    maxima: list[jax.Array] = []
    first = 0
    for part in parts:
        num_lists, length = part.lists.positions.shape
        rows = lax.slice_in_dim(asked, first, first + part.num_rows).reshape(num_lists, part.rows)
        block = _block(part, queries[rows], metric)
        best = block.reshape(part.num_rows, length // group, group).max(axis=-1)
        blocks.append(block.reshape(part.num_rows, length))
        maxima.append(
            jnp.pad(best, ((0, 0), (0, (longest - length) // group)), constant_values=worst_score(block.dtype))
        )
        first += part.num_rows
    num_groups = longest // group
    candidates = jnp.concatenate(maxima)[jnp.maximum(row, 0)]
    worst = worst_score(candidates.dtype)
    candidates = jnp.where(row[:, :, None] < 0, worst, candidates).reshape(num_queries, num_probes * num_groups)
    best, place = lax.top_k(candidates, min(k, num_probes * num_groups))
    chosen = jnp.where(best == worst, -1, jnp.take_along_axis(row, place // num_groups, axis=1))
    return _slots(parts, blocks, chosen, place % num_groups * group, group, k)


def _group(num_slots: int, k: int) -> int:
    """How many slots have one maximum: the maxima of all, and the slots of k groups, are then fewest together."""
    return max(1, min(LENGTH_MULTIPLE, 2 ** round(math.log2(max(1.0, math.sqrt(num_slots / k))))))


def _block(part: _Part, rows: jax.Array, metric: Metric) -> jax.Array:
    """`[num_lists, rows, length]`: scores of rows of queries, `[num_lists, rows, d]`; of padding the worst."""
    lists = part.lists
    vectors = lists.vectors
    if part.codebooks is not None:
        vectors = decode(part.codebooks, lists.vectors)
        vectors = vectors if lists.origins is None else vectors + lists.origins[:, None, :]
    term_axis = None if lists.terms is None else 0
    found = jax.vmap(lambda q, x, term: scores(q, x, metric, term), in_axes=(0, 0, term_axis))(
        rows, vectors, lists.terms
    )
    return jnp.where((lists.positions == NO_ID)[:, None, :], worst_score(found.dtype), found)


def _slots(parts: list[_Part], blocks: list[jax.Array], row: jax.Array, start: jax.Array, group: int, k: int) -> Best:
    """The best k slots of groups, `[num_queries, num_groups]`: each in a row of all parts (-1: none) from `start`."""
    num_queries = row.shape[0]
    worst = worst_score(blocks[0].dtype)
    fetched = jnp.full((*row.shape, group), worst, blocks[0].dtype)
    first = 0
    for part, block in zip(parts, blocks, strict=True):
        is_here = (row >= first) & (row < first + part.num_rows)
        here = _runs(block, jnp.where(is_here, row - first, 0), jnp.where(is_here, start, 0), group)
        fetched = jnp.where(is_here[:, :, None], here, fetched)
        first += part.num_rows
    fetched = fetched.reshape(num_queries, -1)
    best, place = lax.top_k(fetched, min(k, fetched.shape[1]))
    row = jnp.take_along_axis(row, place // group, axis=1)
    slot = jnp.take_along_axis(start, place // group, axis=1) + place % group
    positions = jnp.full(row.shape, NO_ID, jnp.int32)
    first = 0
    for part in parts:
        is_here = (row >= first) & (row < first + part.num_rows) & (best != worst)
        which = jnp.where(is_here, row - first, 0) // part.rows
        positions = jnp.where(is_here, part.lists.positions[which, jnp.where(is_here, slot, 0)], positions)
        first += part.num_rows
    missing = ((0, 0), (0, k - best.shape[1]))
    return Best(jnp.pad(best, missing, constant_values=worst), jnp.pad(positions, missing, constant_values=NO_ID))


def _runs(block: jax.Array, row: jax.Array, start: jax.Array, length: int) -> jax.Array:
    """`[.., length]`: `block[row, start : start + length]`."""
    return lax.gather(
        block,
        jnp.stack([row, start], axis=-1),
        lax.GatherDimensionNumbers(offset_dims=(row.ndim,), collapsed_slice_dims=(0,), start_index_map=(0, 1)),
        slice_sizes=(1, length),
        mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
    )
