"""Run the layers of Hugging Face's Flax models as one `nn.scan`, because many unrolled layers make a large program.

In: a model's `Training`, and the classes that create its layers. Out: the same with all layers in one loop, whose
parameters are stacked. The layer class does not change.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any
from unittest import mock

import flax.linen as nn
import jax.numpy as jnp
from transformers.modeling_flax_outputs import FlaxBaseModelOutputWithPastAndCrossAttentions

from benchmarks.zoo.training import Training


@dataclass(frozen=True, slots=True)
class Collection:
    """The classes that create a model's layers.

    Args:
        module: module that has both classes.
        collection, layer: names of the class that calls the layers in order, and of the layer class.
        outputs: function from the last layer's hidden states to the collection's result.
    """

    module: str
    collection: str
    layer: str
    outputs: Callable[[Any], Any]


GPT2 = Collection(
    "transformers.models.gpt2.modeling_flax_gpt2",
    "FlaxGPT2BlockCollection",
    "FlaxGPT2Block",
    lambda hidden: (hidden, None, None, None),
)
BERT = Collection(
    "transformers.models.bert.modeling_flax_bert",
    "FlaxBertLayerCollection",
    "FlaxBertLayer",
    lambda hidden: FlaxBaseModelOutputWithPastAndCrossAttentions(last_hidden_state=hidden),
)


def stacked(of: Training, which: Collection) -> Training:
    """A model's training, with its layers in a loop."""

    def within(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def called(*args: Any) -> Any:
            with _stacked_layers(which):
                return function(*args)

        return called

    return replace(of, step=within(of.step), create_state=within(of.create_state))


@contextmanager
def _stacked_layers(which: Collection) -> Iterator[None]:
    """A context in which models run their layers in a loop."""
    layer: Any = getattr(importlib.import_module(which.module), which.layer)

    class Stacked(nn.Module):
        config: Any
        dtype: Any = jnp.float32
        gradient_checkpointing: bool = False

        @nn.compact
        def __call__(self, hidden: Any, mask: Any, *_: Any, deterministic: bool = True, **unused: Any) -> Any:
            del unused  # caches and attentions are not returned

            def call(block: Any, hidden: Any, nothing: None) -> tuple[Any, None]:
                return block(hidden, mask, **more, deterministic=deterministic)[0], nothing

            more = {"layer_head_mask": None} if which is BERT else {}
            scanned: Any = nn.scan(
                call,
                variable_axes={"params": 0},
                split_rngs={"params": True, "dropout": True},
                length=self.config.num_hidden_layers,
            )
            hidden, _ = scanned(layer(self.config, dtype=self.dtype, name="layers"), hidden, None)
            return which.outputs(hidden)

    with mock.patch(f"{which.module}.{which.collection}", Stacked):
        yield
