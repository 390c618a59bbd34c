"""Repeat one row of the table on this machine: `python -m benchmarks.plans gpt2 [--setting "8 GPUs"]`.

XLA compiles every program again, for GPUs that need not exist; the table's figures are printed next to the new ones. The
table's row is of an earlier version if its times are XLA's estimates.
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.plans.models import MODELS
from benchmarks.plans.page import ahead
from benchmarks.plans.parts import SETTINGS, measure
from benchmarks.plans.split import HAND, best
from benchmarks.run import records


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plans", description=__doc__)
    parser.add_argument(
        "model", choices=list(MODELS), help="; ".join(f"{name}: {one.description}" for name, one in MODELS.items())
    )
    parser.add_argument("--setting", choices=list(SETTINGS), default=next(iter(SETTINGS)))
    options = parser.parse_args()
    program = f"{options.model}: {options.setting}"
    print(_told("now", measure(program, again=True)))
    known = [record for record in records("plans") if record["program"] == program]
    print(
        _told(f"in the table of {known[-1]['date']}", known[-1]["rows"]) if known else "The table has no such row yet."
    )


def _told(when: str, rows: list[dict[str, Any]]) -> str:
    own, hand, value = best(rows, "autopar"), best(rows, *HAND), ahead(rows)
    if own is None or hand is None or value is None:
        return f"{when}: nothing to compare"
    by_hand = f"{hand['recipe']} ({hand.get('variant', hand['way'])}) {1e3 * hand['step_s']:.2f} ms"
    return f"{when}: autopar {1e3 * own['step_s']:.2f} ms, best by hand {by_hand}: {value:.3f} times as fast"


if __name__ == "__main__":
    main()
