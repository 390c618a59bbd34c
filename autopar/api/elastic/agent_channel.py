"""A worker's connection to the agent of its host.

In: the variables that the agent set. Out: the worker's place; then signs of life, its position, and step borders at which to pause. If
the agent ends or is silent, the worker ends too: its members may go on without it, and it must not train without them.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

from autopar.membership.records import Place, WorkerState
from autopar.membership.wire import Connection, Message
from autopar.membership.worker_process import AGENT, NAME, TOKEN

_BEATS_PER_TIMEOUT, _LONGEST_BEAT_S, _SHORTEST_BEAT_S = 6, 1.0, 0.1


class AgentChannel:
    """The connection. It is made while the process waits for its place.

    Attributes:
        token: the job's.
    """

    def __init__(self, address: str) -> None:
        self.token = os.environ.get(TOKEN, "")
        greeting = {"token": self.token, "call": "worker", "worker": os.environ.get(NAME, "")}
        self._connection = Connection.to(address, greeting, None)
        self._changed = threading.Condition()
        self._position, self._step_s = 0, 0.0
        self._stops_at: int | None = None
        self._state: WorkerState = "running"
        self._border: Any = None
        self._heard_s = self._sent_s = 0.0

    def place(self) -> Place:
        """Wait for this process's place. The process ends if the agent does."""
        try:
            while "place" not in (message := self._connection.receive()[0]):
                pass
        except OSError:
            sys.exit("autopar: the agent that started this process has ended")
        place = Place.from_json(message["place"])
        self._heard_s = time.monotonic()
        self._position = place.restore.step if place.restore is not None else 0
        beat_s = min(place.timeout_s / _BEATS_PER_TIMEOUT, _LONGEST_BEAT_S)
        for target, argument in ((self._listen, place.timeout_s), (self._beat, beat_s)):
            threading.Thread(target=target, args=(argument,), name="autopar agent", daemon=True).start()
        return place

    def at(self, position: int, step_s: float = 0.0) -> int | None:
        """Say how many steps are done. Returns the step at whose border the worker is to end, None for none; while that is being agreed
        on, it waits.

        On request a worker stops at the border of the step that it is in, and reports that step at once, from another thread: the
        main one may wait in a collective for a worker that has stopped already. So the latest of these borders is known before
        any worker has to go on to it.
        """
        with self._changed:
            self._position, self._step_s = position, step_s or self._step_s
            if time.monotonic() - self._sent_s > _SHORTEST_BEAT_S:
                self._changed.notify_all()
            while self._border == "ask":
                self._changed.wait()
            return self._border

    def end(self, state: WorkerState) -> None:
        """Say how the worker ends."""
        self._state = state
        self._send()

    def fail(self, error: str) -> None:
        """Say why the worker fails."""
        self._send(error=error)

    def _send(self, **more: Any) -> None:
        message: Message = {"position": self._position, "stops_at": self._stops_at, "step_s": self._step_s}
        self._sent_s = time.monotonic()
        try:
            self._connection.send({**message, "state": self._state, **more})
        except OSError:
            self._lost("ended")

    def _beat(self, beat_s: float) -> None:
        while True:
            with self._changed:
                self._send()
                self._changed.wait(beat_s)

    def _listen(self, timeout_s: float) -> None:
        threading.Thread(target=self._fence, args=(timeout_s,), name="autopar fence", daemon=True).start()
        try:
            while True:
                message, _ = self._connection.receive()
                self._heard_s = time.monotonic()
                if "border" in message:
                    with self._changed:
                        self._border = message["border"]
                        if self._border == "ask":
                            self._stops_at = self._position + 1
                        elif self._border is None:  # another keeper does not know of the request
                            self._stops_at = None
                        self._changed.notify_all()
        except OSError:
            self._lost("ended")

    def _fence(self, timeout_s: float) -> None:
        while True:
            before_s = time.monotonic()
            time.sleep(timeout_s / 4)
            now_s = time.monotonic()
            starved = now_s - before_s > timeout_s / 2  # then the thread that listens was, too
            if now_s - self._heard_s > 2 * timeout_s and not starved:
                self._lost(f"not answered for {2 * timeout_s:g} s")

    def _lost(self, how: str) -> None:
        """End this process: its agent is gone."""
        if self._state == "running":
            sys.stderr.write(f"autopar: the agent of this worker has {how}; the worker ends too\n")
            sys.stderr.flush()
            os._exit(1)


def agent_address() -> str:
    """The address of this process's agent; empty where none has started it."""
    return os.environ.get(AGENT, "")
