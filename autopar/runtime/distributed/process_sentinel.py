"""Report that a process was killed, from a small separate process that `watch` starts.

In: names, and a pipe from the watched process. Out: nothing if the watched process announced a normal exit before the
pipe closed, else one line on stderr. It is needed if process 0 dies: JAX then ends the other processes at once, from
C++, without naming the dead one. It imports nothing of the package, so that it starts in milliseconds.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

NORMAL_EXIT = b"normal exit"
_CONNECT_S = 5.0


class Sentinel:
    """The watched process's handle of the sentinel process.

    Args:
        me: this process, as messages name it.
        first: process 0, as messages name it.
        address: the address of JAX's coordination service, which runs in process 0.
    """

    def __init__(self, me: str, first: str, address: str) -> None:
        command = [sys.executable, "-I", "-S", str(Path(__file__).resolve()), me, first, address]
        # In its own session, so that Ctrl-C does not reach it.
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def withdraw(self) -> None:
        """Stop the sentinel: this process ends normally and reports its own errors."""
        try:
            self._process.communicate(NORMAL_EXIT, timeout=_CONNECT_S)
        except (OSError, ValueError, subprocess.TimeoutExpired):
            self._process.kill()


def line(me: str, first: str, address: str) -> str:
    """The report on a process that ended without announcing a normal exit."""
    if me != first and not _answers(address):
        return (
            f"autopar: {first}, which runs JAX's coordination service, has died: nothing answers at {address}. Therefore JAX"
            f" has ended {me}"
        )
    return (
        f"autopar: {me} was ended from outside its loop by a signal, the system or JAX: see the message above, if any"
    )


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except (OSError, ValueError):
        return False
    return True


if __name__ == "__main__":
    if sys.stdin.buffer.read() != NORMAL_EXIT:
        sys.stderr.write(line(*sys.argv[1:4]) + "\n")
