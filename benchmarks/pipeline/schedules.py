"""Train language models under every schedule, in stages that `autopar.parallelize` plans, and compare them with `jax.jit`.

Each row is a schedule on 2 or 4 submeshes of one virtual CPU device each, with its usual number of stages on each: a
small model in float32 with SGD, after two steps of 8 microbatches. *Stages* is their number. *Loss*: the largest
relative error of the losses. *Parameters*: the largest error of a parameter in norm, relative to its norm, or to a
thousandth of what the steps added to all if that is more. The gate is 1e-5 for both. *Refused*: why a schedule cannot run
the model, which is right for slices of tokens if the model looks ahead.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import jax

from autopar.errors import AutoparError
from autopar.pipeline.schedule.kind import PipelineShape
from autopar.pipeline.schedule.table import SCHEDULES, find
from benchmarks.pipeline.models import MODELS, Case, Model, errors

MICROBATCHES, SUBMESHES = 8, (2, 4)
#: Those that train.
TRAINING = tuple(name for name, kind in SCHEDULES.items() if kind.backward != "none")
#: Slices of TeraPipe, which would not slice so few tokens if the choice were its own.
SLICES = {"GPT-2": "terapipe(8, 4, 3)", "GPT-2 scanned": "terapipe(8, 4, 3)", "BART": "terapipe(6, 4, 2)"}


def measure(name: str) -> list[dict[str, Any]]:
    """The rows of one model."""
    with tempfile.TemporaryDirectory() as folder:
        jax.config.update("jax_compilation_cache_dir", folder)
        return list(_rows(MODELS[name](), SLICES[name]))


def _rows(model: Model, slices: str) -> Iterator[dict[str, Any]]:
    for schedule in TRAINING:
        for submeshes in SUBMESHES:
            yield _row(model, slices if schedule == "terapipe" else schedule, submeshes)


def _row(model: Model, schedule: str, submeshes: int) -> dict[str, Any]:
    kind = find(schedule)
    num_stages = len(kind.placement(PipelineShape(submeshes, MICROBATCHES, kind.virtuals[0])))
    row: dict[str, Any] = {"schedule": schedule, "submeshes": submeshes, "stages": num_stages}
    try:
        losses, parameters, step = errors(model, Case(num_stages, MICROBATCHES, schedule, submeshes))
    except AutoparError as error:
        return {**row, "loss": "", "parameters": "", "refused": str(error)}
    assert len(step.latest_plan.stages) == num_stages, step.latest_plan.strategy
    return {**row, "loss": losses, "parameters": parameters, "refused": ""}
