"""Test paged attention and the selection of its backend.

Every backend gives NumPy's result, whatever is in a page after a sequence's end. A device with some of the heads needs
no pages of other devices. A backend that is wrong, raises or is slow is rejected with a reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.errors import InferenceError
from autopar.hardware.profile import load
from autopar.inference.kernels import paged_attention
from autopar.inference.kernels import paged_attention_pallas as paged_kernel
from autopar.inference.kernels import select_backend as choose_attention
from autopar.inference.kernels.paged_attention import BACKENDS, Backend, attend_paged
from autopar.inference.kernels.select_backend import Problem, choose_backend
from autopar.inference.kv_cache import device_pages as kv_pages
from autopar.inference.kv_cache.device_pages import KVPages
from autopar.inference.kv_cache.scores import PLAIN, Scores
from autopar.jax_interop import compilation
from autopar.plans.plan import Plan
from autopar.xla_compiler import hlo_collectives as hlo

DIM = 16


class Case:
    """Rows of several lengths, also the shortest, the longest and an idle one, in shuffled pages. Entries that were never
    written are NaN."""

    def __init__(self, heads: int, kv_heads: int, tokens: int = 1, page: int = 8, num: int = 5, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        longest = page * num
        self.starts = np.array([0, longest - tokens, -1, page - 1, page, longest // 2])
        rows = len(self.starts)
        self.queries = self.random(rows, tokens, heads, DIM)
        self.tables = self.rng.permutation(rows * num).astype(np.int32).reshape(rows, num)
        ranks = np.arange(tokens)
        self.positions = np.where(self.starts[:, None] < 0, -1, self.starts[:, None] + ranks).astype(np.int32)
        self.keys, self.values = (self.random(rows, longest, kv_heads, DIM) for _ in range(2))
        for array in (self.keys, self.values):
            array[np.arange(longest) > self.positions.max(1)[:, None]] = np.nan
        self.pages = KVPages(*(self._paged(array, page) for array in (self.keys, self.values)))

    def random(self, *shape: int) -> Any:
        return self.rng.standard_normal(shape).astype(np.float32)

    def _paged(self, rows: Any, page: int) -> jax.Array:
        pool = np.full((self.tables.size + 1, page, *rows.shape[2:]), np.nan, np.float32)
        pool[self.tables.reshape(-1)] = rows.reshape(-1, page, *rows.shape[2:])
        pool[-1] = 0
        for row in np.flatnonzero(self.starts < 0):  # an idle slot's table is padded with the scratch page
            self.tables[row] = len(pool) - 1
        return jnp.asarray(pool)

    def expected(self, scores: Scores = PLAIN) -> Any:
        """NumPy's attention of each head, in float64; zeros for the idle row."""
        found = np.zeros(self.queries.shape)
        rows, tokens, heads, _ = self.queries.shape
        group = heads // self.keys.shape[2]
        for row, token, head in np.ndindex(rows, tokens, heads):
            last = self.positions[row, token] + 1
            first = 0 if scores.window is None else max(0, last - scores.window)
            if last:
                seen = slice(first, last)
                keys, values = (each[row, seen, head // group].astype(np.float64) for each in (self.keys, self.values))
                dots = keys @ self.queries[row, token, head] * (scores.scale or 1 / math.sqrt(DIM))
                capped = dots if scores.softcap is None else scores.softcap * np.tanh(dots / scores.softcap)
                weights = np.exp(capped - capped.max())
                found[row, token, head] = weights @ values / weights.sum()
        return found

    def attended(self, backend: str, dtype: Any = jnp.float32, scores: Scores = PLAIN) -> Any:
        pages = KVPages(*(each.astype(dtype) for each in self.pages))
        run = jax.jit(attend_paged, static_argnums=(0, 5))
        queries = jnp.asarray(self.queries, dtype)
        return np.asarray(run(backend, queries, pages, self.tables, self.positions, scores), np.float64)

    def behind(self, window: int) -> None:
        """Give back the pages behind the window of each row: another sequence has left NaNs in them."""
        for row, start in enumerate(self.starts):
            pages = self.tables[row, : max(0, start - window + 1) // self.pages.page_size]
            self.pages = KVPages(*(each.at[pages].set(jnp.nan) for each in self.pages))
            pages[:] = self.pages.scratch_page


@pytest.mark.sampled(2)
@pytest.mark.contract
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("heads", "kv_heads", "tokens"), [(8, 2, 1), (4, 4, 1), (8, 1, 1), (8, 2, 3), (4, 2, 20)])
def test_every_backend_equals_numpy(backend: str, heads: int, kv_heads: int, tokens: int) -> None:
    """Pallas runs in interpret mode. The outputs of idle rows are finite."""
    case = Case(heads, kv_heads, tokens)
    got = case.attended(backend)
    assert np.isfinite(got).all()
    is_real = case.positions >= 0
    np.testing.assert_allclose(got[is_real], case.expected()[is_real], atol=1e-5)
    np.testing.assert_allclose(got[is_real], case.attended("gather")[is_real], atol=1e-5)


@pytest.mark.sampled(3)
@pytest.mark.contract
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("scores", "tokens"),
    [
        (Scores(window=1), 1),
        (Scores(window=9), 1),
        (Scores(scale=0.3, softcap=0.7, window=12), 3),
        (Scores(window=5), 20),
        (Scores(softcap=2.0), 3),
    ],
)
def test_windows_and_soft_caps_equal_numpy(backend: str, scores: Scores, tokens: int) -> None:
    """No page behind the window is read."""
    case = Case(8, 2, tokens)
    if scores.window is not None:
        case.behind(scores.window)
    is_real = case.positions >= 0
    got = case.attended(backend, scores=scores)
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got[is_real], case.expected(scores)[is_real], atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_in_bfloat16(backend: str) -> None:
    case = Case(8, 2, page=16)
    is_real = case.positions >= 0
    np.testing.assert_allclose(case.attended(backend, jnp.bfloat16)[is_real], case.expected()[is_real], atol=2e-2)


@pytest.mark.slow
def test_pallas_splits_the_pages_of_a_row_over_several_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """With few rows and long tables, the partial results of the splits are combined."""
    monkeypatch.setattr(paged_kernel, "_BLOCK_TOKENS", 16)
    for num_programs in (1, 24, 1000):
        monkeypatch.setattr(paged_kernel, "_NUM_PROGRAMS", num_programs)
        jax.clear_caches()
        case = Case(4, 2, num=7)
        is_real = case.positions >= 0
        np.testing.assert_allclose(case.attended("pallas")[is_real], case.expected()[is_real], atol=1e-5)


def test_blocks_give_a_row_the_same_bits_in_any_batch() -> None:
    """The lengths of other rows and the numbers of its pages do not matter."""
    case = Case(8, 2, page=16, num=20)
    attend = jax.jit(lambda *arrays: attend_paged("blocks", *arrays))
    alone = np.where(np.arange(len(case.starts))[:, None] == 3, case.positions, -1)
    moved = np.random.default_rng(5).permutation(case.tables.size + 1)
    pages = KVPages(*(jnp.zeros_like(each).at[moved].set(each) for each in case.pages))
    found = [
        attend(case.queries, case.pages, case.tables, case.positions),
        attend(case.queries, case.pages, case.tables, alone),
        attend(case.queries, pages, moved[case.tables].astype(np.int32), case.positions),
    ]
    for other in found[1:]:
        np.testing.assert_array_equal(found[0][3], other[3])


def step(backend: str) -> Callable[..., Any]:
    def decode(pages: Any, queries: Any, keys: Any, values: Any, tables: Any, positions: Any) -> Any:
        pages = kv_pages.write(pages, keys, values, tables, positions)
        return pages, attend_paged(backend, queries, pages, tables, positions)

    return decode


def step_arguments(num_pages: int, heads: int, kv_heads: int, rows: int = 8, page: int = 16) -> tuple[Any, ...]:
    rng = np.random.default_rng(2)

    def random(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    pages = KVPages(*(random(num_pages + 1, page, kv_heads, DIM) for _ in range(2)))
    tables = jnp.asarray(rng.permutation(num_pages)[: rows * 8].reshape(rows, -1), jnp.int32)
    positions = jnp.asarray(rng.integers(0, 8 * page, (rows, 1)), jnp.int32)
    return (pages, random(rows, 1, heads, DIM), *(random(rows, 1, kv_heads, DIM) for _ in range(2)), tables, positions)


@pytest.mark.sampled(2)
@pytest.mark.contract
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mesh", ["8", "2x4"])
def test_attention_split_by_heads_needs_no_collective(backend: str, mesh: str) -> None:
    """The planner splits the pool by heads, and the step gives on 8 devices what it gives on one."""
    arguments = step_arguments(256, 16, 8)
    plan = autopar.plan(step(backend), *jax.eval_shape(lambda *x: x, *arguments), mesh=mesh, hardware="h100-sxm")
    assert isinstance(plan, Plan) and plan.notes == ()
    assert {tensor.sharding.dims[2] for tensor in plan.inputs[:2]} == {plan.mesh.axis_names}
    run = autopar.parallelize(step(backend), plan=plan)
    assert not hlo.collectives(run.lower(*arguments).compile().as_text() or "")
    np.testing.assert_allclose(run(*arguments)[1], step("gather")(*arguments)[1], atol=1e-5)


def test_predicted_attention_time_does_not_grow_with_the_pool() -> None:
    """The pool is not donated, so it is copied. The copy adds the same time for each backend."""

    def predicted(backend: str, num_pages: int) -> float:
        arguments = jax.eval_shape(lambda *x: x, *step_arguments(num_pages, 4, 2))
        plan = autopar.plan(step(backend), *arguments, mesh="1", hardware="cpu-host")
        assert isinstance(plan, Plan)
        return plan.prediction.step_time_s

    more = [predicted(backend, 1024) - predicted(backend, 64) for backend in ("gather", "blocks")]
    assert math.isclose(*more, rel_tol=1e-6)


@pytest.mark.contract
def test_blocks_copy_no_pool() -> None:
    """The donated pool is written and read in place."""
    num_pages = 4096
    arguments = step_arguments(num_pages, 4, 2)
    compiled = jax.jit(step("blocks"), donate_argnums=0).lower(*arguments).compile()
    text, pool = compiled.as_text() or "", f"f32[{num_pages + 1},16,2,{DIM}]"
    assert text.count("may-alias") + text.count("must-alias") >= 2
    assert not [line for line in text.splitlines() if f"= {pool}" in line and " copy(" in line]
    memory = compiled.memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < arguments[0].keys.nbytes / 4


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.slow
def test_pallas_compiles_for_an_absent_gpu_and_copies_no_pool(absent_gpus: Any) -> None:
    """XLA compiles the kernel for an absent H100, with the pool updated in place."""
    arguments = jax.eval_shape(lambda *x: x, *step_arguments(4096, 8, 2))
    device = jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", 132, "gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        lowered = jax.jit(step("pallas"), donate_argnums=0).trace(*arguments).lower(lowering_platforms=("cuda",))
    profile = load("h100-sxm")
    made = absent_gpus.compile(compilation.module_bytes(lowered), profile, 1, 1)
    pool = 2 * 4 * math.prod(arguments[0].keys.shape)
    assert "xla.gpu.triton" in made.hlo_text
    assert made.alias_bytes == pool and made.temp_bytes < pool / 4


# -- the choice ----------------------------------------------------------------------------------

SMALL = Problem(rows=4, tokens=1, heads=4, kv_heads=2, head_dim=DIM, page_size=8, pages_per_sequence=4)


def _blocks(*operands: Any, scores: Scores) -> jax.Array:
    queries, keys, values, tables, positions = operands
    return kv_pages.attend_in_blocks(queries, KVPages(keys, values), tables, positions, scores)


def _wrong(*operands: Any, scores: Scores) -> jax.Array:
    return _blocks(*operands, scores=Scores(1.01 * (scores.scale or 1)))


def _reads_on(queries: Any, keys: Any, values: Any, tables: Any, positions: Any, *, scores: Scores) -> jax.Array:
    """Mask the scores, but not the values."""
    keys, values = kv_pages.gather(KVPages(keys, values), tables)
    is_read = jnp.arange(keys.shape[1]) <= positions[:, None, :, None]
    return jax.nn.dot_product_attention(queries, keys, values, mask=is_read, scale=scores.scale)


def _raises(*operands: Any, scores: Scores) -> jax.Array:
    raise RuntimeError("no such kernel\nin this compiler")


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> None:
    more = {
        name: Backend(("cpu",), run)
        for name, run in {"wrong": _wrong, "reads on": _reads_on, "raises": _raises, "equal": _blocks}.items()
    }
    odd = Backend(("cpu",), _blocks, lambda page_size, head_dim: f"page_size is {page_size}")
    table = MappingProxyType({**BACKENDS, **more, "odd": odd})
    for module in (paged_attention, choose_attention):
        monkeypatch.setattr(module, "BACKENDS", table)


def timed(monkeypatch: pytest.MonkeyPatch, **seconds: float) -> None:
    monkeypatch.setattr(
        choose_attention, "_seconds", lambda problem, names, rejected: {name: seconds[name] for name in names}
    )


def test_a_backend_that_is_wrong_or_raises_is_rejected_with_a_reason(
    backends: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed(monkeypatch, gather=2.0, equal=1.0)
    chosen = choose_backend(SMALL, ["gather", "wrong", "reads on", "raises", "equal", "odd", "pallas"])
    assert chosen.name == "equal" and chosen.differences["equal"] <= 1e-5
    assert "differs by" in chosen.rejected["wrong"] and "tolerance is 1e-05" in chosen.rejected["wrong"]
    assert "differs by inf" in chosen.rejected["reads on"], "a stale NaN after a sequence's end reaches the output"
    assert chosen.rejected["raises"] == "RuntimeError: no such kernel"
    assert chosen.rejected["odd"] == "page_size is 8"
    assert chosen.rejected["pallas"] == "it runs on gpu, and this device is a cpu"
    assert chosen.rejected["gather"] == "equal is 2.00 times as fast"
    assert str(chosen).splitlines()[:2] == ["attention by equal (1,000,000 us)", "  not odd: page_size is 8"]


def test_a_backend_that_is_not_clearly_faster_is_rejected(backends: None, monkeypatch: pytest.MonkeyPatch) -> None:
    timed(monkeypatch, gather=1.0, blocks=0.95, equal=3.0)
    chosen = choose_backend(SMALL, ["gather", "blocks", "equal"])
    assert chosen.name == "gather"
    assert chosen.rejected["blocks"] == "it is 1.05 times as fast as gather, and must be 1.1 times as fast"
    timed(monkeypatch, gather=1.0, blocks=0.5, equal=0.6)
    assert choose_backend(SMALL, ["blocks", "equal"]).rejected["equal"].endswith("and blocks is faster")


@pytest.mark.contract
@pytest.mark.parametrize("rows", [1, 3])
def test_by_default_all_backends_of_the_platform_are_tried(rows: int) -> None:
    """On a CPU the Pallas kernel is not a candidate."""
    problem = Problem(rows, 2, 4, 2, DIM, page_size=8, pages_per_sequence=4, dtype=jnp.bfloat16)
    chosen = choose_backend(problem)
    assert chosen.name in ("gather", "blocks")
    assert set(chosen.differences) == {"blocks"} and set(chosen.seconds) == {"gather", "blocks"}
    assert choose_backend(problem, ["gather"]).seconds == {}


def test_unknown_backends_and_unsupported_sizes_are_refused() -> None:
    with pytest.raises(InferenceError, match="no attention backend 'triton'; there are gather, blocks, pallas"):
        choose_backend(SMALL, ["triton"])
    assert paged_kernel.refused(24, 64) == "page_size is 24, and must be a power of two"
    assert paged_kernel.refused(16, 8) == "head_dim is 8, and must be at least 16"
