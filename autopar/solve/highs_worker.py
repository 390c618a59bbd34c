"""Run HiGHS once in a separate process: `python highs_worker.py FOLDER`, started by `highs.py`.

Reads the serialized `model`, `parameters` and `hints` from FOLDER and writes `result` there. Streams HiGHS's log to
standard output. No module imports this one, and it imports nothing from autopar.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ortools.math_opt import callback_pb2, model_parameters_pb2, model_pb2, parameters_pb2
from ortools.math_opt.core.python import solver


def _print(lines: list[str]) -> None:
    try:
        sys.stdout.write("".join(f"{line}\n" for line in lines))
        sys.stdout.flush()
    except OSError:  # the parent process has ended
        os._exit(1)


def main(folder: Path) -> None:
    result = solver.solve(
        model_pb2.ModelProto.FromString((folder / "model").read_bytes()),
        parameters_pb2.SOLVER_TYPE_HIGHS,
        parameters_pb2.SolverInitializerProto(),
        parameters_pb2.SolveParametersProto.FromString((folder / "parameters").read_bytes()),
        model_parameters_pb2.ModelSolveParametersProto.FromString((folder / "hints").read_bytes()),
        _print,
        callback_pb2.CallbackRegistrationProto(),
        None,
        None,
    )
    part = folder / "result.part"  # renamed once complete: a reader never sees a partial result
    part.write_bytes(result.SerializeToString())
    part.rename(folder / "result")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
