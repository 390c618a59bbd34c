"""A gradient is reduced over the devices of a stage once per step, not in each microbatch."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

import jax
import numpy as np
import pytest
from dense_step import WIDTH, arguments, step
from pipelines import pipelined

from autopar.pipeline.run.executor import Pipeline
from autopar.pipeline.run.instructions import Call

_COLLECTIVE = re.compile(r"= (.*?) (?:all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")


def large_collectives(pipeline: Pipeline) -> dict[str, int]:
    """By piece, how many collectives of matrices its compiled program has."""
    values = pipeline.begin(jax.tree.leaves(arguments()))
    found: dict[str, int] = defaultdict(int)
    seen: set[int] = set()
    for one in pipeline.instructions.steps:
        if isinstance(one, Call) and id(one.program) not in seen:
            seen.add(id(one.program))
            assert one.program.jitted is not None
            lowered: Any = one.program.jitted
            text = lowered.lower(*(values[i] for i in one.reads)).compile().as_text()
            found[one.program.piece.name.split()[0]] += sum(
                f"{WIDTH},{WIDTH}]" in of for of in _COLLECTIVE.findall(text)
            )
        one.run(values)
    return found


@pytest.mark.contract
def test_examples_split_over_devices() -> None:
    run, pipeline = pipelined(step, arguments(), num_stages=2, num_microbatches=4, mesh="4")
    state, loss = run(*arguments())
    plain, expected = jax.jit(step)(*arguments())
    assert loss == pytest.approx(float(expected), rel=1e-5)
    for one, other in zip(jax.tree.leaves(state), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    found = large_collectives(pipeline)
    assert found["backward"] == found["forward"] == 0
    assert found["after"] > 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", ["zb-h1", "1f1b"])
def test_examples_and_parameters_split(schedule: str) -> None:
    """Sums over one axis wait; what the other splits stays split."""
    run, pipeline = pipelined(
        step, arguments(), num_stages=2, num_microbatches=4, mesh="data=2,model=2", schedule=schedule
    )
    state, _ = run(*arguments())
    plain, _ = jax.jit(step)(*arguments())
    for one, other in zip(jax.tree.leaves(state), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert any(stage.partial for stage in pipeline.pieces)
