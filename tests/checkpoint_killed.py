"""Processes that save until they are killed, one after another; each restores what the one before it left.

Run as `checkpoint_killed.py FOLDER COUNT`. It imports everything once and forks, before JAX has a back end or a
thread. Prints what happened as JSON; fails where a restore does, or brings what nobody saved.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import sys
import time
from typing import Any

import jax
import orbax.checkpoint
from checkpoint_programs import abstract_batch, bits, filled, mlp, step_on

import autopar

#: Seconds within which a process is killed, from its first save on: some saves long.
MOMENTS_S = 0.4


def restored(folder: str) -> tuple[autopar.Checkpoints, Any]:
    """The latest checkpoint, held against what its number says; a fresh state where there is none."""
    program = mlp()
    step = step_on(program, jax.device_count(), "rows", cache=f"{folder}-cache")
    checkpoints = autopar.Checkpoints(folder, step)
    state = checkpoints.restore_or_init(program.create_state, jax.random.key(0), batch=abstract_batch(program))
    if checkpoints.latest is not None:
        assert bits(state) == bits(filled(state, checkpoints.latest)), "it is not what was saved"
        assert checkpoints.extra() == {"number": checkpoints.latest}
        assert checkpoints.plan() == step.plans[-1]
    return checkpoints, state


def save_on(folder: str, pipe: int) -> None:
    """Save one after another. Each line told is a step that is whole on the disk."""
    checkpoints, state = restored(folder)
    number = checkpoints.latest or 0
    os.write(pipe, f"{number}\n".encode())
    while True:
        number += 1
        checkpoints.save(number, filled(state, number), extra={"number": number}, wait=number % 2 == 0)
        if number % 2 == 0:
            os.write(pipe, f"{number}\n".encode())


def forked(work: Any, *args: Any) -> tuple[int, int]:
    """A process that does it, and where it tells how far it is."""
    reads, writes = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(reads)
        try:
            work(*args, writes)
            os._exit(0)
        except BaseException as error:
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
            os._exit(1)
    os.close(writes)
    return process, reads


def lines_of(reads: int, seconds: float) -> list[int]:
    """The numbers told, until the first of them has come or time is up; then all that are there."""
    if not select.select([reads], [], [], seconds)[0]:
        return []
    return [int(line) for line in os.read(reads, 1 << 16).decode().split()]


def check(folder: str, told: int, pipe: int) -> None:
    checkpoints, _ = restored(folder)
    latest = checkpoints.latest
    assert latest is not None and latest >= told, f"{told} was whole, and {latest} is left"
    os.write(pipe, f"{latest}\n".encode())


def main() -> None:
    folder, count = sys.argv[1], int(sys.argv[2])
    moments = random.Random(0)
    killed, in_a_save, whole = 0, 0, 0
    for _ in range(count):
        process, reads = forked(save_on, folder)
        first = lines_of(reads, 60.0)
        assert first, "it did not get as far as to save"
        assert first[0] >= whole, f"{whole} was whole, and {first[0]} was restored"
        time.sleep(moments.uniform(0.0, MOMENTS_S))
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        whole = max([whole, *first, *lines_of(reads, 0.0)])
        os.close(reads)
        killed += 1
        in_a_save += any(not name.isdigit() for name in os.listdir(folder)) if os.path.isdir(folder) else 0
    process, reads = forked(check, folder, whole)
    latest = lines_of(reads, 60.0)
    assert os.waitpid(process, 0)[1] == 0 and latest
    print(json.dumps({"killed": killed, "restored": killed, "in_a_save": in_a_save, "latest": latest[0]}))


if __name__ == "__main__":
    assert orbax.checkpoint  # imported before the fork
    main()
