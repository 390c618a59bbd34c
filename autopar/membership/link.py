"""A member's link to its keeper: reports, and the keeper's answers; it connects again when the connection breaks.

In: what to report. Out: calls with each answer. Reports are sent several times per timeout, and at once where something has changed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from autopar.errors import ProcessError
from autopar.membership import wire
from autopar.version import __version__

#: Seconds between two attempts to connect.
_RETRY_S = 0.2
#: Reports per timeout, and the longest time between two.
_BEATS_PER_TIMEOUT, _LONGEST_BEAT_S = 6, 1.0


class RefusedError(ProcessError):
    """The keeper refuses this member.

    Attributes:
        why: the keeper's reason.
    """

    def __init__(self, keeper: str, name: str, why: str) -> None:
        super().__init__(f"the keeper at {keeper} refuses {name}: {why}")
        self.why = why


class Link:
    """The link of one member.

    Args:
        report: makes the present report.
        take: takes an answer.
        timeout_s: seconds without a sign of life after which the other side counts as dead, as it is known now.
        keeper_wait_s: seconds without a keeper after which the member gives up.

    Attributes:
        changed: set to report at once.
        is_last: set to end after the next report.
    """

    def __init__(
        self,
        keeper: str,
        token: str,
        name: str,
        report: Callable[[], wire.Message],
        take: Callable[[wire.Message], None],
        timeout_s: Callable[[], float],
        keeper_wait_s: float,
    ) -> None:
        self._keeper, self._name, self._report, self._take = keeper, name, report, take
        self._greeting = {"token": token, "name": name, "version": __version__}
        self._timeout_s, self._keeper_wait_s = timeout_s, keeper_wait_s
        self.changed = asyncio.Event()
        self.is_last = False
        self._heard_s = time.monotonic()

    @property
    def silent_s(self) -> float:
        """Seconds since the keeper's last answer, or since the start."""
        return time.monotonic() - self._heard_s

    async def run(self) -> None:
        """Report until the last report.

        Raises:
            RefusedError: the keeper refuses this member.
            ProcessError: no keeper answers.
        """
        self._heard_s, problem = time.monotonic(), Exception()
        while True:
            try:
                host, port = wire.split(self._keeper)
                reader, writer = await asyncio.open_connection(host, port, limit=1 << 22)
                wire.write(writer, self._greeting)
                listening = asyncio.create_task(self._listen(reader))
                try:
                    while not listening.done():
                        self.changed.clear()
                        is_last = self.is_last
                        wire.write(writer, self._report())
                        await asyncio.wait_for(writer.drain(), self._timeout_s())
                        if is_last:
                            writer.close()
                            await writer.wait_closed()
                            return
                        beat_s = min(self._timeout_s() / _BEATS_PER_TIMEOUT, _LONGEST_BEAT_S)
                        waiting = asyncio.create_task(self.changed.wait())
                        await asyncio.wait({listening, waiting}, timeout=beat_s, return_when=asyncio.FIRST_COMPLETED)
                        waiting.cancel()
                    listening.result()
                finally:
                    listening.cancel()
                    writer.close()
            except (OSError, TimeoutError, asyncio.IncompleteReadError, wire.WireError) as error:
                problem = error
                if self.is_last:
                    return
            if self.silent_s > self._keeper_wait_s:
                raise ProcessError(
                    f"no keeper has answered at {self._keeper} for {self._keeper_wait_s:g} s ({problem or type(problem).__name__}): {self._name}"
                    " ends"
                )
            await asyncio.sleep(_RETRY_S)

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        while True:
            answer, _ = await asyncio.wait_for(wire.read(reader), 2 * self._timeout_s())
            if "refused" in answer:
                raise RefusedError(self._keeper, self._name, str(answer["refused"]))
            self._heard_s = time.monotonic()
            self._take(answer)
