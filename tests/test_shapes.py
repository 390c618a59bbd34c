"""Awkward shapes: dims that no axis divides, batch 1, odd numbers of devices, three axes. Planned, run, unchanged."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from oracles import RandomSolver
from same_steps import Trained, assert_same, splits, train

import autopar
from autopar.api.make_plan import plan
from autopar.ir.mesh import parse_mesh
from benchmarks.zoo import language, vision
from benchmarks.zoo.training import Training

# isort: split
from transformers import BartConfig, GPT2Config, LlamaConfig, ResNetConfig

TESTS = Path(__file__).parent


def gpt2(batch: int, seq: int, vocabulary: int, width: int, heads: int) -> Training:
    """One layer, its embeddings tied."""
    config = GPT2Config(vocab_size=vocabulary, n_positions=64, n_embd=width, n_layer=1, n_head=heads)
    return language.gpt2(config, batch, seq)


def llama(batch: int, seq: int, vocabulary: int, width: int, heads: int) -> Training:
    """One layer, its embeddings tied, and half as many key heads."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=2 * width + 2,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    return language.llama(config, batch, seq)


def bart(batch: int, seq: int, vocabulary: int, width: int, heads: int) -> Training:
    """One layer each way, and one table for encoder, decoder and head."""
    config = BartConfig(
        vocab_size=vocabulary,
        max_position_embeddings=64,
        d_model=width,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=2 * width,
        decoder_ffn_dim=2 * width,
    )
    return language.bart(config, batch, seq)


def resnet(batch: int, size: int, width: int) -> Training:
    config = ResNetConfig(embedding_size=width, hidden_sizes=[width], depths=[1], layer_type="basic", num_labels=11)
    return vision.resnet(config, batch, size)


MODELS: dict[str, Callable[[], Training]] = {
    "primes": lambda: gpt2(batch=3, seq=13, vocabulary=101, width=67, heads=1),
    "batch 1": lambda: gpt2(batch=1, seq=24, vocabulary=128, width=64, heads=4),
    "batch and sequence 1 and odd": lambda: llama(batch=1, seq=17, vocabulary=97, width=60, heads=6),
    "50257 words": lambda: gpt2(batch=8, seq=8, vocabulary=50_257, width=32, heads=2),
    "for 6 and 12": lambda: llama(batch=12, seq=18, vocabulary=150, width=72, heads=6),
    "for 8 on 6 and 12": lambda: gpt2(batch=8, seq=16, vocabulary=128, width=64, heads=8),
    "tied tables": lambda: bart(batch=8, seq=15, vocabulary=131, width=64, heads=4),
    "odd images": lambda: resnet(batch=10, size=37, width=24),
}
CASES = [
    ("primes", "8"),
    ("primes", "2x4"),
    ("batch 1", "8"),
    ("batch 1", "2x2x2"),
    ("batch and sequence 1 and odd", "2x4"),
    ("50257 words", "8"),
    ("50257 words", "2x4"),
    ("for 6 and 12", "6"),
    ("for 6 and 12", "2x3"),
    ("for 6 and 12", "1x1x3"),
    ("for 8 on 6 and 12", "6"),
    ("for 8 on 6 and 12", "3x2"),
    ("for 8 on 6 and 12", "2x2x2"),
    ("tied tables", "2x2x2"),
    ("tied tables", "7"),
    ("odd images", "2x4"),
    ("odd images", "5"),
    ("odd images", "2x2x2"),
]
#: With nothing to split on these meshes.
INDIVISIBLE: set[tuple[str, str]] = set()


@cache
def unsharded(name: str) -> tuple[Training, Trained]:
    training = MODELS[name]()
    return training, train(training)


def some_devices(mesh: str) -> Mesh:
    """A mesh of the first devices."""
    shape = parse_mesh(mesh)
    types = (AxisType.Auto,) * len(shape.axis_names)
    devices = jax.devices()[: shape.num_devices]
    return jax.make_mesh(shape.axis_sizes, shape.axis_names, axis_types=types, devices=devices)


@pytest.mark.sampled(30)
@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_any_shape_on_any_mesh_trains_as_on_one_device(name: str, mesh: str) -> None:
    training, plain = unsharded(name)
    sharded = train(training, mesh=some_devices(mesh))
    assert splits(sharded.plan) == ((name, mesh) not in INDIVISIBLE)
    assert_same(sharded, plain)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh"), [("primes", "8"), ("50257 words", "2x4"), ("tied tables", "2x3")])
def test_any_shape_split_at_random_trains_as_on_one_device(name: str, mesh: str) -> None:
    """So that padded splits are run too, which an optimum seldom has."""
    training, plain = unsharded(name)
    sharded = train(training, mesh=some_devices(mesh), solver=RandomSolver(0))
    assert splits(sharded.plan)
    assert_same(sharded, plain)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "num_devices"), [("primes", 7), ("50257 words", 12), ("odd images", 6), ("batch 1", 1)]
)
def test_any_shape_is_planned_for_any_number_of_devices(name: str, num_devices: int) -> None:
    step, args = MODELS[name]().target
    made = plan(step, *args, num_devices=num_devices, all_devices=True, hardware="h100-sxm")
    assert made.mesh.num_devices == num_devices
    assert all(t.sharding.divides(t.shape, made.mesh) for t in (*made.inputs, *made.outputs))


TWELVE = """
import jax, same_steps, test_shapes
assert jax.device_count() == 12
for name in ("for 6 and 12", "for 8 on 6 and 12"):
    training, plain = test_shapes.unsharded(name)
    for mesh in ("12", "3x4"):
        sharded = same_steps.train(training, mesh=mesh)
        assert same_steps.splits(sharded.plan)
        same_steps.assert_same(sharded, plain)
print("the same")
"""


NOTHING: dict[str, Callable[..., Any]] = {
    "as it is": lambda state, x: (state, x),
    "reshaped": lambda state, x: (state, x.reshape(-1)),
    "constants": lambda state, x: (state, jnp.zeros(())),
    "the state alone": lambda state, x: state,
}


@pytest.mark.parametrize("hardware", ["h100-sxm", "cpu-host"])
@pytest.mark.parametrize("name", NOTHING)
def test_a_step_that_computes_nothing_is_planned_explained_and_run(name: str, hardware: str) -> None:
    state, x = jnp.arange(32.0).reshape(8, 4), jnp.arange(64.0).reshape(16, 4)
    several: list[dict[str, Any]] = [{"num_devices": 8}, {"num_devices": 8, "num_microbatches": "auto"}, {"mesh": "1"}]
    for options in several:
        planned = plan(NOTHING[name], state, x, hardware=hardware, **options)
        assert planned.prediction.step_time_s == 0.0
        assert "0" in str(autopar.explain(planned))
    step = autopar.parallelize(NOTHING[name], num_devices=8, hardware="cpu-host", cache=False)
    expected = NOTHING[name](state, x)
    jax.tree.map(np.testing.assert_array_equal, step(jnp.copy(state), x), expected)


@pytest.mark.slow
def test_twelve_devices_train_as_one() -> None:
    environment: dict[str, Any] = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=12",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run([sys.executable, "-c", TWELVE], env=environment, capture_output=True, text=True)
    assert done.stdout.endswith("the same\n"), done.stderr[-3000:]


@pytest.mark.parametrize("seed", [24, 50])
def test_a_few_places_to_look_in_are_whole_where_they_are_used(seed: int) -> None:
    """Too few to plan for, they were XLA's to split; its partitioner then ended the process (24, on 2x3)."""

    def step(table: jax.Array, places: jax.Array) -> jax.Array:
        gradient = jax.grad(lambda table: jnp.sum(jnp.sin(jnp.take(table, places % 33, axis=0))))(table)
        return table - 0.1 * gradient

    args = jnp.sin(jnp.arange(33.0 * 24)).reshape(33, 24), jnp.arange(16) * 5
    mesh = jax.make_mesh((2, 3), ("data", "model"), (AxisType.Auto,) * 2, devices=jax.devices()[:6])
    planned = autopar.parallelize(mesh=mesh, hardware="cpu-host", solver=RandomSolver(seed))(step)
    plan, program = planned.planned(*args)
    graph = program.graph
    looking = [n for n, node in enumerate(graph.nodes) if node.primitive in ("gather", "scatter-add")]
    whole = {c.node for c in plan.constraints if c.operand == 1 and all(s.is_replicated for s in c.shardings)}
    assert looking and whole.issuperset(looking)
    np.testing.assert_allclose(planned(*args), step(*args), rtol=1e-5, atol=1e-6)


def test_a_batch_of_updates_is_split_evenly_or_not_at_all() -> None:
    """Of rows that no axis divides; XLA's partitioner cannot pad them, and ended the process (9, on 2x4)."""

    def step(x: jax.Array) -> jax.Array:
        return jax.grad(lambda x: jnp.sum(jnp.sin(jnp.sort(x, axis=2))))(x)

    x = jnp.cos(jnp.arange(31.0 * 6)).reshape(31, 6, 1)
    planned = autopar.parallelize(mesh="2x4", hardware="cpu-host", solver=RandomSolver(9))(step)
    expected = step(x)
    np.testing.assert_allclose(planned(x), expected, rtol=1e-5, atol=1e-6)
