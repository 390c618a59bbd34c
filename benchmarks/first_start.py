"""The first start of a train step against what cannot be spared: a Flax U-Net of 4 million parameters on 8 virtual CPU
devices, nothing kept from before.

`ratio` is of `step.init` and the first call, which plan, compile and run, to planning plus the compilation of the same step
by `jax.jit` for one device; all of one process. Three processes measure it one after another; the last row has the median of
each column. `cpu_s` is what the process and its copies used, of all cores together, which
a busy machine changes less. `jit_init` compiles and runs the function that makes the state, by plain `jax.jit`.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

Row = dict[str, str | float | bool]

#: Widths, blocks at each, examples and pixels.
SIZES: dict[str, tuple[tuple[int, ...], int, int, int]] = {
    "unet": ((56, 112, 144), 2, 16, 32),
    "unet_small": ((16, 32), 1, 16, 16),
}
_PROCESSES = 3


def measure(program: str) -> list[Row]:
    """A row for each process, and their medians: seconds of each part, and the ratio by both clocks."""
    rows = [_in_a_process(program) for _ in range(_PROCESSES)]
    medians = {name: statistics.median(float(row[name]) for row in rows) for name in rows[0]}
    return [{"process": str(name), **row} for name, row in [*enumerate(rows, 1), ("median", medians)]]


def _in_a_process(program: str) -> Row:
    """`once`, in a process of its own that finds nothing kept."""
    command = [sys.executable, "-m", "benchmarks.first_start", program]
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"XDG_CACHE_HOME": folder}
        child = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if child.returncode:
        raise RuntimeError(child.stderr[-3000:])
    return json.loads(child.stdout.splitlines()[-1])


def once(program: str) -> Row:
    """The row, of this process, whose cache folder is empty."""
    import jax

    import autopar
    from benchmarks.zoo import diffusion

    row: Row = {}

    def timed(name: str, work: Any) -> Any:
        before, used = time.perf_counter(), _cpu_s()
        made = jax.block_until_ready(work())
        row[f"{name}_s"] = time.perf_counter() - before
        row[f"{name}_cpu_s"] = _cpu_s() - used
        return made

    training = diffusion.unet(*SIZES[program])
    batch, key = training.make_batch(0), jax.random.key(0)
    shapes = jax.eval_shape(training.create_state, key)
    step = autopar.parallelize(training.step)
    timed("plan", lambda: step.abstract_state(training.create_state, key, batch=batch) and None)
    state = timed("init", lambda: step.init(training.create_state, key, batch=batch))
    timed("first_call", lambda: step(state, batch))
    # Last, so that what a process does once is not counted against them.
    timed("jit_compile", lambda: jax.jit(training.step).lower(shapes, batch).compile() and None)
    timed("jit_init", lambda: jax.jit(training.create_state)(key))
    row["num_parameters"] = float(sum(leaf.size for leaf in jax.tree.leaves(shapes.params)))
    for unit in ("s", "cpu_s"):
        spent, least = ("plan", "init", "first_call"), ("plan", "jit_compile")
        row[f"ratio_{unit}"] = sum(float(row[f"{part}_{unit}"]) for part in spent) / sum(
            float(row[f"{part}_{unit}"]) for part in least
        )
    return row


def _cpu_s() -> float:
    """Seconds of all cores, of this process and of the copies of it that planning made and that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


if __name__ == "__main__":
    print(json.dumps(once(sys.argv[1])))
