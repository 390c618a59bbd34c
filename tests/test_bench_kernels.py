"""Stored steps: kernels align with the instructions that launched them, and are compared with the replay's prices."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.xla_compiler.hlo_text import parse_module
from benchmarks.gpu import programs, replayed
from benchmarks.gpu.aligned import Aligned, AlignmentError, align
from benchmarks.gpu.kernels import Event, in_order, summed

ARRAY = "f32[1024,1024]{1,0}"
GEMM = (
    f'({ARRAY}, s8[4194304]{{0}}) custom-call(%x, %x), custom_call_target="__cublas$lt$matmul",'
    ' metadata={op_name="jit(run)/layer_1/dot_general"}, backend_config={"gemm_backend_config":{"alpha_real":1,'
    '"alpha_imag":0,"beta":0,"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],'
    '"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}}}'
)
HEAD = f"""HloModule jit_run, is_scheduled=true

FileNames
1 "/somewhere/call.py"

StackFrames
1 {{file_location_id=1}}


%fused_add (a: f32[1024,1024], b: f32[1024,1024]) -> f32[1024,1024] {{
  %a = {ARRAY} parameter(0)
  %b = {ARRAY} parameter(1)
  ROOT %sum = {ARRAY} add(%a, %b)
}}

"""


def fusion(name: str, layer: int) -> str:
    return (
        f"  %{name} = {ARRAY} fusion(%x, %x), kind=kLoop, calls=%fused_add,"
        f' metadata={{op_name="jit(run)/layer_{layer}/add" stack_frame_id=1}}\n'
    )


def program(*lines: str) -> str:
    entry = "ENTRY %main (x: f32[1024,1024]) -> f32[1024,1024] {\n"
    return f"{HEAD}{entry}  %x = {ARRAY} parameter(0)\n{''.join(lines)}  ROOT %out = {ARRAY} bitcast(%x)\n}}\n"


STEP = program(
    fusion("loop_add_fusion.1", 0),
    f"  %custom-call.1 = {GEMM}\n",
    f"  %custom-call.2 = {GEMM}\n",
    fusion("loop_add_fusion.2", 1),
    f"  %copy.1 = {ARRAY} copy(%x)\n",
)
#: Both fusions share a kernel; the first call has a memory operation before it, the second a reduction after it.
KERNELS = [
    ("loop_add_fusion", 5e-6),
    ("Memset 0", 1e-6),
    ("nvjet_sm90_tst_128x160", 8e-6),
    ("nvjet_sm90_tst_64x256", 7e-6),
    ("void cublasLt::splitKreduce_kernel<32>", 2e-6),
    ("loop_add_fusion", 6e-6),
    ("memcpy32_post", 1e-6),
]


def by_name(found: list[Aligned]) -> dict[str, tuple[str, ...]]:
    return {one.instruction.name: one.kernels for one in found}


def test_each_instruction_has_its_kernels() -> None:
    found = align(parse_module(STEP), KERNELS)
    names = [name for name, _ in KERNELS]
    assert by_name(found) == {
        "loop_add_fusion.1": (names[0],),
        "custom-call.1": (names[1], names[2]),
        "custom-call.2": (names[3], names[4]),
        "loop_add_fusion.2": (names[5],),
        "copy.1": (names[6],),
    }
    assert sum(one.seconds for one in found) == pytest.approx(sum(seconds for _, seconds in KERNELS))


def test_a_memory_operation_before_a_fusion_is_the_fusions() -> None:
    module = parse_module(program(fusion("loop_add_fusion", 0)))
    kernels = [("Memset 0", 1e-6), ("loop_add_fusion_3", 5e-6)]
    assert by_name(align(module, kernels)) == {"loop_add_fusion": ("Memset 0", "loop_add_fusion_3")}


def test_a_copy_may_launch_nothing() -> None:
    module = parse_module(program(f"  %copy.1 = {ARRAY} copy(%x)\n", fusion("loop_add_fusion", 0)))
    assert by_name(align(module, [("loop_add_fusion", 5e-6)])) == {"loop_add_fusion": ("loop_add_fusion",)}


def test_the_kernels_of_a_loop_count_once_per_iteration() -> None:
    body = f"%body (x: f32[1024,1024]) -> f32[1024,1024] {{\n  %x = {ARRAY} parameter(0)\n{fusion('loop_add_fusion', 0)}}}\n\n"
    loop = (
        f"  %while = {ARRAY} while(%x), condition=%condition, body=%body,"
        ' backend_config={"known_trip_count":{"n":"3"}}\n'
    )
    text = program(loop).replace("ENTRY", f"{body}ENTRY")
    found = align(parse_module(text), [("loop_add_fusion", 1e-6)] * 3)
    assert [one.instruction.name for one in found] == ["loop_add_fusion"] * 3


@pytest.mark.parametrize(
    ("kernels", "words"),
    [
        (KERNELS[1:], "0 library calls () and 2 groups of kernels (Memset 0"),
        (KERNELS[:5], "kernel 5 of 5 is 'the end', not that of 'loop_add_fusion.2'"),
        ([*KERNELS, KERNELS[0]], "kernel 7 of 8 is 'loop_add_fusion', after the last fusion's"),
        (KERNELS[:1] + KERNELS[5:], "2 library calls (custom-call.1, custom-call.2) and 0 groups"),
    ],
)
def test_kernels_of_another_program_are_an_error(kernels: list[tuple[str, float]], words: str) -> None:
    with pytest.raises(AlignmentError) as caught:
        align(parse_module(STEP), kernels)
    assert words in str(caught.value)


# -- the benchmark -------------------------------------------------------------------------------

HOST = {
    "card": "NVIDIA H100 80GB HBM3",
    "platform": "gpu",
    "num_devices": 1,
    "profile": "h100-sxm",
    "driver": {"driver_version": "580.1"},
    "versions": {"jax": "0.11.2"},
    "date": "2026-11-26",
}


def test_a_stored_program_is_read_back_without_the_hosts_paths(tmp_path: Path) -> None:
    path = programs.save(programs.Program(HOST, "tiny", STEP, KERNELS), tmp_path)
    assert programs.stored(tmp_path) == ["nvidia-h100-80gb-hbm3-x1/tiny"]
    found = programs.load(path)
    assert found.kernels == KERNELS
    assert "/somewhere" not in found.hlo
    assert "stack_frame" not in found.hlo
    assert parse_module(found.hlo).main.by_name.keys() == parse_module(STEP).main.by_name.keys()
    assert found.host["driver"] == HOST["driver"]


def test_the_rows_compare_kernels_with_the_replay() -> None:
    rows = replayed.rows_of(programs.Program(HOST, "tiny", STEP, KERNELS))
    assert rows[0]["measured_ms"] == pytest.approx(0.03)
    kinds = {row["kind"]: row for row in rows if next(iter(row)) == "kind"}
    assert (kinds["gemm"]["count"], kinds["fusion"]["count"]) == (2, 2)
    operations = {row["operation"]: row for row in rows if "operation" in row}
    assert operations["layer_N/add"]["count"] == 2, "the layers' numbers do not count"
    assert operations["layer_N/add"]["TB/s"] == pytest.approx(2 * 3 * 4 * 1024**2 / 11e-6 / 1e12, rel=0.5)
    assert operations["layer_N/dot_general"]["TFLOP/s"] == pytest.approx(2 * 2 * 1024**3 / 18e-6 / 1e12)
    assert operations["layer_N/dot_general"]["shape"] == "f32[1024,1024]"
    assert "replayed" in replayed.summary(rows)
    assert "layer_N/dot_general" in replayed.page_table(rows)


def test_a_program_that_does_not_align_says_why() -> None:
    rows = replayed.rows_of(programs.Program(HOST, "tiny", STEP, KERNELS[1:]))
    assert "not aligned: 0 library calls" in replayed.summary(rows)
    assert replayed.page_table(rows)


def test_every_stored_program_aligns() -> None:
    assert programs.stored()
    for name in programs.stored():
        program = programs.load(programs.path_of(name))
        assert align(parse_module(program.hlo), program.kernels), name


# -- kernels of several runs ---------------------------------------------------------------------


def test_kernels_in_order_are_the_mean_of_the_runs() -> None:
    times = [("a", 1.0), ("b", 2.0), ("a", 4.0), ("a", 3.0), ("b", 4.0), ("a", 6.0)]
    events = [Event("gpu", name, 10.0 * number, seconds) for number, (name, seconds) in enumerate(times)]
    assert in_order(events[::-1], 2) == [("a", 2.0), ("b", 3.0), ("a", 5.0)]
    assert in_order(events[:-1], 2) is None
    assert in_order([*events[:-1], Event("gpu", "b", 60.0, 1.0)], 2) == [("a", 3.0), ("b", 4.0), ("b", 1.0)]
    found = summed(events, 2)
    assert found["busy_s"] == found["kernel_s"] == 10.0
    assert found["kernels"] == {"a": {"seconds": 7.0, "count": 2.0}, "b": {"seconds": 3.0, "count": 1.0}}
