"""Real models from their own libraries train by any plan as without one: the zoo's small configurations.

Eight CPU devices; the planner's own mesh, and three forced ones.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from same_steps import Trained, assert_same, splits, train

from autopar.transforms.program import program_of
from benchmarks.run import BENCHMARKS
from benchmarks.zoo import language, summary
from benchmarks.zoo.proof import fallbacks
from benchmarks.zoo.real import REAL
from benchmarks.zoo.small import SMALL
from benchmarks.zoo.training import Training

# isort: split
from transformers import LlamaConfig

MESHES: dict[str, dict[str, Any]] = {
    "own": {"num_devices": 8},
    "1x8": {"mesh": "1x8"},
    "2x4": {"mesh": "2x4"},
    "8x1": {"mesh": "8x1"},
}


@cache
def unsharded(name: str) -> tuple[Training, Trained]:
    training = SMALL[name]()
    return training, train(training)


@pytest.mark.sampled(44)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", SMALL)
def test_a_real_model_trains_by_a_plan_as_without(name: str, mesh: str) -> None:
    training, plain = unsharded(name)
    sharded = train(training, **MESHES[mesh])
    assert splits(sharded.plan)
    assert_same(sharded, plain)


@pytest.mark.slow
def test_scanned_layers_are_those_that_the_library_unrolls() -> None:
    """One step with the same weights, stacked and not."""
    config = LlamaConfig(
        vocab_size=67,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
    )
    unrolled, scanned = language.llama(config, 4, 12), language.llama_scanned(config, 4, 12)
    before, batch = jax.jit(unrolled.create_state)(jax.random.key(0)), unrolled.make_batch(0)

    def stacked(params: Any) -> Any:
        model = params["model"]
        layers = jax.tree.map(lambda *each: jnp.stack(each), *(model["layers"][str(n)] for n in range(3)))
        names = {name: model[name] for name in ("embed_tokens", "norm")}
        return names | {"layers": {"layer": layers}, "lm_head": params["lm_head"]}

    shapes = jax.eval_shape(scanned.create_state, jax.random.key(0))
    assert jax.tree.structure(shapes.params) == jax.tree.structure(stacked(before.params))
    params = stacked(before.params)
    state = shapes.replace(step=before.step, params=params, opt_state=shapes.tx.init(params))
    after, loss = jax.jit(unrolled.step)(before, batch)
    after_scan, loss_scan = jax.jit(scanned.step)(state, batch)
    np.testing.assert_allclose(loss, loss_scan, rtol=1e-5)
    for one, other in zip(jax.tree.leaves(stacked(after.params)), jax.tree.leaves(after_scan.params), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


# -- the table of real ones --------------------------------------------------------------------


def test_nodes_without_a_rule_are_told_where_they_matter() -> None:
    def step(x: jax.Array, y: jax.Array) -> Any:
        return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x), jnp.sin(y) @ y, y[0] + 1

    square = jax.ShapeDtypeStruct((600, 600), jnp.float32)
    found = fallbacks(program_of(step, (square, square), carry=[], donate=[]))
    (callback,) = found
    assert callback[0] == "pure_callback"
    assert callback[2] == 4 * 600 * 600
    small = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    assert fallbacks(program_of(step, (small, square), carry=[], donate=[])) == []


ROW: dict[str, Any] = {
    "model": "gpt2",
    "gpus": 8,
    "failed": "",
    "fits": True,
    "unpredicted": [],
    "fallbacks": [],
    "plan_s": 30.0,
    "plan_cpu_s": 10.0,
    "trace_s": 1.0,
    "compile_s": 20.0,
    "mesh": "2x4",
    "words": "data parallel",
    "attempts": 1,
    "equations": 7000,
    "decisions": 1300,
    "status": "proven optimal",
    "gap": 0.0,
    "peak_predicted": 11e9,
    "peak_compiled": 12e9,
    "wire_predicted": 1e9,
    "wire_compiled": 1e9,
    "step_predicted_s": 0.026,
    "step_replayed_s": 0.027,
    "step_xla_s": 0.001,
    "estimate_errors": ["a loop"],
    "step_xla_predicted": 0.025,
    "step_xla": None,
    "off": [],
}


def test_the_page_tells_what_does_not_hold() -> None:
    stranger = ROW | {"gpus": 64, "fits": False, "unpredicted": [["all-gather", 3e6, "h/0"]], "attempts": 2}
    stranger |= {"fallbacks": [["scan", 0.5, 2e6, "model.py:3"]], "off": ["peak"]}
    failed = {"model": "llama", "gpus": 8, "failed": "BudgetError: too small"}
    text = summary.summary([ROW, stranger, failed])
    assert "2 of 3 were planned and compiled; 1 fit in 80 GB, 1 have no unpredicted collective" in text
    assert "| gpt2 | 8 | 30 s (10 s) | 2x4 | 11.0 GB | 12.0 GB | yes | none | none | 26.0 ms | 27.0 ms | - |" in text
    assert "| **no** | **1, 3 MB** | **scan** |" in text
    details = summary.page_table([stranger, failed])
    assert "XLA's estimate is wrong for a loop" in details
    assert "without a rule: `scan`, 50.0% of the operations, 2.0 MB, model.py:3" in details
    assert "planned 2 times" in details and "tolerance: peak" in details
    assert "- 8 GPUs: BudgetError: too small" in details


def test_the_runner_knows_every_model_of_the_zoo() -> None:
    assert set(BENCHMARKS["zoo"].programs) == set(REAL) == set(SMALL)
