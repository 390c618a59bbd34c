"""Plan traced programs with options given as keyword arguments."""

from __future__ import annotations

from typing import Any

from autopar.planner import planner
from autopar.planner.candidate import Candidate
from autopar.planner.mesh_search import search_meshes
from autopar.planner.request import PlanRequest
from autopar.plans.plan import Plan
from autopar.transforms.program import Program


def plan_program(program: Program, **options: Any) -> Plan:
    """The plan, over all numbers of microbatches that the options allow."""
    return planner.plan_program(program, PlanRequest(**options))


def plan_and_candidate(program: Program, **options: Any) -> tuple[Plan, Candidate]:
    """The plan of a program as it is, and what it was made of."""
    found = search_meshes(program, PlanRequest(**options), may_fork=False)
    assert found.candidate is not None
    return found.plan, found.candidate
