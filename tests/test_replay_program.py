"""The replay runs what XLA scheduled: streams overlap, loops repeat, links are shared, faults move the total as they must."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import pytest

from autopar.errors import VerifyError
from autopar.xla_compiler.hlo_text import Computation, Instruction, Module, parse_module
from autopar.xla_replay.price import KernelPrice, TransferPrice
from autopar.xla_replay.program import replay_module
from autopar.xla_replay.replay import Replay

MS = 1e-3
ENTRY = """\
HloModule m, is_scheduled=true, num_partitions=8

%add (x: f32[], y: f32[]) -> f32[] {{
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}}

%condition (p: (s32[], f32[8])) -> pred[] {{
  %p = (s32[], f32[8]{{0}}) parameter(0)
  ROOT %less = pred[] custom-call(%p), custom_call_target="kernel"
}}

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %p = (s32[], f32[8]{{0}}) parameter(0)
  %x = f32[8]{{0}} get-tuple-element(%p), index=1
{body}
  ROOT %out = (s32[], f32[8]{{0}}) tuple(%p, %x)
}}

ENTRY %main (a: f32[8]) -> f32[8] {{
  %a = f32[8]{{0}} parameter(0)
{main}
  ROOT %end = f32[8]{{0}} bitcast(%a)
}}
"""
KERNEL = '  %{name} = f32[8]{{0}} custom-call(%{operand}), custom_call_target="kernel", metadata={{op_name="jit(f)/{name}" source_file="{name}.py" source_line=1}}'
LINK = TransferPrice("", "collectives", "nvlink", 2 * MS, num_bytes=32.0)
START = "  %{name} = (f32[8]{{0}}, f32[8]{{0}}) {kind}-start(%{operand}), replica_groups={{{{0,1,2,3,4,5,6,7}}}}, to_apply=%add"
DONE = "  %{name}.done = f32[8]{{0}} {kind}-done(%{name})"
LOOP = (
    "  %loop = (s32[], f32[8]{{0}}) while(%a), condition=%condition, body=%body"
    ', backend_config={{"known_trip_count":{{"n":"{count}"}}}}'
)


def kernel(name: str, operand: str = "a") -> str:
    return KERNEL.format(name=name, operand=operand)


def start(name: str, kind: str = "all-reduce", operand: str = "a") -> str:
    return START.format(name=name, kind=kind, operand=operand)


def done(name: str, kind: str = "all-reduce") -> str:
    return DONE.format(name=name, kind=kind)


@dataclass(frozen=True)
class Fixed:
    """Every kernel takes 1 ms, every collective 2 ms on a link, whatever they are."""

    transfer: TransferPrice = LINK

    def of(self, module: Module, computation: Computation, one: Instruction) -> KernelPrice | TransferPrice:
        kind = one.opcode.removesuffix("-start")
        if kind in ("all-reduce", "all-gather", "collective-permute"):
            stream = "permutes" if kind == "collective-permute" else self.transfer.stream
            return replace(self.transfer, kind=kind, stream=stream)
        return KernelPrice("kernel", 1 * MS, flops=1e9)

    def host_round_trip(self) -> KernelPrice:
        return KernelPrice("host", 0.01 * MS)


def replayed(*main: str, body: tuple[str, ...] = (), prices: Fixed | None = None, count: int = 1) -> Replay:
    text = ENTRY.format(main="\n".join(main), body="\n".join(body))
    return replay_module(parse_module(text), prices or Fixed(), unknown_trip_count=count)


def test_kernels_run_one_after_the_other() -> None:
    found = replayed(kernel("k1"), kernel("k2"), kernel("k3"))
    assert found.step_time_s == pytest.approx(3 * MS)
    assert found.exposed_s == {}
    assert found.flops == 3e9
    assert [one.count for one in found.operations] == [1, 1, 1]


def test_a_collective_hides_behind_the_kernels_between_its_start_and_its_done() -> None:
    found = replayed(start("c"), kernel("k1"), done("c"), kernel("k2"))
    assert found.step_time_s == pytest.approx(3 * MS)  # 2 ms of collective, 1 of them hidden, then a kernel
    assert found.exposed_s == {"all-reduce": pytest.approx(1 * MS)}
    by_name = {one.name: one for one in found.operations}
    assert by_name["c"].exposed_s == pytest.approx(1 * MS)
    assert by_name["c"].seconds == pytest.approx(2 * MS)


def test_a_serialised_stream_exposes_everything() -> None:
    hidden = replayed(start("c"), kernel("k1"), kernel("k2"), done("c"))
    serial = replayed(start("c"), done("c"), kernel("k1"), kernel("k2"))
    assert hidden.step_time_s == pytest.approx(2 * MS)
    assert serial.step_time_s == pytest.approx(4 * MS)


def test_a_doubled_collective_doubles_its_time() -> None:
    once = replayed(start("c"), done("c"), kernel("k"))
    twice = replayed(start("c"), done("c"), start("d"), done("d"), kernel("k"))
    assert twice.step_time_s - once.step_time_s == pytest.approx(2 * MS)
    assert twice.exposed_s["all-reduce"] == pytest.approx(2 * once.exposed_s["all-reduce"])


def test_a_halved_link_doubles_every_transfer() -> None:
    program = (start("c"), done("c"), kernel("k"), start("d", "all-gather"), done("d", "all-gather"))
    slow = Fixed(replace(LINK, seconds=4 * MS))
    assert sum(replayed(*program, prices=slow).exposed_s.values()) == pytest.approx(
        2 * sum(replayed(*program).exposed_s.values())
    )


def test_transfers_of_one_stream_queue_and_those_of_two_share_the_link() -> None:
    queued = replayed(start("c"), start("d", "all-gather"), done("d", "all-gather"), done("c"))
    assert queued.step_time_s == pytest.approx(4 * MS)
    assert queued.exposed_s == {"all-gather": pytest.approx(2 * MS), "all-reduce": pytest.approx(2 * MS)}
    shared = replayed(
        start("c"), start("p", "collective-permute"), done("c"), done("p", "collective-permute"), kernel("k")
    )
    assert shared.step_time_s == pytest.approx(5 * MS)  # each runs at half the rate for 4 ms


def test_transfers_slow_the_kernels_beside_them() -> None:
    prices = Fixed(replace(LINK, slows_by=0.5))
    found = replayed(start("c"), kernel("k1"), kernel("k2"), done("c"), prices=prices)
    assert found.step_time_s == pytest.approx(3 * MS)  # 2 ms at half the rate, then 1 ms alone
    assert found.exposed_s == {}


@pytest.mark.parametrize("count", [0, 1, 2, 3, 32, 100_000])
def test_a_loop_runs_as_often_as_its_trip_count(count: int) -> None:
    body = (kernel("inner", "x"), start("c", operand="x"), done("c"))
    found = replayed(LOOP.format(count=count), kernel("k"), body=body)
    assert found.step_time_s == pytest.approx((3 * count + 1) * MS)
    assert found.exposed_s.get("all-reduce", 0.0) == pytest.approx(2 * count * MS)
    counts = {one.name: one.count for one in found.operations}
    assert counts.get("inner", 0) == count
    assert not found.notes


def test_an_unknown_trip_count_is_assumed_and_said() -> None:
    loop = LOOP.format(count=1).split(", backend_config")[0]
    found = replayed(loop, body=(kernel("inner", "x"),), count=5)
    assert found.step_time_s == pytest.approx(5 * (1 + 1 + 0.01) * MS)  # body, condition, round trip to the host
    assert any("loop 'loop'" in note and "5 assumed" in note for note in found.notes)


def test_what_an_iteration_leaves_running_is_waited_for() -> None:
    found = replayed(LOOP.format(count=10), body=(start("c", operand="x"), kernel("inner", "x")))
    assert found.step_time_s == pytest.approx(20 * MS)


def test_the_longest_branch_of_a_conditional_is_assumed() -> None:
    call = "  %branch = f32[8]{0} conditional(%a, %a, %a), branch_computations={%short, %long}\n"
    branches = "".join(
        f"%{name} (p: f32[8]) -> f32[8] {{\n  %p = f32[8]{{0}} parameter(0)\n{lines}\n"
        "  ROOT %r = f32[8]{0} bitcast(%p)\n}\n\n"
        for name, lines in (("short", kernel("s", "p")), ("long", kernel("l1", "p") + "\n" + kernel("l2", "p")))
    )
    text = ENTRY.format(main=call, body="").replace("ENTRY", branches + "ENTRY")
    found = replay_module(parse_module(text), Fixed())
    assert found.step_time_s == pytest.approx(2.01 * MS)
    assert any("'long'" in note for note in found.notes)


def test_an_unscheduled_module_is_refused() -> None:
    text = ENTRY.format(main=kernel("k"), body="").replace("is_scheduled=true, ", "")
    with pytest.raises(VerifyError, match="is not scheduled"):
        replay_module(parse_module(text), Fixed())


def test_an_empty_program_takes_no_time() -> None:
    found = replayed()
    assert (found.step_time_s, found.operations, found.table()) == (0.0, (), found.table())
    assert json.dumps(found.as_json())


def test_the_timeline_has_every_run_once_and_adds_up() -> None:
    body = (kernel("inner", "x"), start("c", operand="x"), done("c"))
    found = replayed(LOOP.format(count=32), kernel("k"), body=body)
    trace = found.perfetto()
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    ends = max(event["ts"] + event["dur"] for event in slices)
    assert ends == pytest.approx(1e6 * found.step_time_s)
    assert any(event["name"] == "30 more iterations of loop" for event in slices)
    assert {event["name"] for event in slices} >= {"inner", "c", "k"}
    assert json.dumps(trace)
    assert "inner.py:1" in found.table()
    assert found.by_source()["inner.py:1"] == pytest.approx(32 * MS)
    assert found.by_kind() == {"all-reduce": pytest.approx(64 * MS), "kernel": pytest.approx(33 * MS)}
