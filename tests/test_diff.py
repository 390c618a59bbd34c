"""`autopar diff`: the tensors with another sharding under another plan, and the bytes that each device must fetch."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import programs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import autopar
from autopar.cli.main import main
from autopar.ir.mesh import MeshShape
from autopar.ir.placement import Part, move
from autopar.ir.sharding import TensorSharding
from autopar.jax_interop.partition_spec import named_shardings

MESHES = (MeshShape(("data",), (8,)), MeshShape(("data", "model"), (2, 4)), MeshShape(("model", "data"), (2, 2)))
SHAPE = (16, 8)


@pytest.fixture(scope="module")
def mlp() -> programs.Program:
    return programs.mlp(batch=48, width=48, num_layers=3, optimizer="adam")


def plan_of(program: programs.Program, **options: Any) -> autopar.Plan:
    options = {"hardware": "cpu-host"} | options
    return autopar.plan(program.step, *program.abstract_args(), **options)


@pytest.fixture(scope="module")
def eight(mlp: programs.Program) -> autopar.Plan:
    return plan_of(mlp, mesh="8", pin={"state/params/*": P(), "state/opt_state/*/kernel": P("data")})


@pytest.fixture(scope="module")
def four(mlp: programs.Program) -> autopar.Plan:
    return plan_of(mlp, mesh="2x2", pin={"state/**/kernel": P(None, ("data", "model"))})


# -- what each device must fetch -------------------------------------------------------------


def devices_of(mesh: MeshShape) -> Mesh:
    return Mesh(np.array(jax.devices()[: mesh.num_devices]).reshape(mesh.axis_sizes), mesh.axis_names)


def places(sharding: TensorSharding, mesh: MeshShape) -> list[set[tuple[int, ...]]]:
    """The elements that each device holds, as JAX has it."""
    (named,) = named_shardings([sharding], devices_of(mesh))
    index = named.devices_indices_map(SHAPE)
    grid = np.stack(np.meshgrid(*map(np.arange, SHAPE), indexing="ij"), -1)
    return [
        {tuple(place) for place in grid[index[device]].reshape(-1, len(SHAPE))}
        for device in jax.devices()[: mesh.num_devices]
    ]


@st.composite
def shardings(draw: st.DrawFn) -> tuple[TensorSharding, MeshShape]:
    mesh = draw(st.sampled_from(MESHES))
    axes = draw(st.permutations(mesh.axis_names))
    cut = draw(st.integers(0, len(axes)))
    drop = draw(st.integers(0, len(axes)))
    dims = (tuple(a for a in axes[:cut] if a != axes[drop % len(axes)] or drop == len(axes)), tuple(axes[cut:]))
    return TensorSharding(dims), mesh


@pytest.mark.contract
@settings(max_examples=60, deadline=None)
@given(shardings(), shardings())
def test_what_a_device_lacks_is_what_jax_puts_there_and_was_not(
    before: tuple[TensorSharding, MeshShape], after: tuple[TensorSharding, MeshShape]
) -> None:
    told = move(SHAPE, (Part(*before),), (Part(*after),))
    old, new = places(*before), places(*after)
    old += [set()] * (len(new) - len(old))
    assert told.held == tuple(map(len, new))
    assert told.fetched == tuple(len(there - before) for there, before in zip(new, old, strict=False))
    assert told.same == (new == old[: len(new)])


# -- two plans -------------------------------------------------------------------------------


@pytest.mark.contract
def test_a_plan_and_itself_differ_in_nothing(eight: autopar.Plan) -> None:
    told = autopar.diff(eight, eight)
    assert told.same_state and not told.state and not told.data and not told.activations and not told.unlike
    assert not any(told.fetched_bytes)
    assert "keep their sharding" in str(told)


@pytest.mark.contract
def test_each_device_of_the_new_mesh_is_told_what_it_lacks(eight: autopar.Plan, four: autopar.Plan) -> None:
    told = autopar.diff(eight, four)
    assert not told.same_state and not told.unlike
    assert len(told.held_bytes) == len(told.fetched_bytes) == 4
    state = [tensor for tensor in four.inputs if tensor.role != "data"]
    assert told.num_state == len(state)
    assert told.held_bytes == pytest.approx([sum(tensor.num_bytes for tensor in state)] * 4)
    by_path = {change.path: change for change in told.state}
    kernel = by_path["state/params/Dense_0/kernel"]  # whole on each of the eight: a part of it is there already
    assert (kernel.fetched_bytes, kernel.local_bytes, kernel.num_bytes) == (0.0, 48 * 48, 4 * 48 * 48)
    moment = by_path["state/opt_state/0/mu/Dense_0/kernel"]  # rows on the eight, columns on the four
    assert moment.fetched_bytes == moment.local_bytes - 4 * 6 * 12
    assert str(moment.before) == "P('data')" and str(moment.after) == "P(None, ('data', 'model'))"
    assert sum(told.fetched_bytes) == pytest.approx(sum(change.total_fetched_bytes for change in told.state))
    assert told.num_activations > 0


def test_devices_that_were_not_there_lack_everything(eight: autopar.Plan, four: autopar.Plan) -> None:
    told = autopar.diff(four, eight)
    assert told.fetched_bytes[4:] == told.held_bytes[4:]
    assert all(lacks < holds for lacks, holds in zip(told.fetched_bytes[:4], told.held_bytes[:4], strict=True))


def test_the_text_says_both_plans_and_what_lies_otherwise(eight: autopar.Plan, four: autopar.Plan) -> None:
    text = str(autopar.diff(eight, four))
    for shown in ("8 (data=8)", "2x2 (data=2, model=2)", "step time", "peak memory", "P('data')", "8 -> 2x2"):
        assert shown in text
    assert "Dense_{0..2}/" in text, "layers alike share a row"


def test_data_that_is_split_otherwise_is_no_state(mlp: programs.Program) -> None:
    one, other = (plan_of(mlp, mesh="2x2", pin={"state/**": P(), "batch/*": spec}) for spec in (P("data"), P("model")))
    told = autopar.diff(one, other)
    assert told.same_state and not any(told.fetched_bytes)
    assert {change.path for change in told.data} == {"batch/x", "batch/y"}


def test_plans_of_two_programs_say_what_only_one_has(eight: autopar.Plan) -> None:
    deeper = plan_of(programs.mlp(batch=48, width=48, num_layers=4, optimizer="adam"), mesh="8")
    wider = plan_of(programs.mlp(batch=48, width=96, num_layers=3, optimizer="adam"), mesh="8")
    told = autopar.diff(eight, deeper)
    assert "`state/params/Dense_3/bias` is only in the second plan" in told.unlike
    assert not told.same_state and "Dense_3" in str(told)
    told = autopar.diff(eight, wider)
    assert any("float32[48] in the first plan, float32[96] in the second" in line for line in told.unlike)


def test_values_within_the_step_are_told_where_other_dims_are_split(mlp: programs.Program, eight: autopar.Plan) -> None:
    tensor_parallel = {"state/**/kernel": P(None, "data"), "batch/*": P()}
    other = plan_of(mlp, mesh="4", pin=tensor_parallel)
    told = autopar.diff(eight, other)
    for change in told.activations:
        split = [tuple(map(bool, sharding.dims)) for sharding in (change.before, change.after)]
        assert split[0] != split[1] or change.before.unreduced != change.after.unreduced
    shown = {(change.path, change.primitive, change.phase) for change in told.activations}
    decided = {(d.path, d.primitive, d.phase) for d in other.decisions if d.kind == "activation"}
    assert shown <= decided and len(told.activations) <= told.num_activations


def test_names_of_axes_do_not_make_a_difference(eight: autopar.Plan) -> None:
    def renamed(sharding: TensorSharding) -> TensorSharding:
        return TensorSharding(tuple(tuple("rows" for _ in axes) for axes in sharding.dims))

    inputs = tuple(replace(tensor, sharding=renamed(tensor.sharding)) for tensor in eight.inputs)
    other = replace(eight, mesh=MeshShape(("rows",), (8,)), inputs=inputs, decisions=())
    assert autopar.diff(eight, other).same_state


# -- the command line ------------------------------------------------------------------------


def test_the_command_prints_text_and_json(
    eight: autopar.Plan, four: autopar.Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, plan in (("a.json", eight), ("b.json", four)):
        plan.save(tmp_path / name)
    files = [str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    assert main(["diff", *files]) == 0
    assert capsys.readouterr().out.strip() == str(autopar.diff(eight, four)).strip()
    assert main(["diff", *files, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["format"] == "autopar-diff"
    assert told["fetched_bytes"] == list(autopar.diff(eight, four).fetched_bytes)
    assert {row["path"] for row in told["state"]} == {change.path for change in autopar.diff(eight, four).state}


def test_the_command_refuses_what_is_no_plan(
    eight: autopar.Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    eight.save(tmp_path / "a.json")
    (tmp_path / "b.json").write_text("{}")
    assert main(["diff", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 2
    assert "it is not a plan" in capsys.readouterr().err
    assert main(["diff", str(tmp_path / "a.json"), str(tmp_path)]) == 2
    assert "cannot use the plan file" in capsys.readouterr().err
