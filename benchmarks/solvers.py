"""Compare autopar's solver with others on the same problems: cost, lower bound, seconds.

The problems: instances of the ASPLOS 2025 contest on intra-operator parallelism (`iopddl.py`), each from a cold start
within the contest's time limit, including reading the file; the contest's example of five nodes; and the problems of
planning GPT-2 small's train step for 8 H100s, without and with a memory limit. The solvers: autopar's with three seeds,
of which the worst counts; HiGHS alone on the same programme without any reduction; dynamic programming along the order
of the nodes, as in OptCNN and Tofu, which ignores memory; randomised search, as in FlexFlow. XLA's own solver scores,
by the contest's published table, 13,214,846,074 on A and 1,264,777 on G, and has no score on M and S.
"""

from __future__ import annotations

import math
import resource
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from autopar.solve.branch_and_bound import branch
from autopar.solve.highs import End
from autopar.solve.ilp import Ilp
from autopar.solve.presolve import delete_forbidden, reduce
from autopar.solve.problem import Problem, Solution, Solver, Status
from benchmarks import iopddl
from benchmarks.baselines.dynamic_program import DynamicProgram
from benchmarks.baselines.mcmc import Mcmc

Row = dict[str, str | float | bool]
PROGRAMS = ("G", "A", "M", "S", "example", "gpt2_small", "gpt2_small_tight")
SEEDS = (0, 1, 2)
_LIMIT_S = 60.0  # for problems without a limit of the contest
_KNOWN = {"example": 445.0, "A": 6_548_641_531.0, "G": 217_039.0, "M": 49_928_460_991.0, "S": 1_534_613_444.0}
_TIGHT_BYTES = 12.5e9  # the unlimited plan takes 12.7e9
_MARGIN = 0.03  # share of the time limit, for the work after the search


def measure(program: str) -> list[Row]:
    """One row for each solver, and for each seed of autopar's."""
    limit_s = iopddl.LIMITS_S.get(program, _LIMIT_S)
    rows = [_in_fresh_process(program, f"autopar, seed {seed}", limit_s) for seed in SEEDS]  # each run has both cores
    with ThreadPoolExecutor(2) as pool:  # these use one core
        others = ("HiGHS alone", "randomised", "dynamic programming")
        return rows + list(pool.map(lambda name: _in_fresh_process(program, name, limit_s), others))


@dataclass(frozen=True, slots=True)
class HighsAlone:
    """HiGHS on the unreduced programme."""

    time_limit_s: float

    def solve(self, problem: Problem) -> Solution:
        """Its best solution, with its own bound."""
        allowed = reduce(problem, rules=(delete_forbidden,))
        if allowed is None:
            return Solution((), math.inf, math.inf, Status.INFEASIBLE)
        result = branch(allowed.problem, deadline=time.monotonic() + self.time_limit_s)
        if not result.choices:
            status = Status.INFEASIBLE if result.end is End.INFEASIBLE else Status.NOT_FOUND
            return Solution((), math.inf, result.bound, status)
        choices = allowed.expand(result.choices)
        status = Status.OPTIMAL if result.end is End.OPTIMAL else Status.FEASIBLE
        return Solution(choices, problem.evaluate(choices), result.bound, status)


def _in_fresh_process(program: str, name: str, limit_s: float) -> Row:
    """The row of a solver that starts cold: nothing is imported when its process begins, and the limit counts from
    there."""
    command = [sys.executable, "-m", "benchmarks.solvers", program, name, str(limit_s), str(time.time())]
    child = subprocess.run(command, capture_output=True, text=True, check=True)
    cost, bound, seconds, cpu_s, status = child.stdout.splitlines()[-1].split("\t")
    found, proven = float(cost), float(bound)
    known = _KNOWN.get(program, math.nan)
    return {
        "solver": name,
        "cost": f"{found:,.6g}" if found < 1e3 else f"{found:,.0f}",
        "lower bound": f"{proven:,.6g}" if abs(proven) < 1e3 else f"{proven:,.0f}",
        "gap": (found - proven) / found if math.isfinite(found) and found else math.inf,
        "over best known": f"{found / known - 1:+.4%}" if math.isfinite(found) and math.isfinite(known) else "",
        "s": float(seconds),
        "cpu_s": float(cpu_s),
        "limit_s": limit_s,
        "outcome": status.split(":")[0],
    }


def _solver(name: str, limit_s: float) -> Solver:
    if name.startswith("autopar"):
        return Ilp(time_limit_s=limit_s, seed=int(name.split()[-1]))
    return {"HiGHS alone": HighsAlone(limit_s), "dynamic programming": DynamicProgram(), "randomised": Mcmc(limit_s)}[
        name
    ]


def _problem(program: str) -> Problem:
    if program.startswith("gpt2"):
        return _train_step(tight="tight" in program)
    return iopddl.read(iopddl.instance(program))


def _train_step(*, tight: bool) -> Problem:
    """The largest problem of planning for 8 H100s; if `tight`, with less memory than its optimum takes."""
    # Contest problems are timed from a cold start, and do not import Flax.
    import autopar
    from benchmarks.models import gpt2_small_target

    met: list[Problem] = []

    class Watching:
        def solve(self, problem: Problem) -> Solution:
            met.append(problem)
            return Ilp().solve(problem)

    step, args = gpt2_small_target()
    budget = _TIGHT_BYTES if tight else None
    autopar.plan(
        step, *args, num_devices=8, all_devices=True, hardware="h100-sxm", solver=Watching(), memory_budget_bytes=budget
    )
    limited = [p for p in met if p.memory_limit is not None] if tight else met
    return max(limited, key=lambda p: sum(e.costs.size for e in p.edges))


def _child(program: str, name: str, limit_s: float, began: float) -> None:
    problem = _problem(program)
    start = began if program in iopddl.LIMITS_S else time.time()  # cold start: reading and importing count
    left_s = limit_s * (1 - _MARGIN) - (time.time() - start)
    solution = _solver(name, left_s).solve(problem)
    assert not solution.choices or problem.fits(solution.choices)
    cost = problem.evaluate(solution.choices) if solution.choices else math.inf
    seconds = time.time() - start
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu_s = sum(u.ru_utime + u.ru_stime for u in used)
    print(f"{cost!r}\t{solution.lower_bound!r}\t{seconds:.2f}\t{cpu_s:.2f}\t{solution.status.value}")


if __name__ == "__main__":
    _child(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4]))
