"""Compare a step's simulated timeline with its measured one, in sentences.

In: both timelines.
Out: for each stage, predicted and measured seconds of its tasks; sentences about the step, its bubble, and the stage
that is slowest relative to its prediction.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from autopar.pipeline.draw.palette import LOOKS
from autopar.pipeline.schedule.tasks import Phase
from autopar.pipeline.schedule.timeline import PipelineTimeline
from autopar.system.units import human_seconds

#: A stage is named if it is this factor slower than another one, relative to their predictions.
_WORTH_NAMING = 1.1


@dataclass(frozen=True, slots=True)
class StageComparison:
    """The predicted and measured seconds of a stage's tasks that are in both timelines.

    Args:
        phases: by phase, predicted and measured seconds.
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
        """Measured over predicted seconds; `inf` if nothing was predicted."""
        return _factor(self.predicted_s, self.measured_s)

    @property
    def slowest_phase(self) -> Phase:
        """The phase that is slowest relative to its prediction."""
        return max(self.phases, key=lambda phase: _factor(*self.phases[phase]))


def compare_stages(simulated: PipelineTimeline, measured: PipelineTimeline) -> tuple[StageComparison, ...]:
    """The comparison of each stage that has tasks in both timelines."""
    both = {span.task for span in simulated.spans} & {span.task for span in measured.spans}
    found: dict[int, dict[Phase, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0.0, 0.0]))
    for which, timeline in enumerate((simulated, measured)):
        for span in timeline.spans:
            if span.task in both:
                found[span.task.stage][span.task.phase][which] += span.seconds
    return tuple(
        StageComparison(stage, {phase: (predicted, took) for phase, (predicted, took) in found[stage].items()})
        for stage in sorted(found)
    )


def differences(simulated: PipelineTimeline, measured: PipelineTimeline) -> tuple[str, ...]:
    """Sentences about how a measured timeline differs from the simulated one."""
    slower = measured.makespan_s / simulated.makespan_s - 1 if simulated.makespan_s else 0.0
    sentences = [
        f"from the first task to the last: {human_seconds(measured.makespan_s)} instead of"
        f" {human_seconds(simulated.makespan_s)} ({100 * slower:+.0f} %); bubble {100 * measured.bubble_fraction:.0f} %"
        f" instead of {100 * simulated.bubble_fraction:.0f} %"
    ]
    stages = compare_stages(simulated, measured)
    if not stages:
        return tuple(sentences)
    slowest, fastest = (pick(stages, key=lambda one: one.factor) for pick in (max, min))
    took = f"{human_seconds(slowest.measured_s)} instead of {human_seconds(slowest.predicted_s)}"
    phase = slowest.slowest_phase
    most = f"most of all {LOOKS[phase].name}, {_times(_factor(*slowest.phases[phase]))}"
    if slowest.factor > _WORTH_NAMING * fastest.factor:
        sentences.append(
            f"stage {slowest.stage} is slowest against its prediction: its tasks take {took},"
            f" {_times(slowest.factor)} ({most}); those of stage {fastest.stage}, {_times(fastest.factor)}"
        )
    else:
        sentences.append(f"no stage stands out against its prediction; stage {slowest.stage} takes {took} ({most})")
    return tuple(sentences)


def _times(factor: float) -> str:
    return f"{factor:.3g} times as long"


def _factor(predicted_s: float, measured_s: float) -> float:
    return measured_s / predicted_s if predicted_s else float("inf")
