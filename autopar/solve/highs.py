"""Solve mixed integer programmes with HiGHS, through OR-Tools' MathOpt.

In: a `Programme` of arrays. Out: a `MipOutcome`. The model is passed as a protocol buffer filled from arrays, because
building MathOpt's Python objects, one per variable and term, would take longer than the solve.

MathOpt's HiGHS (ortools 9.15) cannot be interrupted, aborts the process if it still runs at exit, returns solutions
only at its end, and sometimes prints. It therefore runs in a separate process (`highs_worker.py`) that can be killed,
and writes each solution to a file as it finds it, so that a killed run still yields its best solution. Programmes
too small to be worth a process are first tried briefly in this process.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import numpy as np
from ortools.math_opt import (
    callback_pb2,
    model_parameters_pb2,
    model_pb2,
    parameters_pb2,
    result_pb2,
    sparse_containers_pb2,
)
from ortools.math_opt.core.python import solver as mathopt
from pybind11_abseil.status import StatusNotOk

from autopar.solve.mip import End, MipOutcome, Programme, Report

_WORKER = Path(__file__).with_name("highs_worker.py")
_GRACE_S = 5.0  # by which HiGHS may overrun its limit before it is killed
_LISTEN_S = 0.05  # between two checks for an interrupt
_LONGEST_S = 1e7  # instead of no limit
_SMALL, _MOMENT_S = 2_000, 0.2  # a programme with fewer non-zeros gets that much time in this process


def solve_mip(
    programme: Programme,
    *,
    time_limit_s: float,
    hint: np.ndarray | None = None,
    relative_gap: float = 1e-7,
    report: Report | None = None,
) -> MipOutcome:
    """Run HiGHS, deterministically.

    Args:
        time_limit_s: seconds after which the best solution so far is returned.
        hint: a solution to start from, float[columns].
        relative_gap: gap between bound and solution that counts as optimal.
        report: callback for the best objective and the bound; another thread calls it.

    Returns:
        The outcome; after Ctrl-C the best so far, with `End.INTERRUPTED`.
    """
    log = _Log(report)
    try:
        return _solve(programme, time_limit_s, _hints(hint), relative_gap, log)
    except KeyboardInterrupt:  # before HiGHS began or after it ended
        return MipOutcome(End.INTERRUPTED, None, log.bound)


def _solve(
    programme: Programme,
    time_limit_s: float,
    hints: model_parameters_pb2.ModelSolveParametersProto,
    relative_gap: float,
    log: _Log,
) -> MipOutcome:
    model, num_columns = _model(programme), len(programme.objective)
    if len(programme.coefficients) < _SMALL:
        # An unfinished run restarts below, so that the outcome does not depend on its progress.
        result = _call(model, _parameters(min(_MOMENT_S, time_limit_s), relative_gap), hints)
        outcome = _outcome(result, num_columns)
        if outcome.end is not End.STOPPED or time_limit_s <= _MOMENT_S:
            return outcome
    with tempfile.TemporaryDirectory(prefix="autopar-") as name:
        folder = Path(name)
        parameters = _parameters(time_limit_s, relative_gap)
        parameters.highs.bool_options["mip_improving_solution_save"] = True
        parameters.highs.string_options["mip_improving_solution_file"] = str(folder / "solutions")
        for part, message in (("model", model), ("parameters", parameters), ("hints", hints)):
            (folder / part).write_bytes(message.SerializeToString())
        interrupted = _run_worker(folder, log, min(time_limit_s, _LONGEST_S) + _GRACE_S)
        if log.error is not None:
            raise log.error
        stopped = End.INTERRUPTED if interrupted else End.STOPPED
        if (folder / "result").exists():  # the worker may have finished just before it was killed
            result = result_pb2.SolveResultProto.FromString((folder / "result").read_bytes())
            outcome = _outcome(result, num_columns)
            return replace(outcome, end=stopped) if outcome.end is End.STOPPED else outcome
        return MipOutcome(stopped, _last_solution(folder / "solutions", num_columns), log.bound)


def solve_lp(programme: Programme) -> tuple[np.ndarray, np.ndarray] | None:
    """Solve a small linear programme: the columns' values and the rows' duals (<= 0 where the upper side binds).

    Returns None if HiGHS finds no optimum.
    """
    result = _call(_model(programme), parameters_pb2.SolveParametersProto(random_seed=1), _hints(None))
    if result.termination.reason != result_pb2.TERMINATION_REASON_OPTIMAL:
        return None
    solution = result.solutions[0]
    values = _dense(solution.primal_solution.variable_values, len(programme.objective))
    return values, _dense(solution.dual_solution.dual_values, len(programme.row_least))


def _call(
    model: model_pb2.ModelProto,
    parameters: parameters_pb2.SolveParametersProto,
    hints: model_parameters_pb2.ModelSolveParametersProto,
) -> result_pb2.SolveResultProto:
    """Run HiGHS in this process, where only its time limit stops it. After a failure there is no solution and no bound.

    It runs in a thread, because MathOpt loses a Ctrl-C that arrives while it converts its arguments.
    """
    task: Future[result_pb2.SolveResultProto] = Future()

    def run() -> None:
        try:
            result = mathopt.solve(
                model,
                parameters_pb2.SOLVER_TYPE_HIGHS,
                parameters_pb2.SolverInitializerProto(),
                parameters,
                hints,
                None,
                callback_pb2.CallbackRegistrationProto(),
                None,
                None,
            )
            task.set_result(result)
        except StatusNotOk:  # for example an optimum that violates HiGHS's own tolerances
            failed = result_pb2.SolveResultProto()
            failed.termination.reason = result_pb2.TERMINATION_REASON_NUMERICAL_ERROR
            failed.termination.objective_bounds.dual_bound = -math.inf
            task.set_result(failed)
        except Exception as error:  # raised by `task.result()`
            task.set_exception(error)

    thread = threading.Thread(target=run, name="autopar-highs")
    thread.start()
    try:
        while not task.done():  # polls, because an interrupt that is no signal does not end a wait
            thread.join(_LISTEN_S)
        return task.result()
    finally:
        thread.join()


def _run_worker(folder: Path, log: _Log, most_s: float) -> bool:
    """Run the worker on the files of a folder; True if the user interrupted it."""
    worker = subprocess.Popen(
        [sys.executable, "-P", str(_WORKER), str(folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},  # to import the same OR-Tools
        start_new_session=True,  # only this process handles Ctrl-C
    )
    reader = threading.Thread(target=log.read, args=(worker.stdout,), daemon=True)
    reader.start()
    try:
        worker.wait(most_s)
    except subprocess.TimeoutExpired:
        pass
    except KeyboardInterrupt:
        return True
    finally:
        worker.kill()
        worker.wait()
        reader.join()
    return False


class _Log:
    """The bound and objective that HiGHS logs while it runs."""

    def __init__(self, report: Report | None) -> None:
        self.bound = -math.inf
        self.error: Exception | None = None
        self._report = report

    def read(self, lines: Iterable[str]) -> None:
        """Parse a log to its end."""
        for line in lines:
            match = _PROGRESS.match(line)
            if match:
                self.bound = max(self.bound, float(match[1]))
                self._report_objective(float(match[2]))

    def _report_objective(self, objective: float) -> None:
        try:
            if self._report is not None:
                self._report(objective, self.bound)
        except Exception as error:  # keep reading the log: a full pipe would block HiGHS
            self.error, self._report = error, None


# A line of HiGHS's table: [source] nodes, left, leaves, explored %, dual bound, primal bound, …
_NUMBER = r"(-?inf|-?[\d.]+(?:e[+-]?\d+)?)"
_PROGRESS = re.compile(rf"^ ?[A-Za-z]? +\d+ +\d+ +\d+ +[\d.]+% +{_NUMBER} +{_NUMBER} ")


def _model(p: Programme) -> model_pb2.ModelProto:
    model = model_pb2.ModelProto()
    columns, rows = len(p.objective), len(p.row_least)
    model.variables.ids.extend(range(columns))
    model.variables.lower_bounds.extend([0.0] * columns)
    model.variables.upper_bounds.extend([1.0] * columns)
    model.variables.integers.extend(p.integer.tolist())
    priced = np.flatnonzero(p.objective)
    model.objective.linear_coefficients.ids.extend(priced.tolist())
    model.objective.linear_coefficients.values.extend(p.objective[priced].tolist())
    model.linear_constraints.ids.extend(range(rows))
    model.linear_constraints.lower_bounds.extend(p.row_least.tolist())
    model.linear_constraints.upper_bounds.extend(p.row_most.tolist())
    order = np.lexsort((p.columns, p.rows))
    model.linear_constraint_matrix.row_ids.extend(p.rows[order].tolist())
    model.linear_constraint_matrix.column_ids.extend(p.columns[order].tolist())
    model.linear_constraint_matrix.coefficients.extend(p.coefficients[order].tolist())
    return model


def _parameters(time_limit_s: float, relative_gap: float) -> parameters_pb2.SolveParametersProto:
    parameters = parameters_pb2.SolveParametersProto(
        random_seed=1, relative_gap_tolerance=relative_gap, absolute_gap_tolerance=0.0
    )
    parameters.time_limit.FromMilliseconds(max(1, round(min(time_limit_s, _LONGEST_S) * 1e3)))
    return parameters


def _hints(hint: np.ndarray | None) -> model_parameters_pb2.ModelSolveParametersProto:
    hints = model_parameters_pb2.ModelSolveParametersProto()
    if hint is not None:
        values = hints.solution_hints.add().variable_values
        values.ids.extend(range(len(hint)))
        values.values.extend(hint.tolist())
    return hints


def _outcome(result: result_pb2.SolveResultProto, columns: int) -> MipOutcome:
    values = None
    if result.solutions:
        values = _dense(result.solutions[0].primal_solution.variable_values, columns)
    reason = result.termination.reason
    if reason == result_pb2.TERMINATION_REASON_OPTIMAL:
        end = End.OPTIMAL
    elif reason in (result_pb2.TERMINATION_REASON_INFEASIBLE, result_pb2.TERMINATION_REASON_INFEASIBLE_OR_UNBOUNDED):
        end = End.INFEASIBLE  # all columns are bounded
    else:
        end = End.STOPPED
    return MipOutcome(end, values, result.termination.objective_bounds.dual_bound)


def _dense(sparse: sparse_containers_pb2.SparseDoubleVectorProto, size: int) -> np.ndarray:
    values = np.zeros(size)
    values[np.array(sparse.ids, dtype=int)] = np.array(sparse.values)
    return values


def _last_solution(found: Path, columns: int) -> np.ndarray | None:
    """The last complete solution in HiGHS's file: blocks of `Objective …`, `# Columns n`, n lines of `name value`."""
    if not found.exists():
        return None
    for block in reversed(found.read_text().split("# Columns ")[1:]):
        lines = block.splitlines()[1 : 1 + columns]
        if len(lines) == columns:  # else HiGHS was killed while writing it
            return np.array([float(line.split()[-1]) for line in lines])
    return None
