"""Start a program in several processes on this machine, as a launcher would, and collect their output.

In: the name of a program of `process_programs`, a number of processes, and of devices in each. Out: exit codes, and
each process's output. It uses free ports on 127.0.0.1.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROGRAMS = Path(__file__).parent / "process_programs.py"
ROOT = PROGRAMS.parent.parent

#: What a line that a program tells begins with; libraries print too.
TOLD = "told: "


@dataclass(frozen=True, slots=True)
class Ended:
    """One process that has ended.

    Args:
        told: the JSON values it printed, one a line.
        after_s: since the start of all.
    """

    code: int
    told: list[Any]
    errors: str
    after_s: float

    @property
    def last(self) -> Any:
        assert self.told, self.errors[-3000:]
        return self.told[-1]


def run(
    program: str,
    *arguments: str,
    processes: int,
    devices: int,
    limit_s: float = 300.0,
    frozen: int | None = None,
    programs: Path = PROGRAMS,
) -> list[Ended]:
    """Run a program to its end in every process.

    Args:
        programs: the file that has it.
        frozen: a process that stops itself, and is killed once all others have ended.

    Raises:
        AssertionError: one has not ended in time; all are killed.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started_s = time.monotonic()
    running = [
        subprocess.Popen(
            [sys.executable, str(programs), program, *arguments],
            env=os.environ
            | {
                "JAX_PLATFORMS": "cpu",
                "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0",
                "PYTHONPATH": os.pathsep.join([str(ROOT), str(PROGRAMS.parent)]),
                "COORDINATOR": f"127.0.0.1:{port}",
                "PROCESSES": str(processes),
                "PROCESS": str(index),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(processes)
    ]
    ended: list[Ended] = []
    try:
        for process in sorted(running, key=lambda process: running.index(process) == frozen):
            if running.index(process) == frozen:
                process.kill()
            left_s = max(0.1, limit_s - (time.monotonic() - started_s))
            out, errors = process.communicate(timeout=left_s)
            told = [json.loads(line.removeprefix(TOLD)) for line in out.splitlines() if line.startswith(TOLD)]
            ended.append(Ended(process.returncode, told, errors, time.monotonic() - started_s))
    except subprocess.TimeoutExpired:
        for process in running:
            process.kill()
        last = [process.communicate()[1][-1500:] for process in running[len(ended) :]]
        raise AssertionError(f"`{program}` did not end in {limit_s:g} s:\n" + "\n---\n".join(last)) from None
    return ended
