"""Train a decoder on text under every asynchronous rule, and synchronously on the same batches."""

from __future__ import annotations

import runpy
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import jax
import numpy as np
import optax

import autopar
from autopar.pipeline.schedule.asynchronous import ASYNCHRONOUS

Row = dict[str, Any]

TRAINED, AVERAGED, WARM_UP, EVERY = 600, 50, 100, 10
#: Stages, and microbatches per update.
SETTINGS = ((2, 4), (4, 1))
#: PipeMare's K: a quarter of the updates.
NAMED = {"pipemare": f"pipemare({TRAINED // 4})"}
#: Rules that must come this close to the synchronous loss.
WITHIN, MOST = ("pipedream", "2bw"), 1.02


def rows() -> list[Row]:
    """A row for each rule, and one for each point of its curve."""
    example: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "async_pipeline.py"))
    text = "".join(topics[name] for name in sorted(topics))
    letters = sorted(set(text))
    rate = optax.warmup_cosine_decay_schedule(0.0, 1e-3, WARM_UP, TRAINED)
    example["train_step"].__globals__.update(
        LETTERS=letters,
        DATA=np.searchsorted(letters, np.array(list(text))).astype(np.int32),
        optimizer=optax.chain(optax.clip_by_block_rms(1.0), optax.adam(rate)),
    )
    curves = {("synchronous", 2, 4): _synchronous(example)}
    for stages, per_update in SETTINGS:
        for name, kind in ASYNCHRONOUS.items():
            if kind.reads.needs_filled and per_update < stages:
                continue
            curves[name, stages, per_update] = _streamed(example, NAMED.get(name, name), stages, per_update)
    base = _loss_at(curves["synchronous", 2, 4], TRAINED)
    found: list[Row] = []
    for (name, stages, per_update), losses in curves.items():
        ratio = _loss_at(losses, TRAINED) / base
        of = {"rule": name, "stages": stages, "microbatches per update": per_update}
        found.append(
            {
                **of,
                **{f"loss at {at}": _loss_at(losses, at) for at in (100, 200, 400, TRAINED)},
                "over synchronous": ratio,
                "holds": ratio <= MOST if name in WITHIN else "",
            }
        )
        found += [{**of, "update": at, "loss": _loss_at(losses, at)} for at in range(AVERAGED, TRAINED + 1, EVERY)]
    return found


def _loss_at(losses: Sequence[float], at: int) -> float:
    """The mean loss of the updates up to one."""
    return float(np.mean(losses[max(0, at - AVERAGED) : at]))


def _synchronous(example: dict[str, Any]) -> list[float]:
    step = autopar.parallelize(example["train_step"], schedule="1f1b", stages=2, num_microbatches=4, cache=False)
    state, losses = example["create_state"](jax.random.key(0)), []
    for batch in example["batches"](TRAINED):
        state, loss = step(state, batch)
        losses.append(loss)
    return [float(loss) for loss in losses]


def _streamed(example: dict[str, Any], consistency: str, stages: int, per_update: int) -> list[float]:
    options: dict[str, Any] = {"stages": stages, "num_microbatches": per_update, "cache": False}
    step = autopar.parallelize(example["train_step"], consistency=consistency, **options)
    state = example["create_state"](jax.random.key(0))
    losses = [float(loss) for loss in step.stream(state, example["batches"](TRAINED))]
    step.drain()
    return losses
