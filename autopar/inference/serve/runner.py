"""Dispatch iterations to the devices, and fetch their results.

In: the planned programs, weights, and `Iteration`s. Out: a `DispatchedIteration` for each, whose results are fetched later
while the devices work on the next. The KV cache and the last token of each slot stay on the devices, in donated buffers.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from autopar.api.planned_function import Compiled
from autopar.inference.kv_cache.device_pages import KVPages
from autopar.inference.kv_cache.page_tables import Copy
from autopar.inference.schedule.requests import Iteration, Result, Run, Shape
from autopar.inference.serve.layout import Key, Layout, Served
from autopar.inference.step.sampling import SamplingOptions
from autopar.inference.step.step import Out, Resident

#: The reason of the end of a request with NaN or infinite logits.
UNSOUND = "unsound"


@dataclass(frozen=True, slots=True)
class TokenDetails:
    """The details of a run's tokens.

    Args:
        logprobs: the logprob of each token.
        is_cut: as in `sampling.Sampled`.
        best: for each token the most probable tokens with their logprobs; empty if not requested.
    """

    logprobs: tuple[float, ...] = ()
    is_cut: bool = False
    best: tuple[tuple[tuple[int, float], ...], ...] = ()


@dataclass(frozen=True, slots=True)
class DispatchedIteration:
    """An iteration that runs on the devices."""

    iteration: Iteration
    out: Out
    num_slots: int

    def results(self, num_best: Mapping[str, int]) -> tuple[dict[str, Result], dict[str, TokenDetails]]:
        """Wait for the devices, and return the results of each run by name.

        Args:
            num_best: the number of most probable tokens to fetch, by name; 0 for runs that are not listed.
        """
        needs_best = any(num_best.get(run.name) for run in self.iteration.runs)
        out = jax.device_get(self.out if needs_best else self.out._replace(best_tokens=None, best_logprobs=None))
        results: dict[str, Result] = {}
        details: dict[str, TokenDetails] = {}
        for row, run in self._rows():
            num = int(out.num[row]) if run.samples else 0
            if run.samples and not out.is_sound[row]:
                results[run.name], details[run.name] = Result((), UNSOUND), TokenDetails()
                continue
            results[run.name] = Result(tuple(out.tokens[row, :num].tolist()))
            best = _best(out, row, num, num_best.get(run.name, 0))
            details[run.name] = TokenDetails(tuple(out.logprobs[row, :num].tolist()), bool(out.is_cut[row]), best)
        return results, details

    def _rows(self) -> list[tuple[int, Run]]:
        """The row of each run in the outputs."""
        chunks = [(self.num_slots + i, run) for i, run in enumerate(self.iteration.chunks)]
        return [(run.slot, run) for run in self.iteration.decodes] + chunks


def _best(out: Out, row: int, num: int, num_best: int) -> tuple[tuple[tuple[int, float], ...], ...]:
    """The most probable tokens of a row, from host arrays: a slice on a device would compile a program."""
    if not num_best or out.best_tokens is None or out.best_logprobs is None:
        return ()
    tokens, logprobs = (each[row, :num, :num_best].tolist() for each in (out.best_tokens, out.best_logprobs))
    return tuple(tuple(zip(t, p, strict=True)) for t, p in zip(tokens, logprobs, strict=True))


@dataclass(eq=False, slots=True)
class PageMemory:
    """The KV cache pages on the devices. Several models can share them; each uses its first layers."""

    pages: tuple[KVPages, ...]


class Runner:
    """Run the programs of an engine on the devices.

    Args:
        layout: the compiled programs.
        params: the weights, in the shardings of the plans.
        memory: the pages of another model to share; by default the runner allocates its own.
    """

    def __init__(self, served: Served, layout: Layout[Compiled], params: Any, memory: PageMemory | None = None) -> None:
        self.served, self.layout = served, layout
        self._params = params
        self._num_slots = served.options.num_slots
        empty = self._empty(whole=memory is None)
        self._last = empty.last
        self.memory = memory or PageMemory(empty.pages)

    @property
    def num_compiled(self) -> int:
        """The number of compiled programs, all of them compiled before the first request."""
        return len(self.layout.programs)

    def _empty(self, *, whole: bool) -> Resident:
        """Allocate the resident state; without pages unless it is `whole`."""
        primary = self.layout.programs[self.served.keys[0]]
        num_params = len(jax.tree.leaves(self.served.params))
        shapes = self.served.resident(self.layout.num_pages)
        leaves, structure = jax.tree.flatten(shapes)
        shardings = jax.tree.unflatten(structure, primary.shardings[num_params : num_params + len(leaves)])
        if not whole:
            shapes, shardings = (each._replace(pages=()) for each in (shapes, shardings))
        return jax.tree.map(
            lambda leaf, sharding: jnp.zeros(leaf.shape, leaf.dtype, device=sharding), shapes, shardings
        )

    def _resident(self) -> Resident:
        return Resident(self.memory.pages[: self.served.model.config.num_layers], self._last)

    def _store(self, resident: Resident) -> None:
        self.memory.pages = (*resident.pages, *self.memory.pages[len(resident.pages) :])
        self._last = resident.last

    def dispatch(self, iteration: Iteration, sampling: Mapping[str, SamplingOptions]) -> DispatchedIteration:
        """Dispatch an iteration to the devices, without waiting for it.

        Args:
            sampling: the sampling options of each run, by name.
        """
        self._copy(iteration.copies)
        shape = iteration.shape
        slots = self._rows(iteration.decodes, self._num_slots, shape.width, sampling, by_slot=True)
        rows = [slots]
        if shape.rows:
            rows.append(self._rows(iteration.chunks, shape.rows, shape.length, sampling, by_slot=False))
        return DispatchedIteration(iteration, self._run(shape, *rows), self._num_slots)

    def _run(self, key: Key, *rows: NDArray[np.int32]) -> Out:
        resident, out = self.layout.programs[key].run(self._params, self._resident(), *rows)
        self._store(resident)
        return out

    def _copy(self, copies: Sequence[Copy]) -> None:
        for start in range(0, len(copies), self._num_slots):
            batch = copies[start : start + self._num_slots]
            pages = np.full((2, self._num_slots), self.layout.num_pages, np.int32)
            pages[:, : len(batch)] = np.array(batch, np.int32).T
            self._store(self.layout.programs["copy"].run(self._resident(), pages))

    def _rows(
        self, runs: Sequence[Run], num: int, width: int, sampling: Mapping[str, SamplingOptions], *, by_slot: bool
    ) -> NDArray[np.int32]:
        rows = self.served.rows(num, width, self.layout.num_pages)
        for number, run in enumerate(runs):
            row = run.slot if by_slot else number
            rows.tokens[row, : len(run.tokens)] = run.tokens
            if not run.tokens:
                rows.tokens[row, 0] = -1
            rows.start[row] = run.start
            rows.num_tokens[row] = max(1, len(run.tokens))
            rows.slots[row] = run.slot if run.samples else self._num_slots
            rows.tables[row, : len(run.pages)] = run.pages
            options = sampling[run.name]
            values = (options.temperature, options.top_k, options.top_p, options.seed)
            for field, value in zip(rows.sampling, values, strict=True):
                field[row] = value
        return rows.packed()

    def warm_up(self) -> None:
        """Run each program once on idle rows, so that first-run costs and out-of-memory errors come before any request."""
        for shape in self.served.options.shapes:
            self._run_idle(shape)
        self._copy([Copy(self.layout.num_pages, self.layout.num_pages)])
        jax.block_until_ready(self._resident())

    def seconds(self) -> dict[Shape, float]:
        """Measure the seconds of one run of each shape, after `warm_up`."""
        seconds: dict[Shape, float] = {}
        for shape in self.served.options.shapes:
            started = time.perf_counter()
            jax.block_until_ready(self._run_idle(shape))
            seconds[shape] = time.perf_counter() - started
        return seconds

    def _run_idle(self, shape: Shape) -> Out:
        sizes = [(self._num_slots, shape.width)] + ([(shape.rows, shape.length)] if shape.rows else [])
        rows = [self.served.rows(num, width, self.layout.num_pages).packed() for num, width in sizes]
        return self._run(shape, *rows)
