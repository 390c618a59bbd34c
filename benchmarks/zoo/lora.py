"""Fine-tune a LLaMA-like decoder in Flax linen with LoRA adapters: the base weights are frozen.

In: `LoraConfig` and the sizes of a batch. Out: `Training`. The base weights are in bfloat16 and have no gradient and no
optimizer state; the adapters of all linear layers are in float32 and trained with AdamW. The frozen weights are a
subtree of `params` that `optax.multi_transform` sets to zero updates, or a field of the state of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

from benchmarks.zoo.training import BF16, F32, Batch, Field, Training, adamw, next_token_loss

#: How the base weights are frozen: zero updates in `optax.multi_transform`, or a field of the state without gradient.
Freezing = Literal["zero updates", "own field"]


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """Sizes of the decoder and of its adapters.

    Args:
        rank: rank of the adapters.
        scanned: whether the layers are one `nn.scan`, each rematerialized, or unrolled.
        dtype: of activations and base weights.
    """

    vocab: int = 256
    width: int = 64
    hidden: int = 128
    layers: int = 2
    heads: int = 8
    key_heads: int = 4
    rank: int = 8
    scanned: bool = True
    dtype: Any = BF16

    @classmethod
    def llama_70b(cls, *, rank: int = 16, scanned: bool = True) -> LoraConfig:
        """The sizes of LLaMA 3 70B."""
        return cls(128_256, 8192, 28_672, 80, 64, 8, rank, scanned)


def lora(config: LoraConfig, batch: int, seq: int, freezing: Freezing = "own field") -> Training:
    """Fine-tuning with next-token loss."""
    module, fields = _Decoder(config), {"tokens": Field((batch, seq), below=config.vocab)}

    def init(rng: jax.Array) -> Any:
        return module.init(rng, jnp.zeros((1, 2), jnp.int32))["params"]

    def loss_of(params: Any, batch: Batch) -> jax.Array:
        logits: Any = module.apply({"params": params}, batch["tokens"])
        return next_token_loss(logits, batch["tokens"])

    return _of_own_field(init, loss_of, fields) if freezing == "own field" else _of_zero_updates(init, loss_of, fields)


class LoraState(TrainState):
    """A `TrainState` of the adapters, which also carries the frozen base weights."""

    frozen: Any


def _of_own_field(init: Any, loss_of: Any, fields: dict[str, Field]) -> Training:
    def create_state(rng: jax.Array) -> LoraState:
        params = init(rng)
        adapters, frozen = _split(params)
        return LoraState.create(apply_fn=_unused, params=adapters, tx=adamw(), frozen=frozen)

    def train_step(state: LoraState, batch: Batch) -> tuple[LoraState, jax.Array]:
        loss, grads = jax.value_and_grad(lambda adapters: loss_of(_merge(adapters, state.frozen), batch))(state.params)
        return state.apply_gradients(grads=grads), loss

    train_step.__qualname__ = train_step.__name__  # the name in reports
    return Training(train_step, create_state, fields)


def _of_zero_updates(init: Any, loss_of: Any, fields: dict[str, Field]) -> Training:
    def labels(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, _: "adapter" if _is_adapter(path) else "frozen",
            params,
        )

    tx = optax.multi_transform({"adapter": adamw(), "frozen": optax.set_to_zero()}, labels)

    def create_state(rng: jax.Array) -> TrainState:
        return TrainState.create(apply_fn=_unused, params=init(rng), tx=tx)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, jax.Array]:
        loss, grads = jax.value_and_grad(lambda params: loss_of(params, batch))(state.params)
        return state.apply_gradients(grads=grads), loss

    train_step.__qualname__ = train_step.__name__
    return Training(train_step, create_state, fields)


def _is_adapter(path: Any) -> bool:
    return str(path[-1].key).startswith("lora_")


def _split(params: Any) -> tuple[Any, Any]:
    """Adapters and frozen weights, each a dict from path to leaf."""
    adapters: dict[str, Any] = {}
    frozen: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        (adapters if _is_adapter(path) else frozen)[jax.tree_util.keystr(path, simple=True, separator="/")] = leaf
    return adapters, frozen


def _merge(adapters: dict[str, Any], frozen: dict[str, Any]) -> Any:
    merged: dict[str, Any] = {}
    for path, leaf in {**adapters, **frozen}.items():
        *outer, last = path.split("/")
        inner = merged
        for name in outer:
            inner = inner.setdefault(name, {})
        inner[last] = leaf
    return merged


class _LoraDense(nn.Module):
    """`x W + x A B`; W is frozen."""

    features: int
    rank: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        fan_in = x.shape[-1]
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (fan_in, self.features), self.dtype)
        down = self.param("lora_a", nn.initializers.lecun_normal(), (fan_in, self.rank), F32)
        up = self.param("lora_b", nn.initializers.zeros, (self.rank, self.features), F32)
        return x @ kernel + (x @ down.astype(self.dtype)) @ up.astype(self.dtype)


class _Layer(nn.Module):
    config: LoraConfig

    @nn.compact
    def __call__(self, x: jax.Array, _: None = None) -> tuple[jax.Array, None]:
        config, heads = self.config, self.config.heads

        def dense(features: int, name: str) -> _LoraDense:
            return _LoraDense(features, config.rank, config.dtype, name=name)

        def norm(name: str) -> nn.RMSNorm:
            return nn.RMSNorm(dtype=config.dtype, param_dtype=config.dtype, name=name)

        size = config.width // heads
        normed = norm("attention_norm")(x)
        query = dense(heads * size, "query")(normed).reshape(*x.shape[:2], heads, size)
        key, value = (
            dense(config.key_heads * size, name)(normed).reshape(*x.shape[:2], config.key_heads, size)
            for name in ("key", "value")
        )
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        x = x + dense(config.width, "out")(mixed.reshape(*x.shape[:2], heads * size))
        normed = norm("mlp_norm")(x)
        gated = nn.silu(dense(config.hidden, "gate")(normed)) * dense(config.hidden, "up")(normed)
        return x + dense(config.width, "down")(gated), None


class _Decoder(nn.Module):
    config: LoraConfig

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        config = self.config
        table = self.param("embedding", nn.initializers.normal(0.02), (config.vocab, config.width), config.dtype)
        x = table[tokens]
        layer: Any = nn.remat(_Layer, prevent_cse=False)
        if config.scanned:
            x, _ = nn.scan(
                layer,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=config.layers,
            )(config, name="layers")(x, None)
        else:
            for n in range(config.layers):
                x, _ = layer(config, name=f"layer_{n}")(x)
        x = nn.RMSNorm(dtype=config.dtype, param_dtype=config.dtype, name="norm")(x)
        head = self.param("head", nn.initializers.lecun_normal(), (config.width, config.vocab), config.dtype)
        return x @ head


def _unused(*_: Any) -> None:
    """Placeholder for a `TrainState`'s `apply_fn`, which no step here calls."""
