"""Read plan files of one program or of a pipelined step.

In: a path.
Out: the `Plan` or `PipelinePlan` that was saved there. Reading a file never runs code from it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from autopar.errors import PlanFileError
from autopar.pipeline import plan as pipeline_plan
from autopar.pipeline.plan import AnyPlan, PipelinePlan
from autopar.plans.plan import Plan


def plan_from_json(data: Any) -> AnyPlan:
    """The inverse of `to_json` of either kind of plan.

    Raises:
        PlanFileError: a field is missing, unknown, ill-typed or inconsistent; the text names it.
    """
    in_stages = isinstance(data, dict) and data.get("format") == pipeline_plan.FORMAT
    return PipelinePlan.from_json(data) if in_stages else Plan.from_json(data)


def load_plan(path: str | os.PathLike[str]) -> AnyPlan:
    """Read a plan file. Reading never runs code from it.

    Raises:
        PlanFileError: the file is missing, damaged, not a plan, or of another version.
    """
    name = os.fspath(path)
    try:
        return plan_from_json(json.loads(Path(path).read_text(encoding="utf-8"), parse_constant=_refuse_constant))
    except PlanFileError as error:
        what = str(error)
    except OSError as error:
        what = f"it cannot be read ({error.strerror})"
    except json.JSONDecodeError as error:
        what = f"it is damaged: not JSON at line {error.lineno}, column {error.colno} ({error.msg})"
    except (ValueError, RecursionError) as error:
        what = f"it is damaged: {error}"
    raise PlanFileError(f"cannot use the plan file {name!r}: {what}. Plan again with `autopar plan TARGET -o {name}`.")


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
