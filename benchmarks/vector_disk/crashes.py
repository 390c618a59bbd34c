"""Safety of updates: operations that were acknowledged are there, once, after whatever happens.

`torn`: the machine stops at a random operation on files, in the middle of a write, and loses a random part of what was
not synchronized, in sectors of 512 bytes. `killed`: a process that inserts, replaces, deletes and writes checkpoints gets
SIGKILL at a random moment. `faults`: a random operation on files, or several in a row, fail with ENOSPC or EIO, or for lack
of memory. After each, the index is opened again and compared with a dictionary. An operation that had begun may be there, as a whole. `oracle`:
10,000 random operations, and searches of all lists between them, compared with an exact search of the dictionary.

Each is measured of lists and of a graph. A process that changes a graph lives up to ten seconds instead of half a second, as its
checkpoints compile programs, and a quarter of as many are killed.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from autopar.errors import IndexFileError
from autopar.vector_search import UpdatableIndex
from autopar.vector_search.updates.files import FILES
from benchmarks.vector_disk.faulty_files import FaultyFiles, Stopped
from benchmarks.vector_disk.random_updates import (
    Held,
    after,
    fitting,
    held_by,
    operations,
    run,
    start,
    start_graph,
    wrong_results,
)

Row = dict[str, Any]

TIMES, OPERATIONS = 200, 10_000
#: Vectors in a delta before a checkpoint is due, so that there are many.
_DELTA = 100


def measure(which: str) -> list[Row]:
    """The row of one kind of accident."""
    accident, _, graph = which.partition(" of a ")
    kills = TIMES // 4 if graph else TIMES
    kinds: dict[str, tuple[str, Callable[[], int]]] = {
        "torn": (f"{TIMES} stops of the machine", lambda: torn(of=graph)),
        "killed": (f"{kills} SIGKILLs", lambda: _killed_apart(kills, graph)),
        "faults": (f"{TIMES} failures", lambda: faults(of=graph)),
        "oracle": (f"{OPERATIONS:,} random operations", lambda: oracle(of=graph)),
    }
    case, count = kinds[accident]
    case += ", a graph" if graph else ""
    wrong = count()
    return [
        {"case": case, "figure": "operations lost, doubled or wrong", "measured": wrong, "gate": 0, "met": wrong == 0}
    ]


def _killed_apart(times: int, of: str) -> int:
    """`killed`, in a process without threads."""
    program = f"from benchmarks.vector_disk.crashes import killed; print(killed({times}, of={of!r}))"
    return int(subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout)


def torn(times: int = TIMES, seed: int = 0, of: str = "") -> int:
    """Stop at random file operations, again and again, on one index; the number of wrong states."""
    draw, wrong = np.random.default_rng(seed), 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "index"
        _small(path, of)
        held: Held = {}
        for each in range(times):
            files = FaultyFiles(draw, fails_at=int(draw.integers(1, 400)))
            index, begun = None, None
            try:
                index = UpdatableIndex(path, "mmap", files, background=False)
                for operation in operations(1_000 + each):
                    begun = fitting(operation, held)
                    run(index, begun)
                    held = after(held, begun)
            except Stopped:
                pass
            if index is not None:
                index._release()
            files.crash()
            held, is_wrong = _compared(path, held, begun)
            wrong += is_wrong
    return wrong


def faults(times: int = TIMES, seed: int = 0, of: str = "") -> int:
    """Let file operations fail; the number of wrong states, and of operations that failed in another way."""
    draw, wrong = np.random.default_rng(seed), 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "index"
        _small(path, of)
        held: Held = {}
        for each in range(times):
            error = int(draw.choice([errno.ENOSPC, errno.EIO, errno.ENOMEM]))
            files = FaultyFiles(draw, int(draw.integers(3, 300)), error, int(draw.choice([1, 2, 3, 10])))
            unsure = None
            try:
                index = UpdatableIndex(path, "mmap", files, background=False)
            except (IndexFileError, MemoryError):
                continue  # it failed while it was opened
            for operation in operations(5_000 + each):
                one = fitting(operation, held)
                try:
                    run(index, one)
                    held = after(held, one)
                except (IndexFileError, MemoryError) as refused:
                    if index._state.broken is not None:
                        unsure = one if "may or may not" in str(refused) else None
                        break
                if files.num_operations > (files.fails_at or 0) + 60:
                    break
            if unsure is None:
                wrong += held_by(index) != held
            index._release()
            held, is_wrong = _compared(path, held, unsure)
            wrong += is_wrong
    return wrong


def killed(times: int = TIMES, seed: int = 0, of: str = "") -> int:
    """Kill processes; the number of wrong states. Call it in a process without threads: it forks."""
    draw, wrong = np.random.default_rng(seed), 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "index"
        program = f"from pathlib import Path; from benchmarks.vector_disk import crashes; crashes._small(Path({str(path)!r}), {of!r})"
        subprocess.run([sys.executable, "-c", program], check=True)  # building a graph starts threads
        held: Held = {}
        for each in range(times):
            receive, send = os.pipe()
            child = os.fork()
            if not child:
                _work(path, 10_000 + each, held, send)
            os.close(send)
            time.sleep(float(draw.uniform(0.02, 10 if of else 0.5)))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            with os.fdopen(receive, "rb") as file:
                told = file.read()
            done, stream, begun = told.count(b"d"), operations(10_000 + each), None
            for _ in range(told.count(b"b")):
                begun = fitting(next(stream), held)
                if done:
                    held, done = after(held, begun), done - 1
            held, is_wrong = _compared(path, held, begun)
            wrong += is_wrong
    return wrong


def oracle(num: int = OPERATIONS, seed: int = 0, background: bool = True, of: str = "") -> int:
    """Random operations; the number of wrong states, results, and chances to lose something."""
    draw, wrong = np.random.default_rng(seed), 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "index"
        _small(path, of)
        index, held = UpdatableIndex(path, "mmap", FILES, background), {}
        for place, operation in zip(range(num), operations(seed), strict=False):
            one = fitting(operation, held)
            run(index, one)
            held = after(held, one)
            if place % 50 == 49:
                queries = (3 * np.sin(place / 200 + np.arange(8)) + draw.normal(size=(8, 8))).astype(np.float32)
                wrong += wrong_results(index, held, queries, 10)
            if place % 500 == 499:
                wrong += held_by(index) != held
                index.close()
                index = UpdatableIndex(path, "mmap", FILES, background)
        wrong += held_by(index) != held
        index.close()
    return wrong


def _small(path: Path, of: str) -> None:
    """An empty index of lists, or of a "graph"."""
    from autopar.vector_search.updates import create

    settings = create.Settings
    create.Settings = lambda *given, **named: settings(*given, **named, delta_vectors=_DELTA)
    try:
        (start_graph if of == "graph" else start)(path).close()
    finally:
        create.Settings = settings


def _compared(path: Path, held: Held, begun: Any) -> tuple[Held, bool]:
    """What the index holds after it was opened again, and whether that is wrong."""
    with UpdatableIndex(path, "mmap", FILES, background=False) as index:
        found = held_by(index)
    is_right = found == held or (begun is not None and found == after(held, begun))
    return found, not is_right


def _work(path: Path, seed: int, held: Held, send: int) -> None:
    """Carry operations out, and tell when each begins and is done, until this process is killed."""
    try:
        index = UpdatableIndex(path, "mmap", FILES, background=True)
        for operation in operations(seed):
            one = fitting(operation, held)
            os.write(send, b"b")
            run(index, one)
            os.write(send, b"d")
            held = after(held, one)
    finally:
        os._exit(1)
