"""Random train steps to cut into stages: blocks, an optimizer, a state with more than floats, and execution options.

In: a seed. Out: `StagedStep`, whose `text` describes the draw. With several microbatches, a block's result for an
example depends on that example alone. No operation is discontinuous, so the order of sums changes results by rounding
errors only.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

WIDTH, VOCABULARY = 8, 7
SCHEDULES = ("none", "gpipe", "1f1b", "interleaved", "zb-h1")


@dataclass(frozen=True, slots=True)
class StagedStep:
    """A step `(state, batch) -> (state, results)`.

    Args:
        create: makes the state, the same at each call. batches: of two calls. options: of `autopar.parallelize`.
    """

    text: str
    step: Callable[[Any, Any], Any]
    create: Callable[[], Any]
    batches: tuple[Any, Any]
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Given:
    """What a block may read besides its parameters and the activations.

    Args:
        count: an int32 of the state. key: of this block and this step.
    """

    batch: Any
    count: Any
    key: Any


#: From parameters, activations of shape [batch, width] and what else there is, to activations.
Block = Callable[[dict[str, Any], Any, Given], Any]


def _matmul(p: dict[str, Any], h: Any) -> Any:
    return jnp.tanh(h @ p["w"] + p["b"])


def _norm(h: Any) -> Any:
    return (h - h.mean(-1, keepdims=True)) * lax.rsqrt(h.var(-1, keepdims=True) + 1e-2)


def _attention(p: dict[str, Any], h: Any, _: Given) -> Any:
    x = h.reshape(h.shape[0], 4, WIDTH // 4)
    q, k, v = (x @ p["w"].reshape(4, WIDTH // 4, WIDTH)[n, :, : WIDTH // 4] for n in range(3))
    scores = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k), axis=-1)
    return h + (scores @ v).reshape(h.shape)


def _overlapping(dim: int, start: Callable[[Given], Any]) -> Block:
    """A slice written over where it was taken, one place further: where it is updated in place it overlaps itself."""

    def block(p: dict[str, Any], h: Any, given: Given) -> Any:
        at = start(given)
        taken = lax.dynamic_slice_in_dim(h, at, 3, dim) * (1 + p["b"][0])
        return lax.dynamic_update_slice_in_dim(h, taken, at + 1, dim)

    return block


def _scan(p: dict[str, Any], h: Any, _: Given) -> Any:
    return lax.scan(lambda h, s: (jnp.tanh(h @ p["w"] * s), None), h, jnp.array([1.0, 0.5, 0.8]))[0]


def _while(p: dict[str, Any], h: Any, given: Given) -> Any:
    scale = lax.while_loop(lambda s: s[0] < given.count % 3, lambda s: (s[0] + 1, s[1] * 0.9), (0, jnp.float32(1)))[1]
    return _matmul(p, h) * scale


def _cond(p: dict[str, Any], h: Any, given: Given) -> Any:
    return lax.cond(given.count % 2 == 0, lambda h: _matmul(p, h), lambda h: h * 0.9 + p["b"], h)


def _callback(p: dict[str, Any], h: Any, _: Given) -> Any:
    said = jax.pure_callback(np.sin, jax.ShapeDtypeStruct(h.shape, h.dtype), lax.stop_gradient(h))
    return _matmul(p, h) + 0.1 * said


def _scalar_callback(p: dict[str, Any], h: Any, _: Given) -> Any:
    of = lax.stop_gradient(p["b"])
    scale = jax.pure_callback(lambda b: np.float32(1 + 0.1 * b.max()), jax.ShapeDtypeStruct((), jnp.float32), of)
    return _matmul(p, h) * scale


def _printed(p: dict[str, Any], h: Any, given: Given) -> Any:
    jax.debug.print("step {n} bias {b}", n=given.count, b=p["b"][0])
    return _matmul(p, h)


def _dropout(p: dict[str, Any], h: Any, given: Given) -> Any:
    return _matmul(p, h) * jax.random.bernoulli(given.key, 0.8, h.shape)


def _feature_dropout(p: dict[str, Any], h: Any, given: Given) -> Any:
    return _matmul(p, h) * jax.random.bernoulli(given.key, 0.8, (WIDTH,))


#: Of any number of microbatches.
BLOCKS: dict[str, Block] = {
    "dense": lambda p, h, _: _matmul(p, h),
    "residual": lambda p, h, _: h + _matmul(p, h) @ p["w"].T,
    "checkpointed": lambda p, h, _: h + jax.checkpoint(_matmul)(p, h),
    "layernorm": lambda p, h, _: _norm(h) * (1 + p["b"]) @ p["w"],
    "attention": _attention,
    "embedding": lambda p, h, given: jnp.tanh(h + p["table"][given.batch["ids"]]) @ p["w"],
    "clipped embedding": lambda p, h, given: h + jnp.take(p["table"], given.batch["ids"] - 1, axis=0, mode="clip"),
    "gather": lambda p, h, _: h + h[:, jnp.array([3, 1, 1, 0, 7, 2, 2, 6])] * p["b"],
    "scatter": lambda p, h, _: (h @ p["w"]).at[:, jnp.array([1, 5, 2])].add(p["b"][:3]),
    "set": lambda p, h, _: _matmul(p, h).at[:, 2:5].set(p["b"][:3]),
    "dynamic slice": lambda p, h, given: _matmul(p, h) + lax.dynamic_slice_in_dim(h, given.count % 5, 1, 1),
    "overlapping": _overlapping(1, lambda given: given.count % 4),
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "scalar callback": _scalar_callback,
    "print": _printed,
    "feature dropout": _feature_dropout,
    "dropout": _dropout,
}

#: Examples that depend on one another: of one microbatch.
BATCH_BLOCKS: dict[str, Block] = {
    "overlapping examples": _overlapping(0, lambda given: given.batch["ids"][0] % 2),
    "overlapping fixed examples": _overlapping(0, lambda given: 0),
    "one example": lambda p, h, given: _matmul(p, h) + lax.dynamic_slice_in_dim(h, given.batch["ids"][0] % 3, 1, 0),
    "example by index": lambda p, h, given: _matmul(p, h) + h[given.batch["ids"][1] % 3],
    "roll": lambda p, h, given: jnp.roll(_matmul(p, h), given.batch["ids"][0], 0),
    "set examples": lambda p, h, _: _matmul(p, h).at[1:3].set(1.0),
    "callback": _callback,  # which has no rule, so that nobody knows whether examples meet in it
    "centred": lambda p, h, _: _matmul(p, h) - h.mean(0),
}

OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "sgd": lambda: optax.sgd(0.05),
    "momentum": lambda: optax.sgd(0.05, momentum=0.9),
    "adam": lambda: optax.adam(0.02, eps=1e-2),
    "adamw with a schedule": lambda: optax.adamw(optax.cosine_decay_schedule(0.02, 10), eps=1e-2),
    "ema": lambda: optax.chain(optax.ema(0.9), optax.sgd(0.05)),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.05)),
}

#: What a step gives besides its loss. Constants have types of their own, and some results are the same array.
EXTRAS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "float": lambda state, new, loss: 1.5,
    "integer": lambda state, new, loss: 3,
    "boolean": lambda state, new, loss: True,
    "array": lambda state, new, loss: jnp.arange(3, dtype=jnp.int16),
    "loss again": lambda state, new, loss: (loss, loss),
    "state again": lambda state, new, loss: (new["count"], new["params"][0]["w"]),
    "as given": lambda state, new, loss: state["never"],
    "norm": lambda state, new, loss: optax.global_norm(new["params"]),
}


def _keys(draw: random.Random) -> tuple[str, Callable[[], Any]]:
    kind = draw.choice(("threefry", "raw", "rbg"))
    if kind == "raw":
        return kind, lambda: jax.random.PRNGKey(3)
    return kind, lambda: jax.random.key(3, impl={"threefry": "threefry2x32"}.get(kind, kind))


def _batch(seed: int, size: int) -> dict[str, Any]:
    values = np.random.default_rng(seed)
    return {
        "x": values.normal(size=(size, WIDTH)).astype(np.float32),
        "y": values.normal(size=(size, WIDTH)).astype(np.float32),
        "ids": values.integers(0, VOCABULARY, size).astype(np.int32),
    }


def _params(seed: int, num: int) -> list[dict[str, Any]]:
    values = np.random.default_rng(seed)
    shapes = {"w": (WIDTH, WIDTH), "b": (WIDTH,), "table": (VOCABULARY, WIDTH)}
    return [
        {name: jnp.asarray(0.4 * values.normal(size=shape), jnp.float32) for name, shape in shapes.items()}
        for _ in range(num)
    ]


def _loss_of(kind: str, params: Sequence[dict[str, Any]], h: Any, batch: Any) -> Any:
    if kind == "squares":
        return jnp.mean((h - batch["y"]) ** 2)
    table = params[0 if kind == "tied" else -1]["table"]
    return optax.softmax_cross_entropy_with_integer_labels(h @ table.T, batch["ids"]).mean()


def _how(draw: random.Random) -> tuple[dict[str, Any], int]:
    """Options, and the size of the batch."""
    stages = draw.choice((1, 2, 2, 2, 3, 4, 4))
    schedule = draw.choice(SCHEDULES if stages == 4 else [name for name in SCHEDULES if name != "interleaved"])
    size = draw.choice((4, 8))
    fewest = 2 if schedule == "interleaved" else 1  # on two submeshes
    count = draw.choice([n for n in (1, 2, 4, size) if n >= fewest])
    options: dict[str, Any] = {"num_microbatches": count}
    if stages > 1:
        options |= {"stages": stages, "schedule": schedule}
    return options, size


def staged_step(seed: int) -> StagedStep:
    """The step of a seed."""
    draw = random.Random(seed)
    options, size = _how(draw)
    known = BLOCKS | (BATCH_BLOCKS if options["num_microbatches"] == 1 else {})
    names = [draw.choice(sorted(known)) for _ in range(draw.randint(3, 5))]
    names += ["dense"] * max(0, options.get("stages", 1) - 2)  # a layer for each stage
    draw.shuffle(names)
    num_blocks = len(names)
    head, optimizer = draw.choice(("squares", "labels", "tied")), draw.choice(sorted(OPTIMIZERS))
    extras = draw.sample(sorted(EXTRAS), draw.randint(0, 4))
    key_kind, make_key = _keys(draw)
    if "dropout" in names or "feature dropout" in names:  # XLA's own bits depend on how they are split
        key_kind, make_key = "threefry", lambda: jax.random.key(3)
    averaged = draw.random() < 0.3
    rule = OPTIMIZERS[optimizer]()

    def step(state: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            h = batch["x"] + params[0]["table"][batch["ids"]] if head == "tied" else batch["x"]
            for n, name in enumerate(names):
                h = known[name](params[n], h, Given(batch, state["count"], jax.random.fold_in(state["key"], n)))
            return _loss_of(head, params, h, batch)

        value, gradients = jax.value_and_grad(loss)(state["params"])
        updates, moments = rule.update(gradients, state["moments"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        new = {
            **state,
            "params": params,
            "moments": moments,
            "count": state["count"] + 1,
            "key": jax.random.split(state["key"])[0],
        }
        if averaged:
            new["average"] = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, state["average"], params)
        return new, (value, *(EXTRAS[name](state, new, value) for name in extras))

    def create() -> Any:
        params = _params(seed, num_blocks)
        state = {"params": params, "moments": rule.init(params), "key": make_key()}
        state |= {"count": jnp.int32(seed % 5), "seen": jnp.arange(4), "never": jnp.ones((3, 5))}
        return state | ({"average": params} if averaged else {})

    words = [f"{names}", f"loss {head}", optimizer, f"{key_kind} key", *(["average"] if averaged else [])]
    text = f"{'; '.join(words)}; results {extras}; batch of {size}; {options}"
    return StagedStep(text, step, create, (_batch(seed, size), _batch(seed + 1, size)), options)
