"""Run the engines that share one pool of pages: one lock, and the end of all if the devices fail one.

In: a pool, the iterations of each engine. Out: `SharedPages`. An engine on pages of its own is the only member.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from autopar.errors import InferenceError
from autopar.inference.kv_cache.byte_pool import ModelPages, Pages
from autopar.inference.serve.iterations import Iterations, Processed
from autopar.inference.serve.lending import Lending
from autopar.inference.serve.swap_weights import Swapping

_Result = TypeVar("_Result")


class SharedPages:
    """What engines on the same pages have in common.

    Args:
        swapping: which engines' weights are on the devices; None if all are.

    Attributes:
        lock: held while an engine runs or changes. members: the iterations of each engine.
        lent: what runs in their gaps; None if nothing does.
    """

    def __init__(self, swapping: Swapping | None = None) -> None:
        self.swapping, self.lock = swapping, threading.RLock()
        self.members: list[Iterations] = []
        self.lent: Lending | None = None
        self._error: BaseException | None = None

    def step(self, own: Iterations) -> bool:
        """Run the next iteration of an engine. If its requests wait for pages that another model's requests hold, run those.

        Returns:
            Whether there was anything to do.
        """
        if self._has_run(own):
            return True
        others = [member for member in self.members if member is not own] if own.generations else []
        return any(self._has_run(member) for member in others)

    def _has_run(self, member: Iterations) -> bool:
        """Run the next iteration of an engine, whose weights take a place on the devices first if they need one."""
        self.check()
        if member.runner.is_asleep and (self.swapping is None or not self.swapping.wake(member)):
            return False
        has_run = self.guarded(member.run_next)
        if has_run and self.swapping is not None:
            self.swapping.note_run(member)
        return has_run

    def run(self, own: Iterations) -> None:
        """Run until all requests of an engine have ended."""
        is_running = True
        while is_running:
            with self.lock:
                self.run_in_gap()
                is_running = self.step(own)

    def run_in_gap(self) -> bool:
        """Run a piece of the work that the engines' devices are lent to, if there is room for it."""
        return self.lent is not None and self.guarded(self.lent.run_in_gap)

    def close(self, own: Iterations, pages: Pages) -> None:
        """Abort the requests of an engine, and free its weights and pages; those of the others stay."""
        with self.lock:
            for name in list(own.generations):
                own.abort(name)
            if self._error is None:
                self.guarded(own.start_over)
            self.members.remove(own)
            if self.swapping is not None:
                self.swapping.remove(own)
            if isinstance(pages, ModelPages):
                pages.pool.models.remove(pages)
            own.runner.close(frees_pages=not self.members and not isinstance(pages, ModelPages))

    def note(self, member: Iterations, processed: Processed) -> None:
        """Take note of the results of an iteration."""
        if self.lent is not None:
            self.lent.note(member, processed)

    def guarded(self, function: Callable[[], _Result]) -> _Result:
        """Run what changes the state on the devices. An exception ends all engines."""
        self.check()
        try:
            return function()
        except BaseException as error:
            # The failed program may have consumed its donated buffers, and with them the pages of all models.
            self._error = error
            for member in self.members:
                member.fail()
            raise

    def check(self) -> None:
        """Raise an `InferenceError` if an engine has failed."""
        if self._error is not None:
            raise InferenceError(
                f"the engine has failed: {type(self._error).__name__}: {self._error}. Open the model again"
            ) from self._error
