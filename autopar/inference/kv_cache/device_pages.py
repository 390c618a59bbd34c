"""The pages of the KV cache on the device, of one layer: written, gathered, copied, attended to.

In: arrays of pages, and page numbers from the host. Out: pure functions of arrays, whose cost does not grow with the
number of pages if the caller donates them. Keys and values are arrays of their own, and so is every layer: what is cut
out of a larger array is copied by XLA before it is written.

The last page is for waste: what slots without a sequence write goes there, and tables are filled up with it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

_WIDE = jnp.float32
#: Tokens of a block of a sequence, and those of all sequences together that it is worth calling a product of matrices for:
#: a chunk of one prompt takes more at a time, which several cores can share.
_LEAST_BLOCK, _BLOCK_OF_ALL = 128, 512
_UNREAD = -1e30  # a score whose weight is zero, and whose difference from itself is too


class KVPages(NamedTuple):
    """`keys` and `values`, `[num_pages + 1, page_size, kv_heads, head_dim]` each."""

    keys: jax.Array
    values: jax.Array

    @property
    def waste_page(self) -> int:
        return self.keys.shape[0] - 1

    @property
    def page_size(self) -> int:
        return self.keys.shape[1]


def empty_pages(num_pages: int, page_size: int, kv_heads: int, head_dim: int, dtype: jnp.dtype) -> KVPages:
    """Of one layer, all zeros."""
    shape = (num_pages + 1, page_size, kv_heads, head_dim)
    return KVPages(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def page_bytes(num_layers: int, page_size: int, kv_heads: int, head_dim: int, dtype: jnp.dtype) -> int:
    """Of one page in all layers, keys and values."""
    return 2 * num_layers * page_size * kv_heads * head_dim * jnp.dtype(dtype).itemsize


def write(pages: KVPages, keys: jax.Array, values: jax.Array, tables: jax.Array, positions: jax.Array) -> KVPages:
    """Put new tokens where they belong.

    Args:
        keys, values: `[rows, tokens, kv_heads, head_dim]`.
        tables: int32 `[rows, pages of a sequence]`, filled up with the waste page.
        positions: int32 `[rows, tokens]`, in their sequences; negative ones are padding, and zeros go to waste for them.
    """
    size, last = pages.page_size, tables.shape[1] - 1
    keys, values = (jnp.where(positions[..., None, None] < 0, 0, new) for new in (keys, values))
    page = jnp.take_along_axis(tables, jnp.clip(positions // size, 0, last), 1)
    page = jnp.where(positions < 0, pages.waste_page, page)
    offset = positions % size
    return KVPages(
        pages.keys.at[page, offset].set(keys.astype(pages.keys.dtype)),
        pages.values.at[page, offset].set(values.astype(pages.values.dtype)),
    )


def gather(pages: KVPages, tables: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Keys and values of sequences, as if they lay in a row: `[rows, pages of a sequence * page_size, kv_heads, head_dim]`."""
    rows, num = tables.shape

    def in_a_row(array: jax.Array) -> jax.Array:
        return array[tables].reshape(rows, num * array.shape[1], *array.shape[2:])

    return in_a_row(pages.keys), in_a_row(pages.values)


def attend(
    queries: jax.Array, keys: jax.Array, values: jax.Array, positions: jax.Array, *, scale: float | None = None
) -> jax.Array:
    """Each token attends to those up to its own position: the reference for every other kernel.

    Args:
        queries: `[rows, tokens, heads, head_dim]`.
        keys, values: `[rows, length, kv_heads, head_dim]`, position by position; what lies behind `positions` is not read.
        positions: int32 `[rows, tokens]`; what comes out where they are negative is of no worth, but a number.

    Returns:
        `[rows, tokens, heads, head_dim]`.
    """
    places = jnp.arange(keys.shape[1])
    is_read = places <= jnp.maximum(positions, 0)[:, None, :, None]
    is_there = (places <= positions.max(1)[:, None])[..., None, None]  # a NaN left in a page times 0 is a NaN
    values = jnp.where(is_there, values, 0)
    return jax.nn.dot_product_attention(queries, keys, values, mask=is_read, scale=scale, implementation="xla")


def attend_in_blocks(
    queries: jax.Array,
    pages: KVPages,
    tables: jax.Array,
    positions: jax.Array,
    *,
    scale: float | None = None,
) -> jax.Array:
    """`attend` over pages, some of each sequence at a time, and none behind the longest: nothing of a sequence's full
    length is made, and the time is that of the tokens there are.

    The softmax is taken as it goes (Milakov and Gimelshein 2018, Rabe and Staats 2021). A block behind a row's last
    token changes nothing of it, to the bit, so that a row does not depend on how long the others are.

    Args:
        queries, positions: as for `attend`. tables: as for `write`.
    """
    rows, tokens, heads, dim = queries.shape
    block_tokens = max(_LEAST_BLOCK, _BLOCK_OF_ALL // rows)
    kv_heads, size, width = pages.keys.shape[2], pages.page_size, max(1, block_tokens // pages.page_size)
    tables = jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % width)), constant_values=pages.waste_page)
    grouped = queries.reshape(rows, tokens, kv_heads, heads // kv_heads, dim)
    last = positions.max(1)[:, None]

    def block(number: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        most, total, sums = carry
        keys, values = gather(pages, jax.lax.dynamic_slice_in_dim(tables, number * width, width, 1))
        places = number * width * size + jnp.arange(width * size)
        values = jnp.where((places <= last)[..., None, None], values, 0)  # as in `attend`
        scores = jnp.einsum("rtkgd,rskd->rktgs", grouped, keys.astype(queries.dtype), preferred_element_type=_WIDE)
        is_read = places <= jnp.maximum(positions, 0)[:, None, :, None, None]
        scores = jnp.where(is_read, scores * (dim**-0.5 if scale is None else scale), _UNREAD)
        higher = jnp.maximum(most, scores.max(-1))
        weights, kept = jnp.exp(scores - higher[..., None]), jnp.exp(most - higher)
        values = values.astype(queries.dtype)
        more = jnp.einsum("rktgs,rskd->rktgd", weights.astype(values.dtype), values, preferred_element_type=_WIDE)
        return higher, total * kept + weights.sum(-1), sums * kept[..., None] + more

    shape = (rows, kv_heads, tokens, heads // kv_heads)
    start = jnp.full(shape, _UNREAD, _WIDE), jnp.zeros(shape, _WIDE), jnp.zeros((*shape, dim), _WIDE)
    num_blocks = jnp.maximum(positions.max(), 0) // (width * size) + 1
    _, total, sums = jax.lax.fori_loop(0, num_blocks, block, start)
    return (sums / total[..., None]).transpose(0, 2, 1, 3, 4).reshape(queries.shape).astype(queries.dtype)


def copy(pages: KVPages, sources: jax.Array, targets: jax.Array) -> KVPages:
    """Contents of pages to others, all read before any is written.

    Args:
        sources, targets: int32 `[num]`, filled up with the waste page.
    """
    return KVPages(*(array.at[targets].set(array[sources]) for array in pages))
