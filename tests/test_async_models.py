"""Asynchronous pipelines of several models have the bits of their pieces run in sequence: a convolutional network, a scan over layers on
several stages, recomputation by `jax.checkpoint`, weights in bfloat16 with copies in float32."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from async_reference import reads_of, sequential
from test_async_pipeline import WIDTH, batches_of, run, streamed, weights_of
from test_pipemare import with_copies

ADAMW = optax.adamw(1e-2)
NESTEROV = optax.sgd(optax.exponential_decay(0.1, 3, 0.9), momentum=0.9, nesterov=True)
Model = tuple[Callable[[Any, Any], Any], Any, list[Any]]


def trained(loss_of: Callable[[Any, Any], Any], optimizer: optax.GradientTransformation) -> Callable[[Any, Any], Any]:
    def step(state: Any, batch: Any) -> Any:
        parameters, moments = state
        loss, gradients = jax.value_and_grad(loss_of)(parameters, batch)
        updates, moments = optimizer.update(gradients, moments, parameters)
        return (optax.apply_updates(parameters, updates), moments), loss

    return step


def convolutions() -> Model:
    """Four convolutions with biases and normalization by example, a pooling, and a head."""
    rng = np.random.default_rng(0)

    def loss_of(parameters: Any, batch: Any) -> Any:
        x = batch["x"]
        for n, (kernel, bias, scale) in enumerate(parameters["convolutions"]):
            x = bias + jax.lax.conv_general_dilated(
                x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            mean, variance = x.mean((1, 2, 3), keepdims=True), x.var((1, 2, 3), keepdims=True)
            x = jax.nn.relu((x - mean) * jax.lax.rsqrt(variance + 1e-5) * scale)
            if n == 1:
                x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        return optax.softmax_cross_entropy_with_integer_labels(
            x.mean((1, 2)) @ parameters["head"], batch["label"]
        ).mean()

    sizes = [3, 8, 8, 8, 8]
    kernels = [
        (0.2 * rng.normal(size=(3, 3, a, b)).astype(np.float32), np.zeros(b, np.float32), np.ones(b, np.float32))
        for a, b in pairwise(sizes)
    ]
    parameters = {"convolutions": kernels, "head": rng.normal(size=(8, 5)).astype(np.float32)}
    batches = [
        {"x": rng.normal(size=(8, 8, 8, 3)).astype(np.float32), "label": rng.integers(0, 5, 8)} for _ in range(10)
    ]
    return trained(loss_of, ADAMW), (parameters, ADAMW.init(parameters)), batches


def scanned() -> Model:
    def loss_of(parameters: Any, batch: Any) -> Any:
        def layer(h: Any, own: Any) -> Any:
            return h + jnp.tanh(h @ own["weight"] + own["bias"]), None

        return jnp.square(jax.lax.scan(layer, batch, parameters)[0] - batch[:, ::-1]).mean()

    parameters = {"weight": np.stack(weights_of(6)) / 3, "bias": np.zeros((6, WIDTH), np.float32)}
    return trained(loss_of, NESTEROV), (parameters, NESTEROV.init(parameters)), [x for x, _ in batches_of(10, 10)]


def recomputed() -> Model:
    def loss_of(parameters: Any, batch: Any) -> Any:
        h = batch
        for weight in parameters:
            h = jax.checkpoint(lambda h, weight: jnp.tanh(jnp.sin(h @ weight)))(h, weight)
        return jnp.square(h - batch).mean()

    return trained(loss_of, ADAMW), (weights_of(6), ADAMW.init(weights_of(6))), [x for x, _ in batches_of(10, 8)]


def copied() -> Model:
    return (
        with_copies,
        ([w.astype(jnp.bfloat16) for w in weights_of(6)], weights_of(6)),
        [x for x, _ in batches_of(10, 8)],
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "rule", "p", "m"),
    [
        (convolutions, "pipemare(6, 0.3)", 3, 1),
        (convolutions, "vertical", 2, 4),
        (scanned, "pipemare(6, 0.3)", 3, 5),
        (scanned, "ampnet", 2, 2),
        (scanned, "pipedream", 3, 1),
        (recomputed, "pipedream", 3, 2),
        (recomputed, "pipemare(6, 0.3)", 3, 1),
        (copied, "pipedream", 3, 1),
        (copied, "2bw", 2, 4),
    ],
)
def test_a_model_has_the_bits_of_its_pieces_in_sequence(model: Callable[[], Model], rule: str, p: int, m: int) -> None:
    step, state, batches = model()
    whole, leaves = streamed(step, state, batches[0], rule, p, m)
    each = [leaves(batch) for batch in batches]
    _, found = run(whole.start(each[0]), each)
    _, expected = sequential(whole, reads_of(rule.partition("(")[0], p, m), each)
    assert len(expected) >= len(jax.tree.leaves(state))
    for (position, rows), value in expected.items():
        whole_leaf = np.asarray(found[position])
        own = whole_leaf if rows is None else np.take(whole_leaf, range(rows.start, rows.stop), rows.dim)
        np.testing.assert_array_equal(own, value)
