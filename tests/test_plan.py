"""Plan files round-trip, and errors name every defect of a file or a mesh."""

from __future__ import annotations

import json
import math
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

import autopar
from autopar.errors import MeshError, PinError, PlanFileError, PlanMismatchError
from autopar.ir.mesh import MeshShape
from autopar.ir.sharding import TensorSharding, replicated
from autopar.jax_interop.partition_spec import partition_spec, tensor_sharding
from autopar.pipeline.plan import PipelinePlan
from autopar.pipeline.plan_files import load_plan, plan_from_json
from autopar.plans.plan import Plan
from autopar.plans.records import (
    CollectiveUse,
    Constraint,
    Decision,
    Outcome,
    Prediction,
    ProgramSignature,
    RejectedMesh,
    Role,
    TensorPlan,
)
from autopar.solve.problem import Status

MESH = MeshShape(("data", "model"), (2, 4))
COLUMN = TensorSharding(((), ("model",)))
ROW = TensorSharding((("model",), ()))
BATCH = TensorSharding((("data",), ()))


def tensor(path: str, shape: tuple[int, ...], role: Role, sharding: TensorSharding, **more: Any) -> TensorPlan:
    return TensorPlan(
        path=path,
        shape=shape,
        dtype="float32",
        role=role,
        sharding=sharding,
        num_bytes=4.0 * sharding.local_size(shape, MESH),
        **more,
    )


def layer_tensors(num_layers: int) -> list[TensorPlan]:
    """A column and a row kernel per layer and the first moment of each, and one bias."""
    out = []
    roots: dict[Role, str] = {"parameter": "state/params", "optimizer": "state/opt_state/0/mu"}
    for role, root in roots.items():
        for layer in range(num_layers):
            out.append(tensor(f"{root}/h_{layer}/fc_in/kernel", (512, 2048), role, COLUMN, pinned=role == "parameter"))
            out.append(tensor(f"{root}/h_{layer}/fc_out/kernel", (2048, 512), role, ROW))
        out.append(tensor(f"{root}/norm/bias", (512,), role, replicated(1)))
    return out


def parameter_decision(at: TensorPlan, collectives: tuple[int, ...]) -> Decision:
    return Decision(
        path=at.path,
        kind="parameter",
        primitive="",
        phase="update",
        source="",
        shape=at.shape,
        dtype=at.dtype,
        sharding=at.sharding,
        cost_s=1.25e-5,
        runner_up=replicated(len(at.shape)),
        runner_up_extra_s=4.5e-5,
        collectives=collectives,
    )


def layer_decisions(num_layers: int, tensors: list[TensorPlan]) -> tuple[list[Decision], list[CollectiveUse]]:
    collectives = [
        CollectiveUse(
            kind="all-reduce",
            axes=("model",),
            num_bytes=8.4e6,
            time_s=2.1e-4,
            cause=f"sum the result of `GPT/h_{layer}/fc_out` over its split inner dim",
            path=f"GPT/h_{layer}/fc_out",
            source="/home/me/models/gpt.py:31 (__call__)",
            phase="forward",
        )
        for layer in range(num_layers)
    ]
    decisions = [
        parameter_decision(at, (int(at.path.split("_")[1].split("/")[0]),) if "fc_out" in at.path else ())
        for at in tensors
        if at.role == "parameter" and "norm" not in at.path
    ]
    for layer in range(num_layers):
        decisions.append(
            Decision(
                path=f"GPT/h_{layer}/fc_in",
                kind="activation",
                primitive="dot_general",
                phase="forward",
                source="/home/me/models/gpt.py:30 (__call__)",
                shape=(16, 256, 2048),
                dtype="bfloat16",
                sharding=TensorSharding((("data",), (), ("model",))),
                cost_s=3.0e-4 + 1e-6 * layer,
                runner_up=TensorSharding((("data",), (), ())),
                runner_up_extra_s=2.2e-4,
            )
        )
    return decisions, collectives


def make_plan(num_layers: int = 3) -> Plan:
    """A small hand-made plan of a feed-forward stack, tensor parallel over `model`."""
    state = layer_tensors(num_layers)
    inputs = [*state, tensor("batch/x", (16, 512), "data", BATCH)]
    outputs = [*(replace(t, path=t.path.replace("state", "out/0", 1)) for t in state)]
    outputs.append(tensor("out/1", (), "data", replicated(0)))
    decisions, collectives = layer_decisions(num_layers, state)
    signature = ProgramSignature(
        name="train_step",
        inputs=tuple((t.path, t.shape, t.dtype) for t in inputs),
        outputs=tuple((t.path, t.shape, t.dtype) for t in outputs),
        primitives={"dot_general": 6 * num_layers, "add": 40},
        fingerprint="a1b2c3",
    )
    return Plan(
        program=signature,
        mesh=MESH,
        hardware="h100-sxm",
        memory_budget_bytes=40e9,
        strategy="data parallel over `data`, tensor parallel over `model` in fc_in and fc_out",
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        carried=tuple((i, i) for i in range(len(state))),
        donated=tuple(range(len(state))),
        constraints=(
            Constraint(
                at="forward GPT/h_0 add #1", value=12, shardings=(TensorSharding((("data",), ()), ("model",)), BATCH)
            ),
            Constraint(
                at="forward GPT/h_0 dot_general #1, operand 0",
                value=14,
                shardings=(TensorSharding(((), ("data", "model"))),),
                node=7,
                operand=0,
            ),
        ),
        decisions=tuple(decisions),
        collectives=tuple(collectives),
        prediction=Prediction(
            step_time_s=2.6e-3,
            compute_s=1.97e-3,
            exposed_s={"all-reduce": 6.3e-4},
            collective_s={"all-reduce": 6.3e-4},
            xla_step_time_s=2.5e-3,
            xla_exposed_s={"all-reduce": 5e-4},
            parameter_bytes=1.5e9,
            optimizer_bytes=3.0e9,
            data_bytes=1.0e6,
            temporary_bytes=7.5e9,
            output_bytes=4.0,
        ),
        outcome=Outcome(
            cost_s=2.6e-3,
            lower_bound_s=2.6e-3,
            gap=0.0,
            status="proven optimal",
            num_nodes=120,
            num_strategies=1450,
            solve_time_s=0.42,
        ),
        rejected=(
            RejectedMesh(
                mesh=MeshShape(("data",), (8,)), step_time_s=3.1e-3, peak_bytes=2e10, strategy="data parallel"
            ),
            RejectedMesh(mesh=MeshShape(("data", "model"), (4, 2)), step_time_s=math.inf, peak_bytes=5e10, strategy=""),
        ),
        notes=("primitive `fft` has no sharding rule: it runs replicated and is priced so",),
        pins={"state/params/*/fc_in/kernel": "P(None, 'model')"},
        versions={"jax": "0.12.0"},
    )


def test_round_trip(tmp_path: Path) -> None:
    plan = make_plan()
    plan.save(tmp_path / "a.plan.json")
    loaded = load_plan(tmp_path / "a.plan.json")
    assert isinstance(loaded, Plan)
    assert loaded == plan
    assert loaded.rejected[1].step_time_s == math.inf
    assert loaded.in_tree is None
    loaded.save(tmp_path / "b.plan.json")
    assert (tmp_path / "a.plan.json").read_text() == (tmp_path / "b.plan.json").read_text()
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.contract
@pytest.mark.parametrize(
    "name", [f"{kind}version_{n}" for kind in ("", "stages_") for n in range(1, 7)] + ["stages_version_7"]
)
def test_files_of_older_versions_are_read(name: str, tmp_path: Path) -> None:
    """Each file is as its version wrote it; saved again, it is the same plan in today's version."""
    old = Path(__file__).parent / "plan_files" / f"{name}.json"
    plan = load_plan(old)
    plan.save(tmp_path / "new.json")
    assert load_plan(tmp_path / "new.json") == plan
    before, after = (json.loads(path.read_text()) for path in (old, tmp_path / "new.json"))
    assert (before["version"], after["version"]) == (int(name[-1]), 8 if name.startswith("stages") else 7)
    assert before["prediction"] == after["prediction"]
    assert "time_s" not in str(after["outcome"])
    if isinstance(plan, PipelinePlan):  # gradients were priced like activations
        assert {(one.source, one.target) for one in plan.sends} == {(0, 1), (1, 0)}
        assert plan.timeline().makespan_s == plan.prediction.step_time_s


def test_older_files_of_stages_say_what_was_searched_then() -> None:
    plan = load_plan(Path(__file__).parent / "plan_files" / "stages_version_6.json")
    assert isinstance(plan, PipelinePlan)
    assert "among stages in the order of the devices" in " ".join(str(autopar.explain(plan)).split())


@pytest.mark.parametrize("name", ["version_6", "stages_version_6"])
def test_older_files_have_the_status_of_today(name: str) -> None:
    """Of the search for stages, too, and of the plan of each stage."""
    text = (Path(__file__).parent / "plan_files" / f"{name}.json").read_text()
    before = "feasible, as close to the bound as was asked: lower `relative_gap` to close the gap"
    plan = plan_from_json(json.loads(text.replace('"status": "proven optimal"', f'"status": "{before}"')))
    plans = [plan, *(stage.plan for stage in plan.stages)] if isinstance(plan, PipelinePlan) else [plan]
    assert {one.outcome.status for one in plans} == {Status.CLOSE.value}


_PLAN = """\
import sys
import autopar, programs
program = programs.mlp(num_layers=3)
plan = autopar.plan(program.step, *program.abstract_args(), num_devices=4, hardware="h100-sxm")
plan.save(sys.argv[1])
"""


def test_two_runs_write_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing of this machine stands in them."""
    here = Path(__file__).parent
    env = os.environ | {"PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join((str(here), str(here.parent)))}
    command = [sys.executable, "-c", _PLAN, str(tmp_path / "other.json")]
    subprocess.run(command, env=env, cwd=tmp_path, check=True, timeout=300)
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path / "own.json")])
    exec(_PLAN, {})
    own = (tmp_path / "own.json").read_text()
    assert own == (tmp_path / "other.json").read_text()
    assert str(here.parent) not in own
    assert '    "tests/programs.py (' in own


def test_numbers_of_numpy_are_saved() -> None:
    plan = make_plan()
    numpy_outcome = replace(plan.outcome, cost_s=np.float64(2.6e-3), num_nodes=np.int64(120))
    assert Plan.from_json(json.loads(json.dumps(replace(plan, outcome=numpy_outcome).to_json()))) == plan


def test_file_is_made_for_version_control(tmp_path: Path) -> None:
    make_plan().save(tmp_path / "p.json")
    lines = (tmp_path / "p.json").read_text().splitlines()
    assert lines[:3] == ["{", '  "format": "autopar-plan",', '  "version": 7,']
    assert '    {"at": "forward GPT/h_0 dot_general #1, operand 0", "shardings": [[null, ["data", "model"]]]}' in lines
    unreduced = '{"spec": ["data", null], "unreduced": ["model"]}'
    assert f'    {{"at": "forward GPT/h_0 add #1", "shardings": [{unreduced}, ["data", null]]}},' in lines
    assert '    "constraints.value": [12, 14],' in lines
    assert '    "/home/me/models/gpt.py (__call__)": [30, 31]' in lines
    assert max(map(len, lines)) < 400


def test_large_plan_is_small(tmp_path: Path) -> None:
    """About what GPT-2 small needs: 450 inputs, 6,000 constraints, 1,500 decisions."""
    plan = make_plan(110)
    activations = [d for d in plan.decisions if d.kind == "activation"]
    shardings = (TensorSharding((("data",), (), ())), TensorSharding((("data",), (), ("model",))))
    plan = replace(
        plan,
        decisions=plan.decisions + tuple(activations * 11),
        constraints=tuple(Constraint(value=i, shardings=shardings, node=i, operand=1) for i in range(6000)),
    )
    plan.save(tmp_path / "p.json")
    loaded = load_plan(tmp_path / "p.json")
    assert loaded == plan
    assert (tmp_path / "p.json").stat().st_size < 2e6


def test_interrupted_save_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "p.json"
    path.write_text("old")

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        make_plan().save(path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_save_where_nothing_can_be_written(tmp_path: Path) -> None:
    with pytest.raises(PlanFileError, match=r"cannot write to '.*/no/p\.json': No such file or directory\."):
        make_plan().save(tmp_path / "no" / "p.json")


def change(data: dict[str, Any], place: str, value: Any) -> None:
    """Set `a.0.b` in nested JSON, where `a/b` is one name with a dot; a value of ... deletes."""
    *outer, last = (int(part) if part.isdigit() else part.replace("/", ".") for part in place.split("."))
    at: Any = data
    for part in outer:
        at = at[part]
    if value is ...:
        del at[last]
    else:
        at[last] = value


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        ("format", "other", 'it is not a plan: a plan is a JSON object with "format": "autopar-plan"'),
        ("version", 8, "it is of version 8, which a later autopar wrote; this one"),
        ("version", "2", "it is of version '2': versions are whole numbers from 1 on"),
        ("hardware", ..., "its field `hardware` is missing"),
        ("extra", 1, "its field `extra` is unknown"),
        ("hardware", 3, "its field `hardware` must be a text, not 3"),
        ("inputs", {}, "its field `inputs` must be a list, not {}"),
        ("inputs.1.role", "weights", 'field `inputs[1].role` must be one of parameter, optimizer, data, not "weights"'),
        ("inputs.0.shape.1", 2.5, "its field `inputs[0].shape[1]` must be a whole number, not 2.5"),
        ("inputs.0.shape.1", True, "its field `inputs[0].shape[1]` must be a whole number, not true"),
        ("inputs.0.sharding", "P()", 'field `inputs[0].sharding` must be a sharding such as ["data", null], not "P()"'),
        ("inputs.0.sharding", [{}, 1], "field `inputs[0].sharding` must be a sharding such as"),
        ("inputs.0.sharding", [None, 1], 'must be a sharding such as ["data", null], not [null, 1]'),
        ("inputs.0.sharding", {"spec": []}, "field `inputs[0].sharding` must be a sharding such as"),
        ("inputs.0.sharding", [None, "expert"], "names the axis 'expert', which mesh 2x4 (data=2, model=4) has not"),
        ("inputs.0.sharding", ["data", "data"], "uses an axis twice: P('data', 'data')"),
        ("inputs.0.sharding", ["data"], "its field `inputs[0].sharding` has 1 dims for a tensor of 2"),
        ("constraints.1.shardings.0", ["x"], "its field `constraints[1].shardings` names the axis 'x'"),
        ("collectives.0.axes", ["pod"], "its field `collectives[0].axes` names the axis 'pod'"),
        ("prediction.step_time_s", "soon", 'its field `prediction.step_time_s` must be a number, not "soon"'),
        ("mesh", [["data", 0]], "its field `mesh` is not a mesh: mesh axis sizes must be at least 1"),
        ("mesh.0", ["data"], "its field `mesh[0]` must be a list of 2, not"),
        ("numbers.donated.0", 99, "its field `numbers.donated` points at position 99 of a list of 15"),
        (
            "numbers.decisions/collectives.1",
            [3],
            "its field `numbers.decisions.collectives[1]` points at position 3 of a list of 3",
        ),
        ("numbers.constraints/value.1", "x", '`numbers.constraints.value[1]` must be a whole number, not "x"'),
        ("numbers.constraints/value.1", None, "its field `numbers.constraints.value[1]` is missing"),
        ("numbers.constraints/node.0", 0.5, "its field `numbers.constraints.node[0]` must be a whole number, not 0.5"),
        ("numbers.constraints/value", ..., "its field `numbers.constraints.value[0]` is missing"),
        ("numbers.constraints/operand", [0], "`numbers.constraints.operand` has 1 entries for 2 records"),
        ("numbers.constraints/operand", 0, "its field `numbers.constraints.operand` must be a list"),
        ("numbers.constraints/at", [], "its field `numbers.constraints.at` is unknown"),
        ("constraints.1.node", 7, "its field `numbers.constraints.node[1]` is also in its record"),
        ("numbers.carried", ..., "its field `numbers.carried` is missing"),
        (
            "numbers.collectives/source.2",
            7,
            "`numbers.collectives.source[2]` must be a position in `sources`, which has",
        ),
        ("numbers.decisions/source", ..., "its field `numbers.decisions.source[0]` is missing"),
        ("sources", [], "its field `sources` must be an object"),
        ("sources", {"gpt.py": ["30"]}, "its field `sources.gpt.py` must be a list of whole numbers"),
        ("numbers", 3, "its field `numbers` must be an object"),
        ("inputs.14", ..., "its field `inputs` has 14 entries, but `program.inputs` has 15"),
        ("program.primitives.add", None, "its field `program.primitives` must be a whole number, not null"),
        ("program", [], "its field `program` must be an object, not []"),
    ],
)
def test_wrong_field_is_named(tmp_path: Path, place: str, value: Any, words: str) -> None:
    data = make_plan().to_json()
    change(data, place, value)
    path = tmp_path / "p.json"
    path.write_text(json.dumps(data))
    with pytest.raises(PlanFileError) as caught:
        load_plan(path)
    text = str(caught.value)
    assert words in text
    assert text.startswith(f"cannot use the plan file '{path}': ")
    assert text.endswith(f"Plan again with `autopar plan TARGET -o {path}`.")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"format": ', "it is damaged: not JSON at line 1, column 12 (Expecting value)"),
        (b"", "it is damaged: not JSON at line 1"),
        (b"\xff\xfe", "it is damaged: 'utf-8' codec can't decode"),
        (b"[1]", "it is not a plan"),
        (b'{"format": NaN}', "it is damaged: NaN is not JSON"),
        (b"[" * 200_000, "it is damaged: "),
        (pickle.dumps(print), "it is damaged: "),
        (None, "it cannot be read (No such file or directory)"),
    ],
)
def test_damaged_file(tmp_path: Path, content: bytes | None, words: str) -> None:
    path = tmp_path / "p.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(PlanFileError) as caught:
        load_plan(path)
    assert words in str(caught.value)
    assert "Plan again with" in str(caught.value)


def step(state: dict[str, Any], x: Any) -> tuple[dict[str, Any], Any]:
    return {"w": state["w"] + x.sum()}, x.sum()


def step_plan() -> Plan:
    """A plan of `step`, as if it had been read from a file."""
    weight, data = tensor("state/w", (4, 8), "parameter", COLUMN), tensor("x", (2, 3), "data", BATCH)
    outputs = (replace(weight, path="out/0/w"), tensor("out/1", (), "data", replicated(0)))
    return replace(make_plan(), inputs=(weight, data), outputs=outputs)


def step_args(width: int = 3) -> tuple[Any, Any]:
    return {"w": jax.ShapeDtypeStruct((4, 8), "float32")}, jax.ShapeDtypeStruct((2, width), "float32")


def test_shardings_are_trees_for_jit() -> None:
    mesh = AbstractMesh((2, 4), ("data", "model"))
    plan = step_plan().for_step(step, *step_args())
    expected = ({"w": NamedSharding(mesh, PartitionSpec(None, "model"))}, NamedSharding(mesh, PartitionSpec("data")))
    assert plan.in_shardings(mesh) == expected
    assert plan.out_shardings(mesh) == (expected[0], NamedSharding(mesh, PartitionSpec()))


def test_loaded_plan_names_the_way_to_its_trees() -> None:
    with pytest.raises(PlanMismatchError, match=r"read from a file.*`plan\.for_step\(step, \*args\)`.*parallelize"):
        step_plan().in_shardings(AbstractMesh((2, 4), ("data", "model")))


def test_for_step_refuses_another_program() -> None:
    with pytest.raises(PlanMismatchError, match=r"program: `x`: float32\[2,3\] in the plan, float32\[2,5\] here"):
        step_plan().for_step(step, *step_args(width=5))
    with pytest.raises(PlanMismatchError, match="2 outputs in the plan, 1 here"):
        step_plan().for_step(lambda state, x: x, *step_args())


@pytest.mark.parametrize(
    "mesh",
    [
        AbstractMesh((4, 2), ("data", "model")),
        AbstractMesh((4, 2), ("model", "data")),
        AbstractMesh((8,), ("data",)),
    ],
)
def test_other_mesh_is_refused(mesh: Any) -> None:
    with pytest.raises(MeshError) as caught:
        make_plan().in_shardings(mesh)
    text = str(caught.value)
    assert text.startswith("the plan is for mesh 2x4 (data=2, model=4), but this mesh has ")
    assert "jax.make_mesh((2, 4), ('data', 'model')" in text


@pytest.mark.parametrize(
    ("sharding", "spec"),
    [
        (replicated(3), PartitionSpec()),
        (TensorSharding(((), ("data",), ())), PartitionSpec(None, "data")),
        (TensorSharding((("model", "data"), ())), PartitionSpec(("model", "data"))),
    ],
)
def test_partition_spec_and_back(sharding: TensorSharding, spec: PartitionSpec) -> None:
    assert partition_spec(sharding) == spec
    assert tensor_sharding(spec, len(sharding.dims)) == sharding


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (PartitionSpec(None, "data"), "has 2 entries, but the tensor has 1 dims"),
        (PartitionSpec(("data", "data")), "names the mesh axis 'data' twice"),
        (PartitionSpec(PartitionSpec.UNCONSTRAINED), "write None, an axis name, or a tuple of axis names"),
    ],
)
def test_impossible_spec(spec: PartitionSpec, words: str) -> None:
    with pytest.raises(PinError, match=words):
        tensor_sharding(spec, 1)


def test_difference_between_programs() -> None:
    program = make_plan().program
    assert program.difference(replace(program, name="other")) is None
    path, _, dtype = program.inputs[0]
    wider = ((path, (512, 4096), dtype), *program.inputs[1:])
    assert program.difference(replace(program, inputs=wider)) == (
        "input `state/params/h_0/fc_in/kernel`: float32[512,2048] in the plan, float32[512,4096] here"
    )
    assert program.difference(replace(program, inputs=program.inputs[2:])) == (
        "input `state/params/h_0/fc_in/kernel` is in the plan, but not here (and 1 more inputs differ)"
    )
    assert program.difference(replace(program, outputs=(*program.outputs, ("out/2", (), "int32")))) == (
        "output `out/2` is here, but not in the plan"
    )
    assert program.difference(replace(program, inputs=program.inputs[::-1])) == "the inputs come in another order"
    assert program.difference(replace(program, primitives={"dot_general": 24, "add": 40})) == (
        "dot_general: 18 in the plan, 24 here"
    )
    assert "fingerprint a1b2c3 in the plan, ffff here" in str(program.difference(replace(program, fingerprint="ffff")))
