"""What a user fixes inside stages: the mesh, pins, sharding metadata. Values stay, and arrays are where they are pinned."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar.cli.main import main
from autopar.errors import AutoparError, MeshError, PinError
from autopar.frontend.sharding_metadata import annotations_in
from autopar.hardware.profile import load
from autopar.pipeline.cut.stage_programs import Cuttable
from autopar.pipeline.partition.cluster import Cluster, DeviceGroup, SubmeshShape
from autopar.pipeline.search.plan_stages import searches_of
from autopar.pipeline.search.request import StageRequest
from autopar.pipeline.search.searches_by_microbatches import keys_with_pins
from autopar.pipeline.search.stage_layouts import StageLayouts, stage_layouts
from autopar.transforms.program import program_of
from benchmarks.pipeline.execution import equal_starts

WIDTH, HIDDEN, BATCH, LAYERS = 16, 32, 8, 4
OPTIONS: dict[str, Any] = {
    "stages": 2,
    "num_microbatches": 2,
    "schedule": "1f1b",
    "hardware": "cpu-host",
    "cache": False,
}


def create(key: jax.Array) -> Any:
    keys = jax.random.split(key, LAYERS)
    layers = [
        {
            "up": 0.1 * jax.random.normal(one, (WIDTH, HIDDEN)),
            "bias": jnp.zeros((HIDDEN,)),
            "down": 0.1 * jax.random.normal(one, (HIDDEN, WIDTH)),
        }
        for one in keys
    ]
    return {"layers": layers, "scale": jnp.ones((WIDTH,)), "count": jnp.zeros((), jnp.int32)}


def forward(params: Any, x: jax.Array) -> jax.Array:
    """`scale` is read by the first layer and the last."""
    x = x * params["scale"]
    for layer in params["layers"]:
        x = x + jnp.tanh(x @ layer["up"] + layer["bias"]) @ layer["down"]
    return x * params["scale"]


def trained(forward: Any) -> Any:
    def step(state: Any, batch: Any) -> Any:
        floats = {name: leaf for name, leaf in state.items() if name != "count"}
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((forward(p, batch["x"]) - batch["x"]) ** 2))(floats)
        new = jax.tree.map(lambda p, g: p - 0.1 * g, floats, grads)
        return new | {"count": state["count"] + 1}, loss

    return step


def stacked(key: jax.Array) -> Any:
    state = create(key)
    return state | {"layers": jax.tree.map(lambda *each: jnp.stack(each), *state["layers"])}


def scanned(params: Any, x: jax.Array) -> jax.Array:
    def layer(x: jax.Array, one: Any) -> Any:
        return x + jnp.tanh(x @ one["up"] + one["bias"]) @ one["down"], None

    return jax.lax.scan(layer, x * params["scale"], params["layers"])[0] * params["scale"]


def batch_of(seed: int) -> Any:
    return {"x": jax.random.normal(jax.random.key(seed), (BATCH, WIDTH))}


def run(forward: Any, create: Any, **options: Any) -> tuple[Any, Any]:
    """The state after two steps, which equals that of the step by itself, and the plan."""
    step = autopar.parallelize(**OPTIONS | options)(trained(forward))
    state, expected = step.init(create, jax.random.key(0), batch=batch_of(0)), jax.jit(create)(jax.random.key(0))
    for seed in range(2):
        state, loss = step(state, batch_of(seed))
        expected, expected_loss = jax.jit(trained(forward))(expected, batch_of(seed))
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    for one, other in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(one), other, rtol=1e-5, atol=1e-6)
    return state, step.latest_plan


# -- values and places -----------------------------------------------------------------------


def test_a_pinned_leaf_has_its_sharding_on_its_stage() -> None:
    pins = {"state/layers/*/up": P("tp", "dp"), "state/layers/1/down": P(None, ("dp", "tp")), "state/scale": P("dp")}
    state, plan = run(forward, create, mesh="dp=2,tp=2", pin=pins)
    assert [str(stage.plan.mesh) for stage in plan.stages] == ["2x2", "2x2"]
    assert all(stage.plan.mesh.axis_names == ("dp", "tp") for stage in plan.stages)
    devices = set()
    for layer in state["layers"]:
        assert layer["up"].sharding.spec == P("tp", "dp")
        assert {shard.data.shape for shard in layer["up"].addressable_shards} == {(WIDTH // 2, HIDDEN // 2)}
        devices.add(frozenset(layer["up"].sharding.device_set))
    assert len(devices) == 2, "each stage holds its layers"
    assert state["layers"][1]["down"].sharding.spec == P(None, ("dp", "tp"))
    readers = [tensor for stage in plan.stages for tensor in stage.plan.inputs if tensor.path == "state/scale"]
    assert len(readers) == 2, "both stages read it"
    assert {str(tensor.sharding) for tensor in readers if tensor.pinned} == {"P('dp')"}


def test_the_batch_may_be_pinned() -> None:
    state, plan = run(forward, create, mesh=(2, 2), pin={"batch/x": P("data"), "state/*": P()})
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(state))
    (x,) = (tensor for tensor in plan.inputs if tensor.path == "batch/x")
    assert str(x.sharding) == "P('data')" and x.pinned


@pytest.mark.slow
def test_stacked_layers_are_pinned_in_parts() -> None:
    pins = {"state/layers/*": P(None, "model"), "state/layers/down": P("data", None, "model")}
    state, plan = run(scanned, stacked, mesh="2x2", pin=pins)
    assert state["layers"]["up"].sharding.spec == P("stage", "model")
    assert state["layers"]["down"].sharding.spec == P(("stage", "data"), None, "model")
    for tensor, parts in zip(plan.inputs, plan.input_parts, strict=True):
        if tensor.path == "state/layers/up":
            assert [part.rows for part in parts] == [(0, 0, 2), (0, 2, 4)]
            assert {str(part.sharding) for part in parts} == {"P(None, 'model')"}


@pytest.mark.slow
def test_any_number_of_stages_takes_pins() -> None:
    """The search may also choose one program, which takes them too."""
    pins = {"state/layers/*/up": P(None, "model")}
    state, _ = run(forward, create, stages="auto", schedule="auto", pin=pins)
    assert {str(layer["up"].sharding.spec) for layer in state["layers"]} == {"P(None, 'model')"}


def test_a_mesh_limits_the_submeshes() -> None:
    args = jax.eval_shape(create, jax.random.key(0)), batch_of(0)
    plan = autopar.plan(trained(forward), *args, mesh="1x2", num_devices=8, **OPTIONS)
    assert [len(stage.devices) for stage in plan.stages] == [2, 2]
    assert {stage.plan.mesh.describe() for stage in plan.stages} == {"1x2 (data=1, model=2)"}


# -- metadata --------------------------------------------------------------------------------


class Block(nn.Module):
    """A block whose kernels name their dims."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def init(*names: str) -> Any:
            return nn.with_logical_partitioning(nn.initializers.lecun_normal(), names)

        hidden = nn.Dense(HIDDEN, kernel_init=init("embed", "mlp"), name="up")(x)
        return x + nn.Dense(WIDTH, kernel_init=init("mlp", "embed"), name="down")(jnp.tanh(hidden))


class Model(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(LAYERS):
            x = Block()(x)
        return x


def create_model(key: jax.Array) -> Any:
    return dict(Model().init(key, batch_of(0)["x"])) | {"count": jnp.zeros((), jnp.int32)}


def apply(params: Any, x: jax.Array) -> Any:
    return Model().apply(params, x)


RULES = [("embed", None), ("mlp", "tp")]


@pytest.mark.slow
def test_metadata_is_followed_in_stages() -> None:
    assert annotations_in(jax.eval_shape(create_model, jax.random.key(0)), "state")
    state, plan = run(apply, create_model, mesh="dp=2,tp=2", logical_axis_rules=RULES)
    for block in state["params"].values():
        assert block["up"]["kernel"].value.sharding.spec == P(None, "tp")
        assert block["down"]["kernel"].value.sharding.spec == P("tp")
    assert any("split as their metadata say" in note for note in plan.notes)


def test_pins_override_metadata_which_may_be_ignored() -> None:
    args = jax.eval_shape(create_model, jax.random.key(0)), batch_of(0)
    options = OPTIONS | {"mesh": "dp=2,tp=2", "logical_axis_rules": RULES, "num_devices": 8}
    pin = {"state/params/Block_0/up/kernel": P("dp")}
    found = {
        metadata: {
            tensor.path: tensor
            for tensor in autopar.plan(trained(apply), *args, metadata=metadata, pin=pin, **options).inputs
        }
        for metadata in ("pin", "ignore", "hint")
    }
    path = "state/params/Block_{}/up/kernel"
    for inputs in found.values():
        assert str(inputs[path.format(0)].sharding) == "P('dp')"
    assert str(found["pin"][path.format(1)].sharding) == "P(None, 'tp')"
    assert not found["ignore"][path.format(1)].pinned


def test_rules_for_axes_that_no_stage_has_are_refused() -> None:
    args = jax.eval_shape(create_model, jax.random.key(0)), batch_of(0)
    with pytest.raises(PinError, match=r"the logical axis rule \('mlp', 'tensor'\)"):
        autopar.plan(trained(apply), *args, num_devices=8, logical_axis_rules=[("mlp", "tensor")], **OPTIONS)


# -- prices ----------------------------------------------------------------------------------


def test_the_search_knows_what_pins_cost() -> None:
    """A layer whose parameters are pinned whole has more state on each device than one that may be sharded; layers that
    are pinned otherwise are priced apart."""
    shapes = jax.eval_shape(create, jax.random.key(0)), jax.eval_shape(lambda: batch_of(0))
    program = program_of(trained(forward), shapes, carry=None, donate=None)
    cuttable, profiles = Cuttable.of(program), {"h100-sxm": load("h100-sxm")}
    cluster = Cluster((DeviceGroup("h100-sxm", 1, 8),))
    request, shape = StageRequest(cluster=cluster, profiles=profiles), SubmeshShape("h100-sxm", 1, 4, option=6)

    def layouts(pins: Any) -> StageLayouts:
        return stage_layouts(program.as_traced.graph, pins, None, {1, 2, 4, 8}, 8)

    def costs(pins: Any) -> Any:
        searches = searches_of(cuttable, request, layouts(pins))
        searches.search(2)
        return searches.costs[2]

    free, pinned = costs({}), costs({"state/layers/1/*": P()})
    last = len(free.keys) - 1
    assert pinned.cost(0, last, shape).state_bytes > free.cost(0, last, shape).state_bytes
    layers = cuttable.layers(equal_starts(cuttable.chain, LAYERS), 2)
    keys = (0,) * LAYERS
    assert keys_with_pins(keys, layers, layouts({})) == keys
    assert len(set(keys_with_pins(keys, layers, layouts({"state/layers/1/*": P()})))) == 2


# -- plans, the command line -----------------------------------------------------------------


@cache
def plan() -> Any:
    args = jax.eval_shape(create, jax.random.key(0)), jax.eval_shape(lambda: batch_of(0))
    options = OPTIONS | {"mesh": "2x2", "pin": {"state/layers/*/up": P(None, "model")}, "num_devices": 8}
    return autopar.plan(trained(forward), *args, **options)


def test_a_saved_plan_with_pins_runs_the_same(tmp_path: Path) -> None:
    plan().save(tmp_path / "p.json")
    step = autopar.parallelize(plan=tmp_path / "p.json")(trained(forward))
    state = step.init(create, jax.random.key(0), batch=batch_of(0))
    state, loss = step(state, batch_of(0))
    expected = jax.jit(trained(forward))(create(jax.random.key(0)), batch_of(0))[1]
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert {str(layer["up"].sharding.spec) for layer in state["layers"]} == {"P(None, 'model')"}


def make() -> Any:
    return trained(forward), (jax.eval_shape(create, jax.random.key(0)), jax.eval_shape(lambda: batch_of(0)))


def test_the_command_line_takes_mesh_and_pins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "p.json"
    argv = ["plan", f"{__file__}:make", "--devices", "8", "--mesh", "2x2", "--stages", "2", "--hardware", "cpu-host"]
    argv += ["--num-microbatches", "2", "--schedule", "1f1b", "--no-cache", "-o", str(path)]
    assert main([*argv, "--pin", 'state/layers/*/up=P(None, "model")']) == 0
    document = json.loads(path.read_text())
    assert document["format"] == "autopar-pipeline-plan"
    again: Any = autopar.load_plan(path)
    pinned = [tensor for tensor in again.inputs if tensor.path.endswith("/up")]
    assert len(pinned) == LAYERS and {str(tensor.sharding) for tensor in pinned} == {"P(None, 'model')"}
    capsys.readouterr()
    assert main([*argv[:-2], "--pin", 'state/layers/*/up=P("tp")']) == 2
    assert "names the mesh axis 'tp'" in capsys.readouterr().err
    assert main(["plan", f"{__file__}:make", "--devices", "8", "--mesh", "2x4"]) == 2
    assert "--mesh is not allowed with argument --devices" in capsys.readouterr().err


# -- what cannot be --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (
            {"mesh": "2x4"},
            MeshError,
            "has the mesh 2x4 (data=2, model=4), so 2 submeshes need 16 devices, but there are 8",
        ),
        ({"mesh": "4x4"}, MeshError, "has 16 devices, but a submesh here has 1, 2, 3, 4, 5, 6, 7 or 8 devices"),
        ({"mesh": "2x2", "stages": 3}, MeshError, "3 submeshes need 12 devices"),
        ({"mesh": "2xx"}, MeshError, "cannot read mesh"),
        ({"pin": {"state/nope": P()}}, PinError, "the pin 'state/nope' names no input"),
        ({"pin": {"state/scale": P("tp")}}, PinError, "names the mesh axis 'tp', but the mesh has data, model"),
        ({"mesh": "4", "pin": {"state/scale": P("model")}}, PinError, "this is the mesh of a stage"),
        ({"mesh": "3", "pin": {"state/scale": P("data")}}, PinError, "splits a dim of 16 over data=3"),
        ({"pin": {"state/scale": P("data", "model")}}, PinError, "has 2 entries"),
        ({"pin": {"state/count": P("data")}}, PinError, "the pin 'state/count'"),
        (
            {"pin": {"state/scale": P(("data", "model"))}, "stages": 3},
            MeshError,
            "the pins fit meshes of 4 or 8 devices",
        ),
        ({"pin": "data"}, PinError, "`pin` is a str"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], error: type[AutoparError], words: str) -> None:
    args = jax.eval_shape(create, jax.random.key(0)), batch_of(0)
    with pytest.raises(error) as caught:
        autopar.plan(trained(forward), *args, **{"num_devices": 8} | OPTIONS | options)
    assert words in str(caught.value)


def test_layers_that_a_mesh_does_not_divide_are_refused() -> None:
    args = jax.eval_shape(stacked, jax.random.key(0)), batch_of(0)
    pin = {"state/layers/up": P("data")}
    with pytest.raises(PinError, match=r"of which a stage holds layers \d to \d of dim 0, splits \d over data=4"):
        autopar.plan(trained(scanned), *args, num_devices=8, mesh="4", pin=pin, **OPTIONS)
