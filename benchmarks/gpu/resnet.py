"""ResNet-50's architecture in plain Flax, with bfloat16 convolutions. In: sizes. Out: `Training`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from benchmarks.zoo.training import BF16, Batch, Field, Training, cross_entropy, training_with_statistics

#: Channels of a bottleneck's last 1 x 1 convolution, relative to its 3 x 3 one.
_WIDER = 4


def resnet(blocks: Sequence[int], width: int, batch: int, size: int, classes: int) -> Training:
    """Image classification, by SGD with momentum.

    Args:
        blocks: number of blocks at each resolution; each resolution is half the one before.
        width: channels at the first resolution.
    """
    model = _ResNet(tuple(blocks), width, classes)

    def init(rng: jax.Array) -> Any:
        return model.init(rng, jnp.zeros((1, size, size, 3), BF16))

    def loss_of(variables: Any, batch: Batch) -> tuple[jax.Array, Any]:
        logits, updates = model.apply(variables, batch["images"], mutable=["batch_stats"])
        return cross_entropy(logits, batch["labels"]).mean(), updates["batch_stats"]

    fields = {"images": Field((batch, size, size, 3), BF16), "labels": Field((batch,), below=classes)}
    return training_with_statistics(init, loss_of, fields, optax.sgd(0.1, momentum=0.9, nesterov=True))


class _ResNet(nn.Module):
    blocks: tuple[int, ...]
    width: int
    classes: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(_norm()(_conv(self.width, (7, 7), (2, 2))(x)))
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        for level, count in enumerate(self.blocks):
            for block in range(count):
                x = _Bottleneck(self.width << level, 2 if level and not block else 1)(x)
        return nn.Dense(self.classes, dtype=BF16)(x.mean((1, 2)))


class _Bottleneck(nn.Module):
    width: int
    stride: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        wide, strides = _WIDER * self.width, (self.stride, self.stride)
        h = nn.relu(_norm()(_conv(self.width, (1, 1))(x)))
        h = nn.relu(_norm()(_conv(self.width, (3, 3), strides)(h)))
        h = _norm(scale_init=nn.initializers.zeros)(_conv(wide, (1, 1))(h))
        if x.shape != h.shape:
            x = _norm()(_conv(wide, (1, 1), strides)(x))
        return nn.relu(x + h)


def _conv(width: int, kernel: tuple[int, int], strides: tuple[int, int] = (1, 1)) -> nn.Conv:
    return nn.Conv(width, kernel, strides=strides, use_bias=False, dtype=BF16)


_norm = partial(nn.BatchNorm, use_running_average=False, momentum=0.9, dtype=BF16)
