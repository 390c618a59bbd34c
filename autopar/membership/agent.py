"""Run the workers of one host: the agent.

In: the user's command, the keeper's address. Out: one process that trains, one that waits for its place with everything imported, so
that the next generation starts without that delay, and the copies of shards in this process's memory. If the agent dies, so do its
processes; if the keeper dies, they go on, and the agent connects to the next keeper.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from autopar.errors import ProcessError
from autopar.membership import wire
from autopar.membership.link import Link
from autopar.membership.peer_memory import PeerMemory
from autopar.membership.records import Assignment, Report
from autopar.membership.worker_process import WorkerProcess

#: Seconds between two looks at the processes.
_LOOK_S = 0.1
#: Seconds without an answer of the keeper after which the agent says so.
_ALONE_S = 15.0
#: Seconds after which the next process is started although the worker has not done a step.
_STANDBY_S = 30.0
#: Processes in a row that end before they join.
_MOST_IDLE_ENDS = 3
#: Priority of a process that compiles ahead, below that of those that train.
_NICE = 10


class Agent:
    """The agent of one host, or of one part of its devices.

    Args:
        command: the user's.
        keeper: the keeper's address.
        notice: a file whose appearance tells that the host will be taken away.
        keeper_wait_s: seconds without a keeper after which the agent gives up.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        keeper: str,
        token: str,
        show: Callable[[str], None],
        notice: Path | None = None,
        keeper_wait_s: float = 600.0,
    ) -> None:
        self.name = f"{name}-{uuid.uuid4().hex[:4]}"
        self._command, self._keeper, self._token = command, keeper, token
        self._show, self._notice = show, notice
        self._link = Link(
            *(keeper, token, self.name, self._report, self._take),
            *(lambda: self._assignment.timeout_s, keeper_wait_s),
        )
        self._memory = PeerMemory()
        self._assignment = Assignment("idle")
        self._active: WorkerProcess | None = None
        self._standby: WorkerProcess | None = None
        self._rehearsing: WorkerProcess | None = None
        self._generation, self._worker, self._why = 0, "none", ""
        self._position, self._rehearsed = 0, (0, True)
        self._leaving, self._is_alone, self._code = False, False, None
        self._idle_ends = 0
        self._address = self._coordinator = ""
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        """Take part until the job is over, and return its exit code.

        Raises:
            ProcessError: no keeper answers, or the command does not join.
        """
        loop = asyncio.get_running_loop()
        host, _ = wire.split(self._keeper)
        own = own_host(host)
        server = await asyncio.start_server(self._accept, own, 0, limit=1 << 22)
        self._address = wire.host_and_port(own, server.sockets[0].getsockname()[1])
        self._coordinator = _free_address(own)
        loop.add_signal_handler(signal.SIGTERM, self._leave)
        talk = asyncio.create_task(self._link.run())
        try:
            while self._code is None:
                if talk.done():
                    talk.result()
                await self._look()
                await asyncio.sleep(_LOOK_S)
            return self._code
        finally:
            talk.cancel()
            server.close()
            for process in (self._active, self._standby, self._rehearsing):
                if process is not None:
                    process.kill()

    # -- the keeper --------------------------------------------------------------------------

    def _take(self, answer: wire.Message) -> None:
        self._assignment = Assignment.from_json(answer)
        self._apply()

    def _report(self) -> wire.Message:
        active, worker, why = self._active, self._worker, self._why
        if active is not None and active.error:
            worker, why = "failed", active.error
        return Report(
            *(self.name, socket.gethostname(), os.getpid(), self._address, self._coordinator),
            *(self._generation, worker, why),  # type: ignore[arg-type]
            position=self._position if active is None else active.position,
            stops_at=None if active is None else active.stops_at,
            step_s=0.0 if active is None else active.step_s,
            standby=self._standby is not None and self._standby.waits,
            leaving=self._leaving,
            rehearsed=self._rehearsed,
            held=self._memory.held,
        ).to_json()

    def _leave(self) -> None:
        """The host will be taken away, or the user ends the agent: leave at a step border; the second time at once."""
        if self._leaving:
            self._code = 1
        self._leaving = True
        self._show("leaving: waiting for a step border")
        self._link.changed.set()

    # -- the processes -----------------------------------------------------------------------

    def _apply(self) -> None:
        """Do what the keeper wants, as far as it is possible now; what is left is done at the next look."""
        wanted = self._assignment
        self._memory.drop_below(wanted.floor)
        if wanted.phase == "over":
            self._code = wanted.code
            return
        place, active = wanted.place, self._active
        if active is not None and (
            place is None or active.place is None or active.place.generation != place.generation
        ):
            active.kill("was ended with its generation")
            return
        rehearsing, rehearsal = self._rehearsing, wanted.rehearsal
        if rehearsing is not None and (rehearsal is None or rehearsing.place not in (None, rehearsal)):
            rehearsing.kill()
        elif rehearsing is not None and rehearsal is not None and rehearsing.waits:
            rehearsing.give(rehearsal)
            self._new_coordinator()
        if active is not None and active.border != wanted.border:
            active.border = wanted.border
            active.say({"border": wanted.border})
        standby = self._standby
        if place is None or active is not None or place.generation <= self._generation:
            return
        if standby is not None and standby.waits:
            self._generation, self._worker, self._why = place.generation, "running", ""
            self._active, self._standby = standby, None
            standby.give(place)
            self._new_coordinator()

    def _new_coordinator(self) -> None:
        """Report another address for JAX's service: the last one is in use."""
        self._coordinator = _free_address(wire.split(self._address)[0])
        self._link.changed.set()

    async def _look(self) -> None:
        """Find out which processes have ended or are frozen, and start the next one."""
        now_s = time.monotonic()
        is_alone = self._link.silent_s > _ALONE_S
        if is_alone and not self._is_alone:
            self._show(f"no keeper answers at {self._keeper}; trying again")
        self._is_alone = is_alone
        if self._notice is not None and not self._leaving and self._notice.exists():
            self._leave()
        active = self._active
        if active is not None and active.code is None and active.is_silent(self._assignment.timeout_s):
            active.kill(f"has given no sign of life for {now_s - active.heard_s:.1f} s")
        self._apply()
        begun = active is None or active.position > _start_of(active) or now_s - active.started_s > _STANDBY_S
        if self._code is not None or self._leaving:
            return
        rehearsal = self._assignment.rehearsal
        if self._standby is None and begun:
            self._standby = await self._started()
        elif self._rehearsing is None and rehearsal is not None and rehearsal.generation > self._rehearsed[0]:
            self._rehearsing = await self._started()
            os.setpriority(os.PRIO_PROCESS, self._rehearsing.process.pid, _NICE)

    async def _started(self) -> WorkerProcess:
        """A process of the command, which will wait for its place."""
        try:
            process = await WorkerProcess.started(self._command, self._address, self._token)
        except OSError as error:
            raise ProcessError(f"the command {self._command[0]!r} cannot be started: {error.strerror}") from error
        task = asyncio.create_task(self._await_end(process))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return process

    async def _await_end(self, process: WorkerProcess) -> None:
        """Note how a process ended."""
        process.code = await process.process.wait()
        if process is self._active:
            state, why = process.outcome()
            self._worker, self._why, self._position, self._active = state, why, process.position, None
        elif process is self._rehearsing:
            if process.place is not None:
                self._rehearsed = process.place.generation, process.code == 0
            self._rehearsing = None
        else:
            self._standby = None
            self._idle_ends += 1
            if self._idle_ends >= _MOST_IDLE_ENDS and self._worker == "none":
                self._show(
                    f"the command ended {self._idle_ends} times, the last time with exit code {process.code}, before it called"
                    " `autopar.join()`: see its output"
                )
                self._code = 2
        self._link.changed.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection of a worker: its reports, or calls of the memory."""
        try:
            greeting = await asyncio.wait_for(wire.greeted(reader, self._token), self._assignment.timeout_s)
            if greeting is None:
                return
            if greeting.get("call") == "copies":
                await self._memory.serve(reader, writer, self._link.changed)
                return
            for process in (self._standby, self._rehearsing):
                if process is not None and process.name == greeting.get("worker"):
                    await process.listen(reader, writer, self._link.changed.set)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, wire.WireError):
            pass
        finally:
            writer.close()


def _start_of(active: WorkerProcess) -> int:
    return 0 if active.place is None or active.place.restore is None else active.place.restore.step


def own_host(other: str) -> str:
    """The address of this host by which another reaches it: the one of the route to that host."""
    family, _, _, _, place = socket.getaddrinfo(other, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as udp:
        udp.connect(place)  # a UDP socket sends nothing here
        return udp.getsockname()[0]


def _free_address(host: str) -> str:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as free:
        free.bind((host, 0))
        return wire.host_and_port(host, free.getsockname()[1])
