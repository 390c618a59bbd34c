"""Measure the second start of a train step against the first: GPT-2 small on 4 virtual CPU devices.

Each start is a process of its own. Both use the same cache folder, which is empty at first. The time runs from the
decorated step, after the state is made, to the end of its first run: tracing, planning or loading the plan, lowering,
compiling or loading the program, and one step with a sequence of 128 tokens per device. `cpu_s` is the CPU time of the
process over all cores, which a busy machine changes less than wall time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

from benchmarks.machine import ROOT

Row = dict[str, str | float | bool]

NUM_DEVICES = 4
SEQ = 128
PARTS = ("plan", "init", "first_step")
MARK = "SECOND START "


def measure(program: str) -> list[Row]:
    """One row: seconds of both starts and of their parts."""
    assert program == "gpt2_small"
    with tempfile.TemporaryDirectory() as folder:
        first, second = start(folder), start(folder)
    row: Row = {}
    for unit in ("s", "cpu_s"):
        for which, times in (("first", first), ("second", second)):
            row[f"{which}_{unit}"] = sum(times[f"{part}_{unit}"] for part in PARTS)
            row |= {f"{which}_{part}_{unit}": times[f"{part}_{unit}"] for part in PARTS}
    return [row]


def start(folder: str) -> dict[str, float]:
    """Run one start in a process of its own."""
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={NUM_DEVICES}",
        "XDG_CACHE_HOME": folder,
        "PYTHONPATH": str(ROOT),
        "USE_TORCH": "0",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", "benchmarks.second_start"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return json.loads(done.stdout.split(MARK)[-1])


def once() -> dict[str, float]:
    """Time the start of this process, by parts."""
    import jax

    import autopar
    from benchmarks.zoo import language
    from benchmarks.zoo.training import BF16

    # isort: split
    from transformers import GPT2Config

    seconds: dict[str, float] = {}

    def timed(name: str, work: Any) -> Any:
        before, used = time.perf_counter(), time.process_time()
        made = jax.block_until_ready(work())
        seconds[f"{name}_s"] = time.perf_counter() - before
        seconds[f"{name}_cpu_s"] = time.process_time() - used
        return made

    training = language.gpt2(GPT2Config(), NUM_DEVICES, SEQ, BF16)
    batch = training.make_batch(0)
    step = autopar.parallelize(training.step)
    timed("plan", lambda: step.abstract_state(training.create_state, jax.random.key(0), batch=batch) and None)
    state = timed("init", lambda: step.init(training.create_state, jax.random.key(0), batch=batch))
    timed("first_step", lambda: step(state, batch))
    return seconds


if __name__ == "__main__":
    print(MARK + json.dumps(once()))
