"""Write, gather, copy and attend to the pages of one layer's KV cache on the device.

In: arrays of pages, and page numbers from the host. Out: pure functions of arrays. Their cost does not grow with the
number of pages if the caller donates the pages. Each layer has two arrays of its own, for keys and for values: XLA
copies a slice of a larger array before it writes the slice.

The last page is scratch: slots without a sequence write to it, and page tables are padded with it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from autopar.inference.kv_cache.scores import PLAIN, Scores

_WIDE = jnp.float32
#: Tokens per block: at least so many of one sequence, and about so many of all sequences together. With few rows, such as
#: one chunk of a prompt, blocks are longer, so that several cores share a matmul.
_MIN_BLOCK, _BLOCK_ALL_ROWS = 128, 512
_MASKED = -1e30  # finite, so that the difference of two masked scores is 0 and not NaN


class KVPages(NamedTuple):
    """`keys` and `values`, `[num_pages + 1, page_size, kv_heads, head_dim]` each."""

    keys: jax.Array
    values: jax.Array

    @property
    def scratch_page(self) -> int:
        return self.keys.shape[0] - 1

    @property
    def page_size(self) -> int:
        return self.keys.shape[1]


def empty_pages(num_pages: int, page_size: int, kv_heads: int, head_dim: int, dtype: jnp.dtype) -> KVPages:
    """The pages of one layer, filled with zeros."""
    shape = (num_pages + 1, page_size, kv_heads, head_dim)
    return KVPages(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def page_bytes(num_layers: int, page_size: int, kv_heads: int, head_dim: int, dtype: jnp.dtype) -> int:
    """The bytes of one page over all layers, keys and values together."""
    return 2 * num_layers * page_size * kv_heads * head_dim * jnp.dtype(dtype).itemsize


def write(pages: KVPages, keys: jax.Array, values: jax.Array, tables: jax.Array, positions: jax.Array) -> KVPages:
    """Write the keys and values of new tokens into their pages.

    Args:
        keys, values: `[rows, tokens, kv_heads, head_dim]`.
        tables: int32 `[rows, pages of a sequence]`, padded with the scratch page.
        positions: int32 `[rows, tokens]`, positions in the sequences. Negative ones are padding: for them zeros are
            written to the scratch page.
    """
    size, last = pages.page_size, tables.shape[1] - 1
    keys, values = (jnp.where(positions[..., None, None] < 0, 0, new) for new in (keys, values))
    page = jnp.take_along_axis(tables, jnp.clip(positions // size, 0, last), 1)
    page = jnp.where(positions < 0, pages.scratch_page, page)
    offset = positions % size
    return KVPages(
        pages.keys.at[page, offset].set(keys.astype(pages.keys.dtype)),
        pages.values.at[page, offset].set(values.astype(pages.values.dtype)),
    )


def gather(pages: KVPages, tables: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Gather keys and values into contiguous arrays `[rows, pages of a sequence * page_size, kv_heads, head_dim]`."""
    rows, num = tables.shape

    def contiguous(array: jax.Array) -> jax.Array:
        return array[tables].reshape(rows, num * array.shape[1], *array.shape[2:])

    return contiguous(pages.keys), contiguous(pages.values)


def attend(
    queries: jax.Array, keys: jax.Array, values: jax.Array, positions: jax.Array, scores: Scores = PLAIN
) -> jax.Array:
    """Compute causal attention over contiguous keys and values: the reference for every other kernel.

    Args:
        queries: `[rows, tokens, heads, head_dim]`.
        keys, values: `[rows, length, kv_heads, head_dim]`, in the order of positions. Entries after `positions` are not
            read.
        positions: int32 `[rows, tokens]`. Where they are negative, the output is finite but meaningless.
        scores: how dot products become weights.

    Returns:
        `[rows, tokens, heads, head_dim]`.
    """
    head_dim, key_positions = queries.shape[-1], jnp.arange(keys.shape[1])
    mask = scores.may_see(key_positions, jnp.maximum(positions, 0)[:, None, :, None])
    is_valid = (key_positions <= positions.max(1)[:, None])[..., None, None]  # a stale NaN in a page times 0 is a NaN
    values = jnp.where(is_valid, values, 0)
    if scores.softcap is None:
        bias = scores.bias(keys.shape[1], head_dim)
        return jax.nn.dot_product_attention(queries, keys, values, bias, mask, scale=scores.scale, implementation="xla")
    rows, tokens, heads, _ = queries.shape
    grouped = queries.reshape(rows, tokens, keys.shape[2], heads // keys.shape[2], head_dim)
    dots = jnp.einsum("rtkgd,rskd->rkgts", grouped, keys, preferred_element_type=_WIDE)
    capped = scores.capped(dots * scores.scale_of(head_dim))
    weights = jax.nn.softmax(jnp.where(mask[:, :, None], capped, _MASKED), axis=-1).astype(values.dtype)
    return jnp.einsum("rkgts,rskd->rtkgd", weights, values).reshape(queries.shape)


def attend_in_blocks(
    queries: jax.Array,
    pages: KVPages,
    tables: jax.Array,
    positions: jax.Array,
    scores: Scores = PLAIN,
) -> jax.Array:
    """Compute `attend` over pages, block by block, up to the longest sequence.

    No intermediate has the full length of a sequence, and the time depends on the tokens in the cache alone. The softmax
    is an online softmax (Milakov and Gimelshein 2018, Rabe and Staats 2021). A block after the last token of a row leaves
    the row's sums unchanged to the bit, so a row does not depend on the lengths of the others.

    Args:
        queries, positions, scores: see `attend`. tables: see `write`.
    """
    assert scores.slopes is None, "the bias of ALiBi is a further operand, which is split by heads: use `attend`"
    rows, tokens, heads, dim = queries.shape
    block_tokens = max(_MIN_BLOCK, _BLOCK_ALL_ROWS // rows)
    kv_heads, size, width = pages.keys.shape[2], pages.page_size, max(1, block_tokens // pages.page_size)
    tables = jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % width)), constant_values=pages.scratch_page)
    grouped = queries.reshape(rows, tokens, kv_heads, heads // kv_heads, dim)
    last, scale = positions.max(1)[:, None], scores.scale_of(dim)

    def block(number: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        row_max, total, sums = carry
        keys, values = gather(pages, jax.lax.dynamic_slice_in_dim(tables, number * width, width, 1))
        key_positions = number * width * size + jnp.arange(width * size)
        values = jnp.where((key_positions <= last)[..., None, None], values, 0)  # as in `attend`
        dots = jnp.einsum("rtkgd,rskd->rktgs", grouped, keys.astype(queries.dtype), preferred_element_type=_WIDE)
        mask = scores.may_see(key_positions, jnp.maximum(positions, 0)[:, None, :, None, None])
        masked = jnp.where(mask, scores.capped(dots * scale), _MASKED)
        new_max = jnp.maximum(row_max, masked.max(-1))
        # Before its window, a row has seen no key yet, and exp(_MASKED - _MASKED) is 1.
        weights = jnp.where(mask, jnp.exp(masked - new_max[..., None]), 0.0)
        rescale = jnp.exp(row_max - new_max)
        values = values.astype(queries.dtype)
        weighted = jnp.einsum("rktgs,rskd->rktgd", weights.astype(values.dtype), values, preferred_element_type=_WIDE)
        return new_max, total * rescale + weights.sum(-1), sums * rescale[..., None] + weighted

    shape = (rows, kv_heads, tokens, heads // kv_heads)
    start = jnp.full(shape, _MASKED, _WIDE), jnp.zeros(shape, _WIDE), jnp.zeros((*shape, dim), _WIDE)
    num_blocks = jnp.maximum(positions.max(), 0) // (width * size) + 1
    _, total, sums = jax.lax.fori_loop(0, num_blocks, block, start)
    return (sums / total[..., None]).transpose(0, 2, 1, 3, 4).reshape(queries.shape).astype(queries.dtype)


def copy(pages: KVPages, sources: jax.Array, targets: jax.Array) -> KVPages:
    """Copy pages to other pages. All sources are read before any target is written.

    Args:
        sources, targets: int32 `[num]`, padded with the scratch page.
    """
    return KVPages(*(array.at[targets].set(array[sources]) for array in pages))
