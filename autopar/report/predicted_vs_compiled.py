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
    """A predicted and a compiled number; `unit` is `bytes` (on one device) or `s`."""

    name: str
    unit: str
    predicted: float
    compiled: float | None
    tolerance: float | None
    holds: bool
    measured: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledCollectives:
    """All collectives of one kind over the same mesh axes, in bytes that one device sends per step. `axes` is None for
    groups of devices that match no mesh axes."""

    kind: str
    axes: tuple[str, ...] | None
    predicted_count: int
    compiled_count: int
    predicted_bytes: float
    compiled_bytes: float
    holds: bool


@dataclass(frozen=True, slots=True)
class StepTimeRow:
    """The step time, or the exposed communication of one kind, in seconds by model; None if a model has no figure."""

    name: str
    predicted: float
    replayed: float | None
    xla_estimate: float | None
    measured: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """The compiled figures of one program, next to its plan's.

    Args:
        name: the name of a stage; "" for the step itself.
        off: the names of figures outside their tolerance.
        step_times: the step time by model; empty in files of versions before the replay.
        estimate_errors: the reasons why XLA's estimate is left out.
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
    """Read what `autopar verify --json` wrote for a plan.

    Args:
        program, strategy: the plan's program name and strategy, which must be those of the verified plan.

    Raises:
        VerifyError: the file cannot be read, is no verification, or belongs to another plan.
    """
    name = os.fspath(path)
    try:
        return compiled_of(json.loads(Path(path).read_text(encoding="utf-8")), program, strategy)
    except OSError as error:
        reason = f"it cannot be read ({error.strerror})"
    except VerifyError as error:
        reason = str(error)
    except ValueError as error:
        reason = f"it is damaged: {error}"
    raise VerifyError(
        f"cannot use the verification {name!r}: {reason}. Write it with `autopar verify TARGET --plan PLAN.json --json >"
        f" {name}`"
    )


def compiled_of(document: Any, program: str, strategy: str) -> tuple[Compiled, ...]:
    """Parse a verification from JSON types; `program` and `strategy` are the arguments of `read_compiled`.

    Raises:
        VerifyError: the document is no verification, or belongs to another plan.
    """
    if not isinstance(document, dict) or document.get("format") not in (_PROGRAM, _STAGES):
        raise VerifyError(f'it is not a verification: its "format" is not "{_PROGRAM}" or "{_STAGES}"')
    for field, expected in (("program", program), ("strategy", strategy)):
        if document.get(field) != expected:
            raise VerifyError(
                f"it belongs to another plan: its {field} is {document.get(field)!r}, this plan's is {expected!r}"
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
    fields = CompiledCollectives.__dataclass_fields__
    times = document.get("step_times", {})
    if not isinstance(times, dict) or not isinstance(times.get("rows", []), list):
        raise WrongFieldError("step_times", "must be an object with a list of rows")
    return Compiled(
        name=name,
        topology=decoder(str)(document["topology"]),
        compile_s=decoder(float)(document["compile_s"]),
        figures=decoder(tuple[CompiledFigure, ...])(figures),
        collectives=decoder(tuple[CompiledCollectives, ...])(
            [{key: one[key] for key in fields} for one in document["collectives"]]
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
