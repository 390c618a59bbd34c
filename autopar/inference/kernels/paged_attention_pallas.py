"""Compute paged attention in one Pallas (Triton) kernel that reads the pages in place.

In: queries, pages of one layer, page tables, positions. Out: the result of `kv_pages.attend` on gathered pages, for any
number of tokens per row. JAX's own paged-attention kernel needs the heads as the pool's first dim, and a stale NaN after
a sequence's end reaches its output.

A program of the grid has one row, one key head, a block of its queries, and a part of the row's pages. The partial results
are combined at the end (Dao et al. 2023, "Flash-Decoding").
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from autopar.inference.kv_cache.scores import Scores
from autopar.jax_interop import compat as jax_compat

_BLOCK_TOKENS = 64  # keys per block
_MAX_QUERIES = 64  # queries per program
_MIN_ROWS = 16  # rows of a matmul in Triton
_NUM_PROGRAMS = 256  # about two per SM of a large GPU: with fewer, the pages of a row are split over several programs
_MASKED = -1e30


def refused(page_size: int, head_dim: int) -> str | None:
    """Say why the kernel cannot be compiled for these sizes; None if it can."""
    if _options() is None:
        return f"Pallas has no Triton in jax {jax.__version__}"
    for name, size in (("page_size", page_size), ("head_dim", head_dim)):
        if size & (size - 1):
            return f"{name} is {size}, and must be a power of two"
    return f"head_dim is {head_dim}, and must be at least {_MIN_ROWS}" if head_dim < _MIN_ROWS else None


def attend(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    tables: jax.Array,
    positions: jax.Array,
    *,
    scores: Scores,
    interpret: bool,
) -> jax.Array:
    """Compute causal attention over pages.

    Args:
        queries: `[rows, tokens, heads, head_dim]`.
        keys, values: `[num_pages + 1, page_size, kv_heads, head_dim]`; the last page is scratch.
        tables: int32 `[rows, pages of a sequence]`.
        positions: int32 `[rows, tokens]`; negative ones are padding.
        scores: how dot products become weights, without ALiBi.
        interpret: whether Pallas interprets the kernel, which needs no GPU.

    Returns:
        `[rows, tokens, heads, head_dim]`.
    """
    rows, tokens, heads, dim = queries.shape
    num_pages, size, kv_heads, _ = keys.shape
    group = heads // kv_heads
    num_queries = tokens * group  # per key head
    block = min(_MAX_QUERIES, max(_MIN_ROWS, pl.next_power_of_2(num_queries)))
    blocks = pl.cdiv(num_queries, block)
    width = max(1, _BLOCK_TOKENS // size)
    splits, pages_per_split = _splits(pl.cdiv(tables.shape[1], width), rows * kv_heads * blocks)
    pages_per_split *= width

    grouped = (
        queries.reshape(rows, tokens, kv_heads, group, dim).swapaxes(1, 2).reshape(rows, kv_heads, num_queries, dim)
    )
    padding = blocks * block - num_queries
    grouped = jnp.pad(grouped, ((0, 0), (0, 0), (0, padding), (0, 0)))
    positions = jnp.pad(jnp.repeat(positions, group, 1), ((0, 0), (0, padding)), constant_values=-1)
    tables = jnp.pad(tables, ((0, 0), (0, splits * pages_per_split - tables.shape[1])), constant_values=num_pages - 1)

    pool = pl.BlockSpec((num_pages, size, None, dim), lambda r, h, q, s: (0, 0, h, 0))
    partial = (splits, rows, kv_heads, blocks * block)
    per_query = pl.BlockSpec((None, None, None, block), lambda r, h, q, s: (s, r, h, q))
    sums, total, row_max = pl.pallas_call(
        functools.partial(_kernel, scores=scores, width=width),
        grid=(rows, kv_heads, blocks, splits),
        in_specs=[
            pl.BlockSpec((None, None, block, dim), lambda r, h, q, s: (r, h, q, 0)),
            pool,
            pool,
            pl.BlockSpec((None, pages_per_split), lambda r, h, q, s: (r, s)),
            pl.BlockSpec((None, block), lambda r, h, q, s: (r, q)),
        ],
        out_specs=[
            pl.BlockSpec((None, None, None, block, dim), lambda r, h, q, s: (s, r, h, q, 0)),
            per_query,
            per_query,
        ],
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((*partial, dim), partial, partial)],
        compiler_params=_options(),
        interpret=interpret,
        name="paged_attention",
    )(grouped, keys, values, tables, positions)
    weights = jnp.exp(row_max - row_max.max(0))
    out = (sums * weights[..., None]).sum(0) / (total * weights).sum(0)[..., None]
    out = out[:, :, :num_queries].reshape(rows, kv_heads, tokens, group, dim).swapaxes(1, 2)
    return out.reshape(queries.shape).astype(queries.dtype)


def _options() -> Any | None:
    return jax_compat.triton_options(num_warps=4, num_stages=2)


def _splits(num_blocks: int, num_programs: int) -> tuple[int, int]:
    """The number of splits of a row's page blocks, and the blocks per split."""
    most = min(num_blocks, max(1, _NUM_PROGRAMS // num_programs))
    per_split = pl.cdiv(num_blocks, most)
    return pl.cdiv(num_blocks, per_split), per_split


def _kernel(
    queries: Any,
    keys: Any,
    values: Any,
    tables: Any,
    positions: Any,
    sums_out: Any,
    total_out: Any,
    max_out: Any,
    *,
    scores: Scores,
    width: int,
) -> None:
    """One program: attend `[queries, head_dim]` to `[num_pages + 1, page_size, head_dim]`, over its split of the row's
    page table."""
    size, dim = keys.shape[1:]
    first = pl.program_id(3) * tables.shape[0] * size
    query_block = queries[...]
    query_positions = jnp.maximum(positions[...], 0)
    last = jnp.max(query_positions)
    precision = lax.Precision.HIGHEST if query_block.dtype == jnp.float32 else None  # None gives TensorFloat-32

    def matmul(a: jax.Array, b: jax.Array) -> jax.Array:
        return lax.dot(a, b, precision=precision, preferred_element_type=jnp.float32)

    def block(number: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        row_max, total, sums = carry
        pages = tables[pl.ds(number * width, width)]
        key_positions = first + number * width * size + jnp.arange(width * size)
        key_block = keys[pages].reshape(width * size, dim).astype(query_block.dtype)
        value_block = values[pages].reshape(width * size, dim).astype(query_block.dtype)
        is_valid = lax.broadcast_in_dim(key_positions <= last, value_block.shape, (0,))
        value_block = jnp.where(is_valid, value_block, 0)  # a stale NaN in a page times 0 is a NaN
        mask = scores.may_see(key_positions[None, :], query_positions[:, None])
        masked = jnp.where(mask, scores.capped(matmul(query_block, key_block.T) * scores.scale_of(dim)), _MASKED)
        new_max = jnp.maximum(row_max, jnp.max(masked, 1))
        weights = jnp.where(mask, jnp.exp(masked - new_max[:, None]), 0.0)
        rescale = jnp.exp(row_max - new_max)
        weighted = matmul(weights.astype(query_block.dtype), value_block)
        return new_max, total * rescale + jnp.sum(weights, 1), sums * rescale[:, None] + weighted

    start = (
        jnp.full(query_positions.shape, _MASKED, jnp.float32),
        jnp.zeros(query_positions.shape, jnp.float32),
        jnp.zeros(query_block.shape, jnp.float32),
    )
    num_tokens = jnp.clip(last + 1 - first, 0, tables.shape[0] * size)
    max_out[...], total_out[...], sums_out[...] = lax.fori_loop(0, pl.cdiv(num_tokens, width * size), block, start)
