"""Step an engine in a thread of its own, and pass tokens to the event loop.

In: an `Engine`, calls from the event loop. Out: `EngineThread`: it runs calls between two steps, so a request that is aborted ends
within one step, and sends the new tokens of all requests of a step in one message. `Mailbox` holds those of one HTTP request
until its handler takes them; a slow handler takes several steps' tokens at once.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from autopar.inference import Engine, Stats
from autopar.inference.schedule.requests import Update
from autopar.inference.step.step import Out

_STATS_EVERY_S = 0.1
_Result = TypeVar("_Result")


class NewTokens(NamedTuple):
    """New tokens of one choice.

    Args:
        choice: its number in the HTTP request.
        ended: the reason of the end, as in `Generation`; None before.
    """

    choice: int
    tokens: list[int]
    logprobs: list[float]
    ended: str | None


class Mailbox:
    """New tokens of one HTTP request, in the event loop."""

    def __init__(self) -> None:
        self._new: list[NewTokens] = []
        self._waiter: asyncio.Future[None] | None = None

    def put(self, new: NewTokens) -> None:
        """Add new tokens."""
        self._new.append(new)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[NewTokens]:
        """Wait for new tokens, and take all there are."""
        if not self._new:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        new, self._new = self._new, []
        return new


class _StepTokens(NamedTuple):
    """The new tokens of one step, one row for each request."""

    names: list[str]
    slots: NDArray[np.int32]
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    num_new: NDArray[np.int32]
    ended: dict[int, str]


class EngineThread:
    """The thread of an engine. All methods are for the event loop.

    Args:
        engine: the engine. Nothing else may step it.
        on_failure: called in the event loop with the exception of a step, after which the engine serves no more.

    Attributes:
        stats: the engine's counters, at most a moment old.
    """

    def __init__(self, engine: Engine, on_failure: Callable[[BaseException], None]) -> None:
        self.engine = engine
        self.stats: Stats = engine.stats
        self.boxes: dict[str, tuple[Mailbox, int]] = {}
        self._on_failure = on_failure
        self._loop = asyncio.get_running_loop()
        self._calls: deque[tuple[Callable[[], Any], asyncio.Future[Any]]] = deque()
        self._wake = threading.Condition()
        self._is_stopping = False
        self._stats_at = 0.0
        engine.listener = self._send
        self._thread = threading.Thread(target=self._run, name="autopar engine", daemon=True)
        self._thread.start()

    async def call(self, function: Callable[[], _Result]) -> _Result:
        """Run a function in the thread, between two steps."""
        future: asyncio.Future[_Result] = self._loop.create_future()
        self._add(function, future)
        return await future

    def abort(self, name: str) -> None:
        """Abort a request before the next step, and deliver no more of it."""
        if self.boxes.pop(name, None) is not None:
            self._add(lambda: self.engine.abort(name), self._loop.create_future())

    async def stop(self) -> None:
        """End the thread. Requests that run are aborted."""
        with self._wake:
            self._is_stopping = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)
        for box, choice in self.boxes.values():
            box.put(NewTokens(choice, [], [], "aborted"))
        self.boxes.clear()

    def _add(self, function: Callable[[], Any], future: asyncio.Future[Any]) -> None:
        with self._wake:
            if self._is_stopping:
                future.cancel()
                return
            self._calls.append((function, future))
            self._wake.notify()

    # -- in the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._run_calls():
                has_work = self.engine.step()
                self._count(now=not has_work)
                if not has_work:
                    with self._wake:
                        while not self._calls and not self._is_stopping:
                            self._wake.wait()
        except BaseException as error:  # a program has failed, so no request can go on
            self._post(self._failed, error)

    def _run_calls(self) -> bool:
        """Run what was called for; False to end."""
        while self._calls:
            function, future = self._calls.popleft()
            try:
                self._post(_resolve, future, function(), None)
            except Exception as error:  # the caller's to handle
                self._post(_resolve, future, None, error)
        return not self._is_stopping

    def _count(self, *, now: bool) -> None:
        if now or time.monotonic() > self._stats_at:
            self.stats = self.engine.stats
            self._stats_at = time.monotonic() + _STATS_EVERY_S

    def _send(self, update: Update, out: Out) -> None:
        logprobs = np.asarray(out.logprobs)[update.rows]
        new = _StepTokens(update.names, update.slots, update.tokens, logprobs, update.num_new, update.ended)
        self._post(self._deliver, new)

    def _post(self, function: Callable[..., None], *arguments: Any) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)

    # -- in the event loop ------------------------------------------------------------------------

    def _deliver(self, new: _StepTokens) -> None:
        rows = zip(
            new.names, *(each.tolist() for each in (new.slots, new.tokens, new.logprobs, new.num_new)), strict=True
        )
        for name, slot, tokens, logprobs, num in rows:
            ended = new.ended.get(slot)
            found = self.boxes.get(name) if ended is None else self.boxes.pop(name, None)
            if found is not None:
                box, choice = found
                box.put(NewTokens(choice, tokens[:num], logprobs[:num], ended))

    def _failed(self, error: BaseException) -> None:
        for box, choice in self.boxes.values():
            box.put(NewTokens(choice, [], [], "failed"))
        self.boxes.clear()
        self._is_stopping = True
        for _, future in self._calls:
            _resolve(future, None, error)
        self._on_failure(error)


def _resolve(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
        future.exception()  # an abort's is read by nobody
    else:
        future.set_result(result)
