"""Compare attention kernels on one GPU: XLA's and cuDNN's against float32, and cuDNN's as context parallelism calls it.

In: a setting. Out: a record with rows: for each way, mask and shape, the error of the output and of each gradient, as the norm of the
difference over the norm of float32's; and the seconds of both passes. A ring runs as one program: its devices are a mapped axis of one
GPU, so that each kernel call and each merge by log-sum-exp is the one that devices run, without a network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from autopar.runtime.context_parallel.kernels import BLOCKWISE, CUDNN, Kernel
from autopar.runtime.context_parallel.methods import backward, forward
from benchmarks.gpu.quick_keys import quick_key
from benchmarks.gpu.setting import Record, Setting
from benchmarks.timing import median_s

#: (batch, tokens, query heads, key heads, features).
_SHAPES = ((4, 2048, 16, 16, 128), (2, 4096, 16, 4, 64))
_TINY_SHAPES = ((1, 64, 4, 2, 16),)
_RING, _CALLS = 4, 10

Way = Callable[..., tuple[jax.Array, ...]]


def attention(setting: Setting) -> Record:
    """Measure all ways."""
    is_gpu = jax.local_devices()[0].platform == "gpu"
    kernel = CUDNN if is_gpu else BLOCKWISE
    rows: list[Record] = []
    for shape in _TINY_SHAPES if setting.is_tiny else _SHAPES:
        for is_causal in (True, False):
            rows += _rows(shape, is_causal, kernel)
            setting.keep({"rows": rows})
    return {"rows": rows}


def _rows(shape: tuple[int, ...], is_causal: bool, kernel: Kernel) -> list[Record]:
    batch, tokens, num_heads, num_key_heads, dim = shape
    keys = jax.random.split(quick_key(0), 4)
    sizes = (
        (batch, tokens, num_heads, dim),
        *[(batch, tokens, num_key_heads, dim)] * 2,
        (batch, tokens, num_heads, dim),
    )
    arrays = [jax.random.normal(key, size, jnp.bfloat16) for key, size in zip(keys, sizes, strict=True)]
    exact = jax.jit(partial(_written, is_causal, jnp.float32))(*arrays)
    ways: Mapping[str, Way] = {
        "XLA": partial(_written, is_causal, jnp.bfloat16),
        kernel.name: partial(_on_parts, "ring", kernel, is_causal, 1),
        **{
            f"{kernel.name}, {method} of {_RING}": partial(_on_parts, method, kernel, is_causal, _RING)
            for method in ("ring", "gathered", "ulysses")
            if method != "ulysses" or num_heads % _RING == 0
        },
    }
    rows: list[Record] = []
    for name, way in ways.items():
        row: Record = {"way": name, "shape": "x".join(map(str, shape)), "causal": is_causal}
        try:
            run = jax.jit(way)
            errors = [_error(one, other) for one, other in zip(run(*arrays), exact, strict=True)]
            row |= dict(zip(("out", "d_query", "d_key", "d_value"), errors, strict=True))
            row["seconds"] = median_s(partial(run, *arrays), _CALLS)
        except Exception as error:  # record a kernel that this card or this JAX refuses
            row["error"] = f"{type(error).__name__}: {error}"[:300]
        rows.append(row)
    return rows


def _written(is_causal: bool, dtype: Any, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Attention by XLA, and its gradients, computed in a dtype."""
    query, key, value, d_out = (one.astype(dtype) for one in arrays)
    attend = partial(jax.nn.dot_product_attention, is_causal=is_causal, implementation="xla")
    out, gradient = jax.vjp(attend, query, key, value)
    return (out, *gradient(d_out))


def _on_parts(
    method: str, kernel: Kernel, is_causal: bool, num_parts: int, *arrays: jax.Array
) -> tuple[jax.Array, ...]:
    """Attention by a method of context parallelism, whose devices are a mapped axis, and its gradients."""
    scale = arrays[0].shape[-1] ** -0.5
    given: dict[str, Any] = {"axes": ("parts",), "scale": scale, "is_causal": is_causal}

    kernel = replace(kernel, forward=_parts_first(kernel.forward), backward=_parts_first(kernel.backward))

    def of_part(query: Any, key: Any, value: Any, d_out: Any) -> Any:
        out, lse = forward(method, kernel, query, key, value, **given)
        return (out, *backward(method, kernel, query, key, value, out, lse, d_out, **given))

    parts = [jnp.stack(jnp.split(one, num_parts, axis=1)) for one in arrays]
    results = jax.vmap(of_part, axis_name="parts")(*parts)
    return tuple(jnp.concatenate(list(one), axis=1) for one in results)


def _parts_first(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function of a kernel with the mapped axis moved to the front, where JAX's rule for cuDNN's attention wants it."""

    def run(*arrays: jax.Array, **options: Any) -> Any:
        own = partial(function, **options)
        call = custom_vmap(own)
        call.def_vmap(lambda _, is_mapped, *given: _mapped(own, is_mapped, given))
        return call(*arrays)

    return run


def _mapped(function: Callable[..., Any], is_mapped: Sequence[bool], given: Sequence[jax.Array]) -> tuple[Any, Any]:
    """Map over the arrays that have the axis; the results, and that all of them have it."""
    found = jax.vmap(function, [0 if one else None for one in is_mapped])(*given)
    return found, jax.tree.map(lambda _: True, found)


def _error(one: jax.Array, exact: jax.Array) -> float:
    difference = one.astype(jnp.float32) - exact.astype(jnp.float32)
    return float(jnp.linalg.norm(difference) / jnp.linalg.norm(exact.astype(jnp.float32)))
