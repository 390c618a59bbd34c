"""Start agents on the keeper's own host, and start them again when they end."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

from autopar.membership.worker_process import TOKEN

_LOOK_S, _LAST_S = 0.2, 2.0


class LocalAgents:
    """Agents as processes of this host, each in a session of its own, so that they outlive the keeper.

    Args:
        count: how many.
        return_s: seconds after which one that was killed is started again.
    """

    def __init__(
        self, count: int, command: Sequence[str], token: str, return_s: float, show: Callable[[str], None]
    ) -> None:
        self._count, self._command, self._token = count, command, token
        self._return_s, self._show = return_s, show
        self._slots: list[subprocess.Popen[bytes] | None] = [None] * count

    async def keep(self, address: str, present: Callable[[], Mapping[int, bool]]) -> int:
        """Keep the agents running. Returns the exit code of one that ended by itself.

        Args:
            address: the keeper's.
            present: the process numbers of the agents of this host that have reported to this keeper, and whether they still do. Those
                that an earlier keeper started take the place of new ones.
        """
        slots = self._slots
        due_s = [0.0] * self._count
        loop = asyncio.get_running_loop()
        while True:
            heard = present()
            own = {process.pid for process in slots if process is not None}
            others = sum(is_there and pid not in own for pid, is_there in heard.items())
            for slot, process in enumerate(slots):
                code = None if process is None else process.poll()
                if process is None:
                    if loop.time() >= due_s[slot] and sum(map(bool, slots)) + others < self._count:
                        slots[slot] = self._start(slot, address)
                elif code is None:
                    if not heard.get(process.pid, True):
                        process.kill()  # it is frozen: the keeper has gone on without it
                elif code >= 0:
                    return code
                else:
                    self._show(f"agent {slot} was ended by signal {-code}; it is started again in {self._return_s:g} s")
                    slots[slot], due_s[slot] = None, loop.time() + self._return_s
            await asyncio.sleep(_LOOK_S)

    def end(self) -> None:
        """End those that have not heard that the job is over."""
        for process in self._slots:
            if process is not None:
                try:
                    process.wait(_LAST_S)
                except subprocess.TimeoutExpired:
                    process.kill()

    def _start(self, slot: int, address: str) -> subprocess.Popen[bytes]:
        command = [
            sys.executable,
            "-m",
            "autopar",
            "keep",
            "--join",
            address,
            "--name",
            str(slot),
            "--",
            *self._command,
        ]
        return subprocess.Popen(
            command, env={**os.environ, TOKEN: self._token}, stdin=subprocess.DEVNULL, start_new_session=True
        )
