"""Elementwise operations of random programs: functions, comparisons, conversions, selections.

In: a `Builder`. Each operation draws its parameters, takes existing values, and adds itself (`random_operations`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint
from jax.experimental.xla_metadata import set_xla_metadata
from random_programs import Builder
from test_rules_forced import bind


def unit(x: Any) -> Any:
    return 0.9 * jnp.tanh(x)


def positive(x: Any) -> Any:
    return 0.5 + jnp.square(jnp.tanh(x))


def available(names: str) -> list[str]:
    return [name for name in names.split() if hasattr(lax, name)]  # older JAX has fewer


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
