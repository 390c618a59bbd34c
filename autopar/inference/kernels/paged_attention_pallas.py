"""Attention over pages as one Pallas kernel (Triton): each sequence's pages are read where they lie.

In: queries, pages of one layer, page tables, positions. Out: what `kv_pages.attend` gives of gathered pages, for any number
of tokens in a row. JAX has such a kernel, but for pools with heads in front, and one in which a NaN that lies behind
a sequence's end comes out.

A program of the grid has a row, a head of the keys, some of its queries, and a part of the row's pages; what the parts find
is put together at the end (Dao et al. 2023, "Flash-Decoding").
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from autopar.jax_interop import compat as jax_compat

_BLOCK_TOKENS = 64  # keys at a time
_MOST_QUERIES = 64  # queries at a time
_LEAST = 16  # rows of a matrix product in Triton
_NUM_PROGRAMS = 256  # about two for each core of a large GPU: with fewer, a row's pages are read by several
_UNREAD = -1e30


def refused(page_size: int, head_dim: int) -> str | None:
    """Why the kernel cannot be compiled for such pages; None where it can."""
    if _options() is None:
        return f"Pallas has no Triton in jax {jax.__version__}"
    for name, size in (("page_size", page_size), ("head_dim", head_dim)):
        if size & (size - 1):
            return f"{name} is {size}, and must be a power of two"
    return f"head_dim is {head_dim}, and must be at least {_LEAST}" if head_dim < _LEAST else None


def attend(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    tables: jax.Array,
    positions: jax.Array,
    *,
    scale: float,
    interpret: bool,
) -> jax.Array:
    """Each token attends to those up to its own position.

    Args:
        queries: `[rows, tokens, heads, head_dim]`.
        keys, values: `[num_pages + 1, page_size, kv_heads, head_dim]`, the last page is scratch.
        tables: int32 `[rows, pages of a sequence]`. positions: int32 `[rows, tokens]`, negative where idle.
        interpret: without a GPU.

    Returns:
        `[rows, tokens, heads, head_dim]`.
    """
    rows, tokens, heads, dim = queries.shape
    num_pages, size, kv_heads, _ = keys.shape
    group = heads // kv_heads
    num_queries = tokens * group  # that read one head of the keys
    most = min(_MOST_QUERIES, max(_LEAST, pl.next_power_of_2(num_queries)))
    parts = pl.cdiv(num_queries, most)
    width = max(1, _BLOCK_TOKENS // size)
    splits, pages_of_split = _splits(pl.cdiv(tables.shape[1], width), rows * kv_heads * parts)
    pages_of_split *= width

    grouped = (
        queries.reshape(rows, tokens, kv_heads, group, dim).swapaxes(1, 2).reshape(rows, kv_heads, num_queries, dim)
    )
    grouped = jnp.pad(grouped, ((0, 0), (0, 0), (0, parts * most - num_queries), (0, 0)))
    at = jnp.pad(jnp.repeat(positions, group, 1), ((0, 0), (0, parts * most - num_queries)), constant_values=-1)
    tables = jnp.pad(tables, ((0, 0), (0, splits * pages_of_split - tables.shape[1])), constant_values=num_pages - 1)

    pool = pl.BlockSpec((num_pages, size, None, dim), lambda r, h, q, s: (0, 0, h, 0))
    found = (splits, rows, kv_heads, parts * most)
    per_query = pl.BlockSpec((None, None, None, most), lambda r, h, q, s: (s, r, h, q))
    sums, total, highest = pl.pallas_call(
        functools.partial(_kernel, scale=scale, width=width),
        grid=(rows, kv_heads, parts, splits),
        in_specs=[
            pl.BlockSpec((None, None, most, dim), lambda r, h, q, s: (r, h, q, 0)),
            pool,
            pool,
            pl.BlockSpec((None, pages_of_split), lambda r, h, q, s: (r, s)),
            pl.BlockSpec((None, most), lambda r, h, q, s: (r, q)),
        ],
        out_specs=[
            pl.BlockSpec((None, None, None, most, dim), lambda r, h, q, s: (s, r, h, q, 0)),
            per_query,
            per_query,
        ],
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((*found, dim), found, found)],
        compiler_params=_options(),
        interpret=interpret,
        name="paged_attention",
    )(grouped, keys, values, tables, at)
    weights = jnp.exp(highest - highest.max(0))
    out = (sums * weights[..., None]).sum(0) / (total * weights).sum(0)[..., None]
    out = out[:, :, :num_queries].reshape(rows, kv_heads, tokens, group, dim).swapaxes(1, 2)
    return out.reshape(queries.shape).astype(queries.dtype)


def _options() -> Any | None:
    return jax_compat.triton_options(num_warps=4, num_stages=2)


def _splits(num_blocks: int, num_programs: int) -> tuple[int, int]:
    """Into how many parts a row's blocks of pages are cut, and how many are in each."""
    wanted = min(num_blocks, max(1, _NUM_PROGRAMS // num_programs))
    each = pl.cdiv(num_blocks, wanted)
    return pl.cdiv(num_blocks, each), each


def _kernel(
    queries: Any,
    keys: Any,
    values: Any,
    tables: Any,
    positions: Any,
    sums_out: Any,
    total_out: Any,
    most_out: Any,
    *,
    scale: float,
    width: int,
) -> None:
    """One program: `[queries, head_dim]` against `[num_pages + 1, page_size, head_dim]`, by the pages of its part of the
    row's table."""
    size, dim = keys.shape[1:]
    first = pl.program_id(3) * tables.shape[0] * size
    wanted = queries[...]
    at = jnp.maximum(positions[...], 0)
    last = jnp.max(at)
    precision = lax.Precision.HIGHEST if wanted.dtype == jnp.float32 else None  # else TensorFloat-32

    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        return lax.dot(a, b, precision=precision, preferred_element_type=jnp.float32)

    def block(number: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        most, total, sums = carry
        pages = tables[pl.ds(number * width, width)]
        places = first + number * width * size + jnp.arange(width * size)
        read_keys = keys[pages].reshape(width * size, dim).astype(wanted.dtype)
        read_values = values[pages].reshape(width * size, dim).astype(wanted.dtype)
        is_there = lax.broadcast_in_dim(places <= last, read_values.shape, (0,))
        read_values = jnp.where(is_there, read_values, 0)  # a NaN left in a page times 0 is a NaN
        is_read = places[None, :] <= at[:, None]
        scores = jnp.where(is_read, product(wanted, read_keys.T) * scale, _UNREAD)
        higher = jnp.maximum(most, jnp.max(scores, 1))
        weights = jnp.where(is_read, jnp.exp(scores - higher[:, None]), 0.0)
        kept = jnp.exp(most - higher)
        more = product(weights.astype(wanted.dtype), read_values)
        return higher, total * kept + jnp.sum(weights, 1), sums * kept[:, None] + more

    start = (
        jnp.full(at.shape, _UNREAD, jnp.float32),
        jnp.zeros(at.shape, jnp.float32),
        jnp.zeros(wanted.shape, jnp.float32),
    )
    num_tokens = jnp.clip(last + 1 - first, 0, tables.shape[0] * size)
    most_out[...], total_out[...], sums_out[...] = lax.fori_loop(0, pl.cdiv(num_tokens, width * size), block, start)
