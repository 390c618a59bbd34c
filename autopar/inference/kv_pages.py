"""The pages of the KV cache on the device, of one layer: written, gathered, copied.

In: arrays of pages, and page numbers from the host. Out: pure functions of arrays, whose cost does not grow with the
number of pages if the caller donates them. Keys and values are arrays of their own, and so is every layer: what is cut
out of a larger array is copied by XLA before it is written.

The last page is for waste: what slots without a sequence write goes there, and tables are filled up with it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


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
        positions: int32 `[rows, tokens]`, in their sequences; negative ones are padding, and go to waste.
    """
    size, last = pages.page_size, tables.shape[1] - 1
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


def copy(pages: KVPages, sources: jax.Array, targets: jax.Array) -> KVPages:
    """Contents of pages to others, all read before any is written.

    Args:
        sources, targets: int32 `[num]`, filled up with the waste page.
    """
    return KVPages(*(array.at[targets].set(array[sources]) for array in pages))
