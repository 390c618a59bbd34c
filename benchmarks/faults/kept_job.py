"""Start `autopar keep` with a program, do things to its processes, and read what the program logged."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class KeptJob:
    """A job in a folder: its keeper, and its log, a JSON object a line.

    Args:
        command: what each member runs, after the interpreter.
        options: of `autopar keep`.
        apart: whether the keeper starts no members: `join_another` does.
    """

    def __init__(self, folder: Path, command: list[str], *options: str, members: int = 4, apart: bool = False) -> None:
        self.folder, self.log = folder, folder / "log"
        self.output = folder / "output"
        self.address = f"127.0.0.1:{free_port()}"
        keep = [sys.executable, "-m", "autopar", "keep", "-n", str(members), "--at", self.address]
        self._program = ["--", sys.executable, *command]
        self._command = [*keep, "--state", str(folder / "state"), *options, *(() if apart else self._program)]
        self._others: list[subprocess.Popen[bytes]] = []
        self.keeper = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        """Start the keeper, or one that takes over."""
        self.keeper = self._started(self._command)
        return self.keeper

    def join_another(self, *options: str, address: str = "") -> subprocess.Popen[bytes]:
        """Start another member, which reaches the keeper at another address if one is given."""
        folder = str(self.folder / "state")
        keep = [sys.executable, "-m", "autopar", "keep", "--join", address or self.address, "--state", folder]
        self._others.append(self._started([*keep, "--name", "another", *options, *self._program]))
        return self._others[-1]

    def _started(self, command: list[str]) -> subprocess.Popen[bytes]:
        flags = "--xla_force_host_platform_device_count=1 --xla_backend_optimization_level=0"
        path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
        env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": path}
        with self.output.open("ab") as output:
            return subprocess.Popen(command, env=env, stdout=output, stderr=output, start_new_session=True)

    def events(self, event: str = "") -> list[dict[str, Any]]:
        """What the program has logged."""
        text = self.log.read_text() if self.log.exists() else ""
        lines = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
        return [line for line in lines if event in ("", line["event"])]

    def text(self) -> str:
        """What the keeper and the members have printed."""
        return self.output.read_text(errors="replace")

    def wait(self, until: Callable[[], bool], limit_s: float = 120.0) -> None:
        """Wait for something to be true.

        Raises:
            AssertionError: it is not within the limit, or the job has ended.
        """
        end_s = time.monotonic() + limit_s
        while not until():
            assert time.monotonic() < end_s, self.text()[-4000:]
            assert self.keeper.poll() is None or until(), self.text()[-4000:]
            time.sleep(0.02)

    def at(self, step: int) -> None:
        """Wait until a step is done."""
        self.wait(lambda: any(one["step"] >= step for one in self.events("step")))

    def worker(self, rank: int) -> dict[str, Any]:
        """The newest worker of this rank."""
        return [one for one in self.events("start") if one["rank"] == rank][-1]

    def ended(self, limit_s: float = 180.0) -> int:
        """Wait for the end, and return the exit code."""
        self.wait(lambda: self.keeper.poll() is not None, limit_s)
        return self.keeper.returncode

    def close(self) -> None:
        """End every process of the job that is left."""
        for process in (self.keeper, *self._others):
            for _ in range(2):  # the second time at once
                process.send_signal(signal.SIGTERM)
                time.sleep(0.1)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for pid in {one[who] for one in self.events("start") for who in ("pid", "agent")}:
            try:
                if str(self.log) in Path(f"/proc/{pid}/cmdline").read_text():
                    os.kill(pid, signal.SIGKILL)
            except OSError:
                continue

    @staticmethod
    def exists(pid: int) -> bool:
        """Whether a process runs: one that has ended may still wait for its parent."""
        try:
            return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
        except OSError:
            return False

    def __enter__(self) -> KeptJob:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def losses(steps: list[dict[str, Any]]) -> dict[int, tuple[int, float]]:
    """For each step, the number of processes and the loss, as it was done last."""
    return {one["step"]: (one["count"], one["loss"]) for one in steps}


def segments(history: dict[int, tuple[int, float]]) -> list[tuple[int, int, int]]:
    """Runs of steps with one number of processes: the number, and the steps before and after."""
    runs: list[tuple[int, int, int]] = []
    for step, (count, _) in sorted(history.items()):
        if runs and runs[-1][0] == count:
            runs[-1] = (count, runs[-1][1], step)
        else:
            runs.append((count, step - 1, step))
    return runs
