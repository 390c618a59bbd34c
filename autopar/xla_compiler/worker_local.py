"""The process in which `compiler` has steps compiled, and run, on the devices that are here: `python -m
autopar.xla_compiler.worker_local FOLDER`.

In and out: as `compile_absent`, without `target` and `topology`. First it says what devices there are, as a line of
JSON. A job that has a file `arguments` is run as well, on made-up values, and timed.
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
    """Say what is here, then do what is asked for."""
    out, devices = answers(), jax.local_devices()
    kind, platform = devices[0].device_kind, devices[0].platform
    print(json.dumps({"kind": kind, "platform": platform, "count": len(devices)}), file=out, flush=True)
    serve(folder, out, _devices_here, _run)


def _devices_here(job: Path) -> Sequence[Any]:
    return jax.local_devices()[: int((job / "num_devices").read_text(encoding="utf-8"))]


def _run(job: Path, devices: Sequence[Any], executable: Any) -> dict[str, Any]:
    """Run the step some times: seconds of each run, and the most memory that a device held."""
    if not (job / "arguments").exists():
        return {}
    asked = json.loads((job / "arguments").read_text(encoding="utf-8"))
    mesh = Mesh(np.array(devices, dtype=object).reshape(asked["mesh_sizes"]), asked["mesh_axes"])
    makers: dict[str, Any] = {}

    def make(position: int) -> jax.Array:
        shape, dtype, spec = asked["inputs"][position]
        sharding = NamedSharding(mesh, PartitionSpec(*(tuple(axes) or None for axes in spec)))
        key = json.dumps(asked["inputs"][position])
        if key not in makers:
            makers[key] = jax.jit(lambda: _values(tuple(shape), jnp.dtype(dtype)), out_shardings=sharding)
        return makers[key]()

    arrays = [make(position) for position in range(len(asked["inputs"]))]
    donated, carried = asked["donated"], asked["carried"]
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
        for position in donated:  # its buffer is gone
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
    """Small random numbers: zeros would take a GPU less power, and so less time."""
    if jnp.issubdtype(dtype, jnp.floating):
        return (0.02 * jax.random.normal(jax.random.key(0), shape, jnp.float32)).astype(dtype)
    return jnp.zeros(shape, dtype)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
