"""Run processes that save checkpoints until they are killed; each restores what the one before it saved.

Run as `checkpoint_killed.py FOLDER COUNT`. It imports everything once and forks, before JAX has a back end or a thread.
Prints the results as JSON; fails if a restore fails, or returns something that no process saved.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint
from checkpoint_programs import abstract_batch, bits, filled, mlp, step_on

import autopar

#: Seconds that a process may take to restore, or to save twice.
PATIENCE_S = 120.0


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
    """The numbers told, waiting so long for the first of them; then all that are there."""
    if not select.select([reads], [], [], seconds)[0]:
        return []
    return [int(line) for line in os.read(reads, 1 << 16).decode().split()]


def check(folder: str, told: int, pipe: int) -> None:
    checkpoints, _ = restored(folder)
    latest = checkpoints.latest
    assert latest is not None and latest >= told, f"{told} was whole, and {latest} is left"
    os.write(pipe, f"{latest}\n".encode())


def main() -> None:
    folder, count = Path(sys.argv[1]), int(sys.argv[2])
    moments = random.Random(0)
    in_a_save, whole, save_s = 0, 0, 0.1
    for _ in range(count):
        process, reads = forked(save_on, str(folder))
        told = lines_of(reads, PATIENCE_S)
        assert told, "it did not get as far as to save"
        assert told[0] >= whole, f"{whole} was whole, and {told[0]} was restored"
        for _ in range(moments.randrange(3)):  # some saves later, and then at any moment of one
            before = time.perf_counter()
            told += lines_of(reads, PATIENCE_S)
            save_s = time.perf_counter() - before
        time.sleep(moments.uniform(0.0, save_s))
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        whole = max([whole, *told, *lines_of(reads, 0.0)])
        os.close(reads)
        in_a_save += folder.is_dir() and any(not place.name.isdigit() for place in folder.iterdir())
    process, reads = forked(check, str(folder), whole)
    latest = lines_of(reads, PATIENCE_S)
    assert os.waitpid(process, 0)[1] == 0
    assert latest
    print(json.dumps({"killed": count, "in_a_save": in_a_save, "latest": latest[0]}))


if __name__ == "__main__":
    assert orbax.checkpoint  # imported before the fork
    main()
