"""Draw the pictures of `docs/asynchronous-pipelines.md`, from plans, into `docs/images/asynchronous/`.

Usage, from the repository root: `.venv/bin/python scripts/draw_asynchronous.py`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import autopar
from autopar.pipeline.draw.svg import timeline_svg
from autopar.pipeline.partition.cluster import submeshes_of
from autopar.pipeline.partition.sends import edges_between
from autopar.pipeline.partition.step_time import staged_timeline
from autopar.pipeline.schedule.asynchronous import ASYNCHRONOUS
from autopar.pipeline.schedule.table import build
from autopar.pipeline.schedule.tasks import chain_with
from autopar.pipeline.schedule.versions import versions_read

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "images" / "asynchronous"
NUM_STAGES, WIDTH, NUM_TOKENS = 4, 4096, 8192
#: Microbatches per update, and updates drawn.
DRAWN = {"2bw": (4, 3)}
USUAL = (1, 9)


def step(weights: list[Any], batch: Any) -> tuple[list[Any], Any]:
    """SGD on eight equal layers."""

    def loss_of(weights: list[Any]) -> Any:
        x = batch
        for weight in weights:
            x = jnp.tanh(x @ weight)
        return jnp.square(x).mean()

    loss, gradients = jax.value_and_grad(loss_of)(weights)
    return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)], loss


def pictures() -> dict[str, str]:
    """An SVG for each asynchronous schedule."""
    drawn = {}
    weights = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32) for _ in range(2 * NUM_STAGES)]
    for name, kind in ASYNCHRONOUS.items():
        per_update, num_updates = DRAWN.get(name, USUAL)
        batch = jax.ShapeDtypeStruct((per_update * NUM_TOKENS, WIDTH), jnp.float32)
        options = {"num_devices": NUM_STAGES, "hardware": "v100-sxm-32", "cache": False}
        plan = autopar.plan(
            step, weights, batch, stages=NUM_STAGES, num_microbatches=per_update, schedule=name, **options
        )
        costs = [stage.cost for stage in plan.stages]
        edges = chain_with(len(costs), edges_between(plan.sends))
        schedule = build(kind, len(costs), per_update, edges=edges, num_updates=num_updates)
        timeline = staged_timeline(schedule, costs, plan.sends, submeshes_of(plan.stages))
        reads = versions_read(schedule, kind.reads, per_update)
        drawn[name] = timeline_svg(replace(timeline, title=f"{name}, planned", versions=reads))
    return drawn


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, svg in pictures().items():
        (FOLDER / f"{name}.svg").write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
