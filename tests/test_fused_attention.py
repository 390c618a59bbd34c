"""Fused attention (cuDNN, Pallas) is split over batch and heads, and every device runs the kernel on its part."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn  # noqa: TID251

import autopar


def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def cudnn_step(q: Any, k: Any, v: Any) -> Any:
    def loss(*args: Any) -> Any:
        out = jax.nn.dot_product_attention(*args, implementation="cudnn", is_causal=True)
        return jnp.sum(out.astype(jnp.float32) ** 2)

    return jax.grad(loss, argnums=(0, 1, 2))(q, k, v)


def test_cudnn_attention_is_planned_without_cudnn() -> None:
    args = array(8, 256, 8, 64), array(8, 256, 4, 64), array(8, 256, 4, 64)
    plan = autopar.plan(cudnn_step, *args, mesh="8", hardware="h100-sxm")
    assert plan.prediction.step_time_s > 0
    with pytest.raises(RuntimeError, match="cuDNN"):  # JAX's own check is in place again
        cudnn.check_cudnn_version()
