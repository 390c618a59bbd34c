"""`autopar replay`: estimate the step time of a compiled GPU program from its HLO.

In: optimized HLO. Out: step time, exposed communication, the longest operations; a timeline.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from autopar.cli import options as shared
from autopar.cli.terminal import output
from autopar.errors import VerifyError

if TYPE_CHECKING:
    from autopar.xla_replay.replay import Replay

_EXAMPLES = """
replay step.after_optimizations.txt --hardware h100-sxm
replay step.after_optimizations.txt --hardware h100-sxm --perfetto step.json
"""


def add_command(added: Any) -> None:
    """Add the command to a parser's commands."""
    about = "estimate the step time of a compiled GPU program from its optimized HLO; no GPU is needed"
    replay = shared.add_command(added, "replay", about, _EXAMPLES)
    about = "optimized HLO as text: XLA's dump *after_optimizations.txt, or compiled.as_text()"
    replay.add_argument("hlo", metavar="HLO.txt", help=about)
    replay.add_argument("--hardware", metavar="NAME", required=True, help="device whose rates apply, e.g. h100-sxm")
    about = "devices that NVLink connects (default: as in the hardware profile)"
    replay.add_argument("--devices-per-domain", type=shared.device_count, metavar="N", help=about)
    about = "trip count of loops for which XLA knows none (default: 1)"
    replay.add_argument("--trip-count", type=shared.device_count, default=1, metavar="N", help=about)
    replay.add_argument(
        "--rows", type=shared.device_count, default=20, metavar="N", help="longest operations to show (default: 20)"
    )
    replay.add_argument("--perfetto", metavar="FILE", help="write the timeline, which ui.perfetto.dev shows")
    replay.add_argument("--json", action="store_true", help="print JSON for programs: all operations, plain numbers")
    replay.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Replay an HLO file, and print the estimate."""
    from pathlib import Path

    from autopar.xla_replay.run import replay

    found = replay(
        Path(options.hlo),
        hardware=options.hardware,
        devices_per_domain=options.devices_per_domain,
        unknown_trip_count=options.trip_count,
    )
    if options.perfetto is not None:
        _write(found, options.perfetto)
    output(
        options, found.as_json, lambda console: console.print(found.text(options.rows), markup=False, soft_wrap=True)
    )


def _write(found: Replay, path: str) -> None:
    try:
        found.save_perfetto(path)
    except OSError as error:
        raise VerifyError(f"cannot write the timeline to {path!r}: {error.strerror}") from None
