"""Parsing of optimized HLO: collectives, replica groups, source lines."""

from __future__ import annotations

import pytest

from autopar.errors import VerifyError
from autopar.ir.mesh import MeshShape
from autopar.xla_compiler import hlo_collectives as hlo
from autopar.xla_compiler import hlo_metadata as hlo_places
from autopar.xla_compiler.hlo_text import parse_module

MESH = MeshShape(("data", "model"), (2, 4))

PROGRAM = """\
HloModule jit_run, is_scheduled=true

FileNames
1 "/venv/lib/python3.12/site-packages/flax/linen/linear.py"
2 "/home/me/train.py"

FunctionNames
1 "Dense.__call__"
2 "train_step"

FileLocations
1 {file_name_id=2 function_name_id=2 line=12 end_line=12 column=4 end_column=9}
2 {file_name_id=1 function_name_id=1 line=294 end_line=294 column=6 end_column=6}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}

%body (p: (s32[], f32[64,8])) -> (s32[], f32[64,8]) {
  %p = (s32[], f32[64,8]{1,0}) parameter(0)
  %x = f32[64,8]{1,0} get-tuple-element(%p), index=1
  %permute = f32[64,8]{1,0} collective-permute(%x), channel_id=9, source_target_pairs={{0,4},{4,0}}
}

%condition (p: (s32[], f32[64,8])) -> pred[] {
  %p = (s32[], f32[64,8]{1,0}) parameter(0)
}

ENTRY %main (a: f32[128,64], b: bf16[32]) -> f32[] {
  %a = f32[128,64]{1,0} parameter(0)
  %b = bf16[32]{0} parameter(1)
  %all-reduce-start = ((f32[128,64]{1,0}, bf16[32]{0}), (f32[128,64]{1,0}, bf16[32]{0})) all-reduce-start(%a, %b), \
channel_id=1, replica_groups=[2,4]<=[8], use_global_device_ids=true, to_apply=%add, \
metadata={op_name="jit(run)/jvp(MLP)/Dense_0/dot_general" stack_frame_id=2}
  %all-reduce-done = (f32[128,64]{1,0}, bf16[32]{0}) all-reduce-done(%all-reduce-start), metadata={op_name="x"}
  %scattered = f32[16,64]{1,0} reduce-scatter(%a), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}, to_apply=%add
  %pieces = (f32[64]{0}, f32[64]{0}) all-to-all(%a, %a), channel_id=3, \
replica_groups=mesh['axis_0'=4,'axis_1'=2], device_ids=([2,4]T(1,0)) {'axis_1'}, dimensions={0}
  %start = (s32[], f32[64,8]{1,0}) tuple(%a, %a)
  %loop = (s32[], f32[64,8]{1,0}) while(%start), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"12"},"known_init_step":{"init":"0","step":"1"}}
  ROOT %loss = f32[] constant(0)
}
"""


# -- reading a program ------------------------------------------------------------------------


def test_every_collective_is_parsed_once_with_groups_sources_and_trip_counts() -> None:
    found = {one.kind: one for one in hlo.collectives(PROGRAM)}
    assert list(found) == ["collective-permute", "all-reduce", "reduce-scatter", "all-to-all"]
    reduced = found["all-reduce"]
    assert reduced.result_bytes == (128 * 64 * 4, 32 * 2)  # of the `-done`: the `-start` lists operands too
    assert hlo_places.mesh_axes(reduced.groups, MESH) == ("model",)
    assert reduced.op_name.endswith("Dense_0/dot_general")
    assert reduced.source == "/home/me/train.py:12"  # the caller of the library's frame
    assert found["reduce-scatter"].payloads(8) == (128 * 64 * 4,)  # unscattered
    assert found["all-to-all"].payloads(8) == (128 * 4,)  # its parts form one buffer
    assert hlo_places.mesh_axes(found["all-to-all"].groups, MESH) == ("data",)
    assert found["collective-permute"].num_times == 12
    assert hlo_places.mesh_axes(found["collective-permute"].groups, MESH, pairs=True) == ("data",)


@pytest.mark.parametrize(
    "text",
    [
        "{{0,4},{1,5},{2,6},{3,7}}",
        "[4,2]<=[2,4]T(1,0)",
        "mesh['data'=2,'model'=4] {'data'}",
        "mesh['axis_0'=1,'axis_1'=4,'axis_2'=2], device_ids=([2,4]T(1,0)) {'axis_2'}",
        "mesh['a'=4,'b'=2], device_ids=(0,4,1,5,2,6,3,7) {'b'}",
        "mesh['axis_0'=8] {'axis_0':(1)2}",  # the major part of an axis
    ],
)
def test_replica_groups_in_every_notation(text: str) -> None:
    groups = hlo_places.read_groups(text)
    assert {frozenset(group) for group in groups} == {frozenset({n, n + 4}) for n in range(4)}
    assert hlo_places.mesh_axes(groups, MESH) == ("data",)


def test_groups_of_all_devices_and_of_no_axes() -> None:
    assert hlo_places.mesh_axes((), MESH) == ("data", "model")
    assert hlo_places.mesh_axes(hlo_places.read_groups("mesh['a'=2,'b'=4] {'a','b'}"), MESH) == ("data", "model")
    assert hlo_places.mesh_axes(((0, 5), (1, 4), (2, 7), (3, 6)), MESH) is None


def test_an_unknown_notation_of_groups_is_an_error() -> None:
    with pytest.raises(VerifyError, match="cannot read the devices"):
        hlo_places.read_groups("rings[8]")


def test_older_metadata_has_the_source_line() -> None:
    line = (
        '  %r = f32[512]{0} all-reduce(%a), replica_groups={}, metadata={op_name="f" source_file="a.py" source_line=7}'
    )
    (one,) = hlo.collectives("ENTRY %main (a: f32[512]) -> f32[512] {\n" + line + "\n}\n")
    assert (one.source, one.groups, one.group_size(8)) == ("a.py:7", (), 8)


# -- the parser -------------------------------------------------------------------------------


def test_shapes_operands_and_attributes_are_parsed() -> None:
    module = parse_module(PROGRAM)
    assert (module.name, module.entry, module.num_partitions, module.is_scheduled) == ("jit_run", "main", 1, True)
    start = module.main.by_name["all-reduce-start"]
    assert start.shape.leaves == (*start.shape.elements[0].leaves, *start.shape.elements[1].leaves)
    assert start.shape.num_bytes == 2 * (128 * 64 * 4 + 32 * 2)
    assert [operand.name for operand in start.operands] == ["a", "b"]
    assert start.callees == ("add",)
    loop = module.main.by_name["loop"]
    assert loop.trip_count == 12
    assert {one.name for one in module.called(loop)} == {"body", "condition"}
    assert module.main.root.name == "loss"
    assert [one.name for one in module.main.parameters] == ["a", "b"]
    assert {one.name for one in module.main.users["a"]} == {"all-reduce-start", "scattered", "pieces", "start"}


def test_an_operand_may_be_an_element_of_a_nested_tuple() -> None:
    text = """\
HloModule m, is_scheduled=true

%fused (p: f32[8]) -> (s32[], (f32[4], bf16[2])) {
  %p = f32[8]{0} parameter(0)
  ROOT %r = (s32[], (f32[4]{0}, bf16[2]{0})) custom-call(%p), custom_call_target="c"
}

ENTRY %main (a: f32[8]) -> bf16[2] {
  %a = f32[8]{0} parameter(0)
  %both = (s32[], (f32[4]{0}, bf16[2]{0})) fusion(%a), kind=kInput, calls=%fused
  ROOT %out = bf16[2]{0} custom-call(%both#0, %both#1#1), custom_call_target="d"
}
"""
    main = parse_module(text).main
    assert [main.shape_of(operand).dtype for operand in main.root.operands] == ["s32", "bf16"]
    assert set(main.users) == {"a", "both"}


def test_newer_notations_are_parsed() -> None:
    text = """\
HloModule m, num_partitions=4, is_scheduled=true

ENTRY %main (a: bf16[8,4]) -> (f8e4m3fn[8,4], s4[3]) {
  %a = bf16[8,4]{0,1:T(8,128)S(5)} parameter(0), metadata={op_name="f(\\"x\\", {y)"}
  %pair = (f8e4m3fn[8,4]{1,0}, /*index=1*/s4[3]{0}) custom-call(%a), custom_call_target="odd, {name(", custom_call_has_side_effect=true
  %first = f8e4m3fn[8,4]{1,0} negate(%pair#0)
  ROOT %out = (f8e4m3fn[8,4]{1,0}, s4[3]{0}) tuple(%first, %pair#1)
}
"""
    module = parse_module(text)
    main = module.main
    assert main.by_name["a"].shape.memory_space == 5
    assert main.by_name["a"].shape.minor_to_major == (0, 1)
    call = main.by_name["pair"]
    assert call.custom_call_target == "odd, {name("
    assert call.shape.num_bytes == 32 + 1.5
    assert main.shape_of(main.root.operands[1]).dtype == "s4"
    assert module.num_partitions == 4


@pytest.mark.parametrize(
    "text", ["", "hello", "HloModule m\n\n%f (a: f32[]) -> f32[] {\n  ROOT %a = f32[] parameter(0)\n}\n"]
)
def test_a_text_that_is_no_module_is_an_error(text: str) -> None:
    with pytest.raises(VerifyError, match="no HLO module"):
        parse_module(text)


def test_a_damaged_line_is_named() -> None:
    with pytest.raises(VerifyError, match=r"line 2 .*f32\[512"):
        parse_module("ENTRY %main (a: f32[512]) -> f32[512] {\n  ROOT %r = f32[512 broken\n}\n")
