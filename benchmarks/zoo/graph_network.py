"""DeepMind's jraph graph networks, with Flax layers. In: sizes. Out: `Training`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import jraph

from benchmarks.zoo.training import F32, Batch, Field, Training, cross_entropy, training


class Layers(nn.Module):
    """Two dense layers and a layer norm."""

    width: int
    dtype: Any

    @nn.compact
    def __call__(self, *inputs: jax.Array) -> jax.Array:
        x = nn.relu(nn.Dense(self.width, dtype=self.dtype)(jnp.concatenate(inputs, axis=-1)))
        return nn.LayerNorm(dtype=self.dtype)(nn.Dense(self.width, dtype=self.dtype)(x))


class GraphClassifier(nn.Module):
    """A sequence of `jraph.GraphNetwork`s; each updates the edges, then the nodes, then the whole graph."""

    width: int
    num_layers: int
    num_classes: int
    dtype: Any

    @nn.compact
    def __call__(self, graph: Any) -> jax.Array:
        def update() -> Callable[..., jax.Array]:
            return Layers(self.width, self.dtype)

        embed = jraph.GraphMapFeatures(update(), update(), update())
        graph = embed(graph)
        for _ in range(self.num_layers):
            graph = jraph.GraphNetwork(update(), update(), update())(graph)
        return nn.Dense(self.num_classes, dtype=self.dtype)(graph.nodes)


def graph_network(
    num_nodes: int, num_edges: int, features: int, width: int, num_layers: int, num_classes: int, dtype: Any = F32
) -> Training:
    """Classification of every node of one graph."""
    model = GraphClassifier(width, num_layers, num_classes, dtype)

    def graph_of(batch: Batch) -> Any:
        return jraph.GraphsTuple(
            nodes=batch["nodes"],
            edges=batch["edges"],
            senders=batch["senders"],
            receivers=batch["receivers"],
            globals=jnp.ones((1, width), dtype),
            n_node=jnp.array([num_nodes]),
            n_edge=jnp.array([num_edges]),
        )

    fields = {
        "nodes": Field((num_nodes, features), dtype),
        "edges": Field((num_edges, features), dtype),
        "senders": Field((num_edges,), below=num_nodes),
        "receivers": Field((num_edges,), below=num_nodes),
        "labels": Field((num_nodes,), below=num_classes),
    }

    def init(rng: jax.Array) -> Any:
        return model.init(rng, graph_of({name: jnp.zeros(field.shape, field.dtype) for name, field in fields.items()}))[
            "params"
        ]

    def loss_of(params: Any, batch: Batch, _: jax.Array) -> jax.Array:
        logits: Any = model.apply({"params": params}, graph_of(batch))
        return cross_entropy(logits, batch["labels"]).mean()

    return training(init, loss_of, fields)
