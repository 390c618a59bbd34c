"""Diagnosis of hand-sharded steps: parsing, unintended collectives, search for changes, report."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_verify import StandIn, compiled_step

import autopar
from autopar.cli.main import main
from autopar.cost.collectives import collective_time
from autopar.diagnosis.hand_sharded import read_hand_sharded
from autopar.diagnosis.sharding_changes import Group, Pins, Priced, groups_of, search
from autopar.diagnosis.unintended_collectives import extras, origins_of
from autopar.errors import HardwareError, MeshError, StepSignatureError, TraceError, VerifyError
from autopar.hardware.profile import load
from autopar.ir.mesh import MeshShape
from autopar.ir.sharding import TensorSharding
from autopar.plans.records import Role, TensorPlan
from autopar.runtime.jit import abstract_mesh
from autopar.verification.figures import Collectives, CompiledCollective
from autopar.xla_compiler import gpu_target as absent
from autopar.xla_compiler.compiler import Compiler
from benchmarks.baselines import pinned
from benchmarks.baselines.jitted import jitted
from benchmarks.zoo import language
from benchmarks.zoo.training import BF16

MESH = MeshShape(("data", "model"), (2, 4))
AUTO = (AxisType.Auto,) * 2


def over(*spec: Any, mesh: Any = None) -> NamedSharding:
    return NamedSharding(abstract_mesh(MESH) if mesh is None else mesh, P(*spec))


def shapes(*sizes: tuple[int, ...]) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(jax.ShapeDtypeStruct(size, jnp.float32) for size in sizes)


def step(state: dict[str, jax.Array], batch: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
    def loss_of(weights: dict[str, jax.Array]) -> jax.Array:
        return jnp.square(jnp.tanh(batch @ weights["up"]) @ weights["down"]).mean()

    loss, grads = jax.value_and_grad(loss_of)(state)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), loss


ARGS = (dict(zip(("up", "down"), shapes((64, 256), (256, 64)), strict=True)), *shapes((32, 64)))
STATE = {"up": over(None, "model"), "down": over("model")}


# -- parsing ----------------------------------------------------------------------------------


def test_shardings_donation_and_mesh_are_read() -> None:
    by_hand = jax.jit(step, in_shardings=(STATE, over("data")), out_shardings=(STATE, None), donate_argnums=0)
    hand = read_hand_sharded(by_hand, ARGS)
    assert hand.mesh == MESH
    said = dict(zip(hand.paths, map(str, hand.inputs), strict=True))
    assert said == {"state/up": "P(None, 'model')", "state/down": "P('model')", "batch": "P('data')"}
    assert [str(one) for one in hand.outputs] == ["P('model')", "P(None, 'model')", "None"]
    assert hand.donated == (0, 1)
    assert hand.donated_arguments == (0,)


def test_shardings_of_arguments_are_read() -> None:
    state = jax.tree.map(lambda one, where: jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=where), ARGS[0], STATE)
    hand = read_hand_sharded(step, (state, ARGS[1]))
    assert [str(one) for one in hand.inputs] == ["P('model')", "P(None, 'model')", "None"]
    assert hand.donated == ()


def test_a_mesh_of_devices_is_read_as_well() -> None:
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=AUTO)
    hand = read_hand_sharded(jax.jit(step, in_shardings=(None, over("data", mesh=mesh))), ARGS)
    assert hand.mesh == MESH


def test_partition_specs_take_their_mesh_from_the_context() -> None:
    by_hand = jax.jit(step, in_shardings=(None, P("data")))
    with pytest.raises(MeshError, match=r"bare `PartitionSpec`s.*jax.set_mesh"):
        read_hand_sharded(by_hand, ARGS)
    with jax.set_mesh(jax.make_mesh((2, 4), ("data", "model"), axis_types=AUTO)):
        assert read_hand_sharded(by_hand, ARGS).mesh == MESH


def test_the_mesh_of_inner_constraints_is_read() -> None:
    def constrained(x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x * 2, over("data", "model"))

    assert read_hand_sharded(jax.jit(constrained), shapes((8, 8))).mesh == MESH


def test_a_step_without_shardings_is_refused() -> None:
    with pytest.raises(StepSignatureError, match="is not jitted, and its arguments are not sharded"):
        autopar.diagnose(step, *ARGS, hardware="h100-sxm")
    with pytest.raises(StepSignatureError, match="is jitted without shardings"):
        autopar.diagnose(jax.jit(step), *ARGS, hardware="h100-sxm")
    with pytest.raises(StepSignatureError, match="runs by a plan of autopar's"):
        autopar.diagnose(autopar.parallelize(step), *ARGS, hardware="h100-sxm")


def test_another_mesh_than_the_program_has_is_refused() -> None:
    by_hand = jax.jit(step, in_shardings=(STATE, over("data")))
    for given in ("4x2", "data=4,model=2", "x=2,y=4", 16, MeshShape(("data", "model"), (4, 4))):
        with pytest.raises(MeshError, match=r"are over mesh 2x4 \(data=2, model=4\), of 8 devices, but"):
            read_hand_sharded(by_hand, ARGS, given)
    for given in ("2x4", "data=2,model=4", 8, MESH, abstract_mesh(MESH)):
        assert read_hand_sharded(by_hand, ARGS, given).mesh == MESH


def test_two_meshes_in_one_program_are_refused() -> None:
    other = abstract_mesh(MeshShape(("data", "model"), (4, 2)))
    by_hand = jax.jit(step, in_shardings=(STATE, over("data", mesh=other)))
    with pytest.raises(MeshError, match=r"over two meshes: in_shardings of `state/down` .* of `batch` over 4x2"):
        read_hand_sharded(by_hand, ARGS)


def test_explicit_axes_and_one_device_are_refused() -> None:
    explicit = AbstractMesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with pytest.raises(MeshError, match="are of type Explicit"):
        read_hand_sharded(jax.jit(lambda x: x * 2, in_shardings=over("data", mesh=explicit)), shapes((8, 8)))
    alone = abstract_mesh(MeshShape(("data",), (1,)))
    with pytest.raises(MeshError, match="one device"):
        read_hand_sharded(jax.jit(lambda x: x * 2, in_shardings=over("data", mesh=alone)), shapes((8, 8)))


def test_an_error_of_jax_is_quoted() -> None:
    by_hand = jax.jit(lambda x: x * 2, in_shardings=over("model"))
    with pytest.raises(TraceError, match="JAX said"):
        read_hand_sharded(by_hand, shapes((6, 8)))


def test_a_profile_without_a_gpu_and_a_missing_compiler_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    by_hand = jax.jit(step, in_shardings=(STATE, over("data")))
    with pytest.raises(HardwareError, match=r"no \[xla_target\]"):
        autopar.diagnose(by_hand, *ARGS, hardware="cpu-host", compiler=object())  # type: ignore[arg-type]

    def missing(name: str) -> str:
        if name != "jaxlib":
            raise absent.PackageNotFoundError(name)
        return "0.11.0"

    monkeypatch.setattr(absent, "version", missing)
    with pytest.raises(VerifyError, match="pip install 'jax-cuda12-plugin"):
        autopar.diagnose(by_hand, *ARGS, hardware="h100-sxm")


# -- unintended collectives -------------------------------------------------------------------


def found(kind: str, layer: int, left: float, op: str = "split") -> CompiledCollective:
    path = f"transpose(jvp(GPT))/h/{layer}/attn/{op}"
    return CompiledCollective(kind, ("model",), f"{kind}.{layer}", 1, left, left, path, "train.py:3", (), "gpt.py:7")


def test_equal_collectives_of_all_layers_are_one_row_with_their_time() -> None:
    compiled = (*(found("all-to-all", n, 3e6) for n in range(12)), found("collective-permute", 0, 1e6, "merge"))
    first, second = extras(Collectives((), compiled, ()), MESH, load("h100-sxm"))
    assert (first.kind, first.count, first.num_bytes) == ("all-to-all", 12, 36e6)
    assert first.path == "transpose(jvp(GPT))/h/{0..11}/attn/split"
    assert (first.source, first.library_source) == ("train.py:3", "gpt.py:7")
    each = collective_time("all-to-all", 4e6, ("model",), MESH, load("h100-sxm"))
    assert first.time_s == pytest.approx(12 * each)
    assert second.kind == "collective-permute"
    assert origins_of([first, second]) == (("GPT/h/*/attn", "split"), ("GPT/h/*/attn", "merge"))
    assert not first.is_sum


# -- search for changes -----------------------------------------------------------------------


def tensor(path: str, role: Role, *shape: int) -> TensorPlan:
    sharding = TensorSharding(((),) * len(shape))
    return TensorPlan(path=path, shape=shape, dtype="float32", role=role, sharding=sharding, num_bytes=4.0)


def layers(num: int) -> list[TensorPlan]:
    tensors = [tensor("state/step", "optimizer")]
    for n in range(num):
        for name, shape in (("attn/kernel", (8, 24)), ("attn/bias", (24,)), ("fc/kernel", (8, 32))):
            tensors.append(tensor(f"state/params/h_{n}/{name}", "parameter", *shape))
            tensors += [tensor(f"state/opt/0/{m}/h_{n}/{name}", "optimizer", *shape) for m in ("mu", "nu")]
    return [*tensors, tensor("batch/x", "data", 32, 8), tensor("batch/y", "data", 32)]


def test_a_module_of_every_layer_goes_with_its_optimizer_state() -> None:
    tensors = layers(3)
    groups = groups_of(tensors)
    assert sorted(n for group in groups for n in group.members) == list(range(len(tensors)))
    by_name = {group.name: group.members for group in groups}
    assert set(by_name) == {"state/params/h_*/attn", "state/params/h_*/fc", "batch", "state/step"}
    assert len(by_name["state/params/h_*/attn"]) == 3 * 2 * 3
    assert len(by_name["state/params/h_*/fc"]) == 3 * 3
    assert len(by_name["batch"]) == 2


def test_modules_of_other_shapes_are_other_groups() -> None:
    tensors = [tensor("params/Dense_0/kernel", "parameter", 8, 16), tensor("params/Dense_1/kernel", "parameter", 16, 4)]
    assert len(groups_of(tensors)) == 2


WHOLE, SPLIT = TensorSharding(((),)), TensorSharding((("model",),))


def priced_by(gains: Mapping[str, float], start: float, members: Mapping[str, Sequence[int]]) -> Any:
    """A price that falls by each group whose tensors are all replicated; free tensors become so."""

    def price(pins: Pins) -> Priced:
        num = 1 + max(n for group in members.values() for n in group)
        shardings = tuple(pins.get(n, WHOLE) for n in range(num))
        good = {name for name, group in members.items() if all(shardings[n] == WHOLE for n in group)}
        gained = sum(gain for names, gain in gains.items() if set(names.split("+")) <= good)
        return Priced(start - gained, shardings)

    return price


def searched(gains: Mapping[str, float], enough: float) -> list[tuple[tuple[str, ...], float]]:
    members = {name: (2 * n, 2 * n + 1) for n, name in enumerate("abc")}
    tensors = [tensor(f"{name}_{k}", "parameter", 8) for name in members for k in range(2)]
    own = dict.fromkeys(range(6), SPLIT)
    groups = [Group(name, group) for name, group in members.items()]
    changes = search(own, groups, priced_by(gains, 10.0, members), 10.0, enough, tensors)
    return [(tuple(group.name for group in one.groups), one.step_time_s) for one in changes]


def test_the_search_is_greedy_and_stops_when_enough_is_recovered() -> None:
    assert searched({"a": 1.0, "b": 3.0, "c": 0.5}, 3.5) == [(("b",), 7.0), (("a",), 6.0)]
    assert searched({"a": 1.0, "b": 3.0, "c": 0.5}, 2.5) == [(("b",), 7.0)]


def test_groups_that_help_only_together_change_together() -> None:
    """`c` gains nothing and does not change."""
    assert searched({"a+b": 4.0, "c": 0.0}, 4.0) == [(("a", "b"), 6.0)]


def test_groups_that_do_not_help_do_not_change() -> None:
    assert searched({"a": -1.0, "b": 0.0}, 4.0) == []


def test_equal_layers_get_equal_shardings() -> None:
    """One of three layers would be slightly better unchanged, but all of them change."""
    tensors = [tensor(f"h_{n}/w", "parameter", 8) for n in range(3)]

    def price(pins: Pins) -> Priced:
        best = (WHOLE, WHOLE, SPLIT)
        shardings = tuple(pins.get(n, best[n]) for n in range(3))
        return Priced(10.0 - sum(s == WHOLE for s in shardings[:2]) - 0.1 * (shardings[2] == SPLIT), shardings)

    (change,) = search(dict.fromkeys(range(3), SPLIT), [Group("h_*", (0, 1, 2))], price, 9.9, 1.5, tensors)
    assert change.to == dict.fromkeys(range(3), WHOLE)


# -- with a fake compiler ---------------------------------------------------------------------


def wide(num_rows: int = 65_536) -> tuple[Any, tuple[Any, Any]]:
    """Small weights sharded over `model` and a large batch replicated there: each layer reduces activations."""
    up, down, batch = shapes((512, 2048), (2048, 512), (num_rows, 512))
    args = ({"up": up, "down": down}, batch)
    return jax.jit(step, in_shardings=(STATE, over("data")), out_shardings=(STATE, over()), donate_argnums=0), args


NO_COLLECTIVES = (
    "HloModule m, is_scheduled=true\n\nENTRY %main (a: f32[]) -> f32[] {\n  ROOT %a = f32[] parameter(0)\n}\n"
)


def stood_in(*programs: str) -> Any:
    """A fake compiler of given HLO texts; the first of several has three times the step time of the others."""
    times = [3e-3, *[1e-3] * len(programs)] if len(programs) > 1 else [1e-3]
    texts = [text or NO_COLLECTIVES for text in programs]
    return StandIn(*(compiled_step(hlo_text=text, step_time_s=s) for text, s in zip(texts, times, strict=False)))


@pytest.mark.parametrize("check", [True, False])
def test_needlessly_gathered_weights_are_the_change(check: bool) -> None:
    """XLA's program has no collectives, so no intermediate values are constrained: only input shardings change."""
    by_hand, args = wide()
    compiler = stood_in("")
    result = autopar.diagnose(by_hand, *args, hardware="h100-sxm", check=check, compiler=compiler)
    (change,) = result.changes
    assert change.kind == "shardings"
    assert {(one.path, one.before) for one in change.tensors} <= {
        ("state/up", "P(None, 'model')"),
        ("state/down", "P('model')"),
    }
    gained = result.kept.predicted_s - change.after.predicted_s
    assert change.gain_s == pytest.approx(gained)
    assert gained >= 0.9 * (result.kept.predicted_s - result.best.predicted_s) > 0
    assert len(compiler.compiled_for) == (3 if check else 1)
    assert (change.after.compiled is not None) == check
    changed = {tensor.path: str(tensor.sharding) for tensor in result.changed.inputs}
    assert all(changed[one.path] == one.after != one.before for one in change.tensors)
    assert f"{change.tensors[0].before} -> {change.tensors[0].after}" in str(result)


def test_collectives_that_xla_inserted_are_found_and_removed_by_constraints() -> None:
    """The user's program has a large permute, and the planned one has none."""
    by_hand, args = wide()
    result = autopar.diagnose(by_hand, *args, hardware="h100-sxm", share=0.5, compiler=stood_in(PERMUTED, ""))
    (row,) = result.unintended
    assert (row.kind, row.axes) == ("collective-permute", ("model",))
    assert row.num_bytes == 4 * 1024**3
    assert result.changes[0].kind == "constraints"
    assert result.changes[0].gain_s == pytest.approx(result.as_is.predicted_s - result.kept.predicted_s)
    after = result.changes[0].after.compiled
    assert after is not None
    assert after.unintended_counts == {}
    assert "unintended: none" in " ".join(str(result).split())
    assert result.by_replay
    assert result.as_is.replayed_s is not None
    assert result.difference_s == result.as_is.replayed_s > 4e9 / 450e9  # a link's rate; nothing else runs
    assert result.recovered == pytest.approx(1.0)
    assert result.to_json()["unintended"][0]["kind"] == "collective-permute"


PERMUTED = """HloModule m, is_scheduled=true, num_partitions=8

ENTRY %main (a: f32[1024,1048576]) -> f32[1024,1048576] {
  %a = f32[1024,1048576]{1,0} parameter(0)
  ROOT %p = f32[1024,1048576]{1,0} collective-permute(%a), source_target_pairs={{0,1},{1,0}}, metadata={op_name="jit(step)/jvp(M)/split"}
}
"""


def test_odd_shardings_are_noted() -> None:
    other = dict(STATE, up=over())
    by_hand = jax.jit(step, in_shardings=(STATE, None), out_shardings=(other, None))
    result = autopar.diagnose(by_hand, *ARGS, hardware="h100-sxm", check=False, compiler=stood_in(""))
    first, second, third = result.notes
    assert "`state/up` has sharding P(None, 'model') as an input and P() as an output" in first
    assert "no sharding for 1 of its inputs, e.g. `batch`" in second
    assert "nothing is donated" in third


def test_shardings_over_the_budget_are_noted() -> None:
    by_hand, args = wide()
    least = autopar.plan(step, *args, mesh=MESH, hardware="h100-sxm").prediction.peak_bytes
    result = autopar.diagnose(
        by_hand,
        *args,
        hardware="h100-sxm",
        check=False,
        memory_budget_bytes=1.2 * least,
        compiler=stood_in(""),
    )
    assert any("do not fit" in note for note in result.notes)


# -- with XLA's GPU compiler ------------------------------------------------------------------


def gpt2_by_hand() -> tuple[Any, tuple[Any, Any]]:
    """Hugging Face's GPT-2, a layer of it, split as Megatron-LM's names say: the fused projection by its 1,536 columns,
    of which a quarter is no whole number of heads of the query, the key and the value."""
    from transformers import GPT2Config

    config = GPT2Config(vocab_size=4_003, n_positions=128, n_embd=512, n_layer=1, n_head=8)
    train, args = language.gpt2(config, batch=16, seq=128, dtype=BF16).target
    return jitted(train, args, pinned.tensor_parallel(args, MESH), MESH), args


@pytest.fixture(scope="module")
def gpt2(absent_gpus: Compiler) -> autopar.Diagnosis:
    by_hand, args = gpt2_by_hand()
    return autopar.diagnose(by_hand, *args, hardware="h100-sxm", compiler=absent_gpus)


@pytest.mark.slow
def test_the_head_split_of_gpt2_causes_unintended_collectives(gpt2: autopar.Diagnosis) -> None:
    kinds = {row.kind for row in gpt2.unintended if "/attn" in row.path}
    assert "collective-permute" in kinds
    for row in gpt2.unintended:
        assert row.num_bytes > 0
        assert row.time_s > 0
    (place,) = {row.library_source.rpartition(":")[0] for row in gpt2.unintended if "attn/split" in row.path}
    assert place.endswith("modeling_flax_gpt2.py")


@pytest.mark.slow
def test_the_changes_remove_unintended_collectives(gpt2: autopar.Diagnosis) -> None:
    """The changed step is compiled by XLA."""
    before, after = gpt2.as_is.compiled, gpt2.changes[-1].after.compiled
    assert before is not None and after is not None
    assert before.unintended_counts["collective-permute"] > 0
    for kind in ("all-to-all", "collective-permute"):
        assert not after.unintended_counts.get(kind)
        assert after.counts.get(kind, 0) < before.counts[kind]
    assert gpt2.by_replay
    assert gpt2.difference_s > 0
    assert gpt2.recovered > 0.5  # by the replay
    assert gpt2.recovered_as_predicted >= 0.85
    assert [(change.kind, change.gain_s) for change in gpt2.changes if change.gain_s <= 0] == []


@pytest.mark.slow
def test_the_diagnosis_as_text_and_json(gpt2: autopar.Diagnosis) -> None:
    text = str(gpt2)
    assert "Unintended collectives" in text
    assert "modeling_flax_gpt2.py" in text
    document = json.loads(json.dumps(gpt2.to_json(), allow_nan=False))
    assert document["format"] == "autopar-diagnosis"
    assert document["mesh"] == {"data": 2, "model": 4}
    assert document["changes"][0]["after"]["compiled"]["unintended_counts"] is not None


@pytest.mark.slow
def test_the_plan_with_all_changes_runs(gpt2: autopar.Diagnosis) -> None:
    by_hand, args = gpt2_by_hand()
    planned = autopar.parallelize(by_hand.__wrapped__, plan=gpt2.changed)
    assert planned.lower(*args) is not None


def test_a_good_sharding_needs_no_change(
    gpu_compiler: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Data parallelism without unconstrained choices, by the command line."""
    target = tmp_path / "by_hand.py"
    target.write_text(GOOD)
    assert main(["diagnose", f"{target}:make", "--hardware", "h100-sxm", "--no-check", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["unintended"] == []
    assert document["best"]["compiled"] is None
    assert document["compared_by"] == "prediction"


GOOD = """
import jax, jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P

def make():
    mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))
    def step(w, x):
        grad = jax.grad(lambda w: jnp.square(jnp.tanh(x @ w)).mean())(w)
        return w - 0.1 * grad
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    shapes = jax.ShapeDtypeStruct((512, 512), jnp.float32), jax.ShapeDtypeStruct((4096, 512), jnp.float32)
    return jax.jit(step, in_shardings=(whole, split), out_shardings=whole, donate_argnums=0), shapes
"""
