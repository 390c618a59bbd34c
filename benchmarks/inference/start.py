"""Measure the first and the second start of an engine, and count recompilations.

The model has the size of GPT-2 small, float32, 16 slots, on one device. Each start is a process of its own; both use
the same cache folder, which is empty at first. The time runs from `Engine.open` to the first token of a request, so it
includes planning, compiling, and reading 500 MB of weights, but not the start of Python and the imports. Recompilations
are all of JAX's compiles while a decoder of 4 layers, d 256, serves 1,000 requests of mixed lengths and sampling
options.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.inference.rows import Row, row
from benchmarks.machine import ROOT

MARK = "START "
REQUESTS = 1000
_COMPILED = "/jax/core/compile/backend_compile_duration"


def measure() -> list[Row]:
    """Rows of both starts, then of the thousand requests."""
    from autopar.inference import write_checkpoint
    from benchmarks.inference.models import GPT2_SMALL

    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder) / "model", GPT2_SMALL)
        cold, warm = (_start(Path(folder)) for _ in range(2))
    return [
        row("first start", cold["seconds"], "s"),
        row("second start", warm["seconds"], "s"),
        row("second / first", warm["seconds"] / cold["seconds"], at_most=0.35),
        row("first start, of all cores", cold["cpu_s"], "s"),
        row("second start, of all cores", warm["cpu_s"], "s"),
        row("programs compiled", cold["compiled"], at_most=6),
        row("first tokens that differ", int(cold["token"] != warm["token"]), at_most=0),
        row(f"compiled while {REQUESTS:,} requests were served", compiled_by_requests(REQUESTS), at_most=0),
    ]


def _start(folder: Path) -> dict[str, float]:
    env = os.environ | {"XDG_CACHE_HOME": str(folder / "cache"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "benchmarks.inference.start", str(folder / "model")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return json.loads(done.stdout.split(MARK)[-1])


def once(folder: str) -> dict[str, float]:
    """Time the start of this process."""
    import jax

    from autopar.inference import Engine, Options

    jax.devices()
    begin, used = time.perf_counter(), time.process_time()
    engine = Engine.open(folder, options=Options(max_length=512), num_pages=512)
    token = next(iter(engine.submit([1, 2, 3], max_tokens=2))).tokens[0]
    return {
        "seconds": time.perf_counter() - begin,
        "cpu_s": time.process_time() - used,
        "compiled": engine.stats.num_compiled,
        "token": token,
    }


def compiled_by_requests(num: int) -> int:
    """Number of JAX's compiles while this many requests are served."""
    import jax
    import numpy as np

    from autopar.inference import Engine, Options, SamplingOptions
    from benchmarks.inference.models import SMALL, config_of, params_of

    config = config_of(SMALL)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("model",))
    engine = Engine.of(config, params_of(config), options=Options(max_length=512), mesh=mesh, cache=False)
    times: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: times.append(event))
    chance = random.Random(0)
    for number in range(num):
        engine.submit(
            [chance.randrange(config.vocab_size) for _ in range(chance.randrange(1, 120))],
            max_tokens=chance.randrange(1, 12),
            sampling=SamplingOptions(chance.choice([0, 0.7]), chance.choice([0, 5]), chance.choice([1, 0.9]), number),
            num_best=chance.choice([0, 3]),
        )
    engine.run()
    return times.count(_COMPILED)


if __name__ == "__main__":
    print(MARK + json.dumps(once(sys.argv[1])))
