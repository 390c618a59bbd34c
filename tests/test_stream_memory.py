"""The weights, velocities and corrected weights that a stream has on its devices take the bytes of its plan."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_async_pipeline import batches_of, layered_step, weights_of

import autopar
from autopar.errors import BudgetError
from autopar.pipeline.cut.pieces import Slot
from autopar.pipeline.run.calls_and_moves import Call
from autopar.pipeline.run.stream import Stream


def most_live(step: Any, state: Any, batches: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """For each stage the most bytes on one device, at any task after filling, of what passes read of the weights, of velocities, and
    of weights moved back."""
    streams: list[Stream] = []
    usual, started = Call.run, Stream.__init__

    def start(self: Stream, *args: Any) -> None:
        streams.append(self)
        started(self, *args)

    most: dict[int, list[int]] = {}

    def observed(self: Call, values: Any) -> None:
        (stream,) = streams
        inputs = [values[i] for i in self.reads]
        if self.task is not None and stream.num_batches > stream.whole.program.filled:
            names = {base: name for name, base in stream.whole.program.bases.items()}
            found = [0, 0, 0]
            for (base, _), array in stream.store.items():
                kind = kind_of(stream, self.stage, names[base])
                if kind is not None:
                    found[kind] += array.addressable_shards[0].data.nbytes
            most[self.stage] = [max(*pair) for pair in zip(found, most.get(self.stage, found), strict=True)]
        del inputs
        usual(self, values)

    monkeypatch.setattr(Stream, "__init__", start)
    monkeypatch.setattr(Call, "run", observed)
    for _ in step.stream(state, batches):
        pass
    monkeypatch.undo()
    step.drain()
    return [(most[s][0], most[s][1], most[s][2]) for s in sorted(most)]


def kind_of(stream: Stream, s: int, name: Any) -> int | None:
    """0 for what passes of stage s read of a version, 1 for a velocity, 2 for what is moved back; None for all else."""
    if not isinstance(name[1], Slot) or name[0] != s:
        return None
    if name[1].kind == "velocity":
        return 1
    stage = stream.whole.streamed.stages[s]
    if name[3:]:
        return 2
    read = {slot for piece in stage.pieces.each.values() for slot in stage.taken(piece) if slot.kind == "once"}
    return 0 if name[1] in read and "version" in stream.whole.streamed.sources.stages[s].of(name[1]) else None


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("consistency", "m", "dtype"),
    [
        ("pipedream", 1, None),
        ("pipedream", 2, jnp.bfloat16),
        ("vertical", 1, jnp.bfloat16),
        ("2bw", 4, None),
        ("ampnet", 1, None),
        ("pipemare", 1, None),
        ("pipemare", 2, None),
    ],
)
def test_live_bytes_are_those_of_the_plan(
    consistency: str, m: int, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = optax.adam(1e-2)
    step = autopar.parallelize(
        layered_step(optimizer, dtype),
        stages=4,
        num_microbatches=m,
        num_devices=8,
        cache=False,
        consistency=consistency,
    )
    state = (weights_of(8), optimizer.init(weights_of(8)))
    live = most_live(step, state, batches_of(20, 16), monkeypatch)
    (plan,) = step.plans
    assert plan.weight_versions[0].num_bytes > 0
    for (weights, velocities, moved), kept in zip(live, plan.weight_versions, strict=True):
        assert weights == kept.kept_bytes <= kept.copies * kept.num_bytes
        assert velocities == kept.velocity_bytes
        assert moved == kept.corrected_bytes


def test_a_plan_has_the_copies_in_its_budget() -> None:
    """A budget that one version fits into, and the versions of PipeDream do not; 2BW has fewer."""
    weights = [np.zeros((256, 256), np.float32)] * 8
    batch = (np.zeros((4, 256), np.float32),) * 2
    options: dict[str, Any] = {"stages": 4, "num_devices": 4, "hardware": "v100-sxm-32", "cache": False}
    step, state = layered_step(optax.sgd(0.1)), (weights, optax.sgd(0.1).init(weights))

    def planned(schedule: str, **more: Any) -> Any:
        return autopar.plan(step, state, batch, schedule=schedule, **options, **more)

    few = planned("2bw", num_microbatches=4).prediction.peak_bytes
    many = planned("pipedream", num_microbatches=1).prediction.peak_bytes
    assert many > few
    budget = (many + few) / 2
    assert planned("2bw", num_microbatches=4, memory_budget_bytes=budget).prediction.peak_bytes <= budget
    with pytest.raises(BudgetError):
        planned("pipedream", num_microbatches=1, memory_budget_bytes=budget)


def test_stages_are_cut_by_the_versions_that_they_keep() -> None:
    """Equal stages are the fastest, and the first ones have the most copies: in less memory they have fewer layers."""
    weights = [np.zeros((256, 256), np.float32)] * 14
    step, state = layered_step(optax.sgd(0.1)), (weights, optax.sgd(0.1).init(weights))
    options: dict[str, Any] = {"stages": 4, "num_devices": 4, "hardware": "v100-sxm-32", "cache": False}
    options |= {"schedule": "pipedream", "num_microbatches": 1}
    batch = (np.zeros((4, 256), np.float32),) * 2
    usual = autopar.plan(step, state, batch, **options)
    budget = 0.9 * usual.prediction.peak_bytes
    within = autopar.plan(step, state, batch, memory_budget_bytes=budget, **options)
    assert within.prediction.peak_bytes <= budget
    counts = [[stage.last_layer - stage.first_layer + 1 for stage in plan.stages] for plan in (usual, within)]
    assert max(counts[1][:2]) < max(counts[0][:2])
