"""Keep a training job: the rules of `Job`, its state on disk, and the agents of this host.

In: a `Job`, an address, a state folder. Out: the job's exit code. The state is on disk before an assignment leaves, so that a new
keeper at the same address takes over while the workers run.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import Callable

from autopar.errors import ProcessError
from autopar.membership import wire
from autopar.membership.job import Job
from autopar.membership.keeper import Keeper
from autopar.membership.records import Report, Terms
from autopar.membership.state_file import Saved, StateFolder


class JobKeeper:
    """The keeper of a training job.

    Args:
        address: `host:port` at which agents reach it; port 0 for a free one.
        token: what every connection has to give; by default the one in the folder.
        show: shows what happened, a text.

    Raises:
        ProcessError: the folder is damaged, or another keeper uses it.
    """

    def __init__(
        self, terms: Terms, address: str, folder: StateFolder, show: Callable[[str], None], token: str = ""
    ) -> None:
        self._folder, self._show = folder, show
        folder.lock()
        self.token = token or folder.token()
        saved = folder.read()
        self.job = Job(terms, saved, time.monotonic())
        self.address = address
        self.is_successor = saved is not None
        self._local: dict[str, int] = {}
        self._written: tuple[int, tuple[str, ...]] | None = None

    async def run(self, listening: Callable[[], None] = lambda: None) -> int:
        """Keep the job until it ends, and return its exit code.

        Args:
            listening: called when agents can connect.

        Raises:
            ProcessError: the address cannot be listened at.
        """
        try:
            server = wire.listening(self.address)
        except (OSError, ProcessError) as error:
            raise ProcessError(
                f"the keeper cannot listen at {self.address} ({error}): another keeper is there, or the address is not this host's"
            ) from error
        self.address = wire.host_and_port(wire.split(self.address, least=0)[0], server.getsockname()[1])
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._stop)
        listening()
        await Keeper(self, self.token, self.job.terms.timeout_s, self._show).serve(server)
        self._folder.clear()
        assert self.job.code is not None, "it is over"
        return self.job.code

    def local_agents(self) -> dict[int, bool]:
        """The process numbers of the agents of this host that have reported, and whether the job still knows them."""
        return {pid: agent in self.job.seen for agent, pid in self._local.items()}

    def _stop(self) -> None:
        """End the job at the next step border; the second time at once."""
        if self.job.stopping:
            self.job.code = 130
        self.job.stopping = True
        self._show("stopping at the next step border; once more stops at once")

    # -- the rules ---------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """As `Rules.is_over`."""
        return self.job.code is not None

    def heard(self, name: str, report: wire.Message, now_s: float) -> None:
        """As `Rules.heard`."""
        read = Report.from_json(report)
        if read.agent != name:
            raise wire.WireError(f"{name} reports as {read.agent}: the connection is closed")
        if read.host == socket.gethostname():
            self._local[name] = read.pid
        self.job.heard(read, now_s)

    def closed(self, name: str, now_s: float) -> None:
        """As `Rules.closed`."""
        self.job.closed(name, now_s)

    def tick(self, now_s: float) -> None:
        """As `Rules.tick`."""
        job = self.job
        job.tick(now_s)
        for event in job.events:
            self._show(event)
        job.events.clear()
        state = job.generation, tuple(job.places)
        if state != self._written:
            self._folder.write(Saved(self.address, job.generation, job.places))
            self._written = state

    def answer(self, name: str) -> wire.Message:
        """As `Rules.answer`."""
        return self.job.assignment(name).to_json()
