"""Compile and run steps on local devices in the worker process of `Compiler`: `python -m MODULE FOLDER`.

In and out: as `worker_deviceless`, without `target` and `topology`. The worker first prints its devices as one line of
JSON. It runs and times a job that has a file `arguments`, on random inputs.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.xla_compiler.worker_deviceless import answers, serve

_WARM_UP_RUNS = 2
_FEWEST_RUNS, _MOST_RUNS, _SECONDS = 3, 20, 20.0


def main(folder: Path) -> None:
    """Print the local devices, then serve jobs."""
    out, devices = answers(), jax.local_devices()
    kind, platform = devices[0].device_kind, devices[0].platform
    print(json.dumps({"kind": kind, "platform": platform, "count": len(devices)}), file=out, flush=True)
    serve(folder, out, _devices_here, _run)


def _devices_here(job: Path) -> Sequence[Any]:
    return jax.local_devices()[: int((job / "num_devices").read_text(encoding="utf-8"))]


def _run(job: Path, devices: Sequence[Any], executable: Any) -> dict[str, Any]:
    """Run the step repeatedly: seconds of each run, and the peak memory of the fullest device."""
    if not (job / "arguments").exists():
        return {}
    arguments = json.loads((job / "arguments").read_text(encoding="utf-8"))
    mesh = Mesh(np.array(devices, dtype=object).reshape(arguments["mesh_sizes"]), arguments["mesh_axes"])
    compiled: dict[str, Any] = {}

    def make(position: int) -> jax.Array:
        shape, dtype, spec = arguments["inputs"][position]
        sharding = NamedSharding(mesh, PartitionSpec(*(tuple(axes) or None for axes in spec)))
        key = json.dumps(arguments["inputs"][position])
        if key not in compiled:
            compiled[key] = jax.jit(lambda: _values(tuple(shape), jnp.dtype(dtype)), out_shardings=sharding)
        return compiled[key]()

    arrays = [make(position) for position in range(len(arguments["inputs"]))]
    donated, carried = arguments["donated"], arguments["carried"]
    times: list[float] = []
    while len(times) < _WARM_UP_RUNS + _FEWEST_RUNS or (
        len(times) < _WARM_UP_RUNS + _MOST_RUNS and sum(times) < _SECONDS
    ):
        jax.block_until_ready(arrays)
        start = time.perf_counter()
        results = executable.execute_sharded(arrays).disassemble_into_single_device_arrays()
        jax.block_until_ready(results)
        times.append(time.perf_counter() - start)
        fed = {
            before: jax.make_array_from_single_device_arrays(
                arrays[before].shape, arrays[before].sharding, results[after]
            )
            for before, after in carried
        }
        for position in donated:  # the run has consumed its buffer
            arrays[position] = fed[position] if position in fed else make(position)
    stats = [device.memory_stats() for device in devices]
    peaks = [each["peak_bytes_in_use"] for each in stats if each and "peak_bytes_in_use" in each]
    runs = times[_WARM_UP_RUNS:]
    return {
        "measured": {
            "step_time_s": statistics.median(runs),
            "runs_s": runs,
            "peak_bytes": max(peaks) if peaks else None,
        }
    }


def _values(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Small random numbers: on zeros a GPU draws less power and runs faster."""
    if jnp.issubdtype(dtype, jnp.floating):
        return (0.02 * jax.random.normal(jax.random.key(0), shape, jnp.float32)).astype(dtype)
    return jnp.zeros(shape, dtype)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
