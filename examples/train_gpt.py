"""Train a GPT on the source code of Python's standard library, sharded over 8 virtual CPU devices.

`make demo` runs this. Everything above `main` is ordinary Flax; autopar is the one line that makes
`sharded_step`. `autopar plan examples/train_gpt.py:target --devices 8 --hardware h100-sxm` plans the
same step for GPUs that are not there.
"""

from __future__ import annotations

import os

# Before JAX is imported: it reads these once.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import statistics
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import autopar

VOCAB = 256  # bytes
SEQ = 64
BATCH = 8
HIDDEN = 448
HEADS = 8
NUM_LAYERS = 4
DROPOUT_RATE = 0.1
NUM_STEPS = 40

Batch = dict[str, np.ndarray]


class Block(nn.Module):
    """LayerNorm, attention, LayerNorm, MLP; each pair added to the residual stream."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        batch, seq, _ = x.shape
        qkv = nn.Dense(3 * HIDDEN, name="qkv")(nn.LayerNorm()(x))
        q, k, v = (part.reshape(batch, seq, HEADS, -1) for part in jnp.split(qkv, 3, axis=-1))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(HIDDEN // HEADS)
        scores = jnp.where(jnp.tril(jnp.ones((seq, seq), bool)), scores, -1e9)
        weights = nn.Dropout(DROPOUT_RATE, deterministic=not train)(nn.softmax(scores))
        attended = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape)
        x = x + nn.Dropout(DROPOUT_RATE, deterministic=not train)(nn.Dense(HIDDEN, name="attention_out")(attended))
        inner = nn.gelu(nn.Dense(4 * HIDDEN, name="mlp_in")(nn.LayerNorm()(x)))
        return x + nn.Dropout(DROPOUT_RATE, deterministic=not train)(nn.Dense(HIDDEN, name="mlp_out")(inner))


class GPT(nn.Module):
    """A byte-level language model of about 10 million parameters."""

    @nn.compact
    def __call__(self, tokens: jax.Array, train: bool) -> jax.Array:
        token = nn.Embed(VOCAB, HIDDEN, name="token_embed")(tokens)
        position = nn.Embed(SEQ, HIDDEN, name="position_embed")(jnp.arange(tokens.shape[1]))
        x = nn.Dropout(DROPOUT_RATE, deterministic=not train)(token + position)
        for layer in range(NUM_LAYERS):
            x = Block(name=f"block_{layer}")(x, train)
        return nn.Dense(VOCAB, use_bias=False, name="head")(nn.LayerNorm()(x))


MODEL = GPT()
OPTIMIZER = optax.adamw(optax.warmup_constant_schedule(1e-4, 1e-3, 10), b2=0.95, eps=1e-5, weight_decay=0.1)


def create_state(rng: jax.Array) -> TrainState:
    params = MODEL.init(rng, jnp.zeros((BATCH, SEQ), jnp.int32), train=False)["params"]
    return TrainState.create(apply_fn=MODEL.apply, params=params, tx=OPTIMIZER)


def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, jax.Array]:
    dropout_rng = jax.random.fold_in(jax.random.key(0), state.step)

    def loss_fn(params: Any) -> jax.Array:
        logits = state.apply_fn({"params": params}, batch["inputs"], train=True, rngs={"dropout": dropout_rng})
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def standard_library() -> np.ndarray:
    """The bytes of every module at the top of Python's standard library: a few megabytes of text."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return np.frombuffer(b"\n".join(file.read_bytes() for file in files), np.uint8)


def sample_batch(corpus: np.ndarray, step: int) -> Batch:
    """`BATCH` windows of the corpus and, as targets, the same windows one byte later."""
    starts = np.random.default_rng(step).integers(0, len(corpus) - SEQ - 1, BATCH)
    windows = np.stack([corpus[start : start + SEQ + 1] for start in starts]).astype(np.int32)
    return {"inputs": windows[:, :-1], "targets": windows[:, 1:]}


def target() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """What `autopar plan` asks for: the step and the shapes of its arguments."""
    shape = jax.ShapeDtypeStruct((BATCH, SEQ), jnp.int32)
    return train_step, (jax.eval_shape(create_state, jax.random.key(0)), {"inputs": shape, "targets": shape})


def train(step: Callable[..., Any], state: TrainState, corpus: np.ndarray, num_steps: int) -> TrainState:
    """Run the step on fresh batches under a progress bar; print the mean loss of every ten steps."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    losses: list[float] = []
    with Progress(*columns) as progress:
        bar = progress.add_task("training", total=num_steps)
        for _ in range(num_steps):
            number = int(state.step)
            state, loss = step(state, sample_batch(corpus, number))
            losses.append(float(loss))
            progress.update(bar, advance=1, description=f"loss {losses[-1]:.3f}")
            if number % 10 == 9:
                progress.console.print(f"to step {number + 1:2d}   mean loss {np.mean(losses):.3f}", highlight=False)
                losses.clear()
    return state


def largest_difference(state: TrainState, other: TrainState) -> float:
    """Over every parameter, the largest absolute difference."""
    pairs = zip(jax.tree.leaves(state.params), jax.tree.leaves(other.params), strict=True)
    return max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs)


def local_bytes(state: TrainState) -> int:
    """What the state takes on the first device."""
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state))


def data_parallel() -> tuple[Callable[..., Any], TrainState]:
    """By hand, for comparison: plain `jit`, the state replicated and the batch split."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    whole, split = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
    step = jax.jit(train_step, in_shardings=(whole, split), out_shardings=(whole, whole), donate_argnums=0)
    return step, jax.jit(create_state, out_shardings=whole)(jax.random.key(0))


def median_step_times(runs: list[tuple[Callable[..., Any], TrainState]], batch: Batch, rounds: int) -> list[float]:
    """Seconds per step of each run, taken in turns so that a busy machine is unfair to none."""
    times: list[list[float]] = [[] for _ in runs]
    states = [state for _, state in runs]
    for round_number in range(rounds + 1):
        for i, (step, _) in enumerate(runs):
            start = time.perf_counter()
            states[i], _ = jax.block_until_ready(step(states[i], batch))
            if round_number:  # the first round compiles
                times[i].append(time.perf_counter() - start)
    return [statistics.median(one) for one in times]


def data_parallel_peak_bytes(num_devices: int) -> float:
    """Predicted peak memory per device if every device holds the whole state."""
    step, args = target()
    pins = {"state/**": PartitionSpec(), "batch/**": PartitionSpec("data")}
    return autopar.plan(step, *args, mesh=str(num_devices), pin=pins).prediction.peak_bytes


def main() -> None:
    corpus, rng = standard_library(), jax.random.key(0)
    first = sample_batch(corpus, 0)

    print(f"\n1. Plan and train on {jax.device_count()} devices, {len(corpus) / 1e6:.1f} MB of text\n")
    sharded_step = autopar.parallelize(train_step)
    state = sharded_step.init(create_state, rng, batch=first)
    first_plan = sharded_step.plan(state, first)
    print(autopar.explain(first_plan))
    first_peak = first_plan.prediction.peak_bytes

    print("\n2. The first step, sharded and on one device\n")
    whole, whole_loss = jax.jit(train_step)(jax.jit(create_state)(rng), first)
    state, loss = sharded_step(state, first)
    print(f"loss: {float(loss):.6f} sharded, {float(whole_loss):.6f} on one device")
    print(f"largest difference of any parameter: {largest_difference(state, whole):.1e}")
    del whole

    print(f"\n3. {NUM_STEPS} steps\n")
    state = train(sharded_step, state, corpus, NUM_STEPS - 1)

    print("\n4. Step time, in turns\n")
    planned_s, by_hand_s = median_step_times([(sharded_step, state), data_parallel()], first, rounds=5)
    print(f"autopar {planned_s:.3f} s, jit with data-parallel shardings by hand {by_hand_s:.3f} s:", end=" ")
    print(f"{planned_s / by_hand_s:.2f}x")
    del state

    needed = data_parallel_peak_bytes(jax.device_count())
    budget = 0.4 * needed
    print(f"\n5. Again in {budget / 1e6:.0f} MB per device, 40 % of the {needed / 1e6:.0f} MB of data parallelism\n")
    small_step = autopar.parallelize(train_step, memory_budget_bytes=budget)
    state = small_step.init(create_state, rng, batch=first)
    plan = small_step.plan(state, first)
    print(f"{plan.strategy}; predicted peak {plan.prediction.peak_bytes / 1e6:.0f} MB,", end=" ")
    print(f"of it state {local_bytes(state) / 1e6:.0f} MB")
    if first_peak <= budget:
        print(f"(the first plan fits already, in {first_peak / 1e6:.0f} MB: sharded state was the faster choice, too)")
    train(small_step, state, corpus, 10)


if __name__ == "__main__":
    main()
