"""The command line: `autopar plan`, `explain`, `diff`, `export`, `verify`, `calibrate`, `generate`.

In: arguments. Out: text, tables or JSON on standard output, progress and errors on standard error,
and an exit code: 0 done, 1 a verification or a check that does not hold or a diagnosis with what nobody meant, 2 a mistake
of the user's, 130 interrupted. A command parses and prints; every decision is the planner's. What it needs is imported
when it runs: help, and a saved plan explained, wait for no JAX.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
from collections.abc import Iterator, Sequence

from autopar.cli import calibrate, diff, explain, export, generate, plan, verify
from autopar.cli.options import EXAMPLES
from autopar.errors import AutoparError, TargetError
from autopar.system.units import without_controls
from autopar.version import __version__

#: In the order in which help tells of them.
_COMMANDS = (plan, explain, diff, export, calibrate, verify, generate)
_DESCRIPTION = "Plan how to split a JAX train step over many devices, and say why. No device of the target is needed."


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments without the program's name; by default those of the process.

    Returns:
        The exit code. `--help`, `--version` and arguments that argparse refuses raise `SystemExit`.
    """
    options = _parser().parse_args(argv)
    try:
        with _said_on_stderr():
            _check_devices(options)
            code = options.run(options)
        sys.stdout.flush()
    except AutoparError as error:
        print(without_controls("\n".join([f"autopar: {error}", *error.__notes__])), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("autopar: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code or 0


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("autopar", description=_DESCRIPTION, epilog=EXAMPLES, formatter_class=raw)
    parser.add_argument("--version", action="version", version=f"autopar {__version__}")
    added = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in _COMMANDS:
        command.add_command(added)
    return parser


def _check_devices(options: argparse.Namespace) -> None:
    """Refuse several numbers of devices, but for a comparison of these."""
    devices = getattr(options, "devices", None)
    if isinstance(devices, tuple) and getattr(options, "compare", None) != "":
        numbers = ",".join(map(str, devices))
        raise TargetError(
            f"--devices {numbers} are several numbers of devices: give one, or compare them by `autopar plan TARGET --compare"
            " --hardware NAME,... --devices N,...`"
        )


@contextlib.contextmanager
def _said_on_stderr() -> Iterator[None]:
    """What the package has to say beside its result, such as that a plan was kept from an earlier start."""
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
