"""The operations of random programs: each draws its parameters, takes existing values, and adds itself.

In: a `Builder`. `OPERATIONS` reaches every primitive with a rule (`test_fuzz.py` checks this); `COMBINATORS` wrap a
body drawn from them: calls, branches, loops. Values that could grow without bound are kept small, so that a wrong
result differs visibly from rounding errors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from random_elementwise import (
    booleans,
    broadcasting_pair,
    complexes,
    convert,
    integers,
    jump,
    jumping_pair,
    kept,
    pair,
    select,
    smooth,
    special,
    unit,
)
from random_moves import broadcast, concatenate, cut, cut_anywhere, pad, reshape, rev, split, squeeze, transpose
from random_products import algebra, attention_over_pages, convolution, fourier, grouped_product, product
from random_programs import Builder, Value
from random_reductions import cumulative, look_up, order, reduce, reduce_whole, update, window
from test_rules_forced import bind

Operation = Callable[[Builder], Any]


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
    product, product, product, convolution, convolution, grouped_product, attention_over_pages, algebra,
    fourier, randomness, made,
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
