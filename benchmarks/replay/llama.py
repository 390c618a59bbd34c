"""A train step of Llama 3 in plain JAX, fully sharded, as torchtitan and MaxText run it.

In: sizes, a mesh, what is rematerialized. Out: a lowered step for absent GPUs, and the work of its attention kernels.

Collectives are explicit (`jax.shard_map`): each layer's weights are cast to bfloat16 and all-gathered where they are used,
their gradients are reduce-scattered, and the keys and values of context parallelism are all-gathered. Attention is a
stand-in: a Pallas kernel with the operands and the results of cuDNN's or FlashAttention's, so that XLA schedules around it;
the replay is given what the real kernel computes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from autopar.xla_replay.library_calls import Attention

#: The mesh axes: batch and weights are sharded over `fsdp`, the sequence and the weights over `cp`.
AXES = ("fsdp", "cp")
_EPSILON = 1e-5
#: The linear layers of a block.
_LINEAR = ("query", "key", "value", "out", "gate", "up", "down")
_FLOAT8, _FLOAT8_GRADIENT = jnp.float8_e4m3fn, jnp.float8_e5m2

Weights = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama:
    """A model and how it is trained.

    Args:
        batch, length: sequences and tokens of a sequence that one group of context parallelism has.
        saved: names of the activations that the forward pass saves; everything else is computed again.
        float8: whether the linear layers, not the last one, compute in float8 with dynamic scales of whole tensors. Their
            weights are gathered in float8, and the scales of all weights are computed at once.
        eager: whether each operation of PyTorch's is a kernel of its own.
        repeats_keys: whether keys and values are repeated for every query head before attention.
        reduces_f32: whether gradients are reduced in float32.
        one_hot: whether the embedding is a matmul with one-hot rows.
    """

    batch: int
    length: int
    saved: tuple[str, ...]
    layers: int = 32
    width: int = 4096
    hidden: int = 14336
    heads: int = 32
    key_heads: int = 8
    vocabulary: int = 128_256
    float8: bool = False
    eager: bool = False
    repeats_keys: bool = True
    reduces_f32: bool = True
    one_hot: bool = False

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def attention_key_heads(self) -> int:
        """Heads of the keys that the attention kernel reads."""
        return self.heads if self.repeats_keys else self.key_heads

    def shapes(self) -> Weights:
        """Shapes of all weights; those of the layers are stacked."""
        keys = self.key_heads * self.head_dim
        layer = {
            "query": (self.width, self.width),
            "key": (self.width, keys),
            "value": (self.width, keys),
            "out": (self.width, self.width),
            "gate": (self.width, self.hidden),
            "up": (self.width, self.hidden),
            "down": (self.hidden, self.width),
            "attention_norm": (self.width,),
            "ffn_norm": (self.width,),
        }
        return {
            "embedding": (self.vocabulary, self.width),
            "layers": {name: (self.layers, *shape) for name, shape in layer.items()},
            "norm": (self.width,),
            "output": (self.width, self.vocabulary),
        }


def attention_kernels(model: Llama, context_parallel: int) -> Mapping[str, Attention]:
    """What the attention kernels compute on one device, by the names of the stand-ins.

    With context parallelism, a device computes its own tokens under a causal mask, and then, for every other device, half
    of the scores without a mask: as many on each device.
    """
    length = model.length // context_parallel
    row = model.batch * model.head_dim * 2  # bytes of one token of one head
    query_bytes, statistics = row * length * model.heads, 4 * model.batch * model.heads * length

    def kernel(keys: int, fraction: float, is_backward: bool) -> Attention:
        key_bytes = row * keys * model.attention_key_heads
        return Attention(
            batch=model.batch * model.heads,
            queries=length,
            keys=keys,
            head_dim=model.head_dim,
            value_dim=model.head_dim,
            dtype="bf16",
            fraction=fraction,
            is_backward=is_backward,
            num_bytes=(2 + 2 * is_backward) * (query_bytes + key_bytes) + statistics,
        )

    causal = (length + 1) / (2 * length)
    return {
        "mha_own_forward": kernel(length, causal, False),
        "mha_own_backward": kernel(length, causal, True),
        "mha_part_forward": kernel(length // 2, 1.0, False),
        "mha_part_backward": kernel(length // 2, 1.0, True),
    }


def lowered(model: Llama, mesh: Mesh, device_kind: str, num_cores: int) -> jax.stages.Lowered:
    """The train step: gradients, clipping by the global norm, AdamW. The state is donated."""
    sizes = tuple(mesh.shape[axis] for axis in AXES)
    device = AbstractDevice(device_kind=device_kind, num_cores=num_cores, platform="gpu")
    abstract = AbstractMesh(sizes, AXES, (AxisType.Auto,) * 2, abstract_device=device)
    specs = jax.tree.map_with_path(_spec, model.shapes(), is_leaf=lambda node: isinstance(node, tuple))
    state_specs = {"params": specs, "mean": specs, "square": specs, "count": P()}
    batch_spec = P("fsdp", "cp")
    tokens = jax.ShapeDtypeStruct((model.batch * sizes[0], model.length), jnp.int32)
    params = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32), model.shapes(), is_leaf=lambda x: isinstance(x, tuple)
    )
    state = {"params": params, "mean": params, "square": params, "count": jax.ShapeDtypeStruct((), jnp.int32)}
    place = partial(jax.tree.map, lambda spec: NamedSharding(mesh, spec), is_leaf=lambda x: isinstance(x, P))
    step = jax.shard_map(
        partial(_step, model, math.prod(sizes)),
        mesh=None,
        in_specs=(state_specs, batch_spec, batch_spec),
        out_specs=(state_specs, P()),
        check_vma=False,
    )
    with jax.sharding.use_abstract_mesh(abstract):
        jitted = jax.jit(
            step,
            in_shardings=(place(state_specs), place(batch_spec), place(batch_spec)),
            out_shardings=(place(state_specs), place(P())),
            donate_argnums=0,
        )
        return jitted.trace(state, tokens, tokens).lower(lowering_platforms=("cuda",))


def _spec(path: Any, shape: tuple[int, ...]) -> P:
    """Weights are sharded over all devices, in the first dim that is not the layers'."""
    stacked = path[0].key == "layers"
    return P(None, AXES) if stacked else P(AXES)


# -- the step, as one device runs it -----------------------------------------------------------


def _step(model: Llama, num_devices: int, state: Weights, tokens: Any, targets: Any) -> tuple[Weights, Any]:
    loss, grads = jax.value_and_grad(partial(_loss, model))(state["params"], tokens, targets)
    loss = lax.psum(loss, AXES) / num_devices
    squares = sum(jnp.sum(jnp.square(grad)) for grad in jax.tree.leaves(grads))
    scale = jnp.minimum(1.0, lax.rsqrt(lax.psum(squares, AXES)))
    return _adamw(state, grads, scale), loss


def _adamw(state: Weights, grads: Weights, scale: Any) -> Weights:
    count = state["count"] + 1
    first, second = (1 - decay ** count.astype(jnp.float32) for decay in (0.9, 0.95))
    mean = jax.tree.map(lambda old, grad: 0.9 * old + 0.1 * scale * grad, state["mean"], grads)
    square = jax.tree.map(lambda old, grad: 0.95 * old + 0.05 * jnp.square(scale * grad), state["square"], grads)
    params = jax.tree.map(
        lambda old, m, v: old - 3e-4 * (m / first / (jnp.sqrt(v / second) + 1e-8) + 0.1 * old),
        state["params"],
        mean,
        square,
    )
    return {"params": params, "mean": mean, "square": square, "count": count}


def _loss(model: Llama, params: Weights, tokens: Any, targets: Any) -> Any:
    gather = _gather(model.reduces_f32)
    layers = params["layers"]
    scales = _weight_scales(lax.stop_gradient(layers)) if model.float8 else {}
    embedding = gather(params["embedding"])
    x = (
        jax.nn.one_hot(tokens, model.vocabulary, dtype=embedding.dtype) @ embedding
        if model.one_hot
        else embedding[tokens]
    )
    policy = jax.checkpoint_policies.save_only_these_names(*model.saved)
    body = jax.checkpoint(partial(_layer, model, _rotary(model, tokens.shape[1])), policy=policy, prevent_cse=False)
    x, _ = lax.scan(lambda x, layer: (body(x, *layer), None), x, (layers, scales))
    logits = _norm(model, x, gather(params["norm"])) @ gather(params["output"])
    logits = logits.astype(jnp.float32)
    shifted = logits - lax.stop_gradient(logits.max(-1, keepdims=True))
    chosen = jnp.take_along_axis(shifted, targets[..., None], -1)[..., 0]
    return jnp.mean(jnp.log(jnp.exp(shifted).sum(-1)) - chosen)


def _layer(model: Llama, rotary: tuple[Any, Any], x: Any, sharded: Weights, scales: Weights) -> Any:
    gather, alone = _gather(model.reduces_f32), _materialized if model.eager else _unchanged

    def linear(x: Any, name: str) -> Any:
        if model.float8:
            return checkpoint_name(_float8_linear(x, sharded[name], scales[name]), name)
        return checkpoint_name(x @ gather(sharded[name]), name)

    h = _norm(model, x, gather(sharded["attention_norm"]))
    query, key, value = (
        linear(h, name).reshape(*x.shape[:2], -1, model.head_dim) for name in ("query", "key", "value")
    )
    query, key = (_rotate(model, one, rotary) for one in (query, key))
    if model.repeats_keys:
        key, value = (alone(jnp.repeat(one, model.heads // model.key_heads, 2)) for one in (key, value))
    x = alone(x + linear(_attention(query, key, value).reshape(x.shape), "out"))
    h = _norm(model, x, gather(sharded["ffn_norm"]))
    gate, up = (linear(h, name) for name in ("gate", "up"))
    return alone(x + linear(alone(alone(jax.nn.silu(gate)) * up), "down"))


def _gather(reduces_f32: bool) -> Any:
    """All-gather a weight in bfloat16; reduce-scatter its gradient, and average it."""

    @jax.custom_vjp
    def gather(weight: Any) -> Any:
        return lax.all_gather(weight.astype(jnp.bfloat16), AXES, axis=0, tiled=True)

    def backward(_: None, grad: Any) -> tuple[Any]:
        reduced = lax.psum_scatter(
            grad.astype(jnp.float32 if reduces_f32 else jnp.bfloat16), AXES, scatter_dimension=0, tiled=True
        )
        return (reduced.astype(jnp.float32) / lax.axis_size(AXES),)

    gather.defvjp(lambda weight: (gather(weight), None), backward)
    return gather


def _norm(model: Llama, x: Any, weight: Any) -> Any:
    alone = _materialized if model.eager else _unchanged
    wide = alone(x.astype(jnp.float32))
    scale = alone(lax.rsqrt(jnp.mean(alone(jnp.square(wide)), -1, keepdims=True) + _EPSILON))
    return alone(alone(alone(wide * scale).astype(x.dtype)) * weight)


def _rotary(model: Llama, length: int) -> tuple[Any, Any]:
    """Cosine and sine of each position's angles; with context parallelism, of this device's positions."""
    frequencies = 500_000.0 ** -(jnp.arange(0, model.head_dim, 2) / model.head_dim)
    positions = jnp.arange(length) + lax.axis_index("cp") * length
    angles = positions[:, None, None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def _rotate(model: Llama, x: Any, rotary: tuple[Any, Any]) -> Any:
    alone = _materialized if model.eager else _unchanged
    cos, sin = rotary
    wide = alone(x.astype(jnp.float32))
    first, second = wide[..., 0::2], wide[..., 1::2]
    turned = jnp.stack((first * cos - second * sin, first * sin + second * cos), -1)
    return alone(alone(turned.reshape(x.shape)).astype(x.dtype))


@jax.custom_vjp
def _materialized(x: Any) -> Any:
    """A value that a kernel of its own writes to memory, and so does its gradient."""
    return lax.optimization_barrier(x)


_materialized.defvjp(lambda x: (_materialized(x), None), lambda _, grad: (lax.optimization_barrier(grad),))


def _unchanged(x: Any) -> Any:
    return x


# -- float8 ------------------------------------------------------------------------------------


def _weight_scales(layers: Weights) -> Weights:
    """The scale of every linear layer's weight: one reduction over the devices for all of them."""
    largest = {name: jnp.max(jnp.abs(layers[name]), axis=(1, 2)) for name in _LINEAR}
    return jax.tree.map(lambda one: _scale(one, _FLOAT8), lax.pmax(largest, AXES))


def _scale(largest: Any, dtype: Any) -> Any:
    """What a tensor is divided by, so that its largest magnitude fills the range of float8."""
    return jnp.maximum(largest.astype(jnp.float32), 1e-12) / float(jnp.finfo(dtype).max)


def _quantized(x: Any, dtype: Any, scale: Any = None) -> tuple[Any, Any]:
    """A tensor in float8, and its scale."""
    limit = float(jnp.finfo(dtype).max)
    scale = _scale(jnp.max(jnp.abs(x)), dtype) if scale is None else scale
    return jnp.clip(x.astype(jnp.float32) / scale, -limit, limit).astype(dtype), scale


def _scaled_dot(left: tuple[Any, Any], right: tuple[Any, Any], contracted: tuple[int, int]) -> Any:
    """A float8 matmul with one scale per operand, in bfloat16; XLA makes it one call of cuBLASLt."""
    x, y = (
        one.astype(jnp.bfloat16) * jnp.broadcast_to(scale.astype(jnp.bfloat16), one.shape)
        for one, scale in (left, right)
    )
    return lax.dot_general(x, y, (((contracted[0],), (contracted[1],)), ((), ())))


def _gathered(shard: Any, scale: Any) -> tuple[Any, Any]:
    quantized, _ = _quantized(shard, _FLOAT8, scale)
    return lax.all_gather(quantized, AXES, axis=0, tiled=True), scale


@jax.custom_vjp
def _float8_linear(x: Any, shard: Any, scale: Any) -> Any:
    """Matmul with a sharded weight, which is gathered in float8; its gradient is reduce-scattered in float32."""
    flat = _quantized(x.reshape(-1, x.shape[-1]), _FLOAT8)
    return _scaled_dot(flat, _gathered(shard, scale), (1, 0)).reshape(*x.shape[:-1], -1)


def _float8_backward(kept: tuple[Any, Any, Any], grad: Any) -> tuple[Any, Any, Any]:
    x, shard, scale = kept
    flat = _quantized(grad.reshape(-1, grad.shape[-1]), _FLOAT8_GRADIENT)
    to_x = _scaled_dot(flat, _gathered(shard, scale), (1, 1))
    whole = _scaled_dot(_quantized(x.reshape(-1, x.shape[-1]), _FLOAT8), flat, (0, 0))
    reduced = lax.psum_scatter(whole.astype(jnp.float32), AXES, scatter_dimension=0, tiled=True)
    return to_x.reshape(x.shape), reduced / lax.axis_size(AXES), jnp.zeros_like(scale)


_float8_linear.defvjp(lambda *operands: (_float8_linear(*operands), operands), _float8_backward)


# -- attention ---------------------------------------------------------------------------------


def _stand_in(name: str, operands: tuple[Any, ...], results: tuple[Any, ...]) -> tuple[Any, ...]:
    """A kernel with these operands and results. It writes one element: what it computes is never run."""

    def kernel(*refs: Any) -> None:
        for ref in refs[len(operands) :]:
            index = (0,) * len(ref.shape)
            ref[index] = refs[0][(0,) * len(refs[0].shape)].astype(ref.dtype)

    shapes = [jax.ShapeDtypeStruct(one.shape, dtype) for one, dtype in results]
    return tuple(
        pl.pallas_call(kernel, out_shape=shapes, grid=(1,), compiler_params=plgpu.CompilerParams(), name=name)(
            *operands
        )
    )


@jax.custom_vjp
def _attention(query: Any, key: Any, value: Any) -> Any:
    """Causal attention; with context parallelism over all devices' tokens, as PyTorch computes it.

    Keys and values are all-gathered. There is one kernel for each device's part of them, whose results are merged in
    float32. Their gradients go around a ring in float32.
    """
    return _attention_forward(query, key, value)[0]


def _parts(key: Any, value: Any) -> list[tuple[str, Any, Any]]:
    """A device's own keys and values, and the half of every other device's that it needs."""
    length, num_parts = key.shape[1], lax.axis_size("cp")
    if num_parts == 1:
        return [("own", key, value)]
    keys, values = (lax.all_gather(one, "cp", axis=1, tiled=True) for one in (key, value))
    starts = [length * part for part in range(1, num_parts)]
    return [
        ("own", key, value),
        *(("part", *(one[:, start : start + length // 2] for one in (keys, values))) for start in starts),
    ]


def _attention_forward(query: Any, key: Any, value: Any) -> tuple[Any, Any]:
    statistics = jax.ShapeDtypeStruct(query.shape[:3], jnp.float32)
    results = ((query, query.dtype), (statistics, jnp.float32))
    parts = [_stand_in(f"mha_{name}_forward", (query, *part), results) for name, *part in _parts(key, value)]
    out, total = parts[0]
    for part, other in parts[1:]:
        wide = out.astype(jnp.float32)
        out = wide - jax.nn.sigmoid(other - total)[..., None] * (wide - part.astype(jnp.float32))
        total = total - jax.nn.log_sigmoid(total - other)
    out, total = (checkpoint_name(one, "attention") for one in (out.astype(query.dtype), total))
    return out, (query, key, value, out, total)


def _attention_backward(kept: tuple[Any, ...], grad: Any) -> tuple[Any, ...]:
    query, key, value, out, total = kept
    if lax.axis_size("cp") == 1:
        return _stand_in("mha_own_backward", (*kept, grad), tuple((one, one.dtype) for one in kept[:3]))
    ring = [(n, (n + 1) % lax.axis_size("cp")) for n in range(lax.axis_size("cp"))]
    grads = [jnp.zeros(one.shape, jnp.float32) for one in (query, key, value)]
    for name, *part in _parts(key, value):
        operands = (query, *part, out, total, grad)
        found = _stand_in(f"mha_{name}_backward", operands, tuple((one, one.dtype) for one in operands[:3]))
        grads[0] += found[0].astype(jnp.float32)
        for n in (1, 2):
            added = grads[n].at[:, : part[0].shape[1]].add(found[n].astype(jnp.float32))
            grads[n] = lax.ppermute(added, "cp", ring)
    return tuple(one.astype(query.dtype) for one in grads)


_attention.defvjp(_attention_forward, _attention_backward)
