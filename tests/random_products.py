"""Linear algebra of random programs: matmuls, convolutions, decompositions, Fourier transforms.

In: a `Builder`. Each operation draws its parameters, takes existing values, and adds itself (`random_operations`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from random_elementwise import unit
from random_programs import Builder
from test_rules_forced import bind

from autopar.inference.kernels.paged_attention import attend_paged
from autopar.inference.kv_cache.device_pages import KVPages


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


def attention_over_pages(b: Builder) -> None:
    rows, tokens, kv_heads, group = (b.rng.choice(sizes) for sizes in ([4, 6, 8], [1, 2, 3], [1, 4, 8], [1, 2]))
    num_pages, num = rows * 2, b.rng.choice([1, 3])
    q = b.like((rows, tokens, kv_heads * group, 4), jnp.float32)
    keys, values = (b.like((num_pages + 1, 4, kv_heads, 4), jnp.float32) for _ in range(2))
    tables = np.arange(rows * num, dtype=np.int32).reshape(rows, num) % num_pages
    positions = np.arange(rows * tokens, dtype=np.int32).reshape(rows, tokens) % (4 * num) - 1
    positions = np.where(positions < 0, 0, positions)

    def attend(q: Any, keys: Any, values: Any) -> Any:
        pages = KVPages(unit(keys), unit(values))
        return attend_paged("blocks", unit(q), pages, jnp.asarray(tables), jnp.asarray(positions))

    b.add(f"attention over pages {rows, num}", attend, q, keys, values, smooth=False)


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
