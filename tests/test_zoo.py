"""Real models that nobody here wrote train by any plan as they do without one: the zoo's small configurations.

Eight CPU devices; the planner's own mesh, and three that are forced.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from same_steps import Trained, assert_same, splits, train

from benchmarks.zoo.small import SMALL
from benchmarks.zoo.training import Training

MESHES: dict[str, dict[str, Any]] = {
    "own": {"num_devices": 8},
    "1x8": {"mesh": "1x8"},
    "2x4": {"mesh": "2x4"},
    "8x1": {"mesh": "8x1"},
}


@cache
def unsharded(name: str) -> tuple[Training, Trained]:
    training = SMALL[name]()
    return training, train(training)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", SMALL)
def test_a_real_model_trains_by_a_plan_as_without(name: str, mesh: str) -> None:
    training, plain = unsharded(name)
    sharded = train(training, **MESHES[mesh])
    assert splits(sharded.plan)
    assert_same(sharded, plain)
