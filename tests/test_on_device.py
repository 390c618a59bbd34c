"""Fusion, partitioning and buffer assignment on small programs and functions, and one compile by XLA."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from jax.sharding import PartitionSpec
from on_absent_gpus import all_reduced, compiled

import autopar
from autopar.cost.kernel_time import op_seconds
from autopar.formulate.explicit import explicit_program
from autopar.formulate.formulation import Formulation, formulate
from autopar.hardware.profile import HardwareProfile, load
from autopar.ir.device_program import Buffer, DeviceProgram, Op, OpKind, peak_of_temporaries
from autopar.ir.graph import Graph
from autopar.ir.mesh import parse_mesh
from autopar.jax_interop.compilation import module_bytes
from autopar.planner.pins import resolve_pins
from autopar.planner.program_groups import program_groups
from autopar.solve.ilp import Ilp
from autopar.transforms.program import program_of
from autopar.xla_compiler.compiler import Compiler
from autopar.xla_model.buffer_assignment import _with_whole_barriers, device_program
from autopar.xla_model.fusion_pipeline import fuse
from autopar.xla_model.kernels import Fused
from autopar.xla_model.latency_estimator import estimated_seconds
from autopar.xla_model.multi_output_fusion import MultiOutputFusion
from autopar.xla_model.priority_fusion import PriorityFusion
from autopar.xla_model.simulation import Simulation, simulate
from autopar.xla_model.spmd_partition import Instruction, InstructionKind, LocalProgram
from tests.planned import plan_and_candidate

H100 = load("h100-sxm")
ROWS, COLUMNS = 8192, 4096
MATRIX = float(ROWS * COLUMNS)


class Hand:
    """Builds a local program; methods return the position of the new instruction."""

    def __init__(self) -> None:
        self.local = LocalProgram()

    def _add(
        self, kind: InstructionKind, primitive: str, operands: Mapping[int, float], elements: float, **more: Any
    ) -> int:
        at = len(self.local.instructions)
        self.local.instructions.append(
            Instruction(kind, 0, at, primitive, dict(operands), elements, 4 * elements, **more)
        )
        return at

    def argument(self, elements: float = MATRIX) -> int:
        return self._add("argument", "", {}, elements)

    def loop(self, primitive: str, *operands: int, flops: float = 3.0) -> int:
        """An elementwise instruction; smaller operands are read once per element."""
        of = self.local.instructions
        times = {o: MATRIX / of[o].elements for o in operands}
        return self._add("loop", primitive, times, MATRIX, flops=flops * MATRIX)

    def total(self, operand: int, *, rows: bool = True, num_rows: int = ROWS) -> int:
        """A row or column reduction."""
        kept = num_rows if rows else self.local.instructions[operand].elements / num_rows
        elements = self.local.instructions[operand].elements
        return self._add(
            "reduce", "reduce_sum", {operand: 1.0}, kept, flops=7 * elements, reduces=elements / kept, rows=rows,
            columns=0.0 if rows else kept,
        )  # fmt: skip

    def kernels(self, *outputs: int) -> list[Fused]:
        self.local.outputs = list(outputs)
        return fuse(self.local, H100)

    def roots(self, *outputs: int) -> list[list[int]]:
        return [sorted(kernel.roots) for kernel in self.kernels(*outputs)]


# -- fusion ------------------------------------------------------------------------------------


def test_a_chain_of_loops_is_one_kernel() -> None:
    hand = Hand()
    x = hand.argument()
    last = hand.loop("tanh", hand.loop("mul", hand.loop("add", x)))
    (kernel,) = hand.kernels(last)
    assert kernel.roots == [last]
    assert list(kernel.operands) == [x]
    assert len(kernel.members) == 3


def test_a_cheap_function_is_computed_in_each_user() -> None:
    hand = Hand()
    x = hand.argument()
    cheap = hand.loop("mul", x)
    down, along = hand.total(cheap, rows=False), hand.total(cheap)
    assert [cheap] not in hand.roots(down, along)


def test_an_expensive_function_with_two_users_is_stored() -> None:
    hand = Hand()
    dear = hand.loop("erf", hand.argument(), flops=2000.0)
    down, along = hand.total(dear, rows=False), hand.total(dear)
    assert any(dear in roots for roots in hand.roots(down, along))


def test_a_softmax_is_one_kernel_that_the_estimator_does_not_price() -> None:
    hand = Hand()
    x = hand.argument()
    shifted = hand.loop("sub", x, hand.total(x))
    powers = hand.loop("exp", shifted)
    last = hand.loop("div", powers, hand.total(powers))
    (kernel,) = hand.kernels(last)
    assert kernel.tiled
    assert list(kernel.operands) == [x]


@pytest.mark.parametrize(("row", "launches"), [(16_384, [1, 1]), (32_768, [1, 2, 2, 1])])
def test_a_softmax_of_long_rows_is_no_tiled_kernel(row: int, launches: list[int], absent_gpus: Compiler) -> None:
    """XLA then reduces each row in two kernels, for the maximum and for the sum."""

    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.nn.softmax(x @ w)

    args = array(512, 64), array(64, row)
    assert [op.num_launches for op in built(step, *args).ops] == launches
    plan, program = autopar.parallelize(step, mesh="1", hardware="h100-sxm").planned(*args)
    text = compiled(absent_gpus, plan, program, *args).hlo_text
    assert len(re.findall(r" fusion\(", text[text.index("\nENTRY") :])) == sum(launches)


def test_the_gradient_of_a_softmax_is_one_kernel() -> None:
    """Its row sum is of the product of two tensors; a tiled kernel computes it once for its row."""
    hand = Hand()
    x, given = hand.argument(), hand.argument()
    powers = hand.loop("exp", hand.loop("sub", x, hand.total(x)))
    row = hand.total(hand.loop("mul", given, powers))
    last = hand.loop("mul", hand.loop("sub", given, row), powers)
    (kernel,) = hand.kernels(last)
    assert kernel.tiled
    assert kernel.operands == {x: 1.0, given: 1.0}


def test_the_user_of_a_reduction_is_another_kernel() -> None:
    hand = Hand()
    first, second = hand.argument(), hand.argument()
    total = hand.total(first)
    last = hand.loop("mul", second, total)
    assert hand.roots(last) == [[total], [last]]


def test_reductions_of_one_operand_are_one_kernel() -> None:
    hand = Hand()
    x = hand.argument()
    one, squares = hand.total(x), hand.total(hand.loop("integer_pow", x))
    assert hand.roots(one, squares) == [[one, squares]]


def test_reductions_of_few_columns_have_few_blocks_and_low_bandwidth() -> None:
    """A kernel with few thread blocks has low bandwidth, so it reads as little as possible."""
    hand = Hand()
    few = 64 * COLUMNS
    wide = [hand._add("argument", "", {}, float(few)) for _ in range(6)]
    total = hand._add("loop", "add", dict.fromkeys(wide, 1.0), float(few), flops=6.0 * few)
    summed = hand.total(total, rows=False, num_rows=few // 64)
    assert hand.roots(summed) == [[total], [summed]]


def random_program(seed: int) -> tuple[LocalProgram, list[int]]:
    """Loops and reductions with random earlier operands, and the outputs."""
    random, hand = np.random.default_rng(seed), Hand()
    large, small = [hand.argument(), hand.argument()], [hand.argument(float(ROWS))]
    for _ in range(random.integers(10, 60)):
        if random.random() < 0.2:
            small.append(hand.total(int(random.choice(large)), rows=bool(random.random() < 0.5)))
        else:
            read = random.choice([*large, *small], size=random.integers(1, 4), replace=False).tolist()
            name = str(random.choice(["add", "mul", "tanh", "convert_element_type"]))
            large.append(hand.loop(name, *read, flops=float(random.choice([1.0, 30.0]))))
    hand.local.outputs = [large[-1], *random.choice(large[2:] or large, size=2).tolist()]
    return hand.local, [at for at in hand.local.outputs if at is not None]


@pytest.mark.parametrize("seed", range(30))
def test_cached_savings_of_fusions_equal_fresh_ones(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    local, _ = random_program(seed)
    priced, seen = PriorityFusion._priority, 0

    def checked(fusion: PriorityFusion, i: int) -> float | None:
        nonlocal seen
        seen += 1
        remembered = priced(fusion, i)
        with monkeypatch.context() as fresh:
            for name, empty in {"savings": defaultdict(dict), "barred": defaultdict(set), "times": {}}.items():
                fresh.setattr(fusion, name, empty)
            fresh = priced(fusion, i)
        assert (remembered is None) == (fresh is None)
        assert remembered is None or remembered == pytest.approx(fresh, rel=1e-9, abs=1e-15)
        return remembered

    monkeypatch.setattr(PriorityFusion, "_priority", checked)
    fuse(local, H100)
    assert seen


@pytest.mark.parametrize("seed", range(30))
def test_fused_kernels_know_all_their_dependencies(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    local, _ = random_program(seed)
    fuse_two = MultiOutputFusion._fuse

    def checked(siblings: MultiOutputFusion, a: int, b: int) -> None:
        fuse_two(siblings, a, b)
        home = siblings.home
        direct = {i: {home[o] for o in k.operands if o in home} - {i} for i, k in siblings.kernels.items()}
        for i, bits in siblings.above.items():
            waits_for, new = set[int](), direct[i]
            while new:
                waits_for |= new
                new = {k for j in new for k in direct[j]} - waits_for
            known = {home[j] for j in range(bits.bit_length()) if bits >> j & 1}
            assert known - {i} == waits_for  # its own members may be among them

    monkeypatch.setattr(MultiOutputFusion, "_fuse", checked)
    fuse(local, H100)


# -- lowering ----------------------------------------------------------------------------------


def planned(
    step: Callable[..., Any], *args: Any, mesh: str = "1", pin: Any = None, profile: HardwareProfile = H100
) -> tuple[Formulation, Any]:
    """A function's formulation and its best choices."""
    shape = parse_mesh(mesh)
    traced = program_of(step, args, carry=None, donate=None)
    pins = resolve_pins(pin or {}, traced.graph, shape)
    groups = program_groups(traced.graph, pins).groups
    made = formulate(traced.graph, groups, shape, profile, pins=pins, memory_budget_bytes=None)
    return made, Ilp().solve(made.problem).choices


def built(
    step: Callable[..., Any], *args: Any, mesh: str = "1", pin: Any = None, profile: HardwareProfile = H100
) -> DeviceProgram:
    """The local program of a function on one device."""
    made, choices = planned(step, *args, mesh=mesh, pin=pin, profile=profile)
    assert choices is not None
    return device_program(made, explicit_program(made, choices))


def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def gemms(program: DeviceProgram) -> list[Op]:
    return [op for op in program.ops if op.kind == "gemm"]


def test_a_row_of_a_softmax_is_read_once() -> None:
    """The profile's rates price it too, although XLA's estimator does not."""

    def step(x: jax.Array) -> jax.Array:
        return jax.grad(lambda v: (jax.nn.softmax(v) ** 2).sum())(x)

    program = built(step, array(4096, 4096))
    size = 4096 * 4096 * 4
    assert all(op.read_bytes <= 4 * size for op in program.ops)
    own = simulate(program, parse_mesh("1"), H100)
    assert own.step_time_s < 20 * size / H100.hbm_bytes_per_s


def test_the_gradient_of_max_pooling_stores_positions() -> None:
    """XLA finds the largest element of each window and its position in each dim, and scatters the gradient to them."""

    def step(x: jax.Array) -> jax.Array:
        def pooled(v: jax.Array) -> jax.Array:
            windows = jax.lax.reduce_window(v, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
            return jnp.sin(windows).sum()

        return jax.grad(pooled)(x)

    size, pooled = 8 * 64 * 64 * 32, 8 * 32 * 32 * 32
    program = built(step, array(8, 64, 64, 32))
    assert max(op.written_bytes for op in program.ops[:-1]) == 4 * pooled * (1 + 4)
    assert peak_of_temporaries(program) >= 4 * pooled * (1 + 4)
    assert program.ops[-1].written_bytes > 4 * size + 64 * pooled - 1


@pytest.mark.parametrize(("experts", "dim", "copies"), [(8, 1, 0), (8, 2, 1), (16, 1, 1), (16, 2, 1)])
def test_state_is_copied_where_its_gradient_is_scattered_along_an_inner_dim(
    experts: int, dim: int, copies: int, absent_gpus: Compiler
) -> None:
    """Eight ways, 8 experts leave one on a device, so that the next dim is its outermost one."""

    def step(w: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        return w - 0.1 * jax.grad(lambda w: jnp.sum((jnp.einsum("ebd,edf->ebf", x, w) * y) ** 2))(w)

    args = array(experts, 1024, 2048), array(experts, 4096, 1024), array(experts, 4096, 2048)
    rows = PartitionSpec("data", "model")
    pin = {"w": PartitionSpec("data", *[None] * (dim - 1), "model"), "x": rows, "y": rows}
    ops = built(step, *args, mesh="8x2", pin=pin).ops
    update = next(i for i, op in enumerate(ops) if op.collective == "reduce-scatter")
    assert len(ops[update + 1 :]) == 1 + copies
    plan, program = autopar.parallelize(step, mesh="8x2", hardware="h100-sxm", pin=pin).planned(*args)
    text = compiled(absent_gpus, plan, program, *args).hlo_text
    assert text[text.index("\nENTRY") :].count(" copy(") == copies


#: What is done to the result of one matmul and read by another.
CHANGES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "elementwise": jnp.tanh,
    "reversed": lambda y: jnp.tanh(y)[::-1],
    "with a sum": lambda y: jnp.tanh(y) + y.sum(0),
    "read later": lambda y: jnp.tanh(y) @ y,
    "softmax": lambda y: jax.nn.softmax(y),
    "two operands": lambda y: jnp.tanh(y) * jnp.sin(y @ y),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_kernel_overwrites_an_operand_where_xlas_does(change: str, absent_gpus: Compiler) -> None:
    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum(CHANGES[change](x @ w) @ w[:, :8])

    args = array(1024, 1024), array(1024, 1024)
    plan, program = autopar.parallelize(step, mesh="1", hardware="h100-sxm").planned(*args)
    made = compiled(absent_gpus, plan, program, *args)
    assert peak_of_temporaries(built(step, *args)) == pytest.approx(made.temp_bytes, rel=0.01)


def test_a_narrow_convolution_fills_a_part_of_a_tile() -> None:
    """Half as many features take as long, and so does a gradient with few results, as its sum is split."""

    def seconds(features: int) -> float:
        def convolved(x: jax.Array, w: jax.Array) -> jax.Array:
            return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

        arrays = (64, 56, 56, 64), (3, 3, 64, features)
        program = built(convolved, *(array(*shape, dtype=jnp.bfloat16) for shape in arrays))
        (op,) = (op for op in program.ops if op.kind == "convolution")
        return op_seconds(op, parse_mesh("1"), H100)

    assert seconds(32) > 0.8 * seconds(64)
    assert seconds(128) > 1.5 * seconds(64)


def test_a_widening_cast_is_a_prologue_of_a_matmul() -> None:
    program = built(lambda x, w: x.astype(jnp.float32) @ w, array(512, 512, dtype=jnp.bfloat16), array(512, 512))
    (op,) = program.ops
    assert op.kind == "gemm"
    assert op.read_bytes == 512 * 512 * (2 + 4)


def test_a_narrowing_cast_is_a_kernel_before_all_its_users() -> None:
    program = built(lambda x, w: x @ w.astype(jnp.bfloat16), array(512, 512, dtype=jnp.bfloat16), array(512, 512))
    assert [op.kind for op in program.ops] == ["fusion", "gemm"]


def test_a_narrowing_cast_is_an_epilogue_of_a_matmul() -> None:
    program = built(lambda x, w: (x @ w).astype(jnp.bfloat16), array(512, 512), array(512, 512))
    (op,) = program.ops
    assert op.gemm is not None
    assert op.gemm.out_dtype == "bfloat16"
    assert op.written_bytes == 512 * 512 * 2


def test_a_scaling_before_a_cast_is_an_epilogue_of_a_matmul() -> None:
    """As for the gradient of attention's queries, with a transpose in between."""

    def step(s: jax.Array, k: jax.Array, scale: jax.Array) -> jax.Array:
        made = jnp.einsum("hqk,hkd->hqd", s, k)
        return (jnp.transpose(made / 8.0, (0, 2, 1)) / scale).astype(jnp.bfloat16)

    product, layout = built(step, array(12, 512, 512), array(12, 512, 64), array()).ops
    assert product.gemm is not None
    assert product.gemm.out_dtype == "bfloat16"
    assert product.written_bytes == 12 * 512 * 64 * 2
    assert layout.read_bytes == 12 * 512 * 64 * 2


def test_an_operand_with_inner_batch_dims_is_transposed() -> None:
    x = array(8, 512, 12, 64, dtype=jnp.bfloat16)
    program = built(lambda q, k: jnp.einsum("bqhd,bkhd->bhqk", q, k), x, x)
    assert [op.kind for op in program.ops] == ["fusion", "fusion", "gemm"]


@pytest.mark.parametrize("width", [16, 64, 128])
def test_every_reduction_is_a_collective(width: int) -> None:
    """Small ones too, as in a norm over few channels: their users wait for them."""

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        for _ in range(3):
            y = x @ w
            x = jnp.tanh(y - y.mean(axis=0))
        return x

    program = built(step, array(width, width), array(1 << 18, width), mesh="8")
    sent = [(op.collective, op.payload_bytes) for op in program.ops if op.kind == "collective"]
    assert sent == [("all-reduce", 4 * width)] * 3


def test_a_gather_of_an_inner_dim_is_transposed() -> None:
    """For several sequences; the gathered shards of a single one are in order."""

    def kernels(batch: int) -> list[tuple[str, float]]:
        x = array(batch, 512, 5)
        program = built(lambda x: jnp.sort(x, axis=1), x, mesh="8", pin={"x": PartitionSpec(None, "data")})
        return [(op.kind, op.written_bytes) for op in program.ops]

    gathered, *rest = kernels(3)
    assert gathered == ("collective", 3 * 512 * 5 * 4)
    assert rest[0] == ("fusion", 3 * 512 * 5 * 4)
    assert len(kernels(1)) == len(rest)


def _summed(x: jax.Array, y: jax.Array) -> jax.Array:
    """A reduction over the sharded batch, followed by a cast."""
    return jax.lax.dot_general(x, y, (((0,), (0,)), ((), ()))).astype(jnp.float32)


def _added(w: jax.Array, x: jax.Array, y: jax.Array) -> Any:
    return w - (_summed(x, x) + _summed(y, y) + _summed(x, jnp.sin(y)))


def _both_turned(w: jax.Array, x: jax.Array, y: jax.Array) -> Any:
    return w - (_summed(x, x).T + _summed(y, jnp.sin(x)).T)


def _one_read_twice(w: jax.Array, x: jax.Array, y: jax.Array) -> Any:
    once = _summed(x, x)
    return w - (once + _summed(y, y)), jnp.tanh(once)


def _turned_against_each_other(w: jax.Array, x: jax.Array, y: jax.Array) -> Any:
    return w - (_summed(x, jnp.sin(x)) + _summed(y, jnp.sin(y)).T)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("step", "sent"),
    [
        (_added, ["f32"]),
        (_both_turned, ["f32"]),
        (_one_read_twice, ["bf16", "bf16"]),
        (_turned_against_each_other, ["bf16", "bf16"]),
    ],
)
def test_added_all_reduces_are_reassociated(step: Any, sent: list[str], absent_gpus: Compiler) -> None:
    """In the dtype of the addition, where nothing else uses them."""
    batch = array(1 << 18, 67, dtype=jnp.bfloat16)
    args = array(67, 67), batch, batch
    program = program_of(step, args, carry=None, donate=None)
    pins = {"w": PartitionSpec(), "x": PartitionSpec("data"), "y": PartitionSpec("data")}
    plan, made = plan_and_candidate(program.as_traced.in_microbatches(1), mesh="8", hardware=H100, pin=pins)
    sums = [op for op in made.parts.device.ops if op.collective == "all-reduce"]
    assert [op.payload_bytes / 67**2 for op in sums] == [{"f32": 4, "bf16": 2}[dtype] for dtype in sent]
    by_xla = all_reduced(compiled(absent_gpus, plan, program, *args).hlo_text)
    assert by_xla == {dtype: 67**2 * sent.count(dtype) for dtype in sent}


def test_an_outer_product_is_no_matmul() -> None:
    program = built(lambda x, h: jnp.einsum("hqk,h->hqk", x, h), array(12, 512, 512), array(12))
    assert not gemms(program)
    assert len(program.ops) == 1


def test_a_scatter_writes_in_place_and_the_estimator_charges_it_for_the_whole() -> None:
    def step(table: Any, rows: Any, updates: Any) -> Any:
        return (table * 2.0).at[rows].add(updates).sum()

    program = built(step, array(50000, 512), array(64, dtype=jnp.int32), array(64, 512))
    scatter = next(op for op in program.ops if op.num_blocks and set(op.writes) & set(op.reads))
    assert scatter.written_bytes + scatter.spared_bytes == 50000 * 512 * 4
    assert scatter.written_bytes == 64 * 512 * 4
    assert estimated_seconds(scatter, parse_mesh("1"), H100) > 2 * 50000 * 512 * 4 / H100.hbm_bytes_per_s
    assert peak_of_temporaries(program) < 1.1 * 50000 * 512 * 4


def test_an_updated_slice_takes_the_time_of_what_changes() -> None:
    """One row of a large table, updated in a loop, by the profile's rates."""

    def step(table: Any, row: Any) -> Any:
        return jax.lax.fori_loop(0, 100, lambda i, t: jax.lax.dynamic_update_slice(t, row * i, (i, 0)), table)

    profile = load("cpu-host")
    few, many = (
        simulate(built(step, array(rows, 512), array(1, 512), profile=profile), parse_mesh("1"), profile).compute_s
        for rows in (200, 200_000)
    )
    copied = 2 * 4 * 200_000 * 512 / profile.hbm_bytes_per_s
    assert many < few + 1.5 * copied


def test_an_in_place_update_costs_the_same_for_any_size_of_the_state() -> None:
    def step(state: Any, rows: Any, updates: Any) -> Any:
        before = state[rows]
        return state.at[rows].set(updates + before).at[rows + 1].add(updates), updates

    def cost(num_rows: int) -> tuple[float, float]:
        """Step time by the profile's rates, and peak memory."""
        program = built(step, array(num_rows, 512), array(64, dtype=jnp.int32), array(64, 512))
        own = simulate(program, parse_mesh("1"), H100)
        return own.step_time_s, peak_of_temporaries(program)

    (small, _), (large, peak) = cost(1000), cost(1_000_000)
    assert large == pytest.approx(small, rel=0.02)
    assert peak < 1000 * 512 * 4


def _reads_between(state: Any, rows: Any, updates: Any) -> Any:
    written = state.at[rows].set(updates)
    read = written[rows + 2].sum()
    return written.at[rows + 1].set(updates), read


def _reads_after(state: Any, rows: Any, updates: Any) -> Any:
    renewed = state.at[rows].set(updates)
    return renewed, (state - renewed).sum()


@pytest.mark.parametrize(("step", "is_copied"), [(_reads_between, False), (_reads_after, True)])
def test_a_state_is_copied_if_its_old_value_is_read_later(step: Any, is_copied: bool, absent_gpus: Compiler) -> None:
    """As XLA does."""
    arguments = (array(100_000, 512), array(64, dtype=jnp.int32), array(64, 512))
    size = 100_000 * 512 * 4
    assert any(op.written_bytes >= size for op in built(step, *arguments).ops) == is_copied
    lowered = jax.jit(step, donate_argnums=0).trace(*arguments).lower(lowering_platforms=("cuda",))
    compiled = absent_gpus.compile(module_bytes(lowered), H100, 1, 1)
    assert ("f32[100000,512]{1,0} copy(" in compiled.hlo_text) == is_copied


# -- memory ------------------------------------------------------------------------------------


def test_the_peak_of_three_layers_by_hand() -> None:
    """Three layers with relu, and the gradients of the weights: four activations are live at once."""
    batch, width = 4096, 1024

    def step(weights: Any, x: Any) -> Any:
        def loss(weights: Any) -> Any:
            h = x
            for w in weights:
                h = jnp.maximum(h @ w, 0.0)
            return jnp.sum(h)

        return jax.grad(loss)(weights)

    program = built(step, [array(width, width)] * 3, array(batch, width))
    activation = 4.0 * batch * width
    # The three matmul results stay live, and users recompute their relus. The fourth is the gradient of the last one.
    assert peak_of_temporaries(program) == 4 * activation
    weights = 3 * 4.0 * width * width
    assert sum(b.num_bytes for b in program.buffers if b.output) == weights


def test_outputs_and_arguments_are_no_temporaries() -> None:
    program = built(lambda w, g: w - 0.1 * g, array(1024, 1024), array(1024, 1024))
    assert peak_of_temporaries(program) == 0.0
    assert [b.output for b in program.buffers].count(True) == 1


def test_the_peak_counts_what_is_live_together() -> None:
    buffers = (
        Buffer(1.0, 0, argument=True),
        Buffer(10.0, 1),
        Buffer(20.0, 2),
        Buffer(40.0, 3),
        Buffer(5.0, 4, output=True),
    )
    ops = tuple(Op("fusion", n, (n,), (n + 1,), 0.0, 0.0) for n in range(4))
    assert peak_of_temporaries(DeviceProgram(ops, buffers)) == 60.0


# -- work --------------------------------------------------------------------------------------


def test_a_barrier_is_one_operation() -> None:
    """Dead code between two pieces of a barrier does not split it; the next barrier is another operation."""
    graph = Graph((), (), (), (), (), (), barriers=((0, 3), (3, 4), (5, 6)))
    kinds: tuple[OpKind, ...] = ("border", "border", "border", "border", "fusion", "border")
    ops = [Op(kind, n, (n,), (n,), 0.0, 0.0) for n, kind in enumerate(kinds)]
    together = _with_whole_barriers([op for op in ops if op.node != 1], graph)
    assert [op.reads for op in together] == [(0, 2), (3,), (4,), (5,)]


def test_xla_counts_the_operand_of_two_results_at_different_positions_twice() -> None:
    """It counts an operand once per position of use, in a reduction and in the written value; the device reads it once."""

    def step(x: Any) -> Any:
        y = x * 2.0
        return y, jnp.sum(y, axis=1)

    (op,) = built(step, array(ROWS, 256)).ops
    size = ROWS * 256 * 4
    assert op.read_bytes == size
    assert op.reread_bytes == 0
    assert op.recounted_bytes == (0, size, 0)
    assert op.flops == 2 * 2 * ROWS * 256  # a multiply and an add, each in the time of a multiply-add


def test_a_transpose_of_dims_of_one_element_copies_nothing() -> None:
    def step(x: Any) -> Any:
        return jnp.tanh(jnp.transpose(x * 2.0, (3, 0, 1, 2)))

    (op,) = built(step, array(16, 32, 64, 1)).ops
    assert op.read_bytes == op.written_bytes == 16 * 32 * 64 * 4


def _attention(mask: str) -> Callable[..., Any]:
    def step(q: Any, k: Any, v: Any, allowed: Any) -> Any:
        def loss(q: Any, k: Any, v: Any) -> Any:
            scores = jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=jnp.float32)
            tokens = scores.shape[-1]
            if mask == "causal":
                scores = jnp.where(jnp.arange(tokens)[:, None] >= jnp.arange(tokens), scores, -1e30)
            elif mask == "array":
                scores = jnp.where(allowed, scores, -1e30)
            elif mask == "padding":
                scores = jnp.where(allowed[: q.shape[0], None, None, :], scores, -1e30)
            weights = jax.nn.softmax(scores, -1).astype(jnp.bfloat16)
            return jnp.einsum("bnts,bsnh->btnh", weights, v).astype(jnp.float32).sum()

        return jax.grad(loss, (0, 1, 2))(q, k, v)

    return step


@pytest.mark.parametrize(("mask", "scattered"), [("none", 0), ("padding", 0), ("causal", 2), ("array", 3)])
def test_softmax_kernels_have_scattered_rows_where_xla_tiles_so(mask: str, scattered: int) -> None:
    """XLA's tiles for these programs were read from what it compiles for an H100: [16, 1, 1, 1024] against [1, 1, 16, 1024]."""
    heads = array(16, 1024, 12, 64, dtype=jnp.bfloat16)
    ops = built(_attention(mask), heads, heads, heads, array(1024, 1024, dtype=jnp.bool_)).ops
    assert sum(op.scattered_rows for op in ops) == scattered


@pytest.mark.parametrize(("num_heads", "scattered"), [(4, 0), (3, 1)])
def test_the_heads_of_a_group_are_adjacent_rows_that_share_a_mask(num_heads: int, scattered: int) -> None:
    """XLA's tiles for the gradient of this softmax: [1, 1, 1, 4, 4096] for 4 heads, [2, 4, 1, 1, 2048] for 3."""
    length = 4096 if num_heads == 4 else 2048
    query = array(8, length, 4 * num_heads, 128, dtype=jnp.bfloat16)
    key = array(8, length, 4, 128, dtype=jnp.bfloat16)
    ops = built(_grouped_attention, query, key, key).ops
    assert sum(op.scattered_rows for op in ops if op.fills_registers) == scattered
    assert sum(op.fills_registers for op in ops) == 1


def test_only_the_gradient_of_a_long_softmax_fills_the_registers() -> None:
    for tokens, expected in ((1024, 1), (512, 0)):
        heads = array(16, tokens, 12, 64, dtype=jnp.bfloat16)
        ops = built(_attention("none"), heads, heads, heads, array(tokens, tokens, dtype=jnp.bool_)).ops
        assert sum(op.fills_registers for op in ops) == expected


def _grouped_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
    def loss(*operands: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(*operands, is_causal=True, implementation="xla").astype(jnp.float32).sum()

    return jax.value_and_grad(loss, (0, 1, 2))(q, k, v)


def test_weights_of_grouped_heads_are_transposed_for_each_matmul_that_reads_another_order() -> None:
    """XLA compiles two copies for an H100: keys before heads and queries for the output, heads before queries for values."""
    query = array(8, 2048, 12, 128, dtype=jnp.bfloat16)
    key = array(8, 2048, 4, 128, dtype=jnp.bfloat16)
    size = 2 * 8 * 12 * 2048**2
    ops = built(_grouped_attention, query, key, key).ops
    copies = [op for op in ops if op.kind == "fusion" and op.read_bytes == op.written_bytes and op.read_bytes >= size]
    assert sum(op.written_bytes for op in copies) == 2 * size


def test_a_broadcast_operand_is_read_again_out_of_a_cache() -> None:
    (op,) = built(lambda x, b: x + b, array(8192, 1024), array(1024)).ops
    assert op.read_bytes == 4 * (8192 * 1024 + 1024)
    assert op.broadcast_bytes == pytest.approx(4 * 8191 * 1024)


# -- with XLA's GPU compiler -------------------------------------------------------------------


@pytest.mark.slow
def test_a_small_gpt_is_compiled_about_as_predicted(absent_gpus: Compiler) -> None:
    """Data parallelism on eight absent H100s: temporaries and XLA's estimate agree with XLA's, the time with the replay's."""
    sizes = programs.GPTSizes(seq=512, hidden=512, vocab=4096)
    program = programs.gpt(batch=64, sizes=sizes)
    args = program.abstract_args()
    pin = {"batch/*": PartitionSpec("data"), "state/*": PartitionSpec()}
    result = autopar.verify(program.step, *args, mesh="8", hardware="h100-sxm", pin=pin, compiler=absent_gpus)
    made = built(program.step, *args, mesh="8", pin=pin)
    assert result.step_time.compiled is not None
    own, estimated = Simulation(made, parse_mesh("8"), H100).timelines()
    assert own.temporary_bytes == pytest.approx(result.compiled.temp_bytes, rel=0.12)
    assert estimated is not None and result.times.replay is not None
    assert estimated.step_time_s == pytest.approx(result.step_time.compiled, rel=0.2)
    assert own.step_time_s == pytest.approx(result.times.replay.step_time_s, rel=0.2)
