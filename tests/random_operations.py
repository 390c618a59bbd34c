"""The operations of random programs: each draws its parameters, takes values made before, and adds itself.

In: a `Builder`. `OPERATIONS` reaches every primitive that has a rule (`test_fuzz.py` holds it to that);
`COMBINATORS` wrap a body drawn from them: calls, branches, loops. What could grow without bound is kept small, so
that a wrong result stands out from rounding.
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
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint
from jax.experimental.xla_metadata import set_xla_metadata
from random_programs import Builder, Kind, Value
from test_rules_forced import bind

Operation = Callable[[Builder], Any]


def unit(x: Any) -> Any:
    return 0.9 * jnp.tanh(x)


def positive(x: Any) -> Any:
    return 0.5 + jnp.square(jnp.tanh(x))


def available(names: str) -> list[str]:
    return [name for name in names.split() if hasattr(lax, name)]  # older JAX has fewer


# -- element by element ----------------------------------------------------------------------

BOUNDED = available("sin cos tanh logistic erf erfc neg atan asinh bessel_i0e bessel_i1e")
OF_UNIT = available("acos asin atanh erf_inv exp exp2 expm1 sinh cosh tan square one_minus_square")
OF_POSITIVE = available("cbrt digamma lgamma log log1p log2 rsqrt sqrt")
JUMPING = available("floor ceil round sign is_finite abs")


def smooth(b: Builder) -> None:
    x = b.pick()
    name = b.rng.choice(BOUNDED + OF_UNIT + OF_POSITIVE)
    function, exact = getattr(lax, name), name == "neg"
    prepare = unit if name in OF_UNIT else positive if name in OF_POSITIVE else lambda x: x
    b.add(name, lambda x: function(prepare(x)), x, exact=exact)


def special(b: Builder) -> None:
    x = b.pick(dtype=jnp.float32)
    y = b.like(x.shape, x.dtype)
    kinds: dict[str, Callable[..., Any]] = {
        "acosh": lambda x, y: lax.acosh(1.5 + positive(x)),
        "polynomial": lambda x, y: lax.polynomial(unit(x), [1.0, 2.0, 3.0]) if hasattr(lax, "polynomial") else x,
        "integer_pow": lambda x, y: lax.integer_pow(unit(x), 3),
        "betainc": lambda x, y: lax.betainc(positive(x), positive(y), jnp.abs(unit(x))),
        "polygamma": lambda x, y: lax.polygamma(1.0, positive(y)),
        "zeta": lambda x, y: lax.zeta(1.5 + positive(x), positive(y)),
        "igamma": lambda x, y: lax.igamma(positive(x), positive(y)),
        "igammac": lambda x, y: lax.igammac(positive(x), positive(y)),
        "igamma_grad_a": lambda x, y: lax.igamma_grad_a(positive(x), positive(y)),
    }
    name = b.rng.choice([*kinds])
    differentiable = name in ("acosh", "integer_pow", "polynomial")
    b.add(name, kinds[name], x, y, smooth=differentiable)


def jump(b: Builder) -> None:
    name = b.rng.choice(JUMPING)
    b.add(name, lambda x: getattr(lax, name)(3 * x if name == "round" else x), b.pick(exact=True), exact=True)


def pair(b: Builder) -> None:
    x = b.pick()
    y = b.like(x.shape, x.dtype)
    kinds: dict[str, Callable[..., Any]] = {
        "add": lax.add,
        "sub": lax.sub,
        "mul": lambda x, y: unit(x) * unit(y),
        "div": lambda x, y: unit(x) / positive(y),
        "atan2": lambda x, y: lax.atan2(unit(x), positive(y)),
        "pow": lambda x, y: lax.pow(positive(x), unit(y)),
        "max": lax.max,
        "min": lax.min,
        "add_any": bind("add_any"),
    }
    name = b.rng.choice([*kinds])
    b.add(name, kinds[name], x, y, exact=name in ("max", "min"))


def broadcasting_pair(b: Builder) -> None:
    """As layer norms and biases do it: the smaller operand runs along some dims of the larger."""
    x = b.pick(min_rank=2)
    shape = tuple(1 if b.rng.random() < 0.5 else size for size in x.shape)
    y = b.like(shape, x.dtype) if math.prod(shape) > 1 else x
    name = b.rng.choice(["add", "sub", "mul"])
    b.add(f"broadcasting {name}", lambda x, y: getattr(jnp, {"sub": "subtract", "mul": "multiply"}.get(name, name))(
        unit(x), y), x, y)  # fmt: skip


def jumping_pair(b: Builder) -> None:
    total = ["eq_to", "le_to", "lt_to"]  # not for bfloat16
    name = b.rng.choice(["eq", "ge", "gt", "le", "lt", "ne", "nextafter", "rem", *total])
    x = b.pick(exact=True, dtype=jnp.float32 if name in total else None)
    function = bind(name) if name in total else getattr(lax, name)
    b.add(name, function, x, b.like(x.shape, x.dtype, exact=True), exact=True, smooth=False)


def integers(b: Builder) -> None:
    x = b.pick("int")
    y = b.like(x.shape, x.dtype)
    unary = [
        "population_count",
        "clz",
        "bitwise_not",
        "square",
        *(["sign", "abs", "neg"] if x.dtype == jnp.int32 else []),
    ]
    shifts = ["shift_left", "shift_right_arithmetic", "shift_right_logical"]
    both = ["bitwise_and", "bitwise_or", "bitwise_xor", "add", "sub", "mul", "max", "min", "eq", "lt", "div", "rem"]
    name = b.rng.choice([*unary, *shifts, *both])
    if name in shifts:
        b.add(name, lambda x, y: getattr(lax, name)(x, y & x.dtype.type(7)), x, y)
    elif name in ("div", "rem"):
        b.add(name, lambda x, y: getattr(lax, name)(x, (y & x.dtype.type(7)) + x.dtype.type(1)), x, y)
    elif name in unary:
        b.add(name, getattr(lax, name), x)
    else:
        b.add(name, getattr(lax, name), x, y)


def booleans(b: Builder) -> None:
    x = b.pick("bool")
    name = b.rng.choice(["bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not"])
    b.add(name, getattr(lax, name), *([x] if name == "bitwise_not" else [x, b.like(x.shape, x.dtype)]))


def select(b: Builder) -> None:
    x = b.pick()
    y, chosen = b.like(x.shape, x.dtype), b.like(x.shape, jnp.bool_)
    if b.rng.random() < 0.3:
        b.add("clamp", lambda x: lax.clamp(jnp.asarray(-0.5, x.dtype), x, jnp.asarray(0.5, x.dtype)), x, exact=True)
    else:
        b.add("select", lax.select, chosen, x, y, exact=True)


def convert(b: Builder) -> None:
    kind = b.rng.choice(["bfloat16", "float32", "int", "bool", "of int", "of bool", "bits", "halves", "precision"])
    if kind in ("bfloat16", "float32"):
        x = b.pick(dtype=jnp.float32 if kind == "bfloat16" else jnp.bfloat16)
        b.add(f"as {kind}", lambda x: x.astype(kind), x, exact=True)
    elif kind == "int":
        b.add("as int32", lambda x: (4 * x).astype(jnp.int32), b.pick(exact=True), smooth=False)
    elif kind == "bool":
        b.add("as bool", lambda x: x.astype(bool), b.pick("int"))
    elif kind in ("of int", "of bool"):
        dtype = b.dtype("float")
        b.add("as float", lambda x: unit(x.astype(dtype) / 8), b.pick("int" if kind == "of int" else "bool"))
    elif kind == "bits":
        b.add("as bits", lambda x: lax.bitcast_convert_type(x, jnp.int32),
              b.pick(exact=True, dtype=jnp.float32), smooth=False)  # fmt: skip
    elif kind == "halves":
        x = b.pick("int", dtype=jnp.int32)
        b.add("as halves and back", lambda x: lax.bitcast_convert_type(
            lax.bitcast_convert_type(x, jnp.int16) ^ jnp.int16(5), jnp.int32), x)  # fmt: skip
    else:
        b.add("reduce_precision", lambda x: lax.reduce_precision(x, 5, 10), b.pick(exact=True), exact=True)


def kept(b: Builder) -> None:
    """What changes nothing, but stands in the way."""
    x = b.pick()
    if b.rng.random() < 0.2:
        b.add("optimization_barrier", lambda x, y: lax.optimization_barrier((x, y)), x, b.pick(), exact=True)
        return
    kinds: dict[str, Callable[..., Any]] = {
        "stop_gradient": lax.stop_gradient,
        "device_put": jax.device_put,
        "copy": lambda x: jnp.array(x, copy=True),
        "name": lambda x: checkpoint_name(x, "kept"),
        "layout": lambda x: with_layout_constraint(x, Layout(tuple(reversed(range(x.ndim))))),
        "metadata": lambda x: set_xla_metadata(x, kept="yes"),
        "unconstrained": lambda x: _unconstrained(x, math.prod(map(int, b.mesh.split("x")))),
        "platform": lambda x: lax.platform_dependent(x, cpu=lambda x: -x, default=lambda x: x),
    }
    name = b.rng.choice([*kinds])
    b.add(name, kinds[name], x, exact=True, smooth=name not in ("layout", "metadata"))


def _unconstrained(x: Any, num_devices: int) -> Any:
    devices = jax.devices()[:num_devices]
    mesh = jax.make_mesh((num_devices,), ("any",), axis_types=(jax.sharding.AxisType.Auto,), devices=devices)
    free = jax.P(*[jax.P.UNCONSTRAINED] * x.ndim)
    return lax.with_sharding_constraint(x, jax.sharding.NamedSharding(mesh, free))


def complexes(b: Builder) -> None:
    x = b.pick("complex")
    if b.rng.random() < 0.5:
        f = b.pick(dtype=jnp.float32)
        b.add("complex", lax.complex, f, b.like(f.shape, f.dtype), exact=True)
    else:
        y = b.like(x.shape, x.dtype)
        b.add("complex product", lambda x, y: [lax.real(x * lax.conj(y)), lax.imag(x + y)], x, y)


# -- moves -----------------------------------------------------------------------------------


def any_kind(b: Builder, **options: Any) -> Value:
    return b.pick(b.rng.choice(["float", "float", "float", "int", "bool"]), **options)


def reshape(b: Builder) -> None:
    x = any_kind(b)
    if x.size == 0:
        return
    factors = [p for size in x.shape for p in _primes(size)]
    if b.rng.random() < 0.3:
        b.rng.shuffle(factors)  # strides that need not meet
    shape: list[int] = []
    for p in factors:
        if (shape and len(shape) + 1 > 4) or (shape and b.rng.random() < 0.5):
            shape[-1] *= p
        else:
            shape.append(p)
    if b.rng.random() < 0.3:
        shape.insert(b.rng.randint(0, len(shape)), 1)
    b.add(f"reshape {shape}", lambda x: lax.reshape(x, tuple(shape)), x, exact=True)


def _primes(n: int) -> list[int]:
    for p in range(2, n + 1):
        if n % p == 0:
            return [p, *_primes(n // p)]
    return []


def transpose(b: Builder) -> None:
    x = any_kind(b, min_rank=2)
    order = b.rng.sample(range(len(x.shape)), len(x.shape))
    b.add(f"transpose {order}", lambda x: lax.transpose(x, order), x, exact=True)


def broadcast(b: Builder) -> None:
    x = any_kind(b, max_rank=3)
    if x.size > 1000:
        return
    rank = len(x.shape) + b.rng.randint(0, 1)
    places = sorted(b.rng.sample(range(rank), len(x.shape)))
    shape = [b.rng.choice([2, 3, 8]) for _ in range(rank)]
    for place, size in zip(places, x.shape, strict=True):
        shape[place] = shape[place] if size == 1 else size
    b.add(f"broadcast {shape} {places}", lambda x: lax.broadcast_in_dim(x, shape, places), x, exact=True)


def squeeze(b: Builder) -> None:
    x = any_kind(b)
    ones = [d for d, size in enumerate(x.shape) if size == 1]
    if ones:
        gone = b.rng.choice(ones)
        b.add(f"squeeze {gone}", lambda x: lax.squeeze(x, (gone,)), x, exact=True)
    else:
        place = b.rng.randint(0, len(x.shape))
        b.add(f"expand_dims {place}", lambda x: lax.expand_dims(x, (place,)), x, exact=True)


def concatenate(b: Builder) -> None:
    x = any_kind(b)
    y, d = b.like(x.shape, x.dtype), b.dim(x)
    name = b.rng.choice(["concatenate", "stack", "part"] if hasattr(lax, "stack") else ["concatenate", "part"])
    if name == "stack":
        b.add(f"stack {d}", lambda x, y: lax.stack([x, y], d), x, y, exact=True)
    elif name == "part":
        b.add(f"concatenate {d}, the second cut", lambda x, y: lax.concatenate(
            [x, lax.slice_in_dim(y, 0, max(1, x.shape[d] // 2), axis=d)], d), x, y, exact=True)  # fmt: skip
    else:
        b.add(f"concatenate {d}", lambda x, y: lax.concatenate([x, y, x], d), x, y, exact=True)


def split(b: Builder) -> None:
    x = any_kind(b)
    d = b.dim(x)
    if x.shape[d] < 2:
        return
    first = b.rng.randint(1, x.shape[d] - 1)
    if b.rng.random() < 0.3 and x.shape[d] <= 4 and hasattr(lax, "unstack"):
        b.add(f"unstack {d}", lambda x: lax.unstack(x, axis=d), x, exact=True)
    else:
        b.add(f"split {d} at {first}", lambda x: lax.split(x, (first, x.shape[d] - first), axis=d), x, exact=True)


def pad(b: Builder) -> None:
    x = any_kind(b)
    amounts = [(0, 0, 0)] * len(x.shape)
    amounts[b.dim(x)] = b.rng.choice([(1, 0, 0), (0, 2, 0), (1, 1, 1), (-1, 2, 0), (0, 0, 2)])
    b.add(f"pad {amounts}", lambda x: lax.pad(x, jnp.asarray(1, x.dtype), amounts), x, exact=True)


def rev(b: Builder) -> None:
    x = any_kind(b)
    d = b.dim(x)
    name = b.rng.choice(["rev", "tile", "roll", "repeat"] if hasattr(lax, "tile") else ["rev", "roll", "repeat"])
    if x.size > 1000:
        name = "rev"
    reps = [2 if i == d else 1 for i in range(len(x.shape))]
    kinds: dict[str, Callable[..., Any]] = {
        "rev": lambda x: lax.rev(x, (d,)),
        "tile": lambda x: lax.tile(x, tuple(reps)),
        "roll": lambda x: jnp.roll(x, 1, axis=d),
        "repeat": lambda x: jnp.repeat(x, 2, axis=d),
    }
    b.add(f"{name} {d}", kinds[name], x, exact=True)


def cut(b: Builder) -> None:
    x = any_kind(b)
    starts = [b.rng.randint(0, min(2, size - 1)) if size else 0 for size in x.shape]
    strides = [b.rng.choice([1, 1, 1, 2]) for _ in x.shape]
    whole = b.dim(x)
    starts[whole], strides[whole] = 0, 1
    b.add(f"slice from {starts} by {strides}", lambda x: lax.slice(x, starts, x.shape, strides), x, exact=True)


def cut_anywhere(b: Builder) -> None:
    """Where it starts is known at run time only, perhaps beyond the end."""
    x, start = any_kind(b), b.pick("int", dtype=jnp.int32)
    if x.size == 0 or start.size == 0:
        return
    d = b.dim(x)
    size = max(1, x.shape[d] // 2)
    sizes = [size if i == d else s for i, s in enumerate(x.shape)]

    def places(s: Any) -> list[Any]:
        return [s.reshape(-1)[0] if i == d else 0 for i in range(x.shape.__len__())]

    if b.rng.random() < 0.5:
        b.add(f"dynamic_slice {d}", lambda x, s: lax.dynamic_slice(x, places(s), sizes), x, start, exact=True)
    else:
        update = b.like(tuple(sizes), x.dtype)
        b.add(f"dynamic_update_slice {d}", lambda x, u, s: lax.dynamic_update_slice(x, u, places(s)), x, update, start,
              exact=True)  # fmt: skip


# -- reductions, orders, windows -------------------------------------------------------------


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


# -- products --------------------------------------------------------------------------------


def product(b: Builder) -> None:
    """Any number of batch, contracted and free dims, in any order."""
    x = b.pick()
    roles = [b.rng.choice("bkki") for _ in x.shape]
    free = [b.rng.choice(b.sizes) for _ in range(b.rng.randint(0, 1))]
    places = [("x", d) for d, role in enumerate(roles) if role in "bk"] + [("j", f) for f in range(len(free))]
    b.rng.shuffle(places)
    if not places or len(places) > 4:
        return
    shape = tuple(x.shape[d] if side == "x" else free[d] for side, d in places)
    result = math.prod(s for s, role in zip(x.shape, roles, strict=True) if role in "bi") * math.prod(free)
    if math.prod(shape) > 2 * 1536 or result > 4096:
        return
    y = b.like(shape, x.dtype)
    at = {d: n for n, (side, d) in enumerate(places) if side == "x"}
    batch, contracted = ([d for d, role in enumerate(roles) if role == kind] for kind in "bk")
    numbers = ((contracted, [at[d] for d in contracted]), (batch, [at[d] for d in batch]))
    scale = 1 / math.sqrt(max(1, math.prod(x.shape[d] for d in contracted)))
    wide = jnp.float32 if b.rng.random() < 0.5 else None
    b.add(f"dot_general {numbers}{' wide' if wide else ''}", lambda x, y: unit(lax.dot_general(
        x, y, numbers, preferred_element_type=wide) * scale), x, y)  # fmt: skip


def convolution(b: Builder) -> None:
    spatial = b.rng.choice([1, 2])
    n, ci = b.rng.choice([1, 4, 8, 6]), b.rng.choice([1, 4, 8])
    size = [b.rng.choice([4, 5, 8]) for _ in range(spatial)]
    groups = b.rng.choice([1, 1, 1, ci, 2 if ci % 2 == 0 else 1])
    co = groups * b.rng.choice([1, 2, 4])
    layout = {1: ("NHC", "HIO", "NHC"), 2: b.rng.choice([("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW")])}[spatial]
    kernel = [b.rng.choice([1, 2, 3]) for _ in range(spatial)]

    def laid(text: str, **sizes: int) -> tuple[int, ...]:
        rest = iter(range(spatial))
        return tuple(sizes.get(letter) or {"N": size, "I": kernel}["N" if "N" in text else "I"][next(rest)]
                     for letter in text)  # fmt: skip

    x = b.like(laid(layout[0], N=n, C=ci), jnp.float32)
    w = b.like(laid(layout[1], I=ci // groups, O=co), jnp.float32)
    options: dict[str, Any] = {
        "window_strides": [b.rng.choice([1, 1, 2]) for _ in size],
        "padding": b.rng.choice(["SAME", "VALID"]) if max(kernel) <= min(size) else "SAME",
        "rhs_dilation": [b.rng.choice([1, 1, 2]) for _ in size],
        "dimension_numbers": layout,
        "feature_group_count": groups,
    }
    options["padding"] = "SAME" if max(options["rhs_dilation"]) > 1 else options["padding"]
    if b.rng.random() < 0.2 and options["padding"] != "SAME":
        options["lhs_dilation"], options["padding"] = [2] * spatial, [(1, 0)] * spatial
    b.add(f"conv {options}", lambda x, w: unit(lax.conv_general_dilated(x, w, **options)), x, w)


def grouped_product(b: Builder) -> None:
    m, k, n = b.rng.choice([16, 24]), b.rng.choice(b.sizes), b.rng.choice(b.sizes)
    x, w = b.like((m, k), jnp.float32), b.like((2, k, n), jnp.float32)
    b.add("ragged_dot", lambda x, w: unit(lax.ragged_dot(x, w, jnp.array([m // 3, m - m // 3]))), x, w)


# -- linear algebra, Fourier -----------------------------------------------------------------


def algebra(b: Builder) -> None:
    n, batch = b.rng.choice([3, 4]), b.rng.choice([(8,), (6,), (2, 4), (9,)])
    a = b.like((*batch, n, n), jnp.float32, exact=True)
    linalg, eye = lax.linalg, 3 * np.eye(n, dtype=np.float32)

    def definite(a: Any) -> Any:
        return a @ jnp.swapaxes(a, -1, -2) + eye

    def reflect(a: Any) -> Any:
        reflectors, taus = bind("geqrf")(a)
        return linalg.householder_product(reflectors, taus), linalg.ormqr(reflectors, taus, a)

    kinds: dict[str, Callable[..., Any]] = {
        "cholesky": lambda a: jnp.linalg.cholesky(definite(a)),
        "triangular_solve": lambda a: linalg.triangular_solve(a + eye, a, left_side=True, lower=True),
        "lu": lambda a: linalg.lu(a + eye)[0],
        "qr": lambda a: linalg.qr(a + eye)[1],
        "eigh": lambda a: linalg.eigh(definite(a))[1],
        "svd": lambda a: linalg.svd(a, compute_uv=False),
        "symmetric_product": lambda a: linalg.symmetric_product(a, a),
        "tridiagonal_solve": lambda a: linalg.tridiagonal_solve(
            0.1 * a[..., 0], 4 + a[..., 1], 0.1 * a[..., 1], a[..., :2]
        ),
        "reflect": reflect,
        "eig": lambda a: linalg.eig(jnp.triu(a) + eye, compute_left_eigenvectors=False)[0],
        "schur": lambda a: jnp.abs(linalg.schur(definite(a))[0]),
        "hessenberg": lambda a: linalg.hessenberg(a)[0],
        "tridiagonal": lambda a: linalg.tridiagonal(definite(a))[1],
        "geqp3": lambda a: bind("geqp3", use_magma=None)(a, jnp.zeros(a.shape[:-1], jnp.int32))[0],
        "cholesky_update": lambda a: linalg.cholesky_update(
            eye + 0 * a.reshape(-1, n, n)[0], a.reshape(-1, n, n)[0, 0]
        ),
        "permutation": lambda a: linalg.lu_pivots_to_permutation(
            jnp.zeros(a.shape[:-1], jnp.int32) + np.arange(n, dtype=np.int32), n + 2
        ),
    }
    name = b.rng.choice([*kinds])
    b.add(name, kinds[name], a, smooth=name in ("cholesky", "triangular_solve", "eigh"))


def fourier(b: Builder) -> None:
    x = b.pick(dtype=jnp.float32, max_rank=4)
    d = b.dim(x)
    if x.size == 0:
        return
    scale = 1 / math.sqrt(max(1, x.shape[d]))
    name = b.rng.choice(["fft", "rfft", "ifft"])
    b.add(f"{name} {d}", lambda x: getattr(jnp.fft, name)(x, axis=d) * (1 if name == "ifft" else scale), x)


# -- numbers from nothing --------------------------------------------------------------------


def randomness(b: Builder) -> None:
    keys = [v for v in b.values if v.kind == "key"]
    key = b.rng.choice(keys) if keys else b.fresh((), jax.random.key(0).dtype)
    shape = b.shape()
    words = {"threefry2x32": 4, "threefry4x32": 8}  # jaxlib 0.12.0.1 compiles philox for one device alone
    name = b.rng.choice(["normal", "bits", "split", "fold_in", "wrap", "gamma", "seed", "dropout", "words", "clone"])
    if key.shape:
        b.add("first key", lambda k: k[(0,) * k.ndim], key)
    elif name == "words":
        which = b.rng.choice([*words])
        ints = b.pick("int", dtype=jnp.int32)
        b.add(which, lambda k, x: bind(which)(*[x.astype(jnp.uint32)] * words[which]), key, ints)
    elif name == "dropout":
        x = b.pick()
        b.add("dropout", lambda k, x: jnp.where(jax.random.bernoulli(k, 0.5, x.shape), x, 0), key, x, exact=True)
    else:
        kinds: dict[str, Callable[..., Any]] = {
            "normal": lambda k: jax.random.normal(k, shape),
            "bits": lambda k: jax.random.bits(k, shape),
            "split": lambda k: jax.random.split(k, 96),
            "fold_in": lambda k: jax.vmap(jax.random.fold_in, (None, 0))(k, jnp.arange(96)),
            "wrap": lambda k: jax.random.key_data(
                jax.random.wrap_key_data(jax.random.key_data(jax.random.split(k, 96)))
            ),
            "gamma": lambda k: jax.random.gamma(k, 1.5, (96,)),
            "seed": lambda k: jax.random.uniform(jax.random.key(7), shape),
            "clone": lambda k: jax.random.uniform(jax.random.clone(k), shape),
        }
        b.add(name, kinds[name], key, smooth=False)


def made(b: Builder) -> None:
    shape = b.shape(2)
    x = b.pick("int", dtype=jnp.int32)
    kinds: dict[str, Callable[..., Any]] = {
        "iota": lambda x: lax.broadcasted_iota(jnp.int32, shape, 1),
        "iota_2x32": lambda x: bind("iota_2x32_shape", shape=shape)(),
        "empty": lambda x: (0 * lax.empty(shape, jnp.int32)) if hasattr(lax, "empty") else x,
        "rng_bit_generator": lambda x: lax.rng_bit_generator(jnp.arange(4, dtype=jnp.uint32), shape)[1],
        "rng_uniform": lambda x: bind("rng_uniform", shape=shape)(0.0, 1.0),
        "full": lambda x: jnp.full(shape, 0.5),
    }
    name = b.rng.choice([*kinds])
    b.add(f"{name} {shape}", kinds[name], x)


OPERATIONS: tuple[Operation, ...] = (
    smooth, smooth, special, jump, pair, pair, broadcasting_pair, broadcasting_pair, jumping_pair, integers, booleans,
    select, convert, kept, complexes, reshape, reshape, transpose, broadcast, squeeze, concatenate, split, pad, rev,
    cut, cut_anywhere, reduce, reduce, reduce_whole, cumulative, order, window, look_up, look_up, update, update,
    product, product, product, convolution, convolution, grouped_product, algebra, fourier, randomness, made,
)  # fmt: skip


# -- structure -------------------------------------------------------------------------------

#: What the body of a loop or a branch is drawn from: nothing that takes inputs of its own shape each time.
SIMPLE: tuple[Operation, ...] = (smooth, smooth, pair, broadcasting_pair, reduce, product, transpose, cumulative)


def called(b: Builder) -> None:
    """A body within a call that JAX keeps, differentiates in its own way, or recomputes."""
    x, y = b.pick(), b.pick()
    inner = b.body([x, y], SIMPLE, b.rng.randint(1, 3))
    run = inner.run
    recomputed = jax.custom_vjp(lambda x, y: run(x, y))
    recomputed.defvjp(lambda x, y: jax.vjp(run, x, y), lambda back, slopes: back(slopes))
    kinds: dict[str, Callable[..., Any]] = {
        "jit": jax.jit(run),
        "checkpoint": jax.checkpoint(run),
        "custom": recomputed,
    }
    name = b.rng.choice([*kinds])
    b.add(f"{name} [{inner.words()}]", kinds[name], x, y, within=inner.values)


def mapped(b: Builder) -> None:
    """A body over all rows of a value."""
    x = b.pick(min_rank=2)
    row = Value(0, x.shape[1:], x.dtype, x.exact, x.loose)
    inner = b.body([row, row], SIMPLE, b.rng.randint(1, 3))
    b.add(f"vmap [{inner.words()}]", lambda x: jax.vmap(inner.run)(x, -x), x, within=inner.values)


def branched(b: Builder) -> None:
    x, choice = b.pick(), b.pick("int", dtype=jnp.int32)
    if choice.size == 0:
        return
    inner = b.body([x, x], SIMPLE, b.rng.randint(1, 2))
    b.add(f"cond [{inner.words()}]", lambda x, c: lax.cond(
        c.reshape(-1)[0] > 0, inner.run, lambda x, y: [-v if v.dtype == x.dtype else v for v in inner.run(x, y)], x, x),
        x, choice, within=inner.values)  # fmt: skip


def repeated(b: Builder) -> None:
    """A scan over the rows of one value, or a loop of unknown length, that carries another."""
    x, rows = b.pick(), b.pick(min_rank=2)
    row = Value(1, rows.shape[1:], rows.dtype, rows.exact, rows.loose)
    inner = b.body([x, row], SIMPLE, b.rng.randint(1, 3))
    made = inner.values[-1]

    def turn(carry: Any, row: Any) -> tuple[Any, Any]:
        out = inner.run(carry, row)[-1]
        if made.shape == carry.shape and made.kind == "float":
            return unit(0.5 * carry + out.astype(carry.dtype)).astype(carry.dtype), out
        share = jnp.mean(out.astype(carry.dtype)) + jnp.mean(row).astype(carry.dtype)
        return unit(0.5 * carry + share).astype(carry.dtype), out

    if b.rng.random() < 0.7:
        backwards = b.rng.random() < 0.3
        b.add(f"scan [{inner.words()}]", lambda x, rows: lax.scan(turn, x, rows, reverse=backwards), x, rows,
              within=inner.values)  # fmt: skip
    else:
        b.add(f"while [{inner.words()}]", lambda x, rows: lax.while_loop(
            lambda s: s[0] < 3, lambda s: (s[0] + 1, turn(s[1], rows[0])[0]), (0, x))[1], x, rows,
            smooth=False, within=inner.values)  # fmt: skip


COMBINATORS: tuple[Operation, ...] = (called, mapped, branched, repeated)
