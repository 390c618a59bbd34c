"""Operations of random programs over whole dims: reductions, sorts, windows, gathers and updates.

In: a `Builder`. Each operation draws its parameters, takes existing values, and adds itself (`random_operations`).
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from random_elementwise import unit
from random_programs import Builder, Kind, Value


def dims(b: Builder, x: Value) -> tuple[int, ...]:
    return tuple(sorted(b.rng.sample(range(len(x.shape)), b.rng.randint(1, len(x.shape)))))


def reduce(b: Builder) -> None:
    kinds: list[Kind] = ["float", "float", "int", "bool"]
    kind = b.rng.choice(kinds)
    x = b.pick(kind)
    if x.size == 0:
        return
    axes = dims(b, x)
    count = math.prod(x.shape[d] for d in axes)
    if kind == "bool":
        name = b.rng.choice(["all", "any"])
        b.add(f"{name} {axes}", lambda x: getattr(jnp, name)(x, axes), x)
    elif kind == "int":
        names = ["sum", "max", "min", "prod"]
        name = b.rng.choice([*names, "xor"])
        if name == "xor":
            b.add(f"xor {axes}", lambda x: lax.reduce_xor(x, axes), x)
        else:
            b.add(f"{name} {axes}", lambda x: getattr(jnp, name)(x, axes), x)
    else:
        name = b.rng.choice(["sum", "sum", "mean", "max", "min", "prod", "softmax", "norm"])
        scale = 1 / math.sqrt(count)
        floats: dict[str, Callable[..., Any]] = {
            "sum": lambda x: jnp.sum(x, axes) * scale,
            "mean": lambda x: jnp.mean(x, axes),
            "max": lambda x: jnp.max(x, axes),
            "min": lambda x: jnp.min(x, axes),
            "prod": lambda x: jnp.prod(1 + unit(x) * scale, axes),
            "softmax": lambda x: jax.nn.softmax(x, axes),
            "norm": lambda x: jax.nn.standardize(x, axes, epsilon=0.1),
        }
        b.add(f"{name} {axes}", floats[name], x, exact=name in ("max", "min"))


def reduce_whole(b: Builder) -> None:
    x = b.pick(exact=True, dtype=jnp.float32)
    if x.size == 0:
        return
    d = b.dim(x)
    name = b.rng.choice(["argmax", "argmin", "reduce"])
    if name == "reduce":
        b.add(f"reduce {d}", lambda x: lax.reduce(0.5 * unit(x), np.float32(0), lambda p, q: p + q - p * q, (d,)), x,
              smooth=False)  # fmt: skip
    else:
        b.add(f"{name} {d}", lambda x: getattr(jnp, name)(x, d), x, smooth=False)


def cumulative(b: Builder) -> None:
    x = b.pick()
    d = b.dim(x)
    name = b.rng.choice(["cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"])
    backwards = b.rng.random() < 0.3
    function = partial(getattr(lax, name), axis=d, reverse=backwards)
    scale = 1 / math.sqrt(max(1, x.shape[d]))
    prepare: Callable[[Any], Any] = lambda x: x  # noqa: E731
    if name == "cumsum":
        prepare = lambda x: x * scale  # noqa: E731
    elif name == "cumprod":
        prepare = lambda x: 1 + unit(x) * scale  # noqa: E731
    # The gradient of any other is a scan of many slices: seldom, for it takes seconds to compile.
    smooth = name == "cumsum" or b.rng.random() < 0.1
    b.add(f"{name} {d}", lambda x: function(prepare(x)), x, exact=name in ("cummax", "cummin"), smooth=smooth)


def order(b: Builder) -> None:
    name = b.rng.choice(["sort", "sort both", "argsort", "top_k", "approx_max_k"])
    x = b.pick(exact=name != "sort", dtype=jnp.float32)
    d = b.dim(x)
    if x.size == 0:
        return
    if name == "sort":
        b.add(f"sort {d}", lambda x: jnp.sort(x, d), x, exact=True)
    elif name == "sort both":
        y = b.like(x.shape, x.dtype)
        b.add(f"sort both {d}", lambda x, y: lax.sort((x, y), dimension=d, num_keys=1), x, y, exact=True)
    elif name == "argsort":
        b.add(f"argsort {d}", lambda x: jnp.argsort(x, d), x, smooth=False)
    else:
        k = max(1, min(3, x.shape[-1]))
        options = {"recall_target": 1.0} if name == "approx_max_k" else {}
        b.add(f"{name} {k}", lambda x: getattr(lax, name)(x, k, **options), x, exact=True, smooth=name == "top_k")


def window(b: Builder) -> None:
    x = b.pick(min_rank=2, dtype=jnp.float32)
    if x.size == 0:
        return
    sizes = tuple(b.rng.choice([1, 1, 2, 3]) if size > 2 else 1 for size in x.shape)
    strides = tuple(b.rng.choice([1, size]) for size in sizes)
    padding = b.rng.choice(["VALID", "SAME"])
    name = b.rng.choice(["sum", "max", "min", "generic", "jvp", "scatter"])
    pool: dict[str, Any] = {"window_dimensions": sizes, "window_strides": strides, "padding": padding}
    starts = {"sum": (0.0, lax.add), "max": (-np.inf, lax.max), "min": (np.inf, lax.min)}
    largest = partial(lax.reduce_window, init_value=-np.inf, computation=lax.max, **pool)
    words = f"window {name} {sizes} by {strides} {padding}"
    if name in starts:
        init, op = starts[name]
        b.add(words, lambda x: unit(lax.reduce_window(x, init, op, **pool)), x)
    elif name == "generic":
        b.add(words, lambda x: lax.reduce_window(unit(x), np.float32(1), lambda p, q: 0.5 * (p * q + p), **pool), x,
              smooth=False)  # fmt: skip
    elif name == "jvp":
        b.add(words, lambda x, y: jax.jvp(largest, (x,), (y,))[1], x, b.like(x.shape, x.dtype), smooth=False)
    else:
        scattered = importlib.import_module("jax._src.lax.windowed_reductions")._select_and_scatter
        made = jax.eval_shape(largest, jax.ShapeDtypeStruct(x.shape, x.dtype))
        pads = lax.padtype_to_pads(x.shape, sizes, strides, padding)
        y = b.like(made.shape, x.dtype)
        b.add(words, lambda x, y: scattered(x, lax.ge, sizes, strides, pads, y, jnp.float32(0), lax.add), x, y,
              smooth=False)  # fmt: skip


# -- indexing --------------------------------------------------------------------------------


def ids_of(b: Builder, count: int) -> Value:
    """Whole numbers of either sign, from -9 to 9 where they are inputs."""
    return b.like((count,), jnp.int32)


def look_up(b: Builder) -> None:
    x = b.pick()
    rank = len(x.shape)
    if x.size == 0:
        return
    d = b.dim(x)
    name = b.rng.choice(["rows", "clip", "fill", "along", "pairs", "windows" if rank > 1 else "rows"])
    many = b.rng.choice([5, 8, 12, 16])
    if name in ("rows", "clip", "fill"):
        ids = ids_of(b, many)
        bound = x.shape[d] if name == "rows" else 1 << 30
        mode = {"rows": None, "clip": "clip", "fill": "fill"}[name]
        b.add(f"look up {name} {d}", lambda x, i: jnp.take(x, i % bound if name == "rows" else i, axis=d, mode=mode), x,
              ids, exact=True)  # fmt: skip
    elif name == "along":
        ids = b.like(x.shape, jnp.int32)
        b.add(f"take along {d}", lambda x, i: jnp.take_along_axis(x, i % x.shape[d], axis=d), x, ids, exact=True)
    elif name == "windows":
        ids = ids_of(b, x.shape[0])
        rest = tuple(max(1, size // 2) for size in x.shape[1:])
        b.add("windows of rows", lambda x, i: jax.vmap(lambda row, i: lax.dynamic_slice(
            row, [i] * row.ndim, rest))(x, i), x, ids, exact=True)  # fmt: skip
    else:
        ids, others = ids_of(b, many), ids_of(b, many)
        e = len(x.shape) - 1
        b.add("look up pairs", lambda x, i, j: x[i % x.shape[0]] if e == 0 else x[i % x.shape[0], ..., j % x.shape[e]],
              x, ids, others, exact=True)  # fmt: skip


def update(b: Builder) -> None:
    x = b.pick()
    rank = len(x.shape)
    if x.size == 0:
        return
    name = b.rng.choice(["set", "add", "subtract", "multiply", "min", "max", "segment_sum", "segment_max", "columns",
                         "place", "paired" if rank > 1 else "add"])  # fmt: skip
    many = b.rng.choice([4, 8, 9, 16])
    many = min(many, x.shape[0]) if name == "set" else many
    rows = b.like((many, *x.shape[1:]), x.dtype)
    smooth = name in ("set", "add", "subtract", "segment_sum", "paired", "place")
    mode = b.rng.choice([None, "clip", "drop"])
    if name in ("segment_sum", "segment_max"):
        ids = ids_of(b, x.shape[0])
        function = getattr(jax.ops, name)
        b.add(name, lambda x, i: unit(jnp.nan_to_num(function(x, i % 8, 8), posinf=0, neginf=0)), x, ids, smooth=smooth)
    elif name == "columns":
        ids, e = ids_of(b, many), len(x.shape) - 1
        b.add("add to columns", lambda x, i: unit(x.at[..., i % x.shape[e]].add(jnp.asarray(0.5, x.dtype))), x, ids)
    elif name == "place":
        ids = ids_of(b, 5)
        b.add("set a place", lambda x, i: x.at[i[0] % x.shape[0]].set(jnp.asarray(1, x.dtype)), x, ids, exact=True)
    elif name == "paired":
        ids = ids_of(b, x.shape[0])
        b.add("add to each row", lambda x, i: jax.vmap(lambda row, i: row.at[i % 3].add(jnp.asarray(1, x.dtype)))(
            x, i), x, ids, exact=False)  # fmt: skip
    elif name == "set":  # each place once: which of two comes last is nobody's to say
        ids = ids_of(b, 5)
        b.add(f"set rows {mode}", lambda x, u, i: x.at[jnp.arange(many) + i[0] % 3].set(u, mode=mode), x, rows, ids,
              exact=True)  # fmt: skip
    else:
        ids = ids_of(b, many)
        b.add(f"{name} rows {mode}", lambda x, u, i: unit(getattr(x.at[i % (x.shape[0] + 2)], name)(u, mode=mode)), x,
              rows, ids, smooth=smooth)  # fmt: skip
