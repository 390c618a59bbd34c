"""Exchange JSON values between processes through JAX's coordination service, without devices.

In: a JSON value of each process.
Out: one answer, the same on every process, or the same error on every process. The service counts the calls of each
process, and the n-th call of one matches the n-th call of every other. Processes whose calls differ get an error that
names them.
"""

from __future__ import annotations

import json
import socket
import struct
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from autopar import errors
from autopar.errors import AutoparError, ProcessError
from autopar.runtime.distributed.coordination_store import Service, service_of_jax

#: Seconds that process 0 waits for the others at a call.
WAIT_S = 300.0

#: The longest single wait, in seconds, so that Ctrl-C is handled.
_PART_OF_A_WAIT_S = 2.0

#: The service is not made for large values, so they are split into parts of at most this many bytes.
_PART_BYTES = 1 << 20

_ROOT = "autopar/calls"


@dataclass(frozen=True, slots=True)
class Member:
    """A process as error messages name it."""

    index: int
    host: str

    def __str__(self) -> str:
        return f"process {self.index} (host {self.host})"


@dataclass(frozen=True, slots=True)
class Given:
    """The value that one process contributes to a call."""

    by: Member
    value: Any


@dataclass(frozen=True, slots=True)
class Exchange:
    """This process among several.

    Args:
        service: JAX's coordination service.
        wait_s: seconds that process 0 waits for the others at each call.
    """

    service: Service
    wait_s: float = WAIT_S

    @property
    def index(self) -> int:
        return self.service.index

    @property
    def count(self) -> int:
        return self.service.count

    @property
    def me(self) -> Member:
        return Member(self.index, socket.gethostname())

    def judged(self, what: str, mine: Any, judge: Callable[[Sequence[Given]], Any]) -> Any:
        """Collect a JSON value from every process, evaluate them on process 0, and return its answer everywhere.

        Args:
            what: the purpose of the call, for error messages; the same on every process.
            judge: a function from all values, in process order, to a JSON value.

        Raises:
            ProcessError: on every process, if one does not arrive in time or makes another call.
            AutoparError: on every process, if `judge` raises it.
        """
        folder = self._next_folder()
        self._put(f"{folder}/from/{self.index}", {"what": what, "host": self.me.host, "value": mine})
        if self.index:
            return self._answer(folder, what, 2 * self.wait_s)
        return self._answered(folder, what, lambda: judge(self._gathered(folder, what)))

    def made_once(self, what: str, make: Callable[[], Any]) -> Any:
        """Make a JSON value on process 0 and return it on every process, without a time limit.

        Raises:
            AutoparError: on every process, if `make` raises it.
        """
        folder = self._next_folder()
        return self._answer(folder, what, None) if self.index else self._answered(folder, what, make)

    # -- helpers -----------------------------------------------------------------------------

    def _next_folder(self) -> str:
        return f"{_ROOT}/{self.service.count_up(f'{_ROOT}/number/{self.index}')}"

    def _gathered(self, folder: str, what: str) -> list[Given]:
        """The values of all processes. All have read the answer of the previous call by now, so it is deleted."""
        deadline = time.monotonic() + self.wait_s
        found, missing = [], []
        for index in range(self.count):
            came = self._get(f"{folder}/from/{index}", max(0.0, deadline - time.monotonic()))
            if came is None:
                missing.append(index)
            else:
                found.append((came["what"], Given(Member(index, came["host"]), came["value"])))
        if missing:
            names = ", ".join(map(str, missing))
            raise ProcessError(
                f"process{'es' * (len(missing) > 1)} {names} of {self.count} did not arrive at {what} within"
                f" {self.wait_s:g} s, where the others wait. Every process must make the same calls in the same order."
                " If it does, the process has died or hangs: see its output"
            )
        for their_call, given in found:
            if their_call != what:
                raise ProcessError(
                    f"{given.by} is at {their_call}, but {found[0][1].by} at {what}: every process must make the same calls"
                    " in the same order"
                )
        self.service.delete(f"{_ROOT}/{int(folder.rsplit('/', 1)[1]) - 1}")
        return [given for _, given in found]

    def _answered(self, folder: str, what: str, make: Callable[[], Any]) -> Any:
        """Make an answer on process 0 and send it, or the error, to the others."""
        answer: dict[str, Any] = {"kind": "ProcessError", "error": f"{self.me} was interrupted at {what}"}
        try:
            value = make()
            answer = {"value": value}
        except AutoparError as error:
            answer = {"kind": _kind(error), "error": str(error)}
            raise
        except Exception as error:
            answer["error"] = f"{self.me} failed at {what}: {type(error).__name__}: {error}"
            raise
        finally:
            self._put(f"{folder}/answer", answer)
        return value

    def _answer(self, folder: str, what: str, wait_s: float | None) -> Any:
        answer = self._get(f"{folder}/answer", wait_s)
        if answer is None:
            raise ProcessError(f"process 0 did not answer {what} within {wait_s:g} s: see its own output")
        if "error" in answer:
            raise getattr(errors, answer["kind"])(answer["error"])
        return answer["value"]

    def _put(self, key: str, value: Any) -> None:
        data = zlib.compress(json.dumps(value).encode(), 1)
        parts = [data[start : start + _PART_BYTES] for start in range(0, len(data), _PART_BYTES)]
        for number, part in reversed(list(enumerate(parts))):  # the first part is written last: it means that all exist
            self.service.put(f"{key}/{number}", struct.pack("<I", len(parts)) + part)

    def _get(self, key: str, wait_s: float | None) -> Any:
        """The value that another process put; None after a timeout."""
        first = self._wait_for(f"{key}/0", wait_s)
        if first is None:
            return None
        parts = [first]
        for number in range(1, struct.unpack("<I", first[:4])[0]):
            part = self._wait_for(f"{key}/{number}", None)
            assert part is not None
            parts.append(part)
        return json.loads(zlib.decompress(b"".join(part[4:] for part in parts)))

    def _wait_for(self, key: str, wait_s: float | None) -> bytes | None:
        deadline = None if wait_s is None else time.monotonic() + wait_s
        while True:
            left = _PART_OF_A_WAIT_S if deadline is None else deadline - time.monotonic()
            found = self.service.get(key, min(_PART_OF_A_WAIT_S, max(left, 0.001)))
            if found is not None or left <= 0:
                return found


def among_processes(wait_s: float = WAIT_S) -> Exchange | None:
    """The exchange of this process; None with a single process. Uses no device."""
    service = service_of_jax()
    return None if service is None else Exchange(service, wait_s)


def named(members: Sequence[Member]) -> str:
    """`process 1 (host b)`; `processes 1 (host b), 2 (host c) and 5 more`."""
    if len(members) == 1:
        return str(members[0])
    shown = ", ".join(f"{member.index} (host {member.host})" for member in members[:4])
    return f"processes {shown}" + (f" and {len(members) - 4} more" if len(members) > 4 else "")


def _kind(error: AutoparError) -> str:
    """The name of an error's public class."""
    return next(c.__name__ for c in type(error).__mro__ if getattr(errors, c.__name__, None) is c)
