"""Parse the command line and run its command.

In: arguments. Out: text, tables or JSON on standard output; progress, warnings and errors on standard error; an exit code:
0 for success, 1 if a verification or check fails or a diagnosis finds unintended collectives, 2 for a user error, 130
if interrupted. Commands only parse and print. They import what they need when they run, so that `--help` and `explain`
of a saved plan do not import JAX.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
from collections.abc import Iterator, Sequence

from autopar.cli import (
    calibrate,
    compare,
    compare_profile,
    diagnose,
    diff,
    doctor,
    explain,
    export,
    generate,
    keep,
    plan,
    replay,
    route,
    serve,
    verify,
    why,
)
from autopar.cli.estimate import command as estimate
from autopar.cli.old_spellings import modern
from autopar.errors import AutoparError
from autopar.system.units import without_controls
from autopar.version import __version__

#: In the order of the help.
_COMMANDS = (
    *(plan, explain, why, verify, replay, compare_profile, diagnose, compare, diff, export),
    *(estimate, calibrate, generate, serve, route, keep, doctor),
)
_DESCRIPTION = "Plan how to shard a JAX train step over many devices, and say why. No device of the target is needed."
_EPILOG = """\
start here:
  autopar doctor
  autopar plan train.py:make --devices 8 --hardware h100-sxm -o gpt.plan.json
  autopar explain gpt.plan.json
`autopar COMMAND --help` has the options of a command, and examples.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments without the program's name; by default those of the process.

    Returns:
        The exit code. `--help`, `--version` and arguments that argparse refuses raise `SystemExit`.
    """
    arguments, renamed = modern(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(arguments)
    if renamed is not None:
        print(f"autopar: this spelling goes with the next release; write: {renamed}", file=sys.stderr)
    try:
        with _log_to_stderr():
            code = options.run(options)
        sys.stdout.flush()
    except AutoparError as error:
        print(without_controls("\n".join([f"autopar: {error}", *error.__notes__])), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("autopar: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `head`, say, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code or 0


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("autopar", description=_DESCRIPTION, epilog=_EPILOG, formatter_class=raw)
    parser.add_argument("--version", action="version", version=f"autopar {__version__}")
    added = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in _COMMANDS:
        command.add_command(added)
    return parser


@contextlib.contextmanager
def _log_to_stderr() -> Iterator[None]:
    """Print the package's log on standard error, for example cache hits."""
    handler, logger = logging.StreamHandler(sys.stderr), logging.getLogger("autopar")
    handler.setFormatter(logging.Formatter("autopar: %(message)s"))
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False  # or Python says a warning twice
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]
