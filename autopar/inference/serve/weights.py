"""Change the weights of an engine between two iterations: put them to sleep, wake them up, replace them.

In: an engine's iterations and runner, new weights. Out: `Weights`. Before a change the results in flight are processed, and all running
requests wait again: keys and values of other weights must not be read by the next iteration.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from autopar.errors import InferenceError
from autopar.inference.model.async_load import Load
from autopar.inference.schedule.speculation_policy import Proposer
from autopar.inference.serve.draft_model import DraftModel
from autopar.inference.serve.iterations import Iterations
from autopar.inference.serve.shared_pages import SharedPages
from autopar.inference.serve.weight_transfer import WeightTransfer


def _has_room() -> None:
    """All engines have room at once."""


class Weights:
    """The weights of an engine.

    Args:
        proposer: the source of draft tokens; a draft model sleeps, too.
        load: reads them from where they came from; None if they came from memory.

    Attributes:
        iterations: as given. version: the number of updates so far.
        is_swapped: whether the engine sleeps because others have its place, and not because somebody said so.
        make_room: puts other engines to sleep if there is no room for the weights.
    """

    def __init__(
        self, shared: SharedPages, iterations: Iterations, proposer: Proposer | None, load: Load | None
    ) -> None:
        self._shared, self.iterations, self._runner, self._load = shared, iterations, iterations.runner, load
        self._draft_model = proposer if isinstance(proposer, DraftModel) else None
        self._transfer = WeightTransfer(self._runner.served.params, self._runner.shardings)
        self.version, self.is_swapped = 0, False
        self.make_room: Callable[[], None] = _has_room

    def sleep(self, weights: str) -> None:
        """See `Engine.sleep`."""
        if weights not in ("host", "dropped"):
            raise InferenceError(f"weights is {weights!r}: give 'host' to keep them in the host's memory, or 'dropped'")
        with self._shared.lock:
            self._shared.check()
            if not self._runner.is_asleep:
                self._shared.guarded(lambda: self._sleep(keeps_weights=weights == "host"))
            self.is_swapped = False

    def _sleep(self, *, keeps_weights: bool, frees_pages: bool = True) -> None:
        self.iterations.start_over()
        self._runner.sleep(keeps_weights=keeps_weights)
        if self._draft_model is not None:
            self._draft_model.sleep()
        if frees_pages and all(member.runner.is_asleep for member in self._shared.members):
            self._runner.memory.free()

    def swap_out(self) -> None:
        """Give the place on the devices to another engine. The caller has the lock."""
        self._shared.guarded(lambda: self._sleep(keeps_weights=True, frees_pages=False))
        self.is_swapped = True

    def swap_in(self) -> None:
        """Take a place on the devices again. The caller has the lock."""
        self._shared.guarded(self._runner.wake_up)
        self.is_swapped = False
        if self._draft_model is not None:
            self._shared.guarded(self._draft_model.wake_up)

    def wake_up(self, params: Any = None) -> None:
        """See `Engine.wake_up`."""
        moving = None if params is None else self._transfer.prepare(params)
        with self._shared.lock:
            self._shared.check()
            if not self._runner.is_asleep:
                if moving is not None:
                    raise InferenceError("the engine is awake: `update_weights` replaces its weights")
                return
            self.make_room()
            self.is_swapped = False
            if moving is not None:
                self._shared.guarded(lambda: self._runner.place(moving))
                self._count_update()
            elif not self._shared.guarded(self._runner.wake_up):
                self._read_again()
            if self._draft_model is not None:
                self._shared.guarded(self._draft_model.wake_up)

    def _read_again(self) -> None:
        """Read dropped weights from their folder. If that fails, the engine sleeps on."""
        if self._load is None:
            raise InferenceError(
                "the weights were dropped, and they came from memory: give them to `wake_up`, or let the engine sleep with"
                " weights='host'"
            )
        structure = jax.tree.structure(self._runner.served.params)
        params = self._load(jax.tree.unflatten(structure, self._runner.shardings), lambda _: None)
        moving = [(leaf, lambda array: array) for leaf in jax.tree.leaves(params)]
        self._shared.guarded(lambda: self._runner.place(moving))

    def update(self, params: Any) -> None:
        """See `Engine.update_weights`."""
        moving = self._transfer.prepare(params)  # compiles while other threads step the engine
        with self._shared.lock:
            self._shared.check()
            if self.is_swapped:
                self.make_room()
                self.swap_in()
            if self._runner.is_asleep:
                raise InferenceError("the engine sleeps: `wake_up(params)` wakes it up with these weights")
            self._shared.guarded(self.iterations.start_over)
            self._shared.guarded(lambda: self._runner.place(moving))
            self._count_update()

    def _count_update(self) -> None:
        self.version += 1
        for generation in self.iterations.generations.values():
            generation.note_weights(self.version)

    def check_awake(self) -> None:
        """Raise an `InferenceError` if the engine sleeps, so that a request that waits for it would wait forever."""
        if self._runner.is_asleep:
            raise InferenceError("the engine sleeps, so its requests wait: call `wake_up` first")
