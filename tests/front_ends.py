"""Train steps of every supported front end in one form, for the contract test and for experiments.

Out: `Case`s. A case's step is written as its library's users write it. The other fields say how to make its state, how
to continue after a step, how to run it without autopar, and what to compare.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training.train_state import TrainState

BATCH, WIDTH, CLASSES, LAYERS = 32, 64, 16, 3


def make_batch(seed: int) -> dict[str, np.ndarray]:
    """Inputs, and which class each is of."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((BATCH, WIDTH), dtype=np.float32)
    return {"x": x, "y": (x[:, :CLASSES] + 0.1 * rng.standard_normal((BATCH, CLASSES))).argmax(1).astype(np.int32)}


def cross_entropy(logits: jax.Array, batch: Any) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def optimizer() -> optax.GradientTransformation:
    """With an epsilon that keeps rounding of small gradients small."""
    return optax.adamw(1e-2, eps=1e-3)


@dataclass(frozen=True)
class Case:
    """A train step and all that is needed to run it.

    Args:
        step: `(*state, batch)`, in the library's own style.
        create: its state, anew: a tuple of arguments.
        following: the state after a step, of the state before and what the step returned.
        loss: of what it returned.
        jit: how the library runs it on one device.
        options: of `autopar.parallelize`.
        values: of a state, what is compared.
    """

    step: Callable[..., Any]
    create: Callable[[], tuple[Any, ...]]
    following: Callable[[tuple[Any, ...], Any], tuple[Any, ...]] = lambda state, result: tuple(result[:-1])
    loss: Callable[[Any], Any] = lambda result: result[-1]
    jit: Callable[[Callable[..., Any]], Callable[..., Any]] = jax.jit
    options: dict[str, Any] | None = None
    values: Callable[[Any], Any] = lambda state: state


# -- Flax linen ------------------------------------------------------------------------------


class Classifier(nn.Module):
    """Dense layers, with dropout and batch normalisation where asked for."""

    dropout: float = 0.0
    normalise: bool = False
    names: tuple[str | None, str | None] | None = None

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        kernel_init = nn.initializers.lecun_normal()
        if self.names is not None:
            kernel_init = nn.with_partitioning(kernel_init, self.names)
        for _ in range(LAYERS):
            x = nn.relu(nn.Dense(2 * WIDTH, kernel_init=kernel_init)(x))
            if self.normalise:
                x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
            x = nn.Dropout(self.dropout, deterministic=not train)(x)
        return nn.Dense(CLASSES)(x)


def linen() -> Case:
    model, tx = Classifier(dropout=0.1), optimizer()

    def create() -> tuple[Any, ...]:
        params = model.init(jax.random.key(0), jnp.zeros((1, WIDTH)), train=False)["params"]
        return (TrainState.create(apply_fn=model.apply, params=params, tx=tx), jax.random.key(1))

    def step(state: TrainState, key: jax.Array, batch: Any) -> Any:
        dropout, key = jax.random.split(key)

        def loss_fn(params: Any) -> jax.Array:
            return cross_entropy(state.apply_fn({"params": params}, batch["x"], rngs={"dropout": dropout}), batch)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), key, loss

    return Case(step, create, values=lambda state: state[0].params)


class StatisticsState(TrainState):
    batch_stats: Any = None


def linen_batch_stats() -> Case:
    model, tx = Classifier(normalise=True), optimizer()

    def create() -> tuple[Any, ...]:
        made = model.init(jax.random.key(0), jnp.zeros((1, WIDTH)), train=False)
        return (
            StatisticsState.create(apply_fn=model.apply, params=made["params"], batch_stats=made["batch_stats"], tx=tx),
        )

    def step(state: StatisticsState, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            variables = {"params": params, "batch_stats": state.batch_stats}
            logits, changed = state.apply_fn(variables, batch["x"], mutable=["batch_stats"])
            return cross_entropy(logits, batch), changed

        (loss, changed), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads).replace(batch_stats=changed["batch_stats"]), loss

    return Case(step, create, values=lambda state: (state[0].params, state[0].batch_stats))


def linen_partitioned() -> Case:
    model, tx = Classifier(names=(None, "model")), optimizer()

    def create() -> tuple[Any, ...]:
        params = model.init(jax.random.key(0), jnp.zeros((1, WIDTH)), train=False)["params"]
        return (TrainState.create(apply_fn=model.apply, params=params, tx=tx),)

    def step(state: TrainState, batch: Any) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            return cross_entropy(state.apply_fn({"params": params}, batch["x"]), batch)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    return Case(step, create, options={"mesh": "2x4"}, values=lambda state: state[0].params)


# -- Flax NNX --------------------------------------------------------------------------------


class NnxClassifier(nnx.Module):
    """The same, whose variables are its own: statistics, and the state of its random numbers."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        widths = [WIDTH] + [2 * WIDTH] * LAYERS
        self.layers = nnx.List([nnx.Linear(a, b, rngs=rngs) for a, b in pairwise(widths)])
        self.norm = nnx.BatchNorm(2 * WIDTH, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(2 * WIDTH, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return self.head(self.dropout(self.norm(x)))


def nnx_values(state: Any) -> Any:
    """What the objects of a state hold, random keys as numbers."""
    held = nnx.to_pure_dict(nnx.state(list(state)))

    def plain(leaf: Any) -> Any:
        return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf

    return jax.tree.map(plain, held)


def in_place(state: tuple[Any, ...], result: Any) -> tuple[Any, ...]:
    return state


def nnx_step(model: Any, optimizer: nnx.Optimizer, metric: nnx.Metric, batch: Any) -> jax.Array:
    loss, grads = nnx.value_and_grad(lambda model: cross_entropy(model(batch["x"]), batch))(model)
    optimizer.update(model, grads)
    metric.update(values=loss)
    return loss


def nnx_modules() -> Case:
    def create() -> tuple[Any, ...]:
        model = NnxClassifier(nnx.Rngs(0, dropout=1))
        return model, nnx.Optimizer(model, optimizer(), wrt=nnx.Param), nnx.metrics.Average()

    return Case(nnx_step, create, in_place, lambda loss: loss, nnx.jit, values=nnx_values)


class Stacked(nnx.Module):
    """Equal layers, made by `nnx.vmap` and run by `nnx.scan`."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def create(rngs: nnx.Rngs) -> nnx.Linear:
            return nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        self.layers = create(rngs)
        self.head = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def forward(layer: nnx.Linear, x: jax.Array) -> jax.Array:
            return x + nnx.relu(layer(x))

        return self.head(forward(self.layers, x))


def nnx_scan() -> Case:
    def create() -> tuple[Any, ...]:
        model = Stacked(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optimizer(), wrt=nnx.Param), nnx.metrics.Average()

    return Case(nnx_step, create, in_place, lambda loss: loss, nnx.jit, values=nnx_values)


# -- equinox, haiku, plain functions ---------------------------------------------------------


def equinox() -> Case:
    import equinox as eqx

    tx = optimizer()

    class Model(eqx.Module):
        layers: list[eqx.nn.Linear]
        dropout: eqx.nn.Dropout
        activation: Callable[[jax.Array], jax.Array]

        def __init__(self, key: jax.Array) -> None:
            first, second, last = jax.random.split(key, 3)
            self.layers = [
                eqx.nn.Linear(WIDTH, 2 * WIDTH, key=first),
                eqx.nn.Linear(2 * WIDTH, 2 * WIDTH, key=second),
                eqx.nn.Linear(2 * WIDTH, CLASSES, key=last),
            ]
            self.dropout = eqx.nn.Dropout(0.1)
            self.activation = jax.nn.relu

        def __call__(self, x: jax.Array, key: jax.Array) -> jax.Array:
            for layer in self.layers[:-1]:
                x = self.activation(layer(x))
            return self.layers[-1](self.dropout(x, key=key))

    def create() -> tuple[Any, ...]:
        model = Model(jax.random.key(0))
        return model, tx.init(eqx.filter(model, eqx.is_inexact_array)), jax.random.key(1)

    def step(model: Model, opt_state: Any, key: jax.Array, batch: Any) -> Any:
        key, *keys = jax.random.split(key, BATCH + 1)

        def loss_fn(model: Model) -> jax.Array:
            return cross_entropy(jax.vmap(model)(batch["x"], jnp.stack(keys)), batch)

        loss, grads = eqx.filter_value_and_grad(loss_fn)(model)
        updates, opt_state = tx.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), opt_state, key, loss

    return Case(step, create, jit=eqx.filter_jit, values=lambda state: eqx.filter(state[0], eqx.is_array))


def haiku() -> Case:
    import haiku as hk

    tx = optimizer()

    def forward(x: jax.Array) -> jax.Array:
        for _ in range(LAYERS):
            x = hk.BatchNorm(True, True, 0.9)(jax.nn.relu(hk.Linear(2 * WIDTH)(x)), is_training=True)
        return hk.Linear(CLASSES)(x)

    model = hk.transform_with_state(forward)

    def create() -> tuple[Any, ...]:
        params, state = model.init(jax.random.key(0), jnp.zeros((1, WIDTH)))
        return params, state, tx.init(params)

    def step(params: Any, state: Any, opt_state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            logits, changed = model.apply(params, state, None, batch["x"])
            return cross_entropy(logits, batch), changed

        (loss, changed), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), changed, opt_state, loss

    return Case(step, create, values=lambda state: state[:2])


def create_params() -> dict[str, Any]:
    keys = iter(jax.random.split(jax.random.key(0), LAYERS + 1))
    widths = [WIDTH] + [2 * WIDTH] * (LAYERS - 1) + [CLASSES]
    return {
        f"layer_{i}": {"kernel": jax.random.normal(next(keys), (a, b)) / np.sqrt(a), "bias": jnp.zeros(b)}
        for i, (a, b) in enumerate(pairwise(widths))
    }


def predict(params: Any, x: jax.Array) -> jax.Array:
    for i in range(LAYERS):
        x = x @ params[f"layer_{i}"]["kernel"] + params[f"layer_{i}"]["bias"]
        x = x if i == LAYERS - 1 else jax.nn.relu(x)
    return x


def pure(tx: Any = None) -> Case:
    """Plain functions and an optax optimizer."""
    tx = optimizer() if tx is None else tx

    def create() -> tuple[Any, ...]:
        params = create_params()
        return params, tx.init(params)

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: cross_entropy(predict(p, batch["x"]), batch))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return Case(step, create, values=lambda state: state[0])


FRONT_ENDS: dict[str, Callable[[], Case]] = {
    "linen": linen,
    "linen_batch_stats": linen_batch_stats,
    "linen_partitioned": linen_partitioned,
    "nnx_modules": nnx_modules,
    "nnx_scan": nnx_scan,
    "equinox": equinox,
    "haiku": haiku,
    "pure": pure,
}


# -- optax -----------------------------------------------------------------------------------


def _kernels(params: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.ndim == 2, params)


def _labels(params: Any) -> Any:
    return {
        name: jax.tree.map(lambda _, n=name: "frozen" if n == "layer_0" else "trained", layer)
        for name, layer in params.items()
    }


def _lora() -> Case:
    """Adapters of rank 4 are trained, what they adapt is an argument of its own that does not come back."""
    tx = optimizer()

    def create() -> tuple[Any, ...]:
        base = create_params()
        keys = iter(jax.random.split(jax.random.key(1), LAYERS))
        adapters = {
            name: {
                "a": jax.random.normal(next(keys), (layer["kernel"].shape[0], 4)) / 8,
                "b": jnp.zeros((4, layer["kernel"].shape[1])),
            }
            for name, layer in base.items()
        }
        return base, adapters, tx.init(adapters)

    def step(base: Any, adapters: Any, opt_state: Any, batch: Any) -> Any:
        def loss_fn(adapters: Any) -> jax.Array:
            merged = {
                name: {"kernel": layer["kernel"] + adapters[name]["a"] @ adapters[name]["b"], "bias": layer["bias"]}
                for name, layer in base.items()
            }
            return cross_entropy(predict(merged, batch["x"]), batch)

        loss, grads = jax.value_and_grad(loss_fn)(adapters)
        updates, opt_state = tx.update(grads, opt_state, adapters)
        return optax.apply_updates(adapters, updates), opt_state, loss

    return Case(step, create, lambda state, result: (state[0], *result[:-1]), values=lambda state: state[:2])


def _averaged() -> Case:
    """Beside the parameters their moving average, which begins as the same arrays."""
    tx = optimizer()

    def create() -> tuple[Any, ...]:
        params = create_params()
        return ({"params": params, "average": params, "opt_state": tx.init(params)},)

    def step(state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: cross_entropy(predict(p, batch["x"]), batch))(state["params"])
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        average = optax.incremental_update(params, state["average"], 0.1)
        return {"params": params, "average": average, "opt_state": opt_state}, loss

    return Case(step, create, values=lambda state: (state[0]["params"], state[0]["average"]))


class _ShampooState(NamedTuple):
    """Per parameter, the sums of `G G^T` and of `G^T G`."""

    sums: Any


def _shampoo(learning_rate: float) -> optax.GradientTransformation:
    """Shampoo: an update is `L^(-1/4) G R^(-1/4)`, whose roots need whole matrices (eigendecompositions)."""

    def init(params: Any) -> _ShampooState:
        return _ShampooState(jax.tree.map(lambda p: tuple(jnp.eye(size) for size in p.shape if p.ndim == 2), params))

    def root(matrix: jax.Array) -> jax.Array:
        values, vectors = jnp.linalg.eigh(matrix)
        return (vectors * values**-0.25) @ vectors.T

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params

        def add(g: jax.Array, sums: Any) -> Any:
            return (sums[0] + g @ g.T, sums[1] + g.T @ g) if sums else ()

        def step(g: jax.Array, sums: Any) -> jax.Array:
            return -learning_rate * (root(sums[0]) @ g @ root(sums[1]) if sums else g)

        sums = jax.tree.map(add, updates, state.sums)
        return jax.tree.map(step, updates, sums), _ShampooState(sums)

    return optax.GradientTransformation(init, update)


def _scaled() -> Case:
    """The loss is scaled, and the scale is halved where gradients are not finite."""
    from flax.training.dynamic_scale import DynamicScale

    tx = optimizer()

    def create() -> tuple[Any, ...]:
        params = create_params()
        scale: Any = jnp.float32(2.0**10)
        return params, tx.init(params), DynamicScale(scale=scale, growth_interval=2)

    def step(params: Any, opt_state: Any, scale: DynamicScale, batch: Any) -> Any:
        grad_fn = scale.value_and_grad(lambda p: cross_entropy(predict(p, batch["x"]), batch))
        scale, finite, loss, grads = grad_fn(params)
        updates, changed = tx.update(grads, opt_state, params)

        def keep(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(finite, new, old)

        params = jax.tree.map(keep, optax.apply_updates(params, updates), params)
        return params, jax.tree.map(keep, changed, opt_state), scale, loss

    return Case(step, create, values=lambda state: (state[0], state[2].scale))


OPTAX: dict[str, Callable[[], Case]] = {
    "chain_clip_schedule": lambda: pure(
        optax.chain(
            optax.clip_by_global_norm(0.5),
            optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10), eps=1e-3),
        )
    ),
    "sgd_momentum": lambda: pure(optax.sgd(1e-2, momentum=0.9, nesterov=True)),
    "adafactor": lambda: pure(optax.adafactor(1e-2, min_dim_size_to_factor=16)),
    "lion": lambda: pure(optax.lion(1e-3)),
    "shampoo": lambda: pure(_shampoo(1e-2)),
    "muon": lambda: pure(optax.contrib.muon(1e-2)),
    "multi_steps": lambda: pure(optax.MultiSteps(optimizer(), every_k_schedule=2)),
    "masked": lambda: pure(optax.masked(optimizer(), _kernels)),
    "multi_transform": lambda: pure(
        optax.multi_transform({"trained": optimizer(), "frozen": optax.set_to_zero()}, _labels)
    ),
    "lora": _lora,
    "loss_scaling": _scaled,
    "ema_of_updates": lambda: pure(optax.chain(optax.ema(0.9), optax.sgd(1e-2))),
    "ema_of_params": _averaged,
    "inject_hyperparams": lambda: pure(optax.inject_hyperparams(optax.adamw)(learning_rate=1e-2, eps=1e-3)),
    "apply_if_finite": lambda: pure(optax.apply_if_finite(optimizer(), max_consecutive_errors=3)),
    "schedule_free": lambda: pure(optax.contrib.schedule_free_sgd(1e-2)),
    "prodigy": lambda: pure(optax.contrib.prodigy(0.1, eps=1e-3)),
    "ademamix": lambda: pure(optax.contrib.ademamix(1e-2, eps=1e-3)),
    "dadapt_adamw": lambda: pure(optax.contrib.dadapt_adamw(0.1, eps=1e-3)),
    "lamb": lambda: pure(optax.lamb(1e-2, eps=1e-3)),
    "novograd": lambda: pure(optax.novograd(1e-2, eps=1e-3)),
}
