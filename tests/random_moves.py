"""Operations of random programs that move elements: reshapes, transposes, slices and concatenations.

In: a `Builder`. Each operation draws its parameters, takes existing values, and adds itself (`random_operations`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from random_programs import Builder, Value


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
