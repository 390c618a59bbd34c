"""Compare the step time by three models (prediction, replay, XLA's estimate) with the measured one.

In: a plan, its compiled step. Out: `StepTimes`. The planner predicts from the plan; the replay simulates the compiled
program by independent formulas; XLA's estimate is that of its scheduler, and is left out if it is known to be wrong for
the program.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from autopar.errors import HardwareError, VerifyError
from autopar.plans.plan import Plan
from autopar.xla_compiler.compiler import CompiledStep
from autopar.xla_compiler.estimate_errors import estimate_errors
from autopar.xla_compiler.hlo_text import Module
from autopar.xla_replay import rates
from autopar.xla_replay.device_prices import DevicePrices
from autopar.xla_replay.program import replay_module
from autopar.xla_replay.replay import Replay

#: Names of the columns, in every table and in JSON.
COLUMNS = ("predicted", "replayed", "XLA's estimate", "measured")


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The seconds of a step by three models, and measured.

    Args:
        predicted_s: the planner's prediction; `predicted_exposed_s` its exposed communication by kind.
        replay: the replay of the compiled program; None where `no_replay` says why.
        xla_s: the estimate of XLA's scheduler, right or wrong; None where it made none.
        estimate_errors: why XLA's estimate is wrong for this program or device; empty where it is sound.
        measured_s: median of measured runs; None where the step was not run.
    """

    predicted_s: float
    predicted_exposed_s: dict[str, float]
    replay: Replay | None
    no_replay: str
    xla_s: float | None
    xla_exposed_s: dict[str, float]
    estimate_errors: tuple[str, ...]
    measured_s: float | None = None

    @property
    def sound_xla_s(self) -> float | None:
        """XLA's estimate, where it is sound."""
        return None if self.estimate_errors else self.xla_s

    def rows(self) -> Iterator[tuple[str, float, float | None, float | None, float | None]]:
        """Name, predicted, replayed, XLA's estimate, measured: the step time, then exposed communication by kind."""
        replay, is_sound = self.replay, self.sound_xla_s is not None
        yield "step time", self.predicted_s, replay and replay.step_time_s, self.sound_xla_s, self.measured_s
        known = (self.predicted_exposed_s, replay.exposed_s if replay else {}, self.xla_exposed_s if is_sound else {})
        for kind in sorted({kind for times in known for kind in times}):
            replayed = replay.exposed_s.get(kind, 0.0) if replay else None
            estimate = self.xla_exposed_s.get(kind, 0.0) if is_sound else None
            yield f"exposed {kind}", self.predicted_exposed_s.get(kind, 0.0), replayed, estimate, None

    def to_json(self) -> dict[str, Any]:
        """All columns, as JSON types."""
        predicted, replayed, xla, measured = COLUMNS
        return {
            "columns": list(COLUMNS),
            "rows": [list(row) for row in self.rows()],
            predicted: {"step_time_s": self.predicted_s, "exposed_s": self.predicted_exposed_s},
            replayed: self.replay.as_json() if self.replay else None,
            "no_replay": self.no_replay,
            xla: None if self.sound_xla_s is None else {"step_time_s": self.xla_s, "exposed_s": self.xla_exposed_s},
            "estimate_errors": list(self.estimate_errors),
            measured: None if self.measured_s is None else {"step_time_s": self.measured_s},
        }


def step_times(
    plan: Plan,
    compiled: CompiledStep,
    module: Module,
    rates_name: str,
    devices_per_domain: int,
    *,
    has_tables: bool = True,
) -> StepTimes:
    """Gather the step time of a plan and its compiled step.

    Args:
        module: the compiled step's HLO.
        rates_name: name or path of the replay's rates.
        devices_per_domain: devices that NVLink connects.
        has_tables: whether XLA has measured tables of the device, from which it estimates times.
    """
    replay, no_replay = replayed(module, rates_name, devices_per_domain)
    prediction = plan.prediction
    return StepTimes(
        predicted_s=prediction.step_time_s,
        predicted_exposed_s=prediction.exposed_s,
        replay=replay,
        no_replay=no_replay,
        xla_s=compiled.step_time_s,
        xla_exposed_s=compiled.exposed_s,
        estimate_errors=(*([] if has_tables else ["a GPU without measured tables"]), *estimate_errors(module)),
        measured_s=compiled.measured.step_time_s if compiled.measured else None,
    )


def replayed(module: Module, rates_name: str, devices_per_domain: int) -> tuple[Replay | None, str]:
    """The replay of a compiled program, or None and the reason."""
    try:
        prices = DevicePrices(rates.load(rates_name), devices_per_domain)
        return replay_module(module, prices), ""
    except (HardwareError, VerifyError) as error:
        return None, str(error)
