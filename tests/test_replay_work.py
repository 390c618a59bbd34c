"""The replay counts the bytes and operations that a kernel needs, and reads the sizes of library calls."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

import autopar
from autopar.xla_compiler.hlo_text import Module, parse_module
from autopar.xla_replay.fused_work import FusedWork, fills_registers, fused_work, has_scattered_rows
from autopar.xla_replay.library_calls import (
    Attention,
    Convolution,
    Gemm,
    LibraryCall,
    LibraryKernel,
    dot_gemm,
    library_call,
)
from autopar.xla_replay.rates import load

MB = 1024 * 1024 * 4  # an f32[1024,1024]
ADD = """\
%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

"""


def work(body: str, *, before: str = "") -> FusedWork:
    text = (
        f"HloModule m\n\n{ADD}{before}%fused (p: f32[]) -> f32[] {{\n{body}\n}}\n\nENTRY %main (a: f32[]) -> f32[] {{\n"
    )
    module = parse_module(text + "  ROOT %a = f32[] parameter(0)\n}\n")
    return fused_work(module, module.computations["fused"])


P0 = "  %p0 = f32[1024,1024]{1,0} parameter(0)\n"


def test_elementwise_reads_and_writes_everything_once() -> None:
    found = work(
        P0 + "  %p1 = f32[1024]{0} parameter(1)\n  %b = f32[1024,1024]{1,0} broadcast(%p1), dimensions={1}\n"
        "  %e = f32[1024,1024]{1,0} exponential(%p0)\n  ROOT %r = f32[1024,1024]{1,0} add(%e, %b)"
    )
    assert found.read_bytes == (MB, 4096)
    assert found.written_bytes == MB
    assert found.operations == {("add", "f32"): 2**20, ("exponential", "f32"): 2**20}
    assert found.num_elements == 2**20
    assert not (found.is_transpose or found.is_column_reduction or found.is_gather or found.scattered)


def test_a_rotation_is_one_operation() -> None:
    found = work(
        "  %p0 = u32[1024]{0} parameter(0)\n  %n = u32[1024]{0} parameter(1)\n  %m = u32[1024]{0} parameter(2)\n"
        "  %l = u32[1024]{0} shift-left(%p0, %n)\n  %r = u32[1024]{0} shift-right-logical(%p0, %m)\n"
        "  ROOT %o = u32[1024]{0} or(%l, %r)"
    )
    assert found.operations == {("or", "u32"): 1024}


def test_a_slice_reads_what_it_takes() -> None:
    found = work(
        "  %stacked = f32[32,1024,1024]{2,1,0} parameter(0)\n  %i = s32[] parameter(1)\n  %z = s32[] constant(0)\n"
        "  %n = f32[32,1024,1024]{2,1,0} negate(%stacked)\n"
        "  ROOT %s = f32[1,1024,1024]{2,1,0} dynamic-slice(%n, %i, %z, %z), dynamic_slice_sizes={1,1024,1024}"
    )
    assert found.read_bytes == (MB, 4)
    assert found.operations == {("negate", "f32"): 2**20}  # only of the slice


def test_an_update_in_place_writes_the_update() -> None:
    found = work(
        "  %stacked = f32[32,1024,1024]{2,1,0} parameter(0)\n  %new = f32[1024,1024]{1,0} parameter(1)\n"
        "  %i = s32[] parameter(2)\n  %z = s32[] constant(0)\n  %b = f32[1,1024,1024]{2,1,0} bitcast(%new)\n"
        "  ROOT %u = f32[32,1024,1024]{2,1,0} dynamic-update-slice(%stacked, %b, %i, %z, %z)"
    )
    assert found.read_bytes == (0, MB, 4)
    assert found.written_bytes == MB
    assert found.num_elements == 2**20  # not those of the whole buffer


def test_several_roots_of_which_one_updates_in_place() -> None:
    found = work(
        "  %stacked = f32[32,1024]{1,0} parameter(0)\n  %new = f32[1,1024]{1,0} parameter(1)\n  %i = s32[] parameter(2)\n"
        "  %z = s32[] constant(0)\n  %t = f32[1,1024]{1,0} tanh(%new)\n"
        "  %u = f32[32,1024]{1,0} dynamic-update-slice(%stacked, %t, %i, %z)\n"
        "  ROOT %r = (f32[32,1024]{1,0}, f32[1,1024]{1,0}) tuple(%u, %t)"
    )
    assert found.read_bytes == (0, 4096, 4)
    assert found.written_bytes == 2 * 4096


def test_a_gather_reads_rows_and_a_scatter_updates_them() -> None:
    gathered = work(
        "  %table = f32[50257,1024]{1,0} parameter(0)\n  %ids = s32[1024,1]{1,0} parameter(1)\n"
        "  ROOT %g = f32[1024,1024]{1,0} gather(%table, %ids), offset_dims={1}, slice_sizes={1,1024}"
    )
    assert gathered.is_gather
    assert gathered.read_bytes == (MB, 4096)
    scattered = work(
        "  %table = f32[50257,1024]{1,0} parameter(0)\n  %ids = s32[1024,1]{1,0} parameter(1)\n"
        "  %rows = f32[1024,1024,1]{2,1,0} parameter(2)\n"
        "  ROOT %s = f32[50257,1024]{1,0} scatter(%table, %ids, %rows), update_window_dims={1,2}, to_apply=%add"
    )
    assert scattered.scattered == 2**20 / 8  # rows are contiguous: 8 elements in each sector of 32 bytes
    assert scattered.read_bytes == (0, 4096, MB)
    assert scattered.written_bytes == 2 * MB
    alone = work(
        "  %bins = f32[512]{0} parameter(0)\n  %ids = s32[1024,1]{1,0} parameter(1)\n  %ones = f32[1024]{0} parameter(2)\n"
        "  ROOT %s = f32[512]{0} scatter(%bins, %ids, %ones), update_window_dims={}, to_apply=%add"
    )
    assert alone.scattered == 1024


@pytest.mark.parametrize(("dims", "column"), [("1", False), ("0", True), ("0,1", False)])
def test_reductions_of_rows_and_columns(dims: str, column: bool) -> None:
    shape = "f32[]" if dims == "0,1" else "f32[1024]{0}"
    found = work(
        P0 + f"  %z = f32[] constant(0)\n  ROOT %r = {shape} reduce(%p0, %z), dimensions={{{dims}}}, to_apply=%add"
    )
    assert found.is_column_reduction is column
    assert found.read_bytes == (MB,)
    assert found.operations == {("add", "f32"): 2**20}
    assert found.num_elements == 2**20  # the parallelism is the operand's


def test_a_transpose_that_moves_the_contiguous_dim() -> None:
    swapped = work(P0 + "  ROOT %t = f32[1024,1024]{1,0} transpose(%p0), dimensions={1,0}")
    assert swapped.is_transpose
    same = work(P0 + "  ROOT %t = f32[1024,1024]{0,1} transpose(%p0), dimensions={1,0}")  # only the layout's name
    assert not same.is_transpose


def test_matmuls_and_nested_fusions_are_found() -> None:
    before = (
        "%inner (q: f32[1024,1024]) -> f32[1024,1024] {\n  %q = f32[1024,1024]{1,0} parameter(0)\n"
        "  ROOT %e = f32[1024,1024]{1,0} exponential(%q)\n}\n\n"
    )
    found = work(
        P0 + "  %f = f32[1024,1024]{1,0} fusion(%p0), kind=kLoop, calls=%inner\n"
        "  ROOT %d = f32[1024,1024]{1,0} dot(%f, %p0), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
        before=before,
    )
    assert [dot_gemm(*dot) for dot in found.dots] == [Gemm(1, 1024, 1024, 1024, "f32", "f32", "f32")]
    assert found.operations == {("exponential", "f32"): 2**20}
    assert found.read_bytes == (MB,)


def test_a_matmul_of_few_results_is_read_by_many_blocks(tmp_path: Path) -> None:
    """Blocks share the contracted dim, and a transpose of an operand is part of their loads."""
    body = (
        "  %p0 = f32[16384,1024]{1,0} parameter(0)\n  %p1 = f32[16384,4]{1,0} parameter(1)\n"
        "  %t = f32[1024,16384]{1,0} transpose(%p0), dimensions={1,0}\n"
        "  ROOT %d = f32[1024,4]{1,0} dot(%t, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    )
    assert work(body).num_elements == 16384 * 1024
    rates = load("h100-sxm")
    text = (
        "HloModule m, is_scheduled=true\n\n%fused (p0: f32[16384,1024], p1: f32[16384,4]) -> f32[1024,4] {\n"
        f"{body}\n}}\n\nENTRY %main (a: f32[16384,1024], b: f32[16384,4]) -> f32[1024,4] {{\n"
        "  %a = f32[16384,1024]{1,0} parameter(0)\n  %b = f32[16384,4]{1,0} parameter(1)\n"
        "  ROOT %f = f32[1024,4]{1,0} fusion(%a, %b), kind=kCustom, calls=%fused\n}\n"
    )
    file = tmp_path / "step.hlo"
    file.write_text(text)
    (kernel,) = autopar.replay(file, hardware="h100-sxm").operations
    read_s = 4 * 16384 * 1024 / rates.device.hbm_bytes_per_s
    assert read_s < kernel.seconds < 2 * read_s + 10e-6


def test_empty_arrays_cost_nothing() -> None:
    found = work("  %p0 = f32[0,8]{1,0} parameter(0)\n  ROOT %n = f32[0,8]{1,0} negate(%p0)")
    assert found.num_bytes == 0 and not found.operations


def call(line: str, *shapes: str) -> LibraryCall:
    parameters = "".join(f"  %p{n} = {shape} parameter({n})\n" for n, shape in enumerate(shapes))
    module = parse_module(f"ENTRY %main (a: f32[]) -> f32[] {{\n{parameters}  ROOT %r = {line}\n}}\n")
    return library_call(module.main, module.main.root)


def test_a_batched_matmul_with_transposed_operands() -> None:
    module = parse_module(
        "ENTRY %main (a: f32[]) -> f32[] {\n  %a = bf16[8,64,256]{2,1,0} parameter(0)\n"
        "  %b = bf16[8,512,64]{2,1,0} parameter(1)\n  ROOT %d = f32[8,256,512]{2,1,0} dot(%a, %b), lhs_batch_dims={0},"
        " lhs_contracting_dims={1}, rhs_batch_dims={0}, rhs_contracting_dims={2}\n}\n"
    )
    assert dot_gemm(module.main, module.main.root) == Gemm(8, 256, 512, 64, "bf16", "bf16", "f32")


def test_an_algorithm_decides_the_units_and_odd_rows_the_alignment() -> None:
    module = parse_module(
        "HloModule m\n\nENTRY %main (a: f32[8,50257], b: f32[16,50257]) -> f32[8,16] {\n"
        "  %a = f32[8,50257]{1,0} parameter(0)\n  %b = f32[16,50257]{1,0} parameter(1)\n"
        "  ROOT %dot = f32[8,16]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={1},"
        " algorithm=dot_bf16_bf16_f32\n}\n"
    )
    found = dot_gemm(module.main, module.main.root)
    assert found == Gemm(1, 8, 16, 50257, "f32", "f32", "f32", "bf16", (4, 4, 16))
    assert found.flops == 2 * 8 * 16 * 50257


#: A Triton kernel over two operands, with placeholders for the lines of its fusion, its shape and its tile.
_TILED = """HloModule m

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %z = f32[] add(%x, %y)
}

%fused (p: SHAPE, q: SHAPE) -> SHAPE {
  %p = SHAPE parameter(0)
  %q = SHAPE parameter(1)
BODY
}

ENTRY %main (a: SHAPE, b: SHAPE) -> SHAPE {
  %a = SHAPE parameter(0)
  %b = SHAPE parameter(1)
  ROOT %fusion = SHAPE fusion(%a, %b), kind=kCustom, calls=%fused, backend_config={"fusion_backend_config":\
{"block_level_fusion_config":{"output_tiles":[{"sizes":[TILE]}],"num_warps":"8"},"kind":"__triton"}}
}
"""
_SUM_OF_ROWS = """  %t = SHAPE OPCODE(%p, %q)
  %n = f32[] constant(0)
  %r = f32[16,12,ROWS]{2,1,0} reduce(%t, %n), dimensions={3}, to_apply=%add
  %all = SHAPE broadcast(%r), dimensions={0,1,2}
"""
#: The gradient of a softmax reads both operands again after the sum; a softmax under a mask reads what it sums.
_GRADIENT = (
    _SUM_OF_ROWS.replace("OPCODE", "multiply") + "  %s = SHAPE subtract(%p, %all)\n  ROOT %o = SHAPE multiply(%s, %q)"
)
_SOFTMAX = _SUM_OF_ROWS.replace("OPCODE", "add") + "  ROOT %o = SHAPE divide(%t, %all)"


def _tiled(body: str, tile: Sequence[int], rows: int, length: int) -> Module:
    sizes = ",".join(f'"{size}"' for size in tile)
    text = _TILED.replace("BODY", body).replace("TILE", sizes).replace("ROWS", str(rows))
    return parse_module(text.replace("SHAPE", f"f32[16,12,{rows},{length}]{{3,2,1,0}}"))


@pytest.mark.parametrize(
    ("tile", "scattered"),
    [((16, 1, 1, 1024), True), ((1, 1, 16, 1024), False), ((8, 1, 2, 1024), False), ((2, 8, 1, 1024), True)],
)
def test_rows_are_scattered_where_a_tile_takes_one_at_each_place(tile: Sequence[int], scattered: bool) -> None:
    assert has_scattered_rows(_tiled(_GRADIENT, tile, 1024, 1024).main.root) == scattered


@pytest.mark.parametrize(
    ("body", "tile", "length", "fills"),
    [
        (_GRADIENT, (16, 1, 1, 1024), 1024, True),
        (_GRADIENT, (1, 1, 4, 4096), 4096, True),
        (_GRADIENT, (1, 1, 16, 512), 512, False),
        (_GRADIENT, (16, 1, 1, 197), 197, False),
        (_SOFTMAX, (16, 1, 1, 1024), 1024, False),
    ],
)
def test_the_gradient_of_a_long_softmax_fills_the_registers(
    body: str, tile: Sequence[int], length: int, fills: bool
) -> None:
    module = _tiled(body, tile, 1024, length)
    assert fills_registers(module.main.root, module.computations["fused"]) == fills


def test_cublas_reads_its_configuration() -> None:
    found = call(
        '(bf16[512,256]{1,0}, s8[4194304]{0}) custom-call(%p0, %p1), custom_call_target="__cublas$lt$matmul",'
        ' backend_config={"gemm_backend_config":{"alpha_real":1,"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],'
        '"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}}}',
        "bf16[512,1024]{1,0}",
        "bf16[1024,256]{1,0}",
    )
    assert found == Gemm(1, 512, 256, 1024, "bf16", "bf16", "bf16")


@pytest.mark.parametrize(
    ("target", "result", "operands"),
    [
        ("__cudnn$convForward", "bf16[64,56,56,128]", ("bf16[64,56,56,256]", "bf16[128,3,3,256]")),
        ("__cudnn$convBackwardInput", "bf16[64,56,56,256]", ("bf16[64,56,56,128]", "bf16[128,3,3,256]")),
        ("__cudnn$convBackwardFilter", "bf16[128,3,3,256]", ("bf16[64,56,56,256]", "bf16[64,56,56,128]")),
    ],
)
def test_convolutions_and_their_gradients_have_equal_flops(target: str, result: str, operands: tuple[str, str]) -> None:
    line = f"({result}{{3,2,1,0}}, u8[0]{{0}}) custom-call(%p0, %p1), window={{size=3x3 pad=1_1x1_1}},"
    found = call(
        f'{line} dim_labels=b01f_o01i->b01f, custom_call_target="{target}"', *(f"{one}{{3,2,1,0}}" for one in operands)
    )
    assert isinstance(found, Convolution)
    assert found.flops == 2.0 * 64 * 56 * 56 * 128 * 256 * 9


def test_a_depthwise_convolution() -> None:
    found = call(
        "(f32[8,32,32,64]{3,2,1,0}, u8[0]{0}) custom-call(%p0, %p1), window={size=3x3}, dim_labels=b01f_o01i->b01f,"
        ' feature_group_count=64, custom_call_target="__cudnn$convForward"',
        "f32[8,32,32,64]{3,2,1,0}",
        "f32[64,3,3,1]{3,2,1,0}",
    )
    assert isinstance(found, Convolution)
    assert found.flops == 2.0 * 8 * 32 * 32 * 64 * 9
    assert found.groups == 64


SCORES = '"intermediate_tensor_shape":{"element_type":"BF16","dimensions":["8","32","4096","4096"],"tuple_shapes":[]}'


@pytest.mark.parametrize(("mask", "fraction"), [("NO_MASK", 1.0), ("CAUSAL", 4097 / 8192)])
@pytest.mark.parametrize("backward", [False, True])
def test_cudnn_attention(mask: str, fraction: float, backward: bool) -> None:
    heads = "bf16[8,32,4096,128]{3,1,2,0}"
    results = f"({heads}, {heads}, {heads}, u8[0]{{0}})" if backward else f"({heads}, u8[0]{{0}})"
    target = "__cudnn$fmhaSoftmaxBackward" if backward else "__cudnn$fmhaSoftmax"
    config = (
        f'backend_config={{"cudnn_fmha_backend_config":{{{SCORES},"mask_type":"{mask}","sliding_window_length":0}}}}'
    )
    found = call(f'{results} custom-call(%p0, %p1, %p2), custom_call_target="{target}", {config}', heads, heads, heads)
    assert isinstance(found, Attention)
    assert (found.head_dim, found.value_dim, found.is_backward) == (128, 128, backward)
    forward = 4.0 * 8 * 32 * 4096 * 4096 * 128 * fraction
    assert found.flops == pytest.approx(2.5 * forward if backward else forward)


def test_a_declared_cost_is_taken_and_an_unknown_one_is_none() -> None:
    shape = "f32[1024]{0}"
    known = call(
        f'{shape} custom-call(%p0), custom_call_target="mine", backend_config={{"cost_estimate":{{"flops":"1e9",'
        f'"transcendentals":"0","bytes_accessed":"2048"}}}}',
        shape,
    )
    assert known == LibraryKernel("mine", 1e9, 2048.0, 1.0, "f32")
    assert call(f'{shape} custom-call(%p0), custom_call_target="odd"', shape) == LibraryKernel(
        "odd", None, 8192.0, 1.0, "f32"
    )


def test_sorts_transforms_and_factorizations_are_priced() -> None:
    sort = call("(f32[1024]{0}, s32[1024]{0}) sort(%p0, %p1), dimensions={0}", "f32[1024]{0}", "s32[1024]{0}")
    assert isinstance(sort, LibraryKernel) and sort.num_bytes == 4 * 2 * 8192
    fft = call("c64[1024,4096]{1,0} fft(%p0), fft_type=FFT, fft_length={4096}", "c64[1024,4096]{1,0}")
    assert isinstance(fft, LibraryKernel) and fft.flops == 5 * 1024 * 4096 * 12
    cholesky = call(
        '(f32[1024,1024]{0,1}, s32[]) custom-call(%p0), custom_call_target="cusolver_potrf_ffi"', "f32[1024,1024]{0,1}"
    )
    assert isinstance(cholesky, LibraryKernel) and cholesky.flops == pytest.approx(1024**3 / 3)
