"""A step planned `like` one in stages: the state of both stays where it is, on the same submeshes, sharded alike."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from test_stages_pinned import (
    BATCH,
    LAYERS,
    OPTIONS,
    WIDTH,
    batch_of,
    create,
    forward,
    scanned,
    stacked,
    trained,
)

import autopar
from autopar.cli.main import main
from autopar.errors import AutoparError, BudgetError, PinError, PlanFileError, PlanMismatchError, ScheduleError
from autopar.pipeline.plan import PipelinePlan
from autopar.pipeline.search.plan_stages import frozen_arguments
from autopar.transforms.program import program_of

WORDS = 24
OPTIMIZER = optax.adam(1e-2)


def evaluation(forward: Any) -> Any:
    return lambda state, batch: jnp.mean((forward(state, batch["x"]) - batch["x"]) ** 2)


def predictions(state: Any, batch: Any) -> Any:
    return forward(state, batch["x"])


def places(plan: Any, path: str) -> list[Any]:
    (position,) = (n for n, tensor in enumerate(plan.inputs) if tensor.path == path)
    return [
        (plan.stages[part.stage].devices, plan.stages[part.stage].plan.mesh, part.sharding, part.rows)
        for part in plan.input_parts[position]
    ]


def laid(state: Any) -> Any:
    return jax.tree.map(lambda leaf: (leaf.sharding.spec, [d.id for d in leaf.sharding.mesh.devices.flat]), state)


def alike(one: Any, other: Any) -> None:
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-6)


def evaluated_beside(
    train: Any, evaluate: Any, create: Any, batch_of: Callable[[int], Any] = batch_of, **options: Any
) -> tuple[PipelinePlan, PipelinePlan]:
    """Train in stages and evaluate `like` it: values are those of the steps by themselves, and no leaf moves."""
    step = autopar.parallelize(**OPTIONS | options)(train)
    state, expected = step.init(create, jax.random.key(0), batch=batch_of(0)), jax.jit(create)(jax.random.key(0))
    beside = autopar.parallelize(like=step, cache=False)(evaluate)
    before = laid(state)
    for seed in range(2):
        alike(beside(state, batch_of(seed)), jax.jit(evaluate)(expected, batch_of(seed)))
        state, _ = step(state, batch_of(seed))
        expected, _ = jax.jit(train)(expected, batch_of(seed))
        alike(state, expected)
        assert laid(state) == before
    plan, other = step.latest_plan, beside.latest_plan
    assert isinstance(plan, PipelinePlan) and isinstance(other, PipelinePlan)
    for tensor in plan.inputs:
        if tensor.path.startswith("state"):
            assert places(plan, tensor.path) == places(other, tensor.path), tensor.path
    return plan, other


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("forward", "create", "evaluate"),
    [(forward, create, evaluation(forward)), (forward, create, predictions), (scanned, stacked, evaluation(scanned))],
    ids=["a number", "predictions", "stacked layers"],
)
def test_an_evaluation_finds_the_state_where_it_is(forward: Any, create: Any, evaluate: Any) -> None:
    plan, other = evaluated_beside(trained(forward), evaluate, create)
    assert other.schedule == "inference" and len(other.stages) == len(plan.stages) == 2
    assert any("is on the stages of the plan of" in note for note in other.notes)


@pytest.mark.slow
def test_two_stages_on_each_submesh() -> None:
    plan, other = evaluated_beside(
        trained(forward), evaluation(forward), create, stages=4, schedule="interleaved", mesh="2x2"
    )
    assert other.submesh_of == plan.submesh_of == (0, 1, 0, 1)


def tokens_of(seed: int) -> Any:
    return {"x": jax.random.randint(jax.random.key(seed), (BATCH, 4), 0, WORDS)}


def tied(key: jax.Array) -> Any:
    params = create(key)["layers"]
    params = {"layers": params, "words": 0.1 * jax.random.normal(key, (WORDS, WIDTH)), "rate": jnp.ones(())}
    return {"params": params, "moments": OPTIMIZER.init(params)}


def tied_loss(params: Any, tokens: jax.Array) -> Any:
    """The first and the last layer read the embedding; a scalar is read by the last."""
    x = params["words"][tokens]
    for layer in params["layers"]:
        x = x + jnp.tanh(x @ layer["up"] + layer["bias"]) @ layer["down"]
    logits = params["rate"] * (x @ params["words"].T)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()


def train_tied(state: Any, batch: Any) -> Any:
    loss, grads = jax.value_and_grad(tied_loss)(state["params"], batch["x"])
    updates, moments = OPTIMIZER.update(grads, state["moments"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "moments": moments}, loss


@pytest.mark.slow
def test_a_tied_embedding_and_moments_that_the_other_step_does_not_read() -> None:
    evaluated_beside(
        train_tied, lambda state, batch: tied_loss(state["params"], batch["x"]), tied, tokens_of, mesh="2x2"
    )


@pytest.mark.slow
def test_a_step_may_be_trained_like_its_evaluation() -> None:
    evaluate = autopar.parallelize(**OPTIONS | {"schedule": "auto"})(evaluation(forward))
    abstract = jax.eval_shape(create, jax.random.key(0))
    plan = evaluate.plan(abstract, batch_of(0))
    step = autopar.parallelize(like=evaluate, cache=False)(trained(forward))
    state, expected = step.init(create, jax.random.key(0), batch=batch_of(0)), jax.jit(create)(jax.random.key(0))
    alike(evaluate(state, batch_of(0)), jax.jit(evaluation(forward))(expected, batch_of(0)))
    state, _ = step(state, batch_of(0))
    alike(state, jax.jit(trained(forward))(expected, batch_of(0))[0])
    for number in range(LAYERS):
        path = f"state/layers/{number}/up"
        assert places(plan, path) == places(step.latest_plan, path)


def test_a_step_of_the_parameters_alone_and_a_pin_of_its_own() -> None:
    """Arguments are matched by what is below their names; the other step's options are its own."""
    args = jax.eval_shape(tied, jax.random.key(0)), tokens_of(0)
    plan = autopar.plan(train_tied, *args, num_devices=8, mesh="2x2", **OPTIONS)
    pin = {"model/layers/0/up": P("model", "data")}
    other = autopar.plan(
        lambda model, batch: tied_loss(model, batch["x"]),
        args[0]["params"],
        args[1],
        like=plan,
        num_microbatches=4,
        pin=pin,
    )
    assert other.num_microbatches == 4
    assert places(other, "model/layers/0/down") == places(plan, "state/params/layers/0/down")
    ((_, _, sharding, _),) = places(other, "model/layers/0/up")
    assert str(sharding) == "P('model', 'data')"


def test_state_that_is_not_read_is_planned_where_it_is() -> None:
    """Arguments are laid out alike, although the step needs none of the biases."""
    args = jax.eval_shape(create, jax.random.key(0)), batch_of(0)
    plan = autopar.plan(trained(forward), *args, num_devices=8, mesh="2x2", **OPTIONS)

    def biases(state: Any, batch: Any) -> Any:
        x = batch["x"]
        for layer in state["layers"]:
            x = x + jnp.tanh(x @ layer["up"]) @ layer["down"]
        return jnp.mean(x**2)

    other = autopar.plan(biases, *args, like=plan)
    for number in range(LAYERS):
        path = f"state/layers/{number}/bias"
        assert places(other, path) == places(plan, path)


def make_training() -> Any:
    return trained(forward), (jax.eval_shape(create, jax.random.key(0)), jax.eval_shape(lambda: batch_of(0)))


def make_evaluation() -> Any:
    return evaluation(forward), make_training()[1]


def test_the_command_line_and_saved_plans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    devices = ["--devices", "8", "--hardware", "cpu-host", "--stages", "2", "--no-cache"]
    how = ["--mesh", "2x2", "--num-microbatches", "2", "--schedule", "1f1b"]
    train, other = str(tmp_path / "train.json"), str(tmp_path / "eval.json")
    assert main(["plan", f"{__file__}:make_training", *devices, *how, "-o", train]) == 0
    assert main(["plan", f"{__file__}:make_evaluation", "--like", train, "--no-cache", "-o", other]) == 0
    step = autopar.parallelize(plan=train)(trained(forward))
    evaluate = autopar.parallelize(plan=other)(evaluation(forward))
    state = step.init(create, jax.random.key(0), batch=batch_of(0))
    alike(evaluate(state, batch_of(0)), evaluation(forward)(create(jax.random.key(0)), batch_of(0)))
    read: Any = autopar.load_plan(other)
    assert read.read_state == tuple(range(len(read.inputs) - 1))
    document = json.loads(Path(other).read_text())
    (tmp_path / "damaged.json").write_text(json.dumps(document | {"read_state": [99]}))
    with pytest.raises(PlanFileError, match="`read_state`"):
        autopar.load_plan(tmp_path / "damaged.json")
    capsys.readouterr()
    assert main(["plan", f"{__file__}:make_evaluation", "--like", train, "--stages", "3"]) == 2
    assert "has 2 stages, but `stages` is 3" in capsys.readouterr().err


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"stages": 3}, PlanMismatchError, "has 2 stages, but `stages` is 3: leave `stages` out"),
        ({"num_devices": 4}, PlanMismatchError, "is for 8 devices, but here are 4"),
        ({"mesh": "4"}, PlanMismatchError, "has a stage on mesh 2x2 (data=2, model=2), but `mesh` is 4 (data=4)"),
        ({"hardware": "h100-sxm"}, PlanMismatchError, "is for cpu-host, but `hardware` is h100-sxm"),
        ({"partitioner": object()}, PlanMismatchError, "`partitioner` has nothing to choose"),
        ({"schedule": "interleaved"}, ScheduleError, "The stages are those of the plan given as `like`"),
        ({"schedule": "inference"}, ScheduleError, "runs forward passes only"),
        (
            {"memory_budget_bytes": 1e3, "num_microbatches": 2},
            BudgetError,
            "do not fit where the plan of `trained.<locals>.step` has them",
        ),
        ({"pin": {"state/scale": P("tp")}}, PinError, "but the stage's mesh is 2x2 (data=2, model=2)"),
        ({"pin": {"state/scale": P(("data", "model", "x"))}}, PinError, "names the mesh axis 'x'"),
    ],
)
def test_what_contradicts_the_other_plan_is_refused(options: Any, error: type[AutoparError], words: str) -> None:
    args = jax.eval_shape(create, jax.random.key(0)), batch_of(0)
    with pytest.raises(error) as caught:
        autopar.plan(trained(forward), *args, like=two_stages(), **options)
    assert words in str(caught.value)


def two_stages() -> Any:
    args = jax.eval_shape(create, jax.random.key(0)), batch_of(0)
    return autopar.plan(trained(forward), *args, num_devices=8, mesh="2x2", **OPTIONS | {"cache": True})


def test_other_state_and_another_order_are_refused() -> None:
    args = jax.eval_shape(create, jax.random.key(0)), batch_of(0)
    plan = two_stages()
    with pytest.raises(PlanMismatchError, match=r"no argument of .* is part of the state of `trained\.<locals>\.step`"):
        autopar.plan(lambda batch: jnp.mean(batch["x"]), args[1], like=plan)

    def backwards(state: Any, batch: Any) -> Any:
        return jnp.mean(forward(state | {"layers": state["layers"][::-1]}, batch["x"]) ** 2)

    with pytest.raises(PlanMismatchError, match=r"`state/layers/\d/\w+` is on stage \d .* leave `like` out"):
        autopar.plan(backwards, *args, like=plan)

    def averaged(state: Any, batch: Any) -> Any:
        state = state | {"layers": jax.tree.map(lambda a: jnp.stack([a.mean(0)] * 2), state["layers"])}
        return jnp.mean(scanned(state, batch["x"]) ** 2)

    args = jax.eval_shape(stacked, jax.random.key(0)), batch_of(0)
    in_parts = autopar.plan(trained(scanned), *args, num_devices=8, mesh="2x2", **OPTIONS)
    with pytest.raises(PlanMismatchError, match=r"the layers of .* are on several stages"):
        autopar.plan(averaged, *args, like=in_parts)


def test_parameters_of_an_evaluation_are_told_from_its_batch() -> None:
    def frozen(step: Any, *args: Any) -> tuple[str, ...]:
        graph = program_of(step, args, carry=None, donate=None).as_traced.graph
        return tuple(sorted({graph.input_paths[n].split("/")[0] for n in frozen_arguments(graph)}))

    state, batch = jax.eval_shape(create, jax.random.key(0)), batch_of(0)
    state.pop("count")
    assert frozen(evaluation(forward), state, batch) == ("state",)
    assert frozen(lambda batch, state: forward(state, batch["x"]), batch, state) == ("state",)
    assert frozen(trained(forward), state | {"count": jnp.zeros(())}, batch) == ()
    tokens = {"ids": jnp.zeros((4, 3), jnp.int32), "weights": jnp.zeros((7, 2))}
    assert frozen(lambda state, batch: batch["ids"].sum() + state["scale"].sum(), state, tokens) == ("state",)
    assert frozen(lambda state, rate: rate * state["scale"].sum(), state, jnp.ones(())) == (), "nothing else is a batch"


def test_stages_are_not_planned_like_one_program() -> None:
    args = jax.eval_shape(create, jax.random.key(0)), batch_of(0)
    one = autopar.plan(trained(forward), *args, mesh="8", hardware="cpu-host")
    with pytest.raises(PlanMismatchError, match="one program, whose state is on all 8 devices"):
        autopar.plan(evaluation(forward), *args, like=one, **OPTIONS)
