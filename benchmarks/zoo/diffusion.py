"""A U-Net that removes noise from images, as a Flax user writes it. In: its widths and the batch. Out: `Training`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.zoo.training import F32, Batch, Field, Training, training


def unet(widths: Sequence[int], blocks: int, batch: int, size: int) -> Training:
    """Predict the noise of images from their noisy version and time, with a mean squared error.

    Args:
        widths: channels at each resolution, multiples of 8; each resolution is half the one before.
        blocks: blocks per resolution.
        size: pixels per side of the images, a multiple of 2 to the power of the number of widths less one.
    """
    model = _UNet(tuple(widths), blocks)

    def init(rng: jax.Array) -> Any:
        return model.init(rng, jnp.zeros((1, size, size, 3)), jnp.zeros((1,)))["params"]

    def loss_of(params: Any, batch: Batch, rng: jax.Array) -> jax.Array:
        del rng
        noise = model.apply({"params": params}, batch["images"], batch["times"])
        return jnp.mean((noise - batch["noise"]) ** 2)

    images = (batch, size, size, 3)
    return training(
        init, loss_of, {"images": Field(images, F32), "noise": Field(images, F32), "times": Field((batch,), F32)}
    )


class _Residual(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x: jax.Array, time: jax.Array) -> jax.Array:
        h = nn.Conv(self.width, (3, 3))(nn.silu(nn.GroupNorm(8)(x)))
        h += nn.Dense(self.width)(nn.silu(time))[:, None, None]
        h = nn.Conv(self.width, (3, 3))(nn.silu(nn.GroupNorm(8)(h)))
        return h + (x if x.shape[-1] == self.width else nn.Conv(self.width, (1, 1))(x))


class _UNet(nn.Module):
    widths: tuple[int, ...]
    blocks: int

    @nn.compact
    def __call__(self, x: jax.Array, times: jax.Array) -> jax.Array:
        first = self.widths[0]
        angles = times[:, None] * jnp.exp(-jnp.log(1e4) * jnp.arange(first // 2) / (first // 2))
        time = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
        time = nn.Dense(4 * first)(nn.silu(nn.Dense(4 * first)(time)))
        x = nn.Conv(first, (3, 3))(x)
        kept = []
        for level, width in enumerate(self.widths):
            if level:
                x = nn.Conv(width, (3, 3), strides=(2, 2))(x)
            for _ in range(self.blocks):
                x = _Residual(width)(x, time)
                kept.append(x)
        for level, width in reversed(tuple(enumerate(self.widths))):
            for _ in range(self.blocks):
                x = _Residual(width)(jnp.concatenate([x, kept.pop()], -1), time)
            if level:
                x = jax.image.resize(x, (x.shape[0], 2 * x.shape[1], 2 * x.shape[2], width), "nearest")
                x = nn.Conv(self.widths[level - 1], (3, 3))(x)
        return nn.Conv(3, (3, 3))(nn.silu(nn.GroupNorm(8)(x)))
