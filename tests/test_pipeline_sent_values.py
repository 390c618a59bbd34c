"""What stages do to reshard the values that they send to each other: priced and listed as XLA does it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from dense_step import arguments, step
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from test_stages_out_of_order import Sizes

import autopar
from autopar.cost.collectives import collective_time
from autopar.ir.mesh import MeshShape
from autopar.jax_interop.partition_spec import partition_spec, tensor_sharding
from autopar.pipeline.cut.wires import Split, changes_between, named_axes
from autopar.pipeline.search import plan_stages, sent_values
from autopar.pipeline.search.exposed_reshards import added_s
from autopar.verification.figures import compiled_collectives, sent_by
from autopar.verification.verify_stages import StagesVerification
from autopar.xla_compiler.compiler import Compiler
from autopar.xla_compiler.hlo_collectives import sent_bytes
from autopar.xla_compiler.hlo_metadata import mesh_axes

SHAPE = (16, 32)
P = PartitionSpec


def split(spec: PartitionSpec, **sizes: int) -> Split:
    return Split(MeshShape(tuple(sizes), tuple(sizes.values())), tensor_sharding(spec, len(SHAPE)))


def sharding(one: Split) -> NamedSharding:
    devices = np.array(jax.devices()[: one.mesh.num_devices], dtype=object).reshape(one.mesh.axis_sizes)
    return NamedSharding(Mesh(devices, one.mesh.axis_names), partition_spec(one.sharding))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (split(P("a"), a=4), split(P(None, "a"), a=4)),
        (split(P("a"), a=4), split(P(), a=4)),
        (split(P(), a=4), split(P("a"), a=4)),  # a cut
        (split(P("a", "b"), a=2, b=2), split(P("a"), a=2, b=2)),
        (split(P(("a", "b")), a=2, b=2), split(P(None, ("a", "b")), a=2, b=2)),  # both axes at once
        (split(P(("a", "b")), a=2, b=2), split(P("part"), part=2, copy=2)),  # to fewer devices
        (split(P("a"), a=4), split(P("part"), part=2, copy=2)),  # over a part of an axis
        (split(P("part"), part=2, copy=2), split(P(("a", "b")), a=2, b=2)),
        (split(P("a", "b"), a=2, b=2), split(P(None, "a"), a=4)),
        (split(P("a"), a=2, b=2), split(P("b"), a=2, b=2)),  # equal parts on other devices
        (split(P("a", "b"), a=2, b=2), split(P("b", "a"), a=2, b=2)),
        (split(P("a", "c"), a=2, b=2, c=2), split(P("b", "c"), a=2, b=2, c=2)),
    ],
)
def test_changes_are_those_that_xla_makes(before: Split, after: Split) -> None:
    x = jax.ShapeDtypeStruct(SHAPE, "float32", sharding=sharding(before))
    text = jax.jit(lambda x: x, out_shardings=sharding(after)).lower(x).compile().as_text()
    assert text is not None
    mesh, moves = changes_between(SHAPE, 4, before, after)
    made = [
        (one.kind, mesh_axes(one.groups, mesh, pairs=one.kind == "collective-permute"), sent_by(one, mesh))
        for one in compiled_collectives(text)
    ]
    predicted = [
        (one.kind, one.axes, sent_bytes(one.kind, one.num_bytes, mesh.sizes(one.axes)))
        for one in moves
        if one.kind != "cut"
    ]
    assert sorted(made) == sorted(predicted)


def test_axes_that_are_parts_of_others_are_named_as_they_are() -> None:
    two, four = MeshShape(("a", "b"), (2, 2)), MeshShape(("all",), (4,))
    assert named_axes(("all",), four, two) == ("a", "b")
    assert named_axes(("b",), two, four) == ("b",)  # half of `all`


def test_meshes_without_a_common_refinement_gather_the_value() -> None:
    mesh, moves = changes_between((6, 6), 4, split(P("a"), a=2, b=3), split(P("c"), c=3, d=2))
    assert mesh.axis_names == ("a", "b") and [one.kind for one in moves] == ["all-gather"]


# -- in plans --------------------------------------------------------------------------------

PINS = {"params/0/kernel": P(None, "model"), "params/1/kernel": P("model"), "params/2/kernel": P(("data", "model"))}


def planned(width: int = 512, batch: int = 2048, **options: Any) -> Any:
    args = jax.eval_shape(lambda: arguments(width, batch))
    return autopar.plan(step, *args, hardware="h100-sxm", num_microbatches=4, schedule="1f1b", **options)


def verified(compiler: Compiler, width: int = 512, batch: int = 2048, **options: Any) -> StagesVerification:
    args = jax.eval_shape(lambda: arguments(width, batch))
    plan = planned(width, batch, **options)
    found: Any = autopar.verify(step, *args, plan=plan, hardware="h100-sxm", compiler=compiler)
    return found


def of_sent_values(stage: Any) -> list[str]:
    """What a stage reshards of what passes between stages."""
    before = "reshard a value "
    uses = (use for use in stage.plan.collectives if use.cause.startswith(before))
    return [f"{use.kind} {use.phase} {use.cause.removeprefix(before)}" for use in uses]


def resharded(found: StagesVerification) -> list[list[str]]:
    return [of_sent_values(stage) for stage in found.plan.stages]


def off(found: StagesVerification) -> list[str]:
    """The collectives out of tolerance, but for sums of gradients."""
    return [name for stage in found.stages for name in stage.off if "all-reduce" not in name]


@pytest.mark.slow
@pytest.mark.usefixtures("gpu_compiler")
def test_resharded_values_are_in_the_plans_of_their_stages(absent_gpus: Compiler) -> None:
    found = verified(absent_gpus, num_devices=8, stages=2, mesh="data=2,model=2", pin=PINS)
    assert resharded(found) == [
        ["all-to-all forward sent to stage 1", "all-gather backward received from stage 1"],
        [],
    ]
    assert not off(found)


@pytest.mark.usefixtures("gpu_compiler")
def test_stages_of_other_sizes_send_the_parts_that_both_have(absent_gpus: Compiler) -> None:
    found = verified(absent_gpus, width=128, batch=16384, num_devices=6, stages=2, partitioner=Sizes((4, 2)))
    assert [len(stage.devices) for stage in found.plan.stages] == [4, 2]
    assert resharded(found) == [["all-gather forward sent to stage 1"], []] and not off(found)


def test_what_is_resharded_is_in_the_time_of_its_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(num_devices=8, stages=2, mesh="data=2,model=2", pin=PINS)
    monkeypatch.setattr(plan_stages, "with_sent_values", lambda runs, *_, **__: tuple(runs))
    without = planned(num_devices=8, stages=2, mesh="data=2,model=2", pin=PINS)
    for stage, alone in zip(plan.stages, without.stages, strict=True):
        more = set(stage.plan.collectives) - set(alone.plan.collectives)
        seconds = {
            phase: sum(use.time_s for use in more if use.phase == phase) / 4 for phase in ("forward", "backward")
        }
        assert stage.cost.forward_s - alone.cost.forward_s == pytest.approx(seconds["forward"])
        assert stage.cost.backward_s - alone.cost.backward_s == pytest.approx(seconds["backward"])
    assert plan.prediction.step_time_s > without.prediction.step_time_s


def test_a_plan_like_another_has_them_too() -> None:
    first = planned(num_devices=8, stages=2, mesh="data=2,model=2", pin=PINS)
    args = jax.eval_shape(lambda: arguments(512, 2048))
    other: Any = autopar.plan(step, *args, hardware="h100-sxm", num_microbatches=4, like=first)
    assert list(map(of_sent_values, other.stages)) == list(map(of_sent_values, first.stages))


def test_a_gradient_is_resharded_while_weights_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the gradients of weights, if they are in the same piece; what is received is waited for."""
    known: list[tuple[Any, ...]] = []
    monkeypatch.setattr(sent_values, "added_s", lambda *args: known.append(args) or added_s(*args))
    planned(width=512, batch=32768, num_devices=6, stages=2, partitioner=Sizes((2, 4)))
    figures, phases, passed = next(one for one in known if "weight" in one[1])
    (one,) = passed
    ((kind, axes, size),) = one.collectives
    f = figures.candidate.formulation
    alone = collective_time(kind, size, axes, f.mesh, f.profile)
    assert one.is_sent and kind == "all-gather"
    assert added_s(figures, phases, passed) < 0.5 * alone < added_s(figures, ("input",), passed)
    received = next(iter(figures.layout.takes_inside.values()))
    assert added_s(figures, ("forward",), [replace(one, value=received, is_sent=False)]) == pytest.approx(alone)
