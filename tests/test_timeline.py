"""Schedules of hand-written programs: overlap, exposed communication, combined collectives."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.cost.kernel_time import op_seconds
from autopar.hardware.profile import load
from autopar.ir.device_program import Buffer, DeviceProgram, Gemm, Op
from autopar.ir.mesh import parse_mesh
from autopar.xla_model.collective_combiner import CollectiveCombiner
from autopar.xla_model.simulation import Simulation, simulate
from autopar.xla_model.timeline import Timeline

MESH = parse_mesh("x=8")
H100 = load("h100-sxm")
MIB = 1 << 20
#: A kernel of 100 microseconds, by memory alone.
BYTES_OF_100_US = 100e-6 * 3352.32e9


class Written:
    """Builds a program step by step; methods return the buffer that they write."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.buffers: list[Buffer] = []

    def _buffer(self, **kind: bool) -> int:
        self.buffers.append(Buffer(1.0, len(self.buffers), **kind))
        return len(self.buffers) - 1

    def argument(self) -> int:
        return self._buffer(argument=True)

    def kernel(self, *reads: int, times: float = 1.0) -> int:
        written = self._buffer()
        read = times * BYTES_OF_100_US
        self.ops.append(Op("fusion", len(self.ops), reads, (written,), read, 0.0))
        return written

    def matmul(self, *reads: int) -> int:
        written, gemm = self._buffer(), Gemm(1, 2048, 2048, 2048, "bfloat16", "bfloat16")
        self.ops.append(Op("gemm", len(self.ops), reads, (written,), 16 * MIB, 8 * MIB, gemm=gemm))
        return written

    def collective(self, kind: str, read: int, num_bytes: float, *, combinable: bool = False, dtype: str = "") -> int:
        written = self._buffer()
        self.ops.append(
            Op(
                "collective", len(self.ops), (read,), (written,), 0.0, 0.0, collective=kind, axes=("x",),
                payload_bytes=num_bytes, combinable=combinable, dtype=dtype,
            )
        )  # fmt: skip
        return written

    def output(self, *buffers: int) -> None:
        for buffer in buffers:
            self.buffers[buffer] = replace(self.buffers[buffer], output=True)

    @property
    def program(self) -> DeviceProgram:
        return DeviceProgram(tuple(self.ops), tuple(self.buffers))

    def timeline(self) -> Timeline:
        """By XLA's estimate, whose prices the tests below compute."""
        return Simulation(self.program, MESH, H100).timeline(estimated=True)


def alone(kind: str, num_bytes: float) -> float:
    """Seconds of a collective without overlap."""
    program = Written()
    program.collective(kind, program.argument(), num_bytes)
    return program.timeline().exposed_s[kind]


def test_kernels_add_up() -> None:
    program = Written()
    last = program.argument()
    for _ in range(5):
        last = program.kernel(last)
    found = program.timeline()
    assert found.step_time_s == pytest.approx(500e-6, rel=1e-6)
    assert found.compute_s == found.step_time_s
    assert not found.exposed_s


def test_a_chain_hides_nothing() -> None:
    program = Written()
    first = program.kernel(program.argument())
    reduced = program.collective("all-reduce", first, 100 * MIB)
    program.kernel(reduced)
    found = program.timeline()
    seconds = alone("all-reduce", 100 * MIB)
    assert found.exposed_s["all-reduce"] == pytest.approx(seconds, rel=1e-6)
    assert found.step_time_s == pytest.approx(200e-6 + 2e-6 + seconds, rel=1e-2)


def test_independent_kernels_hide_a_collective() -> None:
    program = Written()
    start = program.argument()
    reduced = program.collective("all-reduce", program.kernel(start), 100 * MIB)
    chain = start
    for _ in range(8):
        chain = program.kernel(chain)
    program.kernel(reduced, chain)
    found = program.timeline()
    assert not found.exposed_s
    assert found.step_time_s == pytest.approx(1002e-6, rel=1e-3)


def test_what_the_kernels_do_not_cover_is_exposed() -> None:
    program = Written()
    start = program.argument()
    reduced = program.collective("all-gather", program.kernel(start), 100 * MIB)
    program.kernel(reduced, program.kernel(start))
    found = program.timeline()
    assert found.exposed_s["all-gather"] == pytest.approx(alone("all-gather", 100 * MIB) - 100e-6, abs=2e-6)


def test_the_schedule_does_not_depend_on_program_order() -> None:
    """The user follows the collective directly, and independent kernels follow the user."""
    program = Written()
    start = program.argument()
    reduced = program.collective("all-reduce", program.kernel(start), 100 * MIB)
    user = program.kernel(reduced)
    chain = start
    for _ in range(8):
        chain = program.kernel(chain)
    program.kernel(user, chain)
    assert not program.timeline().exposed_s


def test_what_makes_another_kernel_ready_is_placed_first_from_the_end() -> None:
    program = Written()
    start = program.argument()
    shared = program.kernel(start)
    reader, other = program.kernel(shared), program.kernel(start)
    program.kernel(shared, reader, other)
    # Only once the last kernel is placed, the reader is the only one that the shared result waits for.
    assert [op.node for op in program.timeline().order] == [0, 2, 1, 3]


def test_a_matmul_has_a_view_behind_it() -> None:
    program = Written()
    first = program.kernel(program.argument())
    program.kernel(program.kernel(first), program.matmul(first))
    assert [op.node for op in program.timeline().order] == [0, 2, 1, 3]


def test_collectives_do_not_overlap_each_other() -> None:
    program = Written()
    start = program.argument()
    ends = [program.collective(kind, start, 100 * MIB) for kind in ("all-gather", "all-to-all")]
    program.kernel(*ends)
    found = program.timeline()
    apart = alone("all-gather", 100 * MIB) + alone("all-to-all", 100 * MIB)
    assert sum(found.exposed_s.values()) == pytest.approx(apart, rel=0.02)


def test_small_collectives_are_combined() -> None:
    program = Written()
    start = program.argument()
    ends = [program.collective("reduce-scatter", program.kernel(start), MIB, combinable=True) for _ in range(6)]
    outputs = [program.kernel(end) for end in ends]
    program.output(*outputs)
    assert program.timeline().num_collectives == {"reduce-scatter": 1}
    merged = [
        task.op
        for task in CollectiveCombiner(program.program, MESH).tasks(H100.combine_threshold_bytes, packs=True)
        if task.op.kind == "collective"
    ]
    assert len(merged[0].writes) == 6
    assert merged[0].payload_bytes == 6 * MIB


def test_combining_stops_at_the_threshold() -> None:
    def merged(kind: str, num_bytes: float) -> int:
        program = Written()
        start = program.argument()
        ends = [program.collective(kind, start, num_bytes, combinable=True) for _ in range(8)]
        program.output(*(program.kernel(end) for end in ends))
        return program.timeline().num_collectives[kind]

    assert merged("all-gather", 10 * MIB) == 3  # three of 10 MiB in 30
    assert merged("all-gather", 40 * MIB) == 8
    assert merged("reduce-scatter", 10 * MIB) == 1  # its results are an eighth


def test_reductions_are_combined_by_dtype() -> None:
    program = Written()
    start = program.argument()
    ends = [
        program.collective("all-reduce", start, MIB, combinable=True, dtype=dtype)
        for dtype in ("float32", "bfloat16", "float32", "bfloat16")
    ]
    program.output(*(program.kernel(end) for end in ends))
    assert program.timeline().num_collectives == {"all-reduce": 2}


def test_dependent_collectives_are_not_combined() -> None:
    program = Written()
    first = program.collective("all-gather", program.argument(), MIB, combinable=True)
    second = program.collective("all-gather", program.kernel(first), MIB, combinable=True)
    program.output(program.kernel(second))
    assert program.timeline().num_collectives == {"all-gather": 2}


def test_combining_makes_no_cycle() -> None:
    """a1 -> b1 and b2 -> a2: if both pairs were combined, each would depend on the other."""
    program = Written()
    start = program.argument()
    a1 = program.collective("all-gather", start, MIB, combinable=True)
    b1 = program.collective("reduce-scatter", program.kernel(a1), MIB, combinable=True)
    b2 = program.collective("reduce-scatter", start, MIB, combinable=True)
    a2 = program.collective("all-gather", program.kernel(b2), MIB, combinable=True)
    program.output(program.kernel(b1), program.kernel(a2))
    found = program.timeline()
    assert sum(found.num_collectives.values()) == 3


def test_a_combined_gather_waits_for_its_last_operand() -> None:
    """Once combined, the early collective no longer overlaps with the late kernels."""

    def exposed(combinable: bool) -> float:
        program = Written()
        start = program.argument()
        early = program.collective("all-reduce", start, 14 * MIB, combinable=combinable)
        last = start
        for _ in range(10):
            last = program.kernel(last)
        late = program.collective("all-reduce", last, 14 * MIB, combinable=combinable)
        program.output(program.kernel(early), program.kernel(late))
        return program.timeline().exposed_s["all-reduce"]

    assert exposed(True) > exposed(False)


def test_an_in_place_write_keeps_the_order_of_reads() -> None:
    """A barrier writes the buffers that it reads. Users after it depend on it and users before it do not, even if their
    other operands are combined collectives that move to the position of the last member."""
    program = Written()
    start, late = program.argument(), program.argument()
    held = program.kernel(start)
    first = program.collective("all-gather", program.kernel(start), MIB, combinable=True)
    program.ops.append(Op("fusion", len(program.ops), (held, first), (program._buffer(),), 0.0, 0.0))
    before = program.ops[-1]
    program.ops.append(Op("border", len(program.ops), (held, late), (held, late), 0.0, 0.0))
    barrier = program.ops[-1]
    program.ops.append(Op("fusion", len(program.ops), (held,), (program._buffer(),), 0.0, 0.0))
    behind = program.ops[-1]
    second = program.collective("all-gather", program.kernel(start), MIB, combinable=True)
    program.output(before.writes[0], behind.writes[0], program.kernel(second))
    tasks = CollectiveCombiner(program.program, MESH).tasks(H100.combine_threshold_bytes, packs=True)
    assert sum(task.op.kind == "collective" for task in tasks) == 1

    def comes_after(op: Op) -> list[Op]:
        (task,) = [task for task in tasks if task.op is op]
        return [tasks[at].op for at in task.waits_for]

    assert barrier in comes_after(behind)
    assert barrier not in comes_after(before)
    assert all(at < n for n, task in enumerate(tasks) for at in task.waits_for)


def test_other_devices_are_timed_too() -> None:
    program = Written()
    program.collective("all-reduce", program.kernel(program.argument()), MIB)
    for name in ("cpu-host", "a100-sxm-80"):
        found = simulate(program.program, MESH, load(name))
        assert found.step_time_s >= found.compute_s > 0
        assert found.exposed_s


def _layers(num_layers: int, num_bytes: float) -> DeviceProgram:
    """Layers that gather weights and reduce-scatter gradients, with small all-reduces that XLA does not combine."""
    program = Written()
    last, gradients = program.argument(), list[int]()
    for n in range(num_layers):
        weight = program.collective("all-gather", program.argument(), num_bytes, combinable=True)
        last = program.kernel(last, weight, times=0.2)
        last = program.collective("all-reduce", last, 2048.0, combinable=n % 2 == 0, dtype="float32")
        own = program.kernel(last, weight, times=0.1)
        gradients.append(program.collective("reduce-scatter", own, num_bytes, combinable=True, dtype="float32"))
    program.output(last, *(program.kernel(gradient, times=0.01) for gradient in gradients))
    return program.program


@pytest.mark.parametrize("num_bytes", [1e5, 3e6, 4e7])
def test_no_combine_threshold_beats_the_lower_bound(num_bytes: float) -> None:
    simulation = Simulation(_layers(12, num_bytes), MESH, H100)
    least = simulation.least_s
    taken = [simulation.timeline(combine_threshold_bytes=limit).step_time_s for limit in (0.0, MIB, 1e8, 1e12)]
    assert 0 < least <= min(taken)
    assert least > 0.3 * min(taken)  # the bound is not trivial
    profile = replace(H100, combine_threshold_bytes=MIB)
    alone = simulate(simulation.program, MESH, profile)
    assert simulation.timeline(combine_threshold_bytes=MIB) == alone  # independent of earlier calls


def test_a_program_that_cannot_win_is_timed_once() -> None:
    simulation = Simulation(_layers(12, 3e6), MESH, H100)
    own, estimated = simulation.timelines()
    assert estimated is not None
    assert simulation.timelines(None, 1.001 * own.step_time_s) == (own, estimated)
    assert simulation.timelines(None, own.step_time_s) is None
    assert simulation.timelines(None, 0.999 * simulation.least_s) is None


def test_xla_orders_by_its_estimate_and_the_device_takes_its_own_time() -> None:
    """A collective slows the kernels beside it; the order of the operations is the same by both prices."""
    program = Written()
    start = program.argument()
    sent, last = program.collective("all-reduce", start, 14 * MIB), start
    for _ in range(40):
        last = program.kernel(last)
    program.output(program.kernel(sent), last)
    simulation = Simulation(program.program, MESH, H100)
    own, estimated = simulation.timelines()
    assert estimated is not None
    assert own.order == estimated.order
    alone = sum(op_seconds(op, MESH, H100) for op in program.program.ops if op.kind != "collective")
    beside = op_seconds(next(op for op in program.program.ops if op.kind == "collective"), MESH, H100)
    assert own.compute_s == pytest.approx(alone + H100.kernel_slowdown * beside, rel=1e-6)
    undisturbed = Simulation(program.program, MESH, replace(H100, kernel_slowdown=0.0)).timeline()
    assert undisturbed.compute_s == pytest.approx(alone)
