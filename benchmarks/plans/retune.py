"""Tune a case's recipes again: `python -m benchmarks.plans.retune "gptj: 8 GPUs"`.

In: the newest rows of one case in `results/plans.jsonl`. Out: the same rows there, with the variants that its recipes
lack and new tuned versions, as `case.py` chooses them. For a change of the variants, such as one more combine threshold,
or of some kinds of recipe; a change of the planner needs `python -m benchmarks.run plans --again`. Autopar's row stays,
unless its memory is a share of that of the best program by hand, and this is now another.
"""

from __future__ import annotations

import argparse
import datetime
import json

from benchmarks.plans.parts import tuned_again
from benchmarks.run import BENCHMARKS, RESULTS, records


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plans.retune", description=__doc__)
    parser.add_argument("program", choices=BENCHMARKS["plans"].programs, metavar="MODEL: SETTING")
    parser.add_argument("--changed", nargs="*", default=(), metavar="KIND", help="kinds of recipe to compile again")
    options = parser.parse_args()
    program = options.program
    known = [record for record in records("plans") if record["program"] == program]
    if not known:
        parser.error(f"{program} has no rows yet: python -m benchmarks.run plans --only {program!r}")
    today = datetime.date.today().isoformat()
    rows = tuned_again(program, known[-1]["rows"], options.changed)
    with (RESULTS / "plans.jsonl").open("a", encoding="utf-8") as out:
        out.write(json.dumps(known[-1] | {"rows": rows, "tuned_again": today}) + "\n")


if __name__ == "__main__":
    main()
