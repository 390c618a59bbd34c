"""A step's simulated timeline beside its measured twin: where they differ, in words.

In: both. Out: of each stage, what its tasks take in the one and in the other; sentences on the step, its bubble, and the
stage that is slowest against its prediction.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from autopar.pipeline.draw.palette import LOOKS
from autopar.pipeline.schedule.tasks import Phase
from autopar.pipeline.schedule.timeline import PipelineTimeline
from autopar.system.units import human_seconds

#: A stage this much slower than another against its prediction is worth a name.
_WORTH_NAMING = 1.1


@dataclass(frozen=True, slots=True)
class StageTwin:
    """A stage in both timelines: the seconds of those of its tasks that are in both, one after another.

    Args:
        phases: the same by phase, predicted and measured.
    """

    stage: int
    phases: dict[Phase, tuple[float, float]]

    @property
    def predicted_s(self) -> float:
        return sum(predicted for predicted, _ in self.phases.values())

    @property
    def measured_s(self) -> float:
        return sum(measured for _, measured in self.phases.values())

    @property
    def factor(self) -> float:
        """Measured over predicted; `inf` where nothing was predicted."""
        return _factor(self.predicted_s, self.measured_s)

    @property
    def slowest_phase(self) -> Phase:
        """Against its prediction."""
        return max(self.phases, key=lambda phase: _factor(*self.phases[phase]))


def stage_twins(simulated: PipelineTimeline, measured: PipelineTimeline) -> tuple[StageTwin, ...]:
    """Of each stage that both have tasks of."""
    both = {span.task for span in simulated.spans} & {span.task for span in measured.spans}
    found: dict[int, dict[Phase, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0.0, 0.0]))
    for which, timeline in enumerate((simulated, measured)):
        for span in timeline.spans:
            if span.task in both:
                found[span.task.stage][span.task.phase][which] += span.seconds
    return tuple(
        StageTwin(stage, {phase: (predicted, took) for phase, (predicted, took) in found[stage].items()})
        for stage in sorted(found)
    )


def differences(simulated: PipelineTimeline, measured: PipelineTimeline) -> tuple[str, ...]:
    """What a measured timeline has otherwise than the simulated one, in words."""
    slower = measured.makespan_s / simulated.makespan_s - 1 if simulated.makespan_s else 0.0
    said = [
        f"from the first task to the last: {human_seconds(measured.makespan_s)} instead of"
        f" {human_seconds(simulated.makespan_s)} ({100 * slower:+.0f} %); bubble {100 * measured.bubble_fraction:.0f} %"
        f" instead of {100 * simulated.bubble_fraction:.0f} %"
    ]
    stages = stage_twins(simulated, measured)
    if not stages:
        return tuple(said)
    slowest, fastest = (pick(stages, key=lambda one: one.factor) for pick in (max, min))
    took = f"{human_seconds(slowest.measured_s)} instead of {human_seconds(slowest.predicted_s)}"
    phase = slowest.slowest_phase
    most = f"most of all {LOOKS[phase].words}, {_times(_factor(*slowest.phases[phase]))}"
    if slowest.factor > _WORTH_NAMING * fastest.factor:
        said.append(
            f"stage {slowest.stage} is slowest against its prediction: its tasks take {took},"
            f" {_times(slowest.factor)} ({most}); those of stage {fastest.stage}, {_times(fastest.factor)}"
        )
    else:
        said.append(f"no stage stands out against its prediction; stage {slowest.stage} takes {took} ({most})")
    return tuple(said)


def _times(factor: float) -> str:
    return f"{factor:.3g} times as long"


def _factor(predicted_s: float, measured_s: float) -> float:
    return measured_s / predicted_s if predicted_s else float("inf")
