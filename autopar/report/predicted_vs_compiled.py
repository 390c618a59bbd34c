"""Read predicted and compiled figures from the output of `autopar verify --json`.

In: the JSON of a verification; the plan's program and strategy. Out: `Compiled`, which a report of the plan shows.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.errors import VerifyError
from autopar.plans.json_codec import WrongFieldError, decoder

_PROGRAM, _STAGES = "autopar-verification", "autopar-stages-verification"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledFigure:
    """One number, predicted and compiled; `unit` is `bytes` (on one device) or `s`."""

    name: str
    unit: str
    predicted: float
    compiled: float | None
    tolerance: float | None
    holds: bool
    measured: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledCollectives:
    """All collectives of one kind over the same mesh axes, in bytes that one device sends in a step; `axes` is None for
    groups of devices that follow no mesh axes."""

    kind: str
    axes: tuple[str, ...] | None
    predicted_count: int
    compiled_count: int
    predicted_bytes: float
    compiled_bytes: float
    holds: bool


@dataclass(frozen=True, slots=True)
class StepTimeRow:
    """The step time, or exposed communication of one kind, in seconds by model; None where there is none."""

    name: str
    predicted: float
    replayed: float | None
    xla_estimate: float | None
    measured: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """The compiled figures of one program next to those of its plan.

    Args:
        name: "" for the step itself, else the stage.
        off: names of the figures that do not hold.
        step_times: step time by model; empty in files of versions before the replay.
        estimate_errors: why XLA's estimate is left out.
    """

    name: str
    topology: str
    compile_s: float
    figures: tuple[CompiledFigure, ...]
    collectives: tuple[CompiledCollectives, ...]
    off: tuple[str, ...]
    step_times: tuple[StepTimeRow, ...] = ()
    estimate_errors: tuple[str, ...] = ()


def read_compiled(path: str | os.PathLike[str], program: str, strategy: str) -> tuple[Compiled, ...]:
    """Read the output of `autopar verify --json` for a plan.

    Args:
        program, strategy: the program's name and the strategy of the plan, which must equal those that were verified.

    Raises:
        VerifyError: the file cannot be read, is not a verification, or is one of another plan.
    """
    name = os.fspath(path)
    try:
        return compiled_of(json.loads(Path(path).read_text(encoding="utf-8")), program, strategy)
    except OSError as error:
        what = f"it cannot be read ({error.strerror})"
    except VerifyError as error:
        what = str(error)
    except ValueError as error:
        what = f"it is damaged: {error}"
    raise VerifyError(
        f"cannot use the verification {name!r}: {what}. Write it with `autopar verify TARGET --plan PLAN.json --json >"
        f" {name}`"
    )


def compiled_of(document: Any, program: str, strategy: str) -> tuple[Compiled, ...]:
    """The programs of a verification given as JSON types; for the arguments see `read_compiled`.

    Raises:
        VerifyError: it is not a verification, or is one of another plan.
    """
    if not isinstance(document, dict) or document.get("format") not in (_PROGRAM, _STAGES):
        raise VerifyError(f'it is not the JSON of a verification: its "format" must be is "{_PROGRAM}" or "{_STAGES}"')
    for what, expected in (("program", program), ("strategy", strategy)):
        if document.get(what) != expected:
            raise VerifyError(
                f"it is of another plan: its {what} is {document.get(what)!r}, that of this plan {expected!r}"
            )
    try:
        if document["format"] == _PROGRAM:
            return (_compiled(document, ""),)
        return tuple(_compiled(one, f"stage {number}") for number, one in enumerate(document["stages"]))
    except KeyError as error:
        raise VerifyError(f"its field {error} is missing") from None
    except (WrongFieldError, TypeError) as error:
        raise VerifyError(f"it is damaged: {error}") from None


def _compiled(document: Mapping[str, Any], name: str) -> Compiled:
    figures = [{"measured": None, **one} for one in (*document["memory"], document["step_time"])]
    kept = CompiledCollectives.__dataclass_fields__
    times = document.get("step_times", {})
    if not isinstance(times, dict) or not isinstance(times.get("rows", []), list):
        raise WrongFieldError("step_times", "must be an object with a list of rows")
    return Compiled(
        name=name,
        topology=decoder(str)(document["topology"]),
        compile_s=decoder(float)(document["compile_s"]),
        figures=decoder(tuple[CompiledFigure, ...])(figures),
        collectives=decoder(tuple[CompiledCollectives, ...])(
            [{key: one[key] for key in kept} for one in document["collectives"]]
        ),
        off=decoder(tuple[str, ...])(document["off"]),
        step_times=tuple(map(_step_time, times.get("rows", []))),
        estimate_errors=decoder(tuple[str, ...])(times.get("estimate_errors", [])),
    )


def _step_time(row: Any) -> StepTimeRow:
    if not isinstance(row, list) or len(row) != len(StepTimeRow.__dataclass_fields__):
        raise WrongFieldError("step_times.rows", f"must have {len(StepTimeRow.__dataclass_fields__)} columns: {row!r}")
    name, *seconds = row
    number = decoder(float | None)
    return StepTimeRow(decoder(str)(name), decoder(float)(seconds[0]), *map(number, seconds[1:]))
