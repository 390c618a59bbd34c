"""Parameter servers whose processes are killed or frozen: two servers of two replicas each, three workers, six shares, heartbeat timeout 5 s.

`kill -9` of a process drawn by chance, at a moment drawn by chance; its replacement is started at once, and the next process is killed when
it has its place. *freezes*: `SIGSTOP`; the process wakes a second when its replacement has its place, and is killed then. *kills*: of workers, heads of chains, other replicas. *next update*: seconds from a kill until all servers have applied their next update, median and
most, all processes on this machine. *log*: updates in the logs of all replicas together, with every share in every clock once; under
backup(1), gaps are late updates, which the policy discards. *weights*: for BSP whether the final
weights of all replicas have the bits of an undisturbed run in one process; for others the loss on new examples against that of the same processes, undisturbed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import autopar
from benchmarks.machine import ROOT

TIMEOUT_S, SLEEP_S, NUM_REPLICAS, NUM_WORKERS = 5.0, 0.05, 2, 3
#: Seconds to wait for anything.
_PATIENCE_S = 240.0


def measure(of: str) -> list[dict[str, Any]]:
    """One run.

    Args:
        of: "POLICY, seed N, M kills" or "... M freezes".
    """
    policy, seed, kills = of.split(", ")
    losses = []
    if policy != "bsp":
        run = Run(policy, 0, 0)
        try:
            run.row()
            losses.append(run.loss())
        finally:
            run.close()
    run = Run(policy, int(seed.split()[1]), int(kills.split()[0]), freezes="freezes" in kills)
    try:
        row = {"run": of, **run.row()}
        if losses:
            row["weights"] = f"loss {100 * (run.loss() / losses[0] - 1):+.1f} %"
        return [row]
    finally:
        run.close()


class Run:
    """A job of processes, some of which are killed."""

    def __init__(self, policy: str, seed: int, num_kills: int, clocks: int = 300, *, freezes: bool = False) -> None:
        self.policy, self.num_kills, self.clocks, self.freezes = policy, num_kills, clocks, freezes
        self.rng = random.Random(seed)
        self.folder = Path(tempfile.mkdtemp())
        self.number = 0
        self.processes: dict[subprocess.Popen[bytes], str] = {}
        self.killed: list[tuple[str, float]] = []
        self.keeper = autopar.StoreKeeper(servers=2, shares=6, timeout_s=TIMEOUT_S)

    def row(self) -> dict[str, Any]:
        """Run, kill, and compare."""
        for server in (0, 1):
            for _ in range(NUM_REPLICAS):
                self.start(f"server {server}")
        for _ in range(NUM_WORKERS):
            self.start("worker")
        self.settle()
        while not (self.logs(0) and self.logs(1)):  # workers have compiled their step
            time.sleep(0.1)
        while len(self.killed) < self.num_kills and not self.keeper.view.over:
            time.sleep(self.rng.uniform(0.5, 2.0))
            victim = self.kill()
            self.settle()
            if self.freezes:  # it wakes, does not know that it counts as dead, and comes again
                os.kill(victim.pid, signal.SIGCONT)
                time.sleep(1.0)
                victim.kill()
                victim.wait()
                self.await_end(victim)
        ended = self.keeper.wait(_PATIENCE_S)
        for process in self.processes:
            ended &= process.wait(_PATIENCE_S) == 0
        after = [self.next_update_s(at_s) for _, at_s in self.killed]
        after = [one for one in after if one is not None]
        roles = [role for role, _ in self.killed]
        return {
            "policy": self.policy,
            "kills": f"{roles.count('worker')} workers, {roles.count('head')} heads, {roles.count('replica')} replicas",
            "ended": "yes" if ended else "no",
            "next update, median": f"{statistics.median(after):.1f} s" if after else "-",
            "next update, most": f"{max(after):.1f} s" if after else "-",
            "within timeout + 5 s": f"{sum(one <= TIMEOUT_S + 5 for one in after)} of {len(after)}",
            "log": self.log_text(),
            "weights": self.weights_text(),
        }

    def close(self) -> None:
        """End what is left."""
        for process in self.processes:
            process.kill()
        self.keeper.close()

    # -- processes ---------------------------------------------------------------------------

    def start(self, role: str) -> None:
        """Start a process."""
        self.number += 1
        options: dict[str, Any] = {
            "keeper": self.keeper.address,
            "token": self.keeper.token,
            "policy": self.policy,
            "clocks": self.clocks,
            "sleep_s": SLEEP_S,
            "started": str(self.folder / f"{self.number}.started"),
        }
        if role != "worker":
            server = int(role.split()[1])
            options |= {
                "server": server,
                "log": str(self.folder / f"{server}-{self.number}.log"),
                "weights": str(self.folder / f"{server}-{self.number}.npz"),
            }
        command = [sys.executable, "-m", "benchmarks.faults.store_process", "work" if role == "worker" else "serve"]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
        with (self.folder / f"{self.number}.out").open("wb") as out:
            process = subprocess.Popen(
                [*command, json.dumps(options)], cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT
            )
        self.processes[process] = role

    def settle(self) -> None:
        """Wait until all processes have their place."""
        until_s = time.monotonic() + _PATIENCE_S
        while not self.keeper.view.over:
            view = self.keeper.view
            if all(len(chain) == NUM_REPLICAS for chain in view.chains) and len(view.workers) == NUM_WORKERS:
                return
            if time.monotonic() > until_s:
                raise TimeoutError(f"processes have not come: {view}; {self.folder}")
            time.sleep(0.05)

    def kill(self) -> subprocess.Popen[bytes]:
        """Kill or freeze a process, and start its replacement."""
        running = [one for one in self.processes if one.poll() is None]
        process = self.rng.choice(sorted(running, key=lambda one: one.pid))
        role = self.processes[process]
        is_head = any(f"-{process.pid}-" in chain[0] for chain in self.keeper.view.chains if chain)
        os.kill(process.pid, signal.SIGSTOP if self.freezes else signal.SIGKILL)
        self.killed.append((role if role == "worker" else "head" if is_head else "replica", time.time()))
        if not self.freezes:
            process.wait()
        del self.processes[process]
        self.start(role)
        self.await_end(process)
        return process

    def await_end(self, process: subprocess.Popen[bytes]) -> None:
        """Wait until a process counts as dead."""
        while any(f"{process.pid}-" in name for name in self._members()) and not self.keeper.view.over:
            time.sleep(0.02)

    def _members(self) -> Iterator[str]:
        view = self.keeper.view
        yield from view.workers
        for chain in (*view.chains, *view.waiting):
            yield from chain

    # -- results -----------------------------------------------------------------------------

    def logs(self, server: int) -> dict[int, tuple[float, list[list[int]]]]:
        """By position, when an update was first applied, and of which shares and clocks it is; replicas agree."""
        found: dict[int, tuple[float, list[list[int]]]] = {}
        for path in self.folder.glob(f"{server}-*.log"):
            for line in path.read_text().splitlines():
                try:
                    one = json.loads(line)
                except ValueError:  # the last line of a process that was killed
                    continue
                at_s, applied = found.get(one["position"], (one["time"], one["applied"]))
                if applied != one["applied"]:
                    raise AssertionError(f"replicas of server {server} differ at {one['position']}")
                found[one["position"]] = min(at_s, one["time"]), applied
        return found

    def next_update_s(self, at_s: float) -> float | None:
        """Seconds until all servers have applied an update; None if there was none left."""
        later = [min((t for t, _ in self.logs(server).values() if t > at_s), default=None) for server in (0, 1)]
        return None if None in later else max(later) - at_s  # pyright: ignore[reportOperatorIssue, reportArgumentType]

    def log_text(self) -> str:
        """Gaps and repeats in the logs."""
        wanted = {(share, clock) for share in range(6) for clock in range(self.clocks)}
        count = gaps = repeats = 0
        for server in (0, 1):
            log = self.logs(server)
            members = [tuple(one) for _, applied in log.values() for one in applied]
            count += len(members)
            gaps += len(wanted - {*members}) + len({*range(len(log))} - {*log})
            repeats += len(members) - len({*members})
        return f"{count}: {gaps} gaps, {repeats} repeats"

    def weights_text(self) -> str:
        """The final weights of all replicas against those of one process."""
        import numpy as np

        if self.policy != "bsp":
            return ""
        expected = undisturbed(self.policy, self.clocks)
        found = self.weights()
        equal = sum(all(np.array_equal(one[key], expected[key]) for key in one) for one in found)
        return f"{equal} of {len(found)} replicas bit-equal"

    def weights(self) -> list[dict[str, Any]]:
        """Of each replica."""
        import numpy as np

        return [dict(np.load(path)) for path in self.folder.glob("*.npz")]

    def loss(self) -> float:
        """Of the final weights, on examples that it is not trained on."""
        import numpy as np

        from benchmarks.faults.store_process import examples, loss

        x, y = (np.concatenate(parts) for parts in zip(*(examples(1_000_000, n) for n in range(256)), strict=True))
        return float(loss({key: array for one in self.weights() for key, array in one.items()}, x, y))


def undisturbed(policy: str, clocks: int) -> dict[str, Any]:
    """The weights of a run in one process, in which the shares push by turns."""
    from benchmarks.faults.store_process import NUM_SERVERS, NUM_SHARES, gradients, store

    stores = [store(server, policy, clocks) for server in range(NUM_SERVERS)]
    for clock in range(clocks):
        for share in range(NUM_SHARES):
            weights = {key: one for own in stores for key, one in own.pull(worker=share).values.items()}
            found = gradients(weights, clock, share)
            for own in stores:
                own.push(None, {key: found[key] for key in own.keys}, worker=share)
                own.clock(worker=share)
    return {key: one for own in stores for key, one in own.pull(worker=None).values.items()}
