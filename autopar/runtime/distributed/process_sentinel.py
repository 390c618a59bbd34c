"""Report why a process ended that cannot report it itself; `watch` runs this as a small separate process.

In: names, and a pipe from the watched process.
Out: nothing if the watched process wrote a farewell before the pipe closed, else one line on stderr. It is needed if
process 0 dies: JAX then ends the other processes at once, from C++, without naming any. It imports nothing of the
package, so that it starts in milliseconds.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

FAREWELL = b"farewell"
_CONNECT_S = 5.0


class Sentinel:
    """The sentinel process, as the watched process sees it.

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
            self._process.communicate(FAREWELL, timeout=_CONNECT_S)
        except (OSError, ValueError, subprocess.TimeoutExpired):
            self._process.kill()


def line(me: str, first: str, address: str) -> str:
    """The report on a process that ended without a farewell."""
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
    if sys.stdin.buffer.read() != FAREWELL:
        sys.stderr.write(line(*sys.argv[1:4]) + "\n")
