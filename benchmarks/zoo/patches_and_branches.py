"""Published models of images that no library here has, in Flax at any size. In: sizes and the batch. Out: `Training`.

`inception`: GoogLeNet (Szegedy et al. 2015), with batch normalization instead of biases as in Ioffe and Szegedy 2015.
`mlp_mixer`: MLP-Mixer (Tolstikhin et al. 2021). Images have channels last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from benchmarks.zoo.training import F32, Batch, Field, Training, cross_entropy, training, training_with_statistics


@dataclass(frozen=True, slots=True)
class Branches:
    """The channels of an Inception module.

    Args:
        single: of the 1x1 branch.
        three, five: of the reduction and the convolution of the 3x3 and of the 5x5 branch.
        pool: of the projection after the pool.
    """

    single: int
    three: tuple[int, int]
    five: tuple[int, int]
    pool: int


#: The channels of GoogLeNet's modules, by resolution.
GOOGLENET: tuple[tuple[Branches, ...], ...] = (
    (Branches(64, (96, 128), (16, 32), 32), Branches(128, (128, 192), (32, 96), 64)),
    (
        Branches(192, (96, 208), (16, 48), 64),
        Branches(160, (112, 224), (24, 64), 64),
        Branches(128, (128, 256), (24, 64), 64),
        Branches(112, (144, 288), (32, 64), 64),
        Branches(256, (160, 320), (32, 128), 128),
    ),
    (Branches(256, (160, 320), (32, 128), 128), Branches(384, (192, 384), (48, 128), 128)),
)


def inception(
    groups: Sequence[Sequence[Branches]],
    batch: int,
    size: int,
    classes: int,
    tx: optax.GradientTransformation,
    share: float = 1.0,
) -> Training:
    """Modules of four branches side by side, with running statistics.

    Args:
        groups: modules at each resolution; each resolution is half the one before.
        size: pixels per side of the images; the first module has an eighth of them.
        share: of the channels of each convolution that remains.
    """
    model = _Inception(tuple(map(tuple, groups)), classes, share)

    def init(rng: jax.Array) -> Any:
        return model.init(rng, jnp.zeros((1, size, size, 3)))

    def loss_of(variables: Any, batch: Batch) -> tuple[jax.Array, Any]:
        logits, updated = model.apply(variables, batch["images"], mutable=["batch_stats"])
        return cross_entropy(logits, batch["labels"]).mean(), updated["batch_stats"]

    return training_with_statistics(init, loss_of, _labelled(batch, size, classes), tx)


def mlp_mixer(width: int, tokens: int, blocks: int, patch: int, batch: int, size: int, classes: int) -> Training:
    """Blocks that mix patches, then channels.

    Args:
        width, tokens: channels, and hidden units of the MLP over patches; the one over channels has four times the width.
        patch: pixels per side of a patch, a divisor of `size`.
    """
    model = _Mixer(width, tokens, blocks, patch, classes)

    def init(rng: jax.Array) -> Any:
        return model.init(rng, jnp.zeros((1, size, size, 3)))["params"]

    def loss_of(params: Any, batch: Batch, rng: jax.Array) -> jax.Array:
        del rng
        logits: Any = model.apply({"params": params}, batch["images"])
        return cross_entropy(logits, batch["labels"]).mean()

    return training(init, loss_of, _labelled(batch, size, classes))


def _labelled(batch: int, size: int, classes: int) -> Mapping[str, Field]:
    return {"images": Field((batch, size, size, 3), F32), "labels": Field((batch,), below=classes)}


class _Normed(nn.Module):
    """A convolution, batch normalization and ReLU."""

    channels: int
    kernel: int
    stride: int = 1

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        sizes = (self.kernel, self.kernel), (self.stride, self.stride)
        x = nn.Conv(self.channels, *sizes, use_bias=False)(x)
        return nn.relu(nn.BatchNorm(use_running_average=False)(x))


class _Module(nn.Module):
    branches: Branches
    share: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def normed(channels: int, kernel: int) -> _Normed:
            return _Normed(max(1, round(self.share * channels)), kernel)

        of = self.branches
        pooled = nn.max_pool(x, (3, 3), (1, 1), "SAME")
        made = [
            normed(of.single, 1)(x),
            normed(of.three[1], 3)(normed(of.three[0], 1)(x)),
            normed(of.five[1], 5)(normed(of.five[0], 1)(x)),
            normed(of.pool, 1)(pooled),
        ]
        return jnp.concatenate(made, -1)


class _Inception(nn.Module):
    groups: tuple[tuple[Branches, ...], ...]
    classes: int
    share: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        first, second = max(1, round(64 * self.share)), max(1, round(192 * self.share))
        x = nn.max_pool(_Normed(first, 7, 2)(x), (3, 3), (2, 2), "SAME")
        x = _Normed(second, 3)(_Normed(first, 1)(x))
        for group in self.groups:
            x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
            for branches in group:
                x = _Module(branches, self.share)(x)
        return nn.Dense(self.classes)(x.mean((1, 2)))


class _Mlp(nn.Module):
    hidden: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(x.shape[-1])(nn.gelu(nn.Dense(self.hidden)(x)))


class _Mixer(nn.Module):
    width: int
    tokens: int
    blocks: int
    patch: int
    classes: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        sizes = (self.patch, self.patch)
        x = nn.Conv(self.width, sizes, sizes)(x).reshape(x.shape[0], -1, self.width)
        for _ in range(self.blocks):
            mixed = _Mlp(self.tokens)(nn.LayerNorm()(x).swapaxes(1, 2))
            x = x + mixed.swapaxes(1, 2)
            x = x + _Mlp(4 * self.width)(nn.LayerNorm()(x))
        return nn.Dense(self.classes)(nn.LayerNorm()(x).mean(1))
