"""A Pallas kernel is split along the dims of its grid that devices can share, and along no other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from kernel_strategies import kernels, run_every_strategy

import autopar
from autopar.errors import RuleError

RNG = np.random.default_rng(0)
X = RNG.standard_normal((64, 64)).astype(np.float32)


def call(kernel: Callable[..., None], grid: Any, inputs: Any, outputs: Any, shape: Any, **options: Any) -> Any:
    struct = jax.ShapeDtypeStruct(shape, jnp.float32)
    return pl.pallas_call(
        kernel, grid=grid, in_specs=inputs, out_specs=outputs, out_shape=struct, interpret=True, **options
    )


def block(shape: Any, index_map: Any) -> pl.BlockSpec:
    return pl.BlockSpec(shape, index_map)


def doubled(x: Any, out: Any) -> None:
    out[...] = x[...] * 2


def added(x: Any, y: Any, out: Any) -> None:
    out[...] = x[...] + y[...]


def matmul(left: Any, right: Any, out: Any) -> None:
    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        out[...] = jnp.zeros_like(out)

    out[...] += left[...] @ right[...]


def matmul_in_scratch(left: Any, right: Any, out: Any, total: Any) -> None:
    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        total[...] = jnp.zeros_like(total)

    total[...] += left[...] @ right[...]

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _() -> None:
        out[...] = total[...]


def column_sum(x: Any, out: Any) -> None:
    @pl.when(pl.program_id(0) == 0)
    def _() -> None:
        out[...] = jnp.zeros_like(out)

    out[...] += x[...].sum(0)


def running_sum(x: Any, out: Any, total: Any) -> None:
    """Along both dims of the grid, in the grid's order."""

    @pl.when(pl.program_id(0) == 0)
    def _() -> None:
        total[...] = jnp.zeros_like(total)

    total[...] += x[...]
    out[...] = total[...]


def running_sum_of_rows(x: Any, out: Any, total: Any) -> None:
    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        total[...] = x[...]

    @pl.when(pl.program_id(1) != 0)
    def _() -> None:
        total[...] += x[...]

    out[...] = total[...]


def of_position(x: Any, out: Any) -> None:
    out[...] = x[...] * pl.program_id(0)


def of_group_position(x: Any, out: Any) -> None:
    out[...] = x[...] * jax.lax.rem(pl.program_id(0), 2)


def moved(function: Callable[..., Any], index_map: Any, out_map: Any, grid: Any = (8,), shape: Any = (8, 64)) -> Any:
    """A kernel over blocks of a 64 x 64 matrix."""
    return call(function, grid, [block(shape, index_map)], block(shape, out_map), (64, 64))


def rows(i: Any, *_: Any) -> Any:
    return i, 0


def blocks(i: Any, j: Any) -> Any:
    return i, j


SQUARE = [block((16, 32), lambda i, j, k: (i, k)), block((32, 8), lambda i, j, k: (k, j))]
SQUARE_OUT = block((16, 8), lambda i, j, k: (i, j))
TOTAL = [pltpu.VMEM((8, 32), jnp.float32)]
HALVES = [block((8, 32), blocks)]
#: By name, the kernel and its rule: with the size of each loop that devices share.
CASES: dict[str, tuple[Any, tuple[Any, ...], str]] = {
    "a matmul": (call(matmul, (4, 8, 2), SQUARE, SQUARE_OUT, (64, 64)), (X, X), "ac ., . bd -> ac bd; a=4 b=8"),
    "a matmul in scratch memory": (
        call(
            matmul_in_scratch,
            (4, 8, 2),
            SQUARE,
            SQUARE_OUT,
            (64, 64),
            scratch_shapes=[pltpu.VMEM((16, 8), jnp.float32)],
        ),
        (X, X),
        "ac ., . bd -> ac bd; a=4 b=8",
    ),
    "a reduction": (
        call(column_sum, (8, 2), HALVES, block((32,), lambda i, j: (j,)), (64,)),
        (X,),
        ". ab -> ab; a=2",
    ),
    "a running sum over the whole grid": (
        call(running_sum, (8, 2), HALVES, HALVES[0], (64, 64), scratch_shapes=TOTAL),
        (X,),
        "none",
    ),
    "a running sum along rows": (
        call(running_sum_of_rows, (8, 2), HALVES, HALVES[0], (64, 64), scratch_shapes=TOTAL),
        (X,),
        "ab . -> ab .; a=8",
    ),
    "a transpose": (
        moved(lambda x, out: out.__setitem__(..., x[...].T), blocks, lambda i, j: (j, i), (8, 8), (8, 8)),
        (X,),
        "ac bd -> bd ac; a=8 b=8",
    ),
    "merged dims": (
        moved(doubled, lambda b, h: (b * 4 + h, 0), lambda b, h: (b * 4 + h, 0), (2, 4)),
        (X,),
        "ab . -> ab .; a=2",
    ),
    "merged dims, minor first": (
        moved(doubled, lambda h, b: (b * 4 + h, 0), lambda h, b: (b * 4 + h, 0), (4, 2)),
        (X,),
        "ab . -> ab .; a=2",
    ),
    "groups": (
        call(
            added, (8,), [block((8, 64), rows), block((8, 64), lambda i: (i // 2, 0))], block((8, 64), rows), (64, 64)
        ),
        (X, X[:32]),
        "ab ., ac . -> ab .; a=4",
    ),
    "every second": (
        call(added, (8,), [block((8, 64), rows), block((8, 64), lambda i: (i % 2, 0))], block((8, 64), rows), (64, 64)),
        (X, X[:16]),
        "ab ., . . -> ab .; a=4",
    ),
    "shared memory": (
        call(
            added,
            (8, 4),
            [block((8, 16), blocks), block((8, 16), lambda i, j: (0, j))],
            block((8, 16), blocks),
            (64, 64),
            input_output_aliases={0: 0},
        ),
        (X, X),
        "ac bd, . bd -> ac bd; a=8 b=4",
    ),
    "its position": (moved(of_position, blocks, blocks, (8, 4), (8, 16)), (X,), ". ab -> . ab; a=4"),
    "its position in a group": (moved(of_group_position, rows, rows), (X,), "ab . -> ab .; a=4"),
    "its position, of each row": (
        jax.vmap(call(of_position, (4,), [block((16,), lambda i: (i,))], block((16,), lambda i: (i,)), (64,))),
        (X,),
        "a . -> a .; a=64",
    ),
    "the size of the grid": (
        moved(lambda x, out: out.__setitem__(..., x[...] * pl.num_programs(0)), rows, rows),
        (X,),
        "ab . -> ab .; a=8",
    ),
    "backwards": (moved(doubled, lambda i: (7 - i, 0), rows), (X,), "none"),
    "interleaved": (moved(doubled, lambda i: (i % 2 * 4 + i // 2, 0), rows), (X,), "none"),
    "the diagonal": (
        call(doubled, (8,), [block((8, 8), lambda i: (i, i))], block((8, 8), rows), (64, 8)),
        (X,),
        "none",
    ),
    "a part of the rows": (
        call(doubled, (4,), [block((8, 64), rows)], block((8, 64), rows), (32, 64)),
        (X,),
        "none",
    ),
    "later rows": (
        call(doubled, (7,), [block((8, 64), lambda i: (i + 1, 0))], block((8, 64), rows), (56, 64)),
        (X,),
        "none",
    ),
    "a last block that is not full": (
        call(doubled, (5,), [block((8, 64), rows)], block((8, 64), rows), (37, 64)),
        (X[:37],),
        "none",
    ),
    "whole arrays": (
        call(
            lambda x, out: out.__setitem__(pl.ds(pl.program_id(0) * 8, 8), x[pl.ds(pl.program_id(0) * 8, 8)]),
            (8,),
            [pl.BlockSpec(memory_space=pl.ANY)],
            pl.BlockSpec(memory_space=pl.ANY),
            (64, 64),
        ),
        (X,),
        "none",
    ),
    "windows by element": (
        call(doubled, (8,), [block((pl.Element(8), 64), lambda i: (i * 8, 0))], block((8, 64), rows), (64, 64)),
        (X,),
        "none",
    ),
}


def gathered(index: Any, x: Any) -> Any:
    """Rows that prefetched scalars choose."""
    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(8, 4),
        in_specs=[block((1, 16), lambda i, j, index: (index[i], j))],
        out_specs=block((1, 16), lambda i, j, index: (i, j)),
    )

    def kernel(_: Any, x: Any, out: Any) -> None:
        out[...] = x[...]

    struct = jax.ShapeDtypeStruct((8, 64), jnp.float32)
    return pl.pallas_call(kernel, grid_spec=spec, out_shape=struct, interpret=True)(index, x)


def of_any_size(size: Any, x: Any) -> Any:
    return moved(doubled, blocks, blocks, (size, 4), (8, 16))(x)


CASES |= {
    "prefetched scalars": (gathered, (np.arange(8, dtype=np.int32)[::-1], X[:8]), "., . ab -> . ab; a=4"),
    "a grid of traced size": (of_any_size, (np.int32(8), X), ", . ab -> . ab; a=4"),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CASES)
def test_a_grid_is_split_where_devices_can_share_it(name: str) -> None:
    function, args, expected = CASES[name]
    (rule,) = kernels(function, args, "pallas_call")
    assert rule == expected
    assert (run_every_strategy(function, args, "2x4") > 0) == (expected != "none")


def test_a_rule_of_the_users_comes_first() -> None:
    def step(x: Any) -> Any:
        return call(doubled, (8,), [block((8, 64), rows)], block((8, 64), rows), (64, 64), name="of_user")(jnp.sin(x))

    def planned() -> autopar.Plan:
        plan = autopar.plan(step, X, mesh="8", hardware="h100-sxm", pin={"x": jax.P("data")})
        assert isinstance(plan, autopar.Plan)
        return plan

    assert [region.operands[0].dims for region in planned().regions] == [(("data",), ())]
    autopar.register_rule("of_user", ". . -> . .")
    assert planned().regions == () and planned().replicated == ()
    autopar.register_rule("of_user", "rows columns -> rows columns")  # without a function: the grid says more
    assert len(planned().regions) == 1 and planned().replicated == ()


def test_a_saved_plan_does_not_split_another_kernel_of_the_same_name(tmp_path: Path) -> None:
    """A plan file names kernels; what devices can share follows from the kernel that runs."""

    def step(index_map: Any) -> Callable[..., Any]:
        spec = [block((8, 64), index_map)]
        return lambda x: call(doubled, (8,), spec, block((8, 64), rows), (64, 64), name="renamed")(jnp.sin(x))

    plan = autopar.plan(step(rows), X, mesh="8", hardware="h100-sxm", pin={"x": jax.P("data")})
    plan.save(tmp_path / "plan.json")
    loaded = autopar.load_plan(tmp_path / "plan.json")
    np.testing.assert_allclose(autopar.parallelize(step(rows), plan=loaded)(X), 2 * np.sin(X), rtol=1e-5)
    with pytest.raises(RuleError, match="`renamed`"):
        autopar.parallelize(step(lambda i: (7 - i, 0)), plan=loaded)(X)


@pytest.mark.parametrize(("shape", "mesh"), [((6, 30, 12, 8), "8"), ((1, 30, 12, 8), "2x4"), ((1, 30, 1, 8), "8")])
def test_what_does_not_divide_runs_on_fewer_parts_or_whole(shape: tuple[int, ...], mesh: str) -> None:
    """Odd batches and heads, a batch of 1."""

    def kernel(x: Any, out: Any) -> None:
        out[...] = jnp.cumsum(x[...], 0)

    def step(x: Any) -> Any:
        spec = block((None, 30, None, 8), lambda b, h: (b, 0, h, 0))
        return call(kernel, shape[::2], [spec], spec, shape)(jnp.sin(x)) * 2

    x = RNG.standard_normal(shape).astype(np.float32)
    plan = autopar.plan(step, x, mesh=mesh, hardware="h100-sxm")
    got = autopar.parallelize(step, plan=plan)(x)
    np.testing.assert_allclose(got, step(jnp.asarray(x)), rtol=1e-4, atol=1e-5)
