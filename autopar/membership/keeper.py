"""Run the keeper: hear agents, decide by the rules of `Job`, and send assignments.

In: a `Job`, an address, a state folder. Out: the job's exit code. The state is on disk before an assignment leaves, so that a new
keeper at the same address takes over while the workers run.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import time
from collections.abc import Callable

from autopar.errors import ProcessError
from autopar.membership import wire
from autopar.membership.job import Job
from autopar.membership.records import Assignment, Report, Terms
from autopar.membership.state_file import Saved, StateFolder

_TICK_S = 0.05
#: Seconds that the keeper waits for agents to take their last assignment.
_LAST_S = 3.0


class Keeper:
    """The keeper of one job.

    Args:
        address: `host:port` at which agents reach it; port 0 for a free one.
        token: what every connection has to give; by default the one in the folder.
        show: shows what happened, a text.
    """

    def __init__(
        self, terms: Terms, address: str, folder: StateFolder, show: Callable[[str], None], token: str = ""
    ) -> None:
        self._folder, self._show = folder, show
        self.token = token or folder.token()
        saved = folder.read()
        self.job = Job(terms, saved, time.monotonic())
        self.address = address
        self.is_successor = saved is not None
        self._writers: dict[str, asyncio.StreamWriter] = {}
        self._sent: dict[str, Assignment] = {}
        self._local: dict[str, int] = {}
        self._written: tuple[int, tuple[str, ...]] | None = None

    async def run(self, listening: Callable[[], None] = lambda: None) -> int:
        """Keep the job until it ends, and return its exit code.

        Args:
            listening: called when agents can connect.

        Raises:
            ProcessError: the address cannot be listened at.
        """
        host, port = self.address.rsplit(":", 1)
        try:
            server = await asyncio.start_server(self._accept, host.strip("[]"), int(port), limit=1 << 22)
        except (OSError, ValueError) as error:
            raise ProcessError(
                f"the keeper cannot listen at {self.address} ({error}): another keeper is there, or the address is not this host's"
            ) from error
        self.address = wire.address_of(host.strip("[]"), server.sockets[0].getsockname()[1])
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._stop)
        listening()
        try:
            while self.job.code is None:
                self._decide()
                await asyncio.sleep(_TICK_S)
            self._decide()
            end_s = time.monotonic() + _LAST_S
            while self._writers and time.monotonic() < end_s:
                await asyncio.sleep(_TICK_S)
            self._folder.clear()
            return self.job.code
        finally:
            server.close()

    def local_agents(self) -> dict[int, bool]:
        """The process numbers of the agents of this host that have reported, and whether the job still knows them."""
        return {pid: agent in self.job.seen for agent, pid in self._local.items()}

    def _stop(self) -> None:
        """End the job at the next step border; the second time at once."""
        if self.job.stopping:
            self.job.code = 130
        self.job.stopping = True
        self._show("stopping at the next step border; once more stops at once")

    def _decide(self) -> None:
        """Let the rules decide, write the state down, and send what changed."""
        job = self.job
        job.tick(time.monotonic())
        for event in job.events:
            self._show(event)
        job.events.clear()
        state = job.generation, tuple(job.places)
        if state != self._written:
            self._folder.write(Saved(self.address, job.generation, job.places))
            self._written = state
        for agent in list(self._writers):
            if job.assignment(agent) != self._sent.get(agent):
                self._send(agent)

    def _send(self, agent: str) -> None:
        self._sent[agent] = self.job.assignment(agent)
        with contextlib.suppress(OSError, RuntimeError):
            wire.write(self._writers[agent], self._sent[agent].to_json())

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Hear one agent until its connection closes."""
        agent = ""
        try:
            greeting = await asyncio.wait_for(wire.greeted(reader, self.token), self.job.terms.timeout_s)
            if greeting is None:
                self._show(
                    f"a connection from {writer.get_extra_info('peername')} without this job's token was refused"
                )
                return
            while True:
                message, _ = await wire.read(reader)
                report = Report.from_json(message)
                agent = report.agent
                self._writers[agent] = writer
                if report.host == socket.gethostname():
                    self._local[agent] = report.pid
                self.job.heard(report, time.monotonic())
                self._send(agent)
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass
        except wire.WireError as error:
            self._show(str(error))
        finally:
            if agent and self._writers.get(agent) is writer:
                del self._writers[agent]
                self.job.closed(agent, time.monotonic())
            writer.close()
