"""Define how a step is divided between workers and a server, and what a worker does in an iteration.

`gradient_work`: the worker computes gradients, the server updates the state. `local_work`: the worker runs the whole step on weights of
its own, and pushes how they changed (local SGD, DiLoCo).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import jax
import numpy as np

from autopar.plans.plan import Plan
from autopar.transforms.microbatch.slices import Cut
from autopar.versions.consistency.policy import Policy
from autopar.versions.snapshot import Snapshot
from autopar.versions.store import VersionedStore

#: What a worker needs of a batch, ready for its devices.
Share = Sequence[Any]
#: Takes all outputs of the step that one update or one worker made; None for those of the state.
Note = Callable[[list[Any]], None]


class Work(Protocol):
    """A divided step, planned.

    Attributes:
        plans: by the name of the part.
        pulled_bytes, pushed_bytes: of array data, of one worker in one clock, if everything is sent.
    """

    @property
    def plans(self) -> Mapping[str, Plan]: ...
    @property
    def pulled_bytes(self) -> int: ...
    @property
    def pushed_bytes(self) -> int: ...

    def deal(self, leaves: Sequence[Any]) -> list[Share]:
        """Divide a batch among the workers.

        Args:
            leaves: of all arguments of the step.
        """
        ...

    def session(self, leaves: Mapping[str, Any], note: Note, dispatching: AbstractContextManager[Any]) -> Session:
        """Begin with a state.

        Args:
            leaves: the state by path.
            dispatching: a context in which programs are dispatched.
        """
        ...

    def new_store(self, leaves: Mapping[str, Any], note: Note, *, keeps_results: bool = False) -> VersionedStore:
        """A store of a state.

        Args:
            keeps_results: whether it also has what the last update returned apart from the state.
        """
        ...

    def session_of(self, store: Any, leaves: Mapping[str, Any], note: Note) -> Session:
        """A session with a store of another process.

        Args:
            store: has the calls of a `VersionedStore` for the worker of this process.
        """
        ...

    def results_in(self, pulled: Callable[[list[str]], Mapping[str, Any]]) -> list[Any] | None:
        """The outputs of the last update, None in the place of state; None if workers have results of their own.

        Args:
            pulled: pulls keys of a store that keeps results.
        """
        ...


class Session(Protocol):
    """A run of the workers from one state on."""

    store: Any  # a `VersionedStore`, or what stands for one of another process

    def iteration(self, worker: int) -> int:
        """The number of a worker's present iteration, counted from the start of the session; skipped clocks count too."""
        ...

    def begin(self, worker: int) -> None:
        """Begin an iteration: pull if it is due, which may wait."""
        ...

    def compute(self, worker: int, share: Share, *, wait: bool) -> None:
        """Compute, and push.

        Args:
            wait: whether to wait for the devices before pushing.
        """
        ...

    def finish(self, worker: int) -> None:
        """Finish an iteration: call the store's clock if it is due."""
        ...

    def end_round(self) -> None:
        """All workers that run in lockstep have finished an iteration."""
        ...

    def flush(self, worker: int) -> None:
        """Push what is left of an unfinished period or held back, with a store of another process."""
        ...

    def leave(self, worker: int) -> None:
        """Push what is left of an unfinished period, and leave the store."""
        ...

    def state(self) -> dict[str, Any]:
        """The newest state, by path."""
        ...

    def snapshot(self) -> Snapshot:
        """Everything that changes; no worker computes."""
        ...

    def load(self, snapshot: Snapshot) -> None:
        """The inverse of `snapshot`.

        Raises:
            StoreError: it is of another session, or damaged.
        """
        ...


def is_lockstep(policy: Policy) -> bool:
    """Whether all workers of a clock wait for each other."""
    return policy.slack == 0 and not policy.catches_up


def bytes_of(shapes: Iterable[Any]) -> int:
    """Bytes of arrays, by their shapes and dtypes."""
    return sum(math.prod(one.shape) * one.dtype.itemsize for one in shapes)


def share_of(cut: Cut, whole: Any, number: int) -> Any:
    """One worker's share of an array; NumPy arrays are sliced without a copy to a device."""
    shape = tuple(whole.shape)
    loops, at = cut.loops(shape)
    apart = whole.reshape(loops)
    return apart[(slice(None),) * at + (number,)].reshape(cut.local(shape))


def as_array(leaf: Any) -> Any:
    """A leaf of a batch that can be sliced; numbers and lists become NumPy arrays."""
    return leaf if isinstance(leaf, jax.Array | np.ndarray) else np.asarray(leaf, dtype=jax.dtypes.result_type(leaf))
