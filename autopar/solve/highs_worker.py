"""One run of HiGHS in a process of its own: `python highs_worker.py FOLDER`, started by `highs.py`.

Reads the serialised `model`, `parameters` and `hints` from FOLDER and writes `result` there; HiGHS's log goes
to standard output, line by line as it comes. Not imported by anything, and imports nothing of autopar.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ortools.math_opt import callback_pb2, model_parameters_pb2, model_pb2, parameters_pb2
from ortools.math_opt.core.python import solver


def _tell(lines: list[str]) -> None:
    try:
        sys.stdout.write("".join(f"{line}\n" for line in lines))
        sys.stdout.flush()
    except OSError:  # whoever asked is gone
        os._exit(1)


def main(folder: Path) -> None:
    result = solver.solve(
        model_pb2.ModelProto.FromString((folder / "model").read_bytes()),
        parameters_pb2.SOLVER_TYPE_HIGHS,
        parameters_pb2.SolverInitializerProto(),
        parameters_pb2.SolveParametersProto.FromString((folder / "parameters").read_bytes()),
        model_parameters_pb2.ModelSolveParametersProto.FromString((folder / "hints").read_bytes()),
        _tell,
        callback_pb2.CallbackRegistrationProto(),
        None,
        None,
    )
    part = folder / "result.part"  # a result is there as a whole, or it is not
    part.write_bytes(result.SerializeToString())
    part.rename(folder / "result")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
