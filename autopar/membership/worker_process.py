"""One process that the agent has started with the user's command: waiting for its place, training, or compiling ahead."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from autopar.membership import wire
from autopar.membership.records import Place, WorkerState

#: Variables of the worker's environment: the address of its agent, the job's token, and the name by which it reports.
AGENT, TOKEN, NAME = "AUTOPAR_AGENT", "AUTOPAR_KEEP_TOKEN", "AUTOPAR_WORKER"
#: The part of a processor from which on a process that says nothing computes, and ticks of the system's clock in a second.
_BUSY, _TICKS_PER_S = 0.05, os.sysconf("SC_CLK_TCK")


class WorkerProcess:
    """A process of the user's command, in a session of its own.

    Attributes:
        place: its place; None while it waits.
        started_s, heard_s: when it got its place, and when it reported last.
        state, position, stops_at, step_s, error: what it reported last.
        code: its exit code; None while it runs.
    """

    def __init__(self, process: asyncio.subprocess.Process, name: str) -> None:
        self.process, self.name = process, name
        self.place: Place | None = None
        self.started_s = self.heard_s = time.monotonic()
        self.state: WorkerState = "running"
        self.position, self.stops_at, self.step_s = 0, None, 0.0
        self.error = ""
        self.code: int | None = None
        self.border: object = None
        self._writer: asyncio.StreamWriter | None = None
        self._used_ticks: int | None = None

    @classmethod
    async def started(cls, command: Sequence[str], address: str, token: str) -> WorkerProcess:
        """Start the command.

        Raises:
            OSError: it cannot be started.
        """
        name = uuid.uuid4().hex
        env = {**os.environ, AGENT: address, TOKEN: token, NAME: name}
        process = await asyncio.create_subprocess_exec(
            *command, env=env, stdin=asyncio.subprocess.DEVNULL, start_new_session=True
        )
        return cls(process, name)

    @property
    def waits(self) -> bool:
        """Whether it has called `join` and has no place yet."""
        return self._writer is not None and self.place is None and self.code is None

    def give(self, place: Place) -> None:
        """Give it its place: it goes on from `join`."""
        assert self._writer is not None
        self.place = place
        self.started_s = self.heard_s = time.monotonic()
        self.position = place.restore.step if place.restore is not None else 0
        self.say({"place": place.to_json()})

    def say(self, message: wire.Message) -> None:
        """Send it a message; nothing if it has ended."""
        if self._writer is not None and self.code is None:
            with contextlib.suppress(OSError, RuntimeError):
                wire.write(self._writer, message)

    async def listen(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, changed: Callable[[], None]
    ) -> None:
        """Read what it reports until it ends."""
        self._writer = writer
        changed()
        while True:
            message, _ = await wire.read(reader)
            self.heard_s = time.monotonic()
            before = self.state, self.position, self.stops_at, self.error
            self.state = message.get("state", self.state)
            self.position = int(message.get("position", self.position))
            self.stops_at = message.get("stops_at")
            self.step_s = float(message.get("step_s", 0.0))
            self.error = message.get("error", self.error)
            if before != (self.state, self.position, self.stops_at, self.error):
                changed()
            self.say({"heard": True})

    def is_silent(self, timeout_s: float) -> bool:
        """Whether it has given no sign of life for so long. One that uses CPU time lives: compilers may hold Python's lock for long."""
        now_s = time.monotonic()
        silent_s = now_s - self.heard_s
        if silent_s < timeout_s / 2:
            self._used_ticks = None
        elif self._used_ticks is None:
            self._used_ticks = _cpu_ticks(self.process.pid)
        elif silent_s > timeout_s:
            ticks = _cpu_ticks(self.process.pid)
            if ticks - self._used_ticks < max(2, _BUSY * _TICKS_PER_S * timeout_s / 2):
                return True
            self.heard_s = now_s
        return False

    def kill(self, why: str = "") -> None:
        """End it, and what it has started, at once."""
        self.error = why or self.error
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def outcome(self) -> tuple[WorkerState, str]:
        """How it ended, and the reason if it failed."""
        assert self.code is not None
        if self.code == 0:
            return ("yielded" if self.state == "yielded" else "finished"), ""
        if self.error:
            return "failed", self.error
        if self.code < 0:
            return "failed", f"was ended by signal {-self.code} ({signal.Signals(-self.code).name})"
        return "failed", f"ended with exit code {self.code}"


def _cpu_ticks(session: int) -> int:
    """The CPU time that the processes of a session have used, in ticks; 0 where the system does not say."""
    ticks = 0
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = status.read_text().rsplit(")", 1)[1].split()
            if int(fields[3]) == session:
                ticks += int(fields[11]) + int(fields[12])
    return ticks
