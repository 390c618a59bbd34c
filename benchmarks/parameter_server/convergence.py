"""Train a model under every consistency policy, with the times of the simulator, and record its loss.

In: a `Task`: weights, a loss, batches, an optimizer. Out: for each policy at the best learning rate, the loss over simulated seconds and
over updates.
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

import autopar
from autopar.extend.consistency import simulate

Row = dict[str, str | float | bool]

WORKERS = 4
_RNG = random.Random(0)
#: The slow worker of each clock or iteration.
SLOW = [_RNG.randrange(WORKERS) for _ in range(1000)]
HORIZON_S, EVERY_S = 200.0, 10.0
#: Iterations of a worker on its own in local SGD and DiLoCo.
LOCAL = 5
POLICIES = (
    "bsp",
    "ssp(1)",
    "ssp(3)",
    "ssp(10)",
    "async",
    "discard(6)",
    "backup(1)",
    "partial(3)",
    "local SGD",
    "DiLoCo",
)


def compute_s(worker: int, iteration: int) -> float:
    return 5.0 if SLOW[iteration] == worker else 1.0


@dataclass(frozen=True, slots=True)
class Task:
    """A model to train.

    Args:
        weights: by key.
        loss: from weights and a batch; the same for training and for `held_out`.
        batch: from a generator, a batch as a tuple of arrays.
        held_out: the batch on which the published loss is evaluated.
        optimizer: without a learning rate; on the server, and in local SGD and DiLoCo in each worker.
        rates: the grid of learning rates.
    """

    weights: dict[str, np.ndarray]
    loss: Callable[..., jax.Array]
    batch: Callable[[np.random.Generator], tuple[np.ndarray, ...]]
    held_out: tuple[np.ndarray, ...]
    optimizer: optax.GradientTransformation
    rates: Sequence[float]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Weights at a time."""

    seconds: float
    updates: int
    weights: dict[str, jax.Array]


@dataclass(frozen=True, slots=True)
class Programs:
    """What workers run.

    Args:
        gradients: from weights and a batch.
        steps: from weights, the optimizer's state, a rate and several batches, the difference that steps make, and the state.
    """

    gradients: Callable[..., Any]
    steps: Callable[..., tuple[Any, Any]]


def converged(name: str, task: Task, policies: Sequence[str] = POLICIES) -> list[Row]:
    """A row for each policy and time."""
    loss, rows, programs = jax.jit(task.loss), list[Row](), programs_of(task)
    for policy in policies:
        best: tuple[float, float, list[Snapshot]] = (np.inf, 0.0, [])
        for rate in task.rates:
            found = trained(task, programs, policy, rate)
            last = float(loss(found[-1].weights, *task.held_out))
            if last < best[0] or not best[2]:
                best = (last, rate, found)
        for one in best[2]:
            value = float(loss(one.weights, *task.held_out))
            where = {"simulated_s": one.seconds, "updates": one.updates, "loss": round(value, 4)}
            rows.append({"task": name, "policy": policy, "rate": best[1], **where})
    return rows


def trained(task: Task, programs: Programs, policy: str, rate: float) -> list[Snapshot]:
    """Weights every `EVERY_S` simulated seconds."""
    local = policy in ("local SGD", "DiLoCo")
    update = optax.chain(task.optimizer, optax.scale(-rate))
    if policy == "local SGD":
        update = optax.scale(1 / WORKERS)
    elif policy == "DiLoCo":
        update = optax.chain(optax.scale(-1 / WORKERS), optax.sgd(0.7, momentum=0.9, nesterov=True))
    store = autopar.VersionedStore(task.weights, update=update, workers=WORKERS, consistency="bsp" if local else policy)
    read: dict[int, Any] = {}
    states = [task.optimizer.init(jax.tree.map(jnp.asarray, task.weights)) for _ in range(WORKERS)]
    rngs = [np.random.default_rng([1, worker]) for worker in range(WORKERS)]
    found: list[Snapshot] = []
    applied = 0

    def mark(now_s: float) -> None:
        while (mark_s := len(found) * EVERY_S) <= HORIZON_S and now_s > mark_s:
            found.append(Snapshot(mark_s, applied, store.pull(worker=None).values))

    def on_read(worker: int, now_s: float) -> None:
        mark(now_s)
        if now_s <= HORIZON_S:
            read[worker] = store.pull(worker=worker, timeout_s=0).values

    def on_push(worker: int, now_s: float) -> None:
        nonlocal applied
        mark(now_s)
        if now_s > HORIZON_S:
            return
        if local:
            batches = [task.batch(rngs[worker]) for _ in range(LOCAL)]
            push, states[worker] = programs.steps(
                read[worker], states[worker], rate, [np.stack(one) for one in zip(*batches, strict=True)]
            )
        else:
            push = programs.gradients(read[worker], *task.batch(rngs[worker]))
        store.push(None, push, worker=worker)
        before = store.report().num_discarded
        store.clock(worker=worker)
        applied += 1 - (store.report().num_discarded - before)

    simulate(
        f"every({LOCAL}, bsp)" if local else policy,
        WORKERS,
        200 // (LOCAL if local else 1),
        compute_s,
        on_read=on_read,
        on_push=on_push,
    )
    mark(HORIZON_S + 1)
    return found


def programs_of(task: Task) -> Programs:
    """The compiled programs of a task, for all its runs."""

    @jax.jit
    def steps(weights: Any, state: Any, rate: jax.Array, batches: Sequence[jax.Array]) -> tuple[Any, Any]:
        def step(carry: Any, batch: Any) -> tuple[Any, None]:
            own, state = carry
            changes, state = task.optimizer.update(jax.grad(task.loss)(own, *batch), state, own)
            return (jax.tree.map(lambda w, change: w - rate * change, own, changes), state), None

        (own, state), _ = jax.lax.scan(step, (weights, state), batches)
        return jax.tree.map(jnp.subtract, own, weights), state

    return Programs(jax.jit(jax.grad(task.loss)), steps)
