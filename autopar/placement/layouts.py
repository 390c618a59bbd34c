"""Describe how fast one model is on one layout of devices: the latency curve that placements are simulated with.

In: seconds of an engine's programs, predicted or measured. Out: `StepTimes`. An engine's programs have static sizes, so the time
of an iteration depends on its shape, on the slots of its layout, and on the tokens that attention reads. A pipeline of several
stages takes the sum of its stages for one iteration, and a new one enters as often as the slowest stage allows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from autopar.errors import PlacementError
from autopar.inference.kv_cache.page_tables import most_held
from autopar.inference.schedule.requests import Options, Shape
from autopar.inference.schedule.steady_state import num_chunks
from autopar.placement.recorded import Recording


class Layout(NamedTuple):
    """How the devices of a group run a model.

    Args:
        tensor: the devices that share each layer. pipeline: the stages that the layers are divided into.
    """

    tensor: int = 1
    pipeline: int = 1

    @property
    def num_devices(self) -> int:
        return self.tensor * self.pipeline

    def describe(self) -> str:
        """
        >>> Layout(4, 2).describe(), Layout(4).describe(), Layout(1, 8).describe(), Layout().describe()
        ('tensor 4 x pipeline 2', 'tensor 4', 'pipeline 8', 'one device')
        """
        parts = [f"{name} {num}" for name, num in zip(self._fields, self, strict=True) if num > 1]
        return " x ".join(parts) or "one device"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """The times and the memory of one model on one layout.

    Args:
        layout: the layout.
        options: the engine's slots, longest sequence and chunk shapes.
        stage_s: for each shape of `options.shapes` the seconds of each stage.
        token_s: the seconds that each token in the cache adds to a stage of a model step.
        weight_bytes: the bytes of the weights on one device; the fullest one counts.
        temporary_bytes: the bytes on one device of temporaries while a program runs. Models of a group run one after the other.
        token_bytes: the bytes of a token's keys and values on one device.
        page_size: tokens per page.
        window: the tokens that any token sees, if that is bounded in all layers: a sequence holds no pages before them.
        recording: recorded times of iterations, which are used instead of `stage_s` on a layout without a pipeline.

    Raises:
        PlacementError: a shape is missing, or a number is not positive and finite.
    """

    layout: Layout
    options: Options
    stage_s: Mapping[Shape, tuple[float, ...]]
    token_s: float = 0.0
    weight_bytes: float = 0.0
    temporary_bytes: float = 0.0
    token_bytes: float = 0.0
    page_size: int = 16
    window: int | None = None
    recording: Recording | None = None

    def __post_init__(self) -> None:
        if self.recording is not None and self.layout.pipeline > 1:
            raise PlacementError(
                f"{self.layout.describe()}: recorded times are of one device stage: leave out the recording"
            )
        for shape in self.options.shapes:
            stages = self.stage_s.get(shape)
            if stages is None:
                raise PlacementError(
                    f"{self.layout.describe()}: the times lack the shape {shape}: give one for each shape"
                )
            if len(stages) != self.layout.pipeline or not all(math.isfinite(each) and each > 0 for each in stages):
                raise PlacementError(
                    f"{self.layout.describe()}: the seconds of {shape} are {stages}: give one positive number for each of the"
                    f" {self.layout.pipeline} stages"
                )

    def seconds(self, shape: Shape, num_cached_tokens: int = 0) -> tuple[float, ...]:
        """The seconds of each stage of an iteration.

        Args:
            num_cached_tokens: the tokens in the cache of all slots.
        """
        if self.recording is not None and (recorded := self.recording.next_s(shape)) is not None:
            return (recorded,)
        stages = self.stage_s[shape]
        if not self.token_s:
            return stages
        more = self.token_s * shape.steps * num_cached_tokens
        return tuple(each + more for each in stages)

    def latency_s(self, prompt: int, output: int) -> float:
        """The seconds of a request that is alone: prefill in the fewest chunks, then one step for each further token."""
        chunk = min(self._chunk_shapes, key=lambda shape: (-(-prompt // shape.length), sum(self.stage_s[shape])))
        chunks = num_chunks(self.options, prompt)
        # In a pipeline, each chunk enters as soon as the slowest stage is free.
        prefill = sum(self.stage_s[chunk]) + (chunks - 1) * max(self.stage_s[chunk])
        return prefill + (output - 1) * sum(self.stage_s[Shape()])

    def work_s(self, prompt: int, output: int) -> float:
        """The seconds of the slowest stage that a request takes while all slots are busy. Its inverse is a bound on requests
        per second."""
        per_chunk = min(
            max(self.stage_s[shape]) * (-(-prompt // shape.length)) / shape.rows for shape in self._chunk_shapes
        )
        per_token = min(
            max(self.stage_s[shape]) / shape.steps
            for shape in self.options.shapes
            if not shape.rows and shape.width == 1
        )
        slots = max(1, self.options.num_slots // self.layout.pipeline)
        return per_chunk + (output - 1) * per_token / slots

    @property
    def _chunk_shapes(self) -> list[Shape]:
        return [shape for shape in self.options.shapes if shape.rows]

    def least_bytes(self) -> float:
        """The bytes on one device of the weights and of a cache for one sequence of full length, without temporaries."""
        return self.weight_bytes + self.token_bytes * self.page_size * (self.pages_of_sequence + 1)

    @property
    def pages_of_sequence(self) -> int:
        """The pages that the longest sequence holds at most."""
        return most_held(self.options.max_length, self.page_size, self.window, self.options.num_ahead)

    def corrected(self, measured: Mapping[Shape, float]) -> StepTimes:
        """Replace predicted times by measured ones. Shapes that are not measured are scaled by the mean ratio of the others.

        Args:
            measured: the measured seconds of an iteration of each shape on this layout.

        Raises:
            PlacementError: nothing is measured, a shape is unknown, or a time is not positive.
        """
        ratios: dict[Shape, float] = {}
        for shape, seconds in measured.items():
            if shape not in self.stage_s:
                raise PlacementError(f"{shape} is measured, but the engine has the shapes {list(self.stage_s)}")
            if not (math.isfinite(seconds) and seconds > 0):
                raise PlacementError(f"the measured time of {shape} is {seconds!r} s: give a positive number")
            ratios[shape] = seconds / sum(self.stage_s[shape])
        return self.scaled(ratios)

    def scaled(self, ratios: Mapping[Shape, float]) -> StepTimes:
        """Multiply the times of shapes by ratios, and those of the other shapes by their geometric mean.

        Raises:
            PlacementError: there is no ratio.
        """
        if not ratios:
            raise PlacementError("no shape is measured: measure at least one, or use the prediction as it is")
        mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios))
        scaled = {
            shape: tuple(each * ratios.get(shape, mean) for each in stages) for shape, stages in self.stage_s.items()
        }
        return replace(self, stage_s=scaled)

    def ratios_to(self, measured: Mapping[Shape, float]) -> dict[Shape, float]:
        """The measured over the predicted seconds of each measured shape, to scale another layout by."""
        return {shape: seconds / sum(self.stage_s[shape]) for shape, seconds in measured.items()}
