"""Measure the first start of a train step against a baseline of planning plus one `jax.jit` compile.

The step is that of a Flax U-Net with 4 million parameters on 8 virtual CPU devices; all caches are empty. `ratio` is
the time of `step.init` and the first call, which plan, compile and run, over the time of planning plus compiling the
same step by `jax.jit` for one device, all in one process. Three processes measure it in sequence; the last row has the
median of each column. `cpu_s` is the CPU time of the process and its copies over all cores, which a busy machine
changes less than wall time. `jit_init` is the time to compile and run the state's initializer by plain `jax.jit`.
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

#: Channel widths, blocks per width, examples, and pixels per side.
SIZES: dict[str, tuple[tuple[int, ...], int, int, int]] = {
    "unet": ((56, 112, 144), 2, 16, 32),
    "unet_small": ((16, 32), 1, 16, 16),
}
_PROCESSES = 3


def measure(program: str) -> list[Row]:
    """A row for each process, then their medians: seconds of each part, and the ratio in wall time and in CPU time."""
    rows = [_in_a_process(program) for _ in range(_PROCESSES)]
    medians = {name: statistics.median(float(row[name]) for row in rows) for name in rows[0]}
    return [{"process": str(name), **row} for name, row in [*enumerate(rows, 1), ("median", medians)]]


def _in_a_process(program: str) -> Row:
    """Run `once` in a process of its own with empty caches."""
    command = [sys.executable, "-m", "benchmarks.first_start", program]
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"XDG_CACHE_HOME": folder}
        child = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if child.returncode:
        raise RuntimeError(child.stderr[-3000:])
    return json.loads(child.stdout.splitlines()[-1])


def once(program: str) -> Row:
    """The row of this process, whose cache folder is empty."""
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
    # Measured last, so that it does not pay the process's one-time costs.
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
    """CPU seconds over all cores, of this process and of the ended copies of it that planning made."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


if __name__ == "__main__":
    print(json.dumps(once(sys.argv[1])))
