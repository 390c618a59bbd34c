"""The strategy of a plan has its common name; the summary has MFU, throughput and what bounds the step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import programs
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from autopar.plans.plan import Plan

STATE = ("state/params/*kernel", "state/opt_state/*kernel")


def planned(program: programs.Program, hardware: str = "h100-sxm", **options: Any) -> Plan:
    return autopar.plan(program.step, *program.abstract_args(), hardware=hardware, **options)


def bert(**sizes: Any) -> programs.Program:
    usual: dict[str, Any] = {"batch": 64, "seq": 64, "hidden": 512, "heads": 8}
    return programs.bert_layers(**usual | sizes)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("pins", "mesh", "name"),
    [
        ({path: P("data") for path in STATE}, "8", "FSDP (ZeRO-3) over `data`"),
        ({STATE[0]: P(), STATE[1]: P("data")}, "8", "ZeRO-1 over `data`"),
        ({"state/*kernel": P(), "batch/*": P("data")}, "8", "data parallel over `data`"),
        (
            {path: P("data") for path in STATE} | {"batch/*": P(("data", "model"))},
            "2x4",
            "HSDP: FSDP (ZeRO-3) over `data`, replicas over `model`",
        ),
        ({path: P(("data", "model")) for path in STATE}, "2x4", "FSDP (ZeRO-3) over `data` and `model`"),
    ],
    ids=["fsdp", "zero-1", "data parallel", "hsdp", "fsdp over two axes"],
)
def test_sharded_state_is_named(pins: dict[str, Any], mesh: str, name: str) -> None:
    assert planned(bert(), mesh=mesh, pin=pins).strategy == name


def test_columns_then_rows_are_megatron() -> None:
    plan = planned(programs.mlp(batch=32, width=256, optimizer="adam"), "cpu-host", num_devices=2)
    assert plan.strategy == "Megatron tensor parallel over `data`"


def test_one_long_sequence_is_context_parallel() -> None:
    plan = planned(bert(batch=1, seq=8192), num_devices=8)
    assert plan.strategy.startswith("context parallel over `data`")
    assert "data parallel over" not in plan.strategy


def test_activations_split_between_the_matmuls_are_sequence_parallel() -> None:
    mesh = AbstractMesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def constrained(x: jax.Array, *spec: Any) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    def step(params: Any, batch: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            x = batch["x"]
            for n in range(2):
                x = constrained(x, "data", "model", None)
                x = x / (1e-3 + jnp.abs(x).mean(-1, keepdims=True))
                hidden = constrained(jax.nn.relu(x @ params[f"in{n}"]), "data", None, "model")
                x = x + constrained(hidden @ params[f"out{n}"], "data", "model", None)
            return (x**2).mean()

        value, gradients = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    params = {
        f"{name}{n}": array(*shape) for n in range(2) for name, shape in (("in", (512, 2048)), ("out", (2048, 512)))
    }
    pins = {"params/in*": P(None, "model"), "params/out*": P("model", None)}
    plan = autopar.plan(step, params, {"x": array(8, 256, 512)}, mesh="2x4", hardware="h100-sxm", pin=pins)
    assert plan.strategy == "data parallel over `data`, Megatron tensor and sequence parallel over `model`"


def test_the_summary_has_mfu_and_throughput() -> None:
    program = programs.mlp(batch=256, width=512, num_layers=4)
    plan = planned(program, num_devices=8)
    found = plan.efficiency
    assert found is not None
    matmuls = [v.shape for v in jax.tree.leaves(program.abstract_args()[0].params) if len(v.shape) == 2]
    forward = sum(2 * 256 * a * b for a, b in matmuls)
    first = 2 * 256 * matmuls[0][0] * matmuls[0][1]  # no gradient of the data is needed
    assert found.model_flops == pytest.approx(3 * forward - first, rel=0.02)
    assert found.num_examples == 256
    assert sum(found.bound_s.values()) == pytest.approx(plan.prediction.step_time_s, rel=0.25)
    text = str(autopar.explain(plan))
    assert " MFU (" in text
    assert " examples/s" in text
    assert "main bottleneck: " in text


def test_tokens_are_counted() -> None:
    plan = planned(programs.gpt(), num_devices=8)
    found = plan.efficiency
    assert found is not None
    tokens = next(t for t in plan.inputs if t.role == "data" and len(t.shape) == 2)
    assert found.num_tokens == tokens.shape[0] * tokens.shape[1]
    assert "tokens/s" in str(autopar.explain(plan))


def test_a_pipeline_has_them_too() -> None:
    program = programs.mlp(num_layers=4)
    plan = autopar.plan(
        program.step, *program.abstract_args(), num_devices=4, hardware="h100-sxm", stages=2, num_microbatches=4
    )
    found = plan.efficiency
    assert found is not None
    whole = planned(program, num_devices=4, all_devices=True).efficiency
    assert whole is not None
    assert (found.model_flops, found.ideal_s) == (whole.model_flops, pytest.approx(whole.ideal_s))
    assert sum(found.bound_s.values()) == pytest.approx(plan.prediction.step_time_s)
    assert "pipeline bubbles" in found.bound_s
    assert " examples/s" in str(autopar.explain(plan))
