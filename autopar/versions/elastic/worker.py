"""Define a worker of a store that survives: it computes the shares that it is dealt, and pushes them again where a server died.

In: the keeper's address. Out: `Task`s, each a share of a batch with the weights to compute it from; updates on the servers, each applied once.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import jax

from autopar.versions.checked_update import checked
from autopar.versions.division import Division
from autopar.versions.elastic.head import Head, OverError
from autopar.versions.elastic.membership import Membership
from autopar.versions.keys import selected
from autopar.versions.remote.served_keys import served_keys
from autopar.versions.server_update import Update

#: Seconds between two looks at the clocks by a worker that has nothing to compute.
_IDLE_S = 0.1


@dataclass(frozen=True, slots=True)
class Task:
    """A share of a batch to compute.

    Args:
        share: its number, below `num_shares`.
        clock: the number of the batch.
        values: the weights by key.
    """

    share: int
    clock: int
    num_shares: int
    values: Mapping[str, jax.Array] = field(repr=False)
    versions: tuple[int, ...] = field(default=(), repr=False)


class ElasticWorker:
    """A worker process of a store whose workers and servers may die; a context. It may come at any time.

        with autopar.ElasticWorker("10.0.0.1:4000", token=token) as worker:
            for task in worker.tasks(num_clocks=1000):
                x, y = share_of(batches[task.clock], task.share, task.num_shares)
                worker.push(task, gradients(task.values, x, y))

    Examples depend on the clock and the share alone, so that whoever computes them takes the same.

    Args:
        keeper: the address of the `StoreKeeper`.
        token: the keeper's.

    Raises:
        StoreError: no keeper answers, or servers do not have all rows of a key.
    """

    def __init__(self, keeper: str, *, token: str) -> None:
        self.name = f"worker {os.getpid()}-{uuid.uuid4().hex[:6]}"
        self._members = Membership(keeper, token, self.name, dict)
        self._heads = [Head(self._members, server, self.name) for server in range(len(self._members.view.chains))]
        self._division = Division({}, {}, {})
        with contextlib.suppress(OverError):  # there is nothing left to compute
            self._division = served_keys([head.about()["kinds"] for head in self._heads])

    @property
    def shares(self) -> tuple[int, ...]:
        """The shares that it computes now."""
        return self._members.view.shares_of(self.name)

    def tasks(self, num_clocks: int) -> Iterator[Task]:
        """What this worker is to compute, until every share has been computed `num_clocks` times.

        Push the update of a task before the next one is taken.

        Raises:
            StoreError: the keeper counts this worker as dead, a server lost its state, or an update raised on a server.
        """
        with contextlib.suppress(OverError):
            yield from self._tasks(num_clocks)

    def _tasks(self, num_clocks: int) -> Iterator[Task]:
        last_s = 0.0
        while not self._members.view.over:
            self._members.check()
            if min(min(head.clocks) for head in self._heads) >= num_clocks and self._is_done(num_clocks):
                self._members.say(over=True)
                return
            waiting = [(self._clock(share), share) for share in self.shares]
            mine = min((one for one in waiting if one[0] < num_clocks), default=None)
            task = None if mine is None else self._pulled(mine[1], mine[0])
            if task is not None and task.clock < num_clocks:
                yield task
            elif mine is None:
                time.sleep(max(0.0, _IDLE_S - (time.monotonic() - last_s)))
                last_s = time.monotonic()
                for head in self._heads:
                    head.status()

    def push(self, task: Task, update: Any) -> None:
        """Push the update of a task: an array for each key, of its shape and dtype. It is one update, applied once, whatever dies.

        Raises:
            StoreError: keys or arrays that do not fit, or the update raised on a server.
        """
        division = self._division
        parts = division.update(checked(update, None, selected(None, division.shapes), division.kinds))
        own: list[Update] = [{} for _ in self._heads]
        for name, pushed in parts.items():
            part = division.parts[name]
            own[part.shard] = {**own[part.shard], part.key: pushed}
        with contextlib.suppress(OverError):  # by another worker that the share was dealt to
            for head, mine, version in zip(self._heads, own, task.versions, strict=True):
                head.push(task.share, task.clock, version, mine)

    def close(self) -> None:
        """Leave: the shares of this worker are dealt to others."""
        self._members.leave()
        for head in self._heads:
            head.close()

    def __enter__(self) -> ElasticWorker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # -- helpers -----------------------------------------------------------------------------

    def _clock(self, share: int) -> int:
        """The first clock of a share that some server lacks."""
        return min(head.clocks[share] for head in self._heads)

    def _is_done(self, num_clocks: int) -> bool:
        """Whether all updates are applied everywhere, by asking."""
        return all(min(head.status()) >= num_clocks for head in self._heads)

    def _pulled(self, share: int, clock: int) -> Task | None:
        """The task of a share in a clock; None if it has to wait, or was computed by another worker."""
        values: dict[str, jax.Array] = {}
        versions: list[int] = []
        names = [
            [name for name, part in self._division.parts.items() if part.shard == n] for n in range(len(self._heads))
        ]
        for number, head in enumerate(self._heads):
            found = head.pull(share, clock)
            if found is None:
                return None
            version, arrays = found
            keys = sorted(names[number], key=lambda name: self._division.parts[name].key)
            values |= {name: jax.numpy.asarray(array) for name, array in zip(keys, arrays, strict=True)}
            versions.append(version)
        if self._clock(share) != clock:  # pushed by the share's last worker, or skipped
            return None
        whole = self._division.concatenated(values, selected(None, self._division.shapes))
        return Task(share, clock, len(self._members.view.shares), whole, tuple(versions))
