"""A catalogue of ordinary train steps to plan, run and compare; it does not use autopar.

In: sizes. Out: a `Program`: the step, and functions for its state and its batch. Everything is fp32, small and
deterministic by seed, with dims that 8 devices divide. `PROGRAMS` holds one entry per kind of program; tests that need
other sizes call the builders.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

OptimizerKind = Literal["sgd", "adam", "adamw"]
Batch = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Program:
    """One train step with its state and batches.

    Args:
        step: `(*state, batch) -> (*state, loss)`.
        create_state: `rng -> state`, or `rng -> (state, ...)` if the step takes several.
        make_batch: `seed -> batch`; different seeds give different values of the same shapes.
        optimizer_kind: the optimizer, which determines the tolerance of comparisons with the unsharded step.
        num_state_args: number of leading arguments of the step that carry state.
    """

    step: Callable[..., Any]
    create_state: Callable[[jax.Array], Any]
    make_batch: Callable[[int], Batch]
    optimizer_kind: OptimizerKind
    num_state_args: int = 1

    def args(self, seed: int = 0) -> tuple[Any, ...]:
        """Arguments for one call of the step, unsharded."""
        state = jax.jit(self.create_state)(jax.random.key(seed))
        return (*(state if self.num_state_args > 1 else (state,)), self.make_batch(seed))

    def abstract_args(self) -> tuple[Any, ...]:
        """The same as `ShapeDtypeStruct`s, without building anything."""
        return jax.eval_shape(self.args)


def _optimizer(kind: OptimizerKind) -> optax.GradientTransformation:
    # A key bias has no gradient but rounding errors, which Adam would scale up to whole learning rates. An eps (Llama
    # 2's) above the rounding errors keeps it out of the comparison with the unsharded step.
    optimizers = {
        "sgd": partial(optax.sgd, 1e-2),
        "adam": partial(optax.adam, 1e-3, eps=1e-5),
        "adamw": partial(optax.adamw, 3e-4, eps=1e-5, weight_decay=0.01),
    }
    return optimizers[kind]()


def _normal(seed: int, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]


class MLP(nn.Module):
    """Dense layers of one width with relu between them."""

    width: int
    num_layers: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(self.num_layers - 1):
            x = nn.relu(nn.Dense(self.width)(x))
        return nn.Dense(self.width)(x)


def _regression(model: nn.Module, shape: tuple[int, ...], optimizer_kind: OptimizerKind) -> Program:
    """Mean squared error between `model(x)` and a target of the same shape as `x`."""
    tx = _optimizer(optimizer_kind)

    def create_state(rng: jax.Array) -> TrainState:
        params = model.init(rng, jnp.zeros(shape))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, jax.Array]:
        def loss_fn(params: Any) -> jax.Array:
            return jnp.mean((state.apply_fn({"params": params}, batch["x"]) - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    def make_batch(seed: int = 0) -> Batch:
        x, y = _normal(seed, shape, shape)
        return {"x": x, "y": y}

    return Program(train_step, create_state, make_batch, optimizer_kind)


def mlp(batch: int = 32, width: int = 64, num_layers: int = 6, optimizer: OptimizerKind = "sgd") -> Program:
    """Flax Dense with bias and relu between layers; input, hidden and output are all `width` wide."""
    return _regression(MLP(width, num_layers), (batch, width), optimizer)


class PostNormLayer(nn.Module):
    """A BERT layer: residual, then LayerNorm; heads outermost in the fused QKV kernel."""

    num_heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        batch, seq, hidden = x.shape
        head_dim = hidden // self.num_heads
        qkv = nn.Dense(3 * hidden, name="qkv")(x).reshape(batch, seq, self.num_heads, 3 * head_dim)
        q, k, v = jnp.split(qkv, 3, axis=-1)
        weights = nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(head_dim))
        attended = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(batch, seq, hidden)
        x = nn.LayerNorm()(x + nn.Dense(hidden, name="attention_out")(attended))
        inner = nn.gelu(nn.Dense(4 * hidden, name="ffn_in")(x))
        return nn.LayerNorm()(x + nn.Dense(hidden, name="ffn_out")(inner))


class PostNormEncoder(nn.Module):
    """BERT layers without embeddings or head."""

    num_layers: int
    num_heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(self.num_layers):
            x = PostNormLayer(self.num_heads)(x)
        return x


def bert_layers(
    batch: int = 8,
    seq: int = 8,
    hidden: int = 64,
    heads: int = 8,
    num_layers: int = 2,
    optimizer: OptimizerKind = "adam",
) -> Program:
    """Post-LayerNorm BERT layers on hidden states, regressed on a target of the same shape."""
    return _regression(PostNormEncoder(num_layers, heads), (batch, seq, hidden), optimizer)


class BatchNormState(TrainState):
    """A `TrainState` that also carries running statistics."""

    batch_stats: Any


class ConvNet(nn.Module):
    """Two conv + BatchNorm + relu + max-pool blocks and a classifier."""

    features: int
    num_classes: int

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        for scale in (1, 2):
            # No bias before a BatchNorm: its gradient is zero, so only rounding errors would be compared.
            x = nn.Conv(scale * self.features, (3, 3), use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
            x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = x.reshape(x.shape[0], -1)
        return nn.Dense(self.num_classes)(nn.relu(nn.Dense(8 * self.features)(x)))


def cnn_batchnorm(
    batch: int = 16, size: int = 16, features: int = 8, num_classes: int = 16, optimizer: OptimizerKind = "sgd"
) -> Program:
    """A convolutional classifier of `size` x `size` RGB images with batch statistics in its state."""
    model, tx = ConvNet(features, num_classes), _optimizer(optimizer)
    shape = (batch, size, size, 3)

    def create_state(rng: jax.Array) -> BatchNormState:
        variables = model.init(rng, jnp.zeros(shape), train=False)
        return BatchNormState.create(
            apply_fn=model.apply, params=variables["params"], tx=tx, batch_stats=variables["batch_stats"]
        )

    def train_step(state: BatchNormState, batch: Batch) -> tuple[BatchNormState, jax.Array]:
        def loss_fn(params: Any) -> tuple[jax.Array, Any]:
            variables = {"params": params, "batch_stats": state.batch_stats}
            logits, updates = state.apply_fn(variables, batch["image"], train=True, mutable=["batch_stats"])
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
            return loss, updates["batch_stats"]

        (loss, batch_stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads, batch_stats=batch_stats), loss

    def make_batch(seed: int = 0) -> Batch:
        (image,) = _normal(seed, shape)
        label = np.random.default_rng(seed + 1).integers(0, num_classes, batch, dtype=np.int32)
        return {"image": image, "label": label}

    return Program(train_step, create_state, make_batch, optimizer)


@dataclass(frozen=True, slots=True)
class GPTSizes:
    """Sizes and options of a GPT-style decoder."""

    vocab: int = 128
    seq: int = 16
    hidden: int = 64
    heads: int = 8
    num_layers: int = 2
    dropout_rate: float = 0.1
    tied_head: bool = False


class Block(nn.Module):
    """A pre-LayerNorm decoder block with fused QKV, split as in GPT-2: (3, heads, head_dim)."""

    sizes: GPTSizes

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        s = self.sizes
        drop = partial(nn.Dropout, s.dropout_rate, deterministic=not train)
        batch, seq, _ = x.shape
        q, k, v = (
            part.reshape(batch, seq, s.heads, -1)
            for part in jnp.split(nn.Dense(3 * s.hidden, name="qkv")(nn.LayerNorm()(x)), 3, axis=-1)
        )
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(s.hidden // s.heads)
        causal = jnp.tril(jnp.ones((seq, seq), bool))
        weights = drop()(nn.softmax(jnp.where(causal, scores, -1e9)))
        attended = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(batch, seq, s.hidden)
        x = x + drop()(nn.Dense(s.hidden, name="attention_out")(attended))
        inner = nn.gelu(nn.Dense(4 * s.hidden, name="mlp_in")(nn.LayerNorm()(x)))
        return x + drop()(nn.Dense(s.hidden, name="mlp_out")(inner))


class GPT(nn.Module):
    """Token and position embedding, decoder blocks, LayerNorm, a tied or separate head."""

    sizes: GPTSizes

    @nn.compact
    def __call__(self, tokens: jax.Array, train: bool) -> jax.Array:
        s = self.sizes
        embed = nn.Embed(s.vocab, s.hidden, name="token_embed")
        x = embed(tokens) + nn.Embed(s.seq, s.hidden, name="position_embed")(jnp.arange(tokens.shape[1]))
        x = nn.Dropout(s.dropout_rate, deterministic=not train)(x)
        for layer in range(s.num_layers):
            x = Block(s, name=f"block_{layer}")(x, train)
        x = nn.LayerNorm()(x)
        return embed.attend(x) if s.tied_head else nn.Dense(s.vocab, use_bias=False, name="head")(x)


def gpt(
    batch: int = 16,
    sizes: GPTSizes = GPTSizes(),
    dropout_rng: Literal["step", "batch"] = "step",
    optimizer: OptimizerKind = "adamw",
) -> Program:
    """A GPT-style language model; the dropout key is folded from the step or comes with the batch."""
    model, tx = GPT(sizes), _optimizer(optimizer)

    def create_state(rng: jax.Array) -> TrainState:
        params = model.init(rng, jnp.zeros((batch, sizes.seq), jnp.int32), train=False)["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, jax.Array]:
        if dropout_rng == "step":
            key = jax.random.fold_in(jax.random.key(0), state.step)
        else:
            key = jax.random.wrap_key_data(jnp.asarray(batch["dropout_rng"]))

        def loss_fn(params: Any) -> jax.Array:
            inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
            logits = state.apply_fn({"params": params}, inputs, train=True, rngs={"dropout": key})
            return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    def make_batch(seed: int = 0) -> Batch:
        rng = np.random.default_rng(seed)
        tokens = {"tokens": rng.integers(0, sizes.vocab, (batch, sizes.seq + 1), dtype=np.int32)}
        keys = {"dropout_rng": np.asarray([0, seed], np.uint32)} if dropout_rng == "batch" else {}
        return tokens | keys

    return Program(train_step, create_state, make_batch, optimizer)


def pure_function(batch: int = 16, width: int = 32) -> Program:
    """No library: a dict of arrays, and gradient descent by hand."""

    def create_state(rng: jax.Array) -> dict[str, jax.Array]:
        first, second = jax.random.split(rng)
        return {
            "w1": jax.random.normal(first, (width, 4 * width)) / np.sqrt(width),
            "b1": jnp.zeros(4 * width),
            "w2": jax.random.normal(second, (4 * width, width)) / np.sqrt(4 * width),
        }

    def train_step(params: dict[str, jax.Array], batch: Batch) -> tuple[dict[str, jax.Array], jax.Array]:
        def loss_fn(params: dict[str, jax.Array]) -> jax.Array:
            hidden = jnp.tanh(batch["x"] @ params["w1"] + params["b1"])
            return jnp.mean((hidden @ params["w2"] - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), loss

    def make_batch(seed: int = 0) -> Batch:
        x, y = _normal(seed, (batch, width), (batch, width))
        return {"x": x, "y": y}

    return Program(train_step, create_state, make_batch, "sgd")


def two_state_args(batch: int = 32, width: int = 32) -> Program:
    """State in two arguments, as in optax's own examples: `params, opt_state, batch`."""
    model, tx = MLP(width, 3), _optimizer("adam")

    def create_state(rng: jax.Array) -> tuple[Any, optax.OptState]:
        params = model.init(rng, jnp.zeros((batch, width)))
        return params, tx.init(params)

    def train_step(params: Any, opt_state: optax.OptState, batch: Batch) -> tuple[Any, optax.OptState, jax.Array]:
        def loss_fn(params: Any) -> jax.Array:
            return jnp.mean((model.apply(params, batch["x"]) - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    def make_batch(seed: int = 0) -> Batch:
        x, y = _normal(seed, (batch, width), (batch, width))
        return {"x": x, "y": y}

    return Program(train_step, create_state, make_batch, "adam", num_state_args=2)


#: Every kind of program whose sharded step is compared with its unsharded one.
PROGRAMS: dict[str, Callable[[], Program]] = {
    "mlp": mlp,
    "mlp_adam": partial(mlp, optimizer="adam"),
    "cnn_batchnorm": cnn_batchnorm,
    "cnn_batchnorm_adamw": partial(cnn_batchnorm, optimizer="adamw"),
    "gpt": gpt,
    "gpt_sgd": partial(gpt, optimizer="sgd"),
    "gpt_tied": partial(gpt, sizes=GPTSizes(tied_head=True), dropout_rng="batch"),
    "bert_layers": bert_layers,
    "pure_function": pure_function,
    "two_state_args": two_state_args,
}
