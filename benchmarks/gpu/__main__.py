"""Measure on this host's GPUs what is only predicted elsewhere: `python -m benchmarks.gpu`.

Pieces run one after the other, the most important first. Results are kept in `benchmarks/results/gpu/`, and the same
command resumes a stopped run. `prepare` makes the plans that are run, under the JAX version that runs it; `report`
renders the page. `docs/gpu.md` lists the requirements.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import MappingProxyType

from benchmarks.gpu import records
from benchmarks.gpu.pieces import PIECES, selected
from benchmarks.gpu.prepared import FOLDER, MOST_BYTES, SEVERAL, num_bytes, prepare
from benchmarks.gpu.runner import PieceError, Run

#: Cards that plans are prepared for; any other card uses the plans of the first.
CARDS = ("h100-sxm", "h200")
#: Two devices, so that pieces for several GPUs run too; XLA compiles with little optimization, since a dry run reports
#: no figures.
_DRY = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0"
    " --xla_llvm_disable_expensive_passes=true",
}
_DRY_CARD = "cpu-host"
#: Almost all of a GPU's memory; a user's own setting takes precedence.
_FULL = MappingProxyType({"XLA_PYTHON_CLIENT_MEM_FRACTION": os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")})


def main() -> int:
    arguments = _parser().parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as a job scheduler sends at the end of its time limit
    try:
        return {"measure": _measure, "prepare": _prepare, "report": _report}[arguments.command](arguments)
    except OSError as error:  # the folder cannot be created or is full
        print(f"python -m benchmarks.gpu: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopped. What was measured is kept; the same command goes on from there.", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=(__doc__ or "").split("\n\n")[0], allow_abbrev=False
    )
    about = "measure (the default), prepare or report"
    parser.add_argument("command", nargs="?", default="measure", choices=("measure", "prepare", "report"), help=about)
    parser.add_argument(
        "--only",
        default="",
        metavar="TEXT",
        help=f"pieces with this in their name, or with one of several parts, in this order (A,B): {', '.join(PIECES)}",
    )
    parser.add_argument(
        "--minutes", type=_minutes, default=float("inf"), metavar="N", help="how long, about (default: all)"
    )
    parser.add_argument("--again", action="store_true", help="measure, or plan, even what is there already")
    parser.add_argument(
        "--dry", action="store_true", help="tiny sizes on two CPU devices, kept in a folder that is named"
    )
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="where records are kept and read")
    about = "with prepare: these profiles only (default: " + ", ".join(CARDS) + ")"
    parser.add_argument("--card", action="append", metavar="NAME", help=about)
    about = "with prepare: do not ask XLA's compiler for its estimate"
    parser.add_argument("--no-estimate", action="store_true", help=about)
    return parser


def _minutes(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"takes a number above 0, not {text}")
    return value


def _measure(arguments: argparse.Namespace) -> int:
    if not selected(arguments.only):
        print(f"no piece has {arguments.only!r} in its name; there are {', '.join(PIECES)}", file=sys.stderr)
        return 2
    if arguments.dry:
        return _dry(arguments)
    code = _run(Run(FOLDER, arguments.results or records.FOLDER, "full", _FULL, _say), arguments)
    _report(arguments)
    return code


def _run(run: Run, arguments: argparse.Namespace) -> int:
    """Run the selected pieces; 0 if none failed."""
    try:
        failed = run.measure(arguments.only, arguments.again, 60 * arguments.minutes)
    except PieceError as error:
        print(f"{error}\nJAX does not start here: nothing was measured.", file=sys.stderr)
        return 1
    if failed:
        print(f"failed: {', '.join(failed)}; their errors are in {run.results}", file=sys.stderr)
    return 1 if failed else 0


def _dry(arguments: argparse.Namespace) -> int:
    """Plan tiny models for two devices, then run every piece."""
    folder = arguments.results or Path(tempfile.mkdtemp(prefix="autopar-gpu-dry-"))
    plans = folder / "plans"
    command = [sys.executable, "-m", "benchmarks.gpu", "prepare", "--dry", "--results", str(plans)]
    if subprocess.run(command, env=os.environ | _DRY).returncode:
        return 1
    _say(f"A dry run: its records, which are no figures, go to {folder}")
    return _run(Run(plans, folder, "tiny", _DRY, _say, at_once=2), arguments)


def _prepare(arguments: argparse.Namespace) -> int:
    folder = arguments.results or FOLDER
    if arguments.dry:
        prepare(folder, [_DRY_CARD], "tiny", (2,), estimate=False, report=_say)
        return 0
    prepare(
        folder,
        arguments.card or CARDS,
        "full",
        SEVERAL,
        estimate=not arguments.no_estimate,
        report=_say,
        only=arguments.only,
        again=arguments.again,
    )
    written = num_bytes(folder)
    _say(f"{folder}: {written / 1e6:.1f} MB")
    return 0 if written <= MOST_BYTES else 1


def _report(arguments: argparse.Namespace) -> int:
    from benchmarks.gpu.report import page

    found = records.read(arguments.results or records.FOLDER)
    path = records.FOLDER.with_suffix(".md") if arguments.results is None else arguments.results / "report.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(found), encoding="utf-8")
    _say(str(path))
    return 0


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
