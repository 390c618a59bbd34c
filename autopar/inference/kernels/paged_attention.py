"""Attention of new tokens over pages, by the name of what computes it.

In: queries, the pages of one layer, page tables, positions. Out: `attend_paged`, for use inside a program.

`gather` is the reference, plain JAX that XLA splits by heads and rows as it stands. Others are loops and kernels that it
would gather the whole pool for, so they are one primitive, `paged_attention`: a plan splits it by rows, tokens and heads of
the keys, and each device runs it on the heads that it has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import jax

from autopar.errors import InferenceError
from autopar.inference.kernels import paged_attention_pallas as paged_kernel
from autopar.inference.kv_cache import device_pages as kv_pages
from autopar.inference.kv_cache.device_pages import KVPages
from autopar.jax_interop import compat as jax_compat


def _blocks(
    queries: jax.Array, keys: jax.Array, values: jax.Array, tables: jax.Array, positions: jax.Array, *, scale: float
) -> jax.Array:
    return kv_pages.attend_in_blocks(queries, KVPages(keys, values), tables, positions, scale=scale)


def _pallas(*operands: jax.Array, scale: float) -> jax.Array:
    """Interpreted where there is no GPU."""
    compiled, interpreted = (
        lambda *arrays, interpret=interpret: paged_kernel.attend(*arrays, scale=scale, interpret=interpret)
        for interpret in (False, True)
    )
    return jax.lax.platform_dependent(*operands, cuda=compiled, rocm=compiled, default=interpreted)


def _always(page_size: int, head_dim: int) -> str | None:
    return None


@dataclass(frozen=True, slots=True)
class Backend:
    """One way to compute attention over pages.

    Args:
        platforms: of JAX's devices, those that it is of use on.
        refused: page size, head dim -> why it cannot be, or None.
        run: queries, keys, values, tables, positions -> attended; None of the reference, which is plain JAX.
    """

    platforms: tuple[str, ...]
    run: Callable[..., jax.Array] | None
    refused: Callable[[int, int], str | None] = _always


#: By name; the first is the reference.
BACKENDS: Mapping[str, Backend] = MappingProxyType(
    {
        "gather": Backend(("cpu", "gpu", "tpu"), None),
        "blocks": Backend(("cpu", "gpu", "tpu"), _blocks),
        "pallas": Backend(("gpu",), _pallas, paged_kernel.refused),
    }
)
REFERENCE = next(iter(BACKENDS))


def backend_named(name: str) -> Backend:
    """One of `BACKENDS`.

    Raises:
        InferenceError: there is none of the name.
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
    *,
    scale: float | None = None,
) -> jax.Array:
    """Each token attends to those of its sequence up to its own position, itself included: they are written before.

    Args:
        backend: a name in `BACKENDS`.
        queries: `[rows, tokens, heads, head_dim]`; head h reads head h // (heads / kv_heads) of the keys.
        pages: of one layer, in the queries' dtype or another.
        tables: int32 `[rows, pages of a sequence]`, padded with the scratch page.
        positions: int32 `[rows, tokens]`; what comes out where they are negative is of no worth, but a number.
        scale: of the scores; by default 1 / sqrt(head_dim).

    Returns:
        `[rows, tokens, heads, head_dim]`, in the queries' dtype.

    Raises:
        InferenceError: there is no such backend.
    """
    if backend_named(backend).run is None:
        keys, values = (each.astype(queries.dtype) for each in kv_pages.gather(pages, tables))
        return kv_pages.attend(queries, keys, values, positions, scale=scale)
    scale = queries.shape[-1] ** -0.5 if scale is None else float(scale)
    return _PRIMITIVE.bind(queries, *pages, tables, positions, backend=backend, scale=scale)


def _run(*operands: jax.Array, backend: str, scale: float) -> jax.Array:
    run = BACKENDS[backend].run
    assert run is not None
    return run(*operands, scale=scale)


_PRIMITIVE = jax_compat.primitive_of("paged_attention", _run, result=lambda queries, *_: queries)
