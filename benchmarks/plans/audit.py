"""Give a tuned recipe any one more of autopar's flags: `python -m benchmarks.plans.audit SEED [--rows 10]`.

In: the table's newest rows, and a random seed in hex, such as the first digits of a commit. Ten tuned rows are drawn with it. XLA compiles
every program that differs from the tuned one in one flag: combine threshold, constraints, kernels, early reductions. Out:
for each row, how much faster the fastest of them is, and which it is. A tuned recipe is strong if that is at most 1 %.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from autopar.hardware import profile as hardware
from benchmarks.plans.judge import Judge, new_compiler
from benchmarks.plans.models import MODELS
from benchmarks.plans.parts import HARDWARE
from benchmarks.plans.recipes import recipes
from benchmarks.plans.split import fits, variant_text
from benchmarks.plans.tuned import Extras, Programs
from benchmarks.run import newest_rows

Row = Mapping[str, Any]

#: The most that one more flag may gain.
MOST = 0.01


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plans.audit", description=__doc__)
    parser.add_argument("seed", help="hexadecimal digits")
    parser.add_argument("--rows", type=int, default=10)
    options = parser.parse_args()
    drawn = draw(newest_rows("plans"), int(options.seed, 16), options.rows)
    with new_compiler() as compiler:
        judge = Judge(compiler, hardware.load(HARDWARE))
        gains = [gain(row, judge) for row in drawn]
    for row, (most, extras) in zip(drawn, gains, strict=True):
        about = f"{row['model']}, {row['setting']}: {row['recipe']} ({row['variant']})"
        print(f"{about}: {100 * most:+.2f} % by {variant_text(asdict(extras)) if extras else 'none'}")
    met = sum(most <= MOST for most, _ in gains)
    print(f"{met} of {len(gains)} rows gain at most {MOST:.0%} by one more flag")


def draw(rows: Sequence[Row], seed: int, num_rows: int) -> list[Row]:
    """Tuned rows that run, without repetition."""
    tuned = [row for row in rows if row["way"] == "tuned" and fits(row)]
    return random.Random(seed).sample(tuned, min(num_rows, len(tuned)))


def gain(row: Row, judge: Judge) -> tuple[float, Extras | None]:
    """The largest share of the step that one more flag saves, and the flags of that program."""
    step, args = MODELS[row["model"]].training(row["batch"]).target
    recipe = next(one for one in recipes(row["gpus_used"], args) if one.name == row["recipe"])
    programs = Programs(recipe, step, args, HARDWARE)
    best, found = 0.0, None
    for extras in Extras.of(row).one_flag_away():
        if not programs.has(extras):
            continue
        module, options = programs.lowered(extras)
        made = judge.figures(module, recipe.mesh, recipe.num_hosts, options)
        if fits({**made, "failed": ""}) and 1 - made["step_s"] / row["step_s"] > best:
            best, found = 1 - made["step_s"] / row["step_s"], extras
    return best, found


if __name__ == "__main__":
    main()
