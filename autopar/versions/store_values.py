"""Define what calls of a store return."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import jax

from autopar.versions.transport import Traffic


@dataclass(frozen=True, slots=True)
class Pulled:
    """What one pull returned.

    Args:
        values: the arrays, or their rows, by key. Where the store's devices are the reader's, they are the store's own
            buffers: do not donate them.
        versions: by number of the shard, the number of updates applied to it. All arrays of a shard are of this version.
        clock: the reader's clock; the number of complete clocks for a reader that is no worker.
    """

    values: dict[str, jax.Array]
    versions: dict[int, int]
    clock: int


@dataclass(frozen=True, slots=True)
class StoreReport:
    """What has happened in a store.

    Args:
        versions: of each shard.
        clocks: of each worker; None for one that left.
        iterations: the number of iterations that each worker has finished; several make a clock under `every`.
        num_discarded: the number of workers' updates that the policy discarded.
        staleness: for each worker, how often it read with the slowest worker how many clocks behind.
        waits_s: for each worker, the seconds for which its pulls waited.
        traffic: bytes by worker (None for readers that are no workers) and number of the shard.
    """

    versions: tuple[int, ...]
    clocks: tuple[int | None, ...]
    iterations: tuple[int, ...]
    num_discarded: int
    staleness: tuple[Counter[int], ...]
    waits_s: tuple[float, ...]
    traffic: Mapping[tuple[int | None, int], Traffic]
