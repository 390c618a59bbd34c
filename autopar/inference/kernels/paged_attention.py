"""Compute paged attention of new tokens with a backend selected by name.

In: queries, the pages of one layer, page tables, positions. Out: `attend_paged`, for use inside a program.

`gather` is the reference: plain JAX, which XLA's partitioner splits by heads and rows. The other backends are loops and
kernels, for which the partitioner would gather the whole pool. So they are one primitive, `paged_attention`: a plan splits
it by rows, tokens and key heads, and each device runs it on its own heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from autopar.errors import InferenceError
from autopar.inference.kernels import paged_attention_pallas as paged_kernel
from autopar.inference.kv_cache import device_pages as kv_pages
from autopar.inference.kv_cache.device_pages import KVPages
from autopar.inference.kv_cache.scores import PLAIN, Scores
from autopar.jax_interop import compat as jax_compat


def _blocks(
    queries: jax.Array, keys: jax.Array, values: jax.Array, tables: jax.Array, positions: jax.Array, *, scores: Scores
) -> jax.Array:
    return kv_pages.attend_in_blocks(queries, KVPages(keys, values), tables, positions, scores)


def _pallas(*operands: jax.Array, scores: Scores) -> jax.Array:
    """Run the Pallas kernel, in interpret mode if there is no GPU."""
    compiled, interpreted = (
        lambda *arrays, interpret=interpret: paged_kernel.attend(*arrays, scores=scores, interpret=interpret)
        for interpret in (False, True)
    )
    return jax.lax.platform_dependent(*operands, cuda=compiled, rocm=compiled, default=interpreted)


def _never_refused(page_size: int, head_dim: int) -> str | None:
    return None


@dataclass(frozen=True, slots=True)
class Backend:
    """One implementation of paged attention.

    Args:
        platforms: the JAX platforms on which it is a candidate.
        run: (queries, keys, values, tables, positions, scores=) -> outputs; None for the reference, which is plain JAX.
        refused: (page size, head dim) -> why the backend does not support them, or None.
    """

    platforms: tuple[str, ...]
    run: Callable[..., jax.Array] | None
    refused: Callable[[int, int], str | None] = _never_refused


#: Backends by name. The first is the reference.
BACKENDS: Mapping[str, Backend] = MappingProxyType(
    {
        "gather": Backend(("cpu", "gpu", "tpu"), None),
        "blocks": Backend(("cpu", "gpu", "tpu"), _blocks),
        "pallas": Backend(("gpu",), _pallas, paged_kernel.refused),
    }
)
REFERENCE = next(iter(BACKENDS))


def backend_named(name: str) -> Backend:
    """Look up a backend in `BACKENDS`.

    Raises:
        InferenceError: no backend has this name.
    """
    if name not in BACKENDS:
        raise InferenceError(f"there is no attention backend {name!r}; there are {', '.join(BACKENDS)}")
    return BACKENDS[name]


def attend_paged(
    backend: str,
    queries: jax.Array,
    pages: KVPages,
    tables: jax.Array,
    positions: jax.Array,
    scores: Scores = PLAIN,
) -> jax.Array:
    """Compute causal attention over pages. The keys and values of the new tokens must be in the pages already.

    Args:
        backend: a name in `BACKENDS`. With ALiBi the reference is used, whose bias XLA's partitioner splits by heads.
        queries: `[rows, tokens, heads, head_dim]`. Head h reads key head h // (heads / kv_heads).
        pages: the pages of one layer, in any float dtype.
        tables: int32 `[rows, pages of a sequence]`, padded with the scratch page; so are those before a window.
        positions: int32 `[rows, tokens]`. Where they are negative, the output is finite but meaningless. The others of a row
            are consecutive, and begin with its first token.
        scores: how dot products become weights.

    Returns:
        `[rows, tokens, heads, head_dim]`, in the queries' dtype.

    Raises:
        InferenceError: no backend has this name.
    """
    run = backend_named(backend).run
    if scores.window is not None:
        tables, positions = _within_window(tables, positions, pages.page_size, scores.window)
    if run is None or scores.slopes is not None:
        keys, values = (each.astype(queries.dtype) for each in kv_pages.gather(pages, tables))
        return kv_pages.attend(queries, keys, values, positions, scores)
    fields = {"scale": scores.scale_of(queries.shape[-1]), "softcap": scores.softcap, "window": scores.window}
    return _PRIMITIVE.bind(queries, *pages, tables, positions, backend=backend, **fields)


def _within_window(tables: jax.Array, positions: jax.Array, size: int, window: int) -> tuple[jax.Array, jax.Array]:
    """The page tables from the first page in the window of each row, and the positions from its first token.

    Attention with a window depends on differences of positions alone.
    """
    num = (window + positions.shape[1] + size - 3) // size + 1  # the pages of so many tokens, wherever the first one is
    if num >= tables.shape[1]:
        return tables, positions
    first = jnp.maximum(positions[:, :1] - window + 1, 0) // size
    columns = jnp.minimum(first + jnp.arange(num, dtype=first.dtype), tables.shape[1] - 1)
    return jnp.take_along_axis(tables, columns, 1), jnp.where(positions < 0, -1, positions - first * size)


def _run(*operands: jax.Array, backend: str, **fields: Any) -> jax.Array:
    run = BACKENDS[backend].run
    assert run is not None
    return run(*operands, scores=Scores(**fields))


_PRIMITIVE = jax_compat.primitive_of("paged_attention", _run, result=lambda queries, *_: queries)
