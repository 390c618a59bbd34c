"""Compile steps for absent GPUs in the worker process of `Compiler`: `python -m MODULE FOLDER`.

In: one line per job on standard input, the name of a folder with `module`, `options`, `target`, `topology`. Out: files
`program` and `figures` in that folder, then the same line on standard output. The worker exits at the end of standard
input, even during a compile, since its parent process is gone.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

from jax.experimental import topologies

from autopar.jax_interop.absent_devices import serialized_output_shardings
from autopar.jax_interop.compilation import compile_module, with_matmuls_apart

#: (job's folder, devices, XLA's executable) -> further figures of the job.
Afterwards = Callable[[Path, Sequence[Any], Any], dict[str, Any]]


def main(folder: Path) -> None:
    """Serve compile jobs for absent devices."""
    serve(folder, answers(), _absent_devices)


def answers() -> TextIO:
    """A stream to the original standard output, reserved for answers; later writes to standard output go to the log."""
    own = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return own


def serve(
    folder: Path, out: TextIO, devices_of: Callable[[Path], Sequence[Any]], afterwards: Afterwards | None = None
) -> None:
    """Run the jobs named on standard input, one after the other."""
    jobs: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(jobs, folder), daemon=True).start()
    while True:
        name = jobs.get()
        job = folder / name
        devices = devices_of(job)
        module = (job / "module").read_bytes()
        for matmul in json.loads((job / "apart").read_text(encoding="utf-8")):
            module = with_matmuls_apart(module, matmul)
        options = json.loads((job / "options").read_text(encoding="utf-8"))
        start = time.perf_counter()
        executable = compile_module(module, devices, options)
        compile_s = time.perf_counter() - start
        figures = _figures(executable, devices) | {"compile_s": compile_s}
        _keep_text(executable, folder / "dump", job / "program")
        figures |= afterwards(job, devices, executable) if afterwards else {}
        (job / "figures").write_text(json.dumps(figures), encoding="utf-8")
        print(name, file=out, flush=True)


def _listen(jobs: queue.SimpleQueue[str], folder: Path) -> None:
    for line in sys.stdin:
        jobs.put(line.strip())
    # The parent process has died without cleaning up, so this process removes the folder.
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def _absent_devices(job: Path) -> Sequence[Any]:
    return topologies.get_topology_desc(
        platform="cuda",
        target_config=(job / "target").read_text(encoding="utf-8"),
        topology=(job / "topology").read_text(encoding="utf-8"),
    ).devices


def _figures(executable: Any, devices: Sequence[Any]) -> dict[str, Any]:
    sizes = executable.get_compiled_memory_stats()
    return {
        "argument_bytes": sizes.argument_size_in_bytes,
        "temp_bytes": sizes.temp_size_in_bytes,
        "output_bytes": sizes.output_size_in_bytes,
        "alias_bytes": sizes.alias_size_in_bytes,
        "hosts": [device.process_index for device in devices],
        "output_shardings": serialized_output_shardings(executable),
    }


def _keep_text(executable: Any, dump: Path, program: Path) -> None:
    """Store the HLO text: XLA's own dump if there is one, which takes half as long as the executable's text."""
    written = sorted(dump.glob("*_after_optimizations.txt"), key=lambda path: path.stat().st_mtime)
    if written:
        written[-1].replace(program)
    else:
        program.write_text(executable.hlo_modules()[0].to_string(), encoding="utf-8")
    shutil.rmtree(dump, ignore_errors=True)  # so that the folder holds one program's dump at a time


if __name__ == "__main__":
    main(Path(sys.argv[1]))
