"""Define the benchmarks of whole layers for a calibration: convolutions and attention, by size, dtype and back end.

In: devices, sizes, a rough profile. Out: `Point`s, as in `probes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar.calibration.probes import Point, Sizes, noise, program
from autopar.hardware.profile import HardwareProfile

_MOST_UNROLLED = 16


def convolution_points(devices: Sequence[Any], sizes: Sizes, base: HardwareProfile) -> Iterator[Point]:
    """Convolutions in Flax's layouts (NHWC images, HWIO kernels), and their gradients with respect to the kernel."""
    for batch, side, channels, kernel in sizes.convolutions:
        for name in (name for name in ("bfloat16", "float32") if name in sizes.dtypes):
            images, filters = (batch, side, side, channels), (kernel, kernel, channels, channels)
            flops = 2.0 * batch * side**2 * channels**2 * kernel**2
            traffic = float(jnp.dtype(name).itemsize * (2 * np.prod(images) + np.prod(filters)))
            counts = {"launch": 1.0, "flops": flops, "bytes": traffic}
            guess = flops / base.matrix_rate(name) + traffic / base.hbm_bytes_per_s + base.kernel_launch_s
            for group, chain in (("convolution", _convolutions), ("convolution gradient", _kernel_gradients)):

                def make(
                    repetitions: int, chain: Any = chain, images: Any = images, filters: Any = filters, name: str = name
                ) -> Callable[[], object]:
                    scale = float(np.prod(filters[:3])) ** -0.5  # so that values neither grow nor shrink
                    inputs = [noise(images, name), noise(filters, name, scale)]
                    return program(devices, partial(chain, repetitions), inputs)

                shape = f"{batch}x{side}x{side}x{channels} by {kernel}x{kernel}"
                yield Point(f"{group} {name}", shape, counts, guess, _MOST_UNROLLED, make)


def _convolve(x: Any, kernel: Any) -> Any:
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def _convolutions(count: int, x: Any, kernel: Any) -> Any:
    for _ in range(count):
        x = _convolve(x, kernel)
    return x


def _kernel_gradients(count: int, x: Any, kernel: Any) -> Any:
    """Kernel gradients in a chain: each depends on the previous one by one element, which is written in place."""
    for _ in range(count):
        _, back = jax.vjp(partial(_convolve, x), kernel)
        gradient = lax.optimization_barrier(back(x)[0])
        x = lax.dynamic_update_slice(x, gradient[:1, :1, :1, :1], (0, 0, 0, 0))
    return x


def attention_points(devices: Sequence[Any], sizes: Sizes, base: HardwareProfile) -> Iterator[Point]:
    """Causal bfloat16 attention by each of JAX's back ends: the forward pass alone, and with gradients.

    FLOPs count the causal half; bytes count a flash kernel, which writes no scores. XLA's kernels write them several times,
    which takes most of their time.
    """
    for batch, tokens, heads, head_dim in sizes.attention:
        forward = 2.0 * batch * heads * tokens**2 * head_dim
        whole = 2.0 * batch * tokens * heads * head_dim
        scores_s = 12.0 * batch * heads * tokens**2 / base.hbm_bytes_per_s
        for backend in ("xla", "cudnn"):
            for suffix, chain, flops, arrays in (
                ("", _attention_chain, forward, 4),
                (" with gradients", _attention_and_gradients, 3.5 * forward, 12),
            ):

                def make(
                    repetitions: int,
                    chain: Any = chain,
                    backend: str = backend,
                    shape: Any = (batch, tokens, heads, head_dim),
                ) -> Callable[[], object]:
                    inputs = [noise(shape, jnp.bfloat16)] * 3
                    return program(devices, partial(chain, backend, repetitions), inputs)

                counts = {"launch": 1.0, "flops": flops, "bytes": arrays * whole}
                guess = flops / base.matrix_rate("bfloat16") + arrays * whole / base.hbm_bytes_per_s
                guess += base.kernel_launch_s + (scores_s * arrays / 4 if backend == "xla" else 0.0)
                name = f"{batch}x{tokens}x{heads}x{head_dim}"
                yield Point(f"attention {backend}{suffix}", name, counts, guess, _MOST_UNROLLED, make)


def _attention(backend: Any, q: Any, k: Any, v: Any) -> Any:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=backend)


def _attention_chain(backend: str, count: int, q: Any, k: Any, v: Any) -> Any:
    for _ in range(count):
        q = _attention(backend, q, k, v)
    return q


def _attention_and_gradients(backend: str, count: int, q: Any, k: Any, v: Any) -> Any:
    """Attention with gradients in a chain; it uses all three gradients so that XLA removes none as dead code."""
    for _ in range(count):
        result, back = jax.vjp(partial(_attention, backend), q, k, v)
        q, k, v = back(result)
    return q + k + v
