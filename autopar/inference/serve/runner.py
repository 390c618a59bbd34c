"""Iterations run on devices.

In: the planned programs, weights, and `Iteration`s. Out: for each, while the devices still work on it, a `Running` that
is asked for its results later. The cache and each slot's last token stay on the devices, and their buffers are used
again and again.
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

#: Why a request ended whose logits were no numbers.
UNSOUND = "unsound"


@dataclass(frozen=True, slots=True)
class Told:
    """What came out of a run beside its tokens.

    Args:
        logprobs: of each token. is_cut: as of `sampling.Sampled`.
        best: for each token the most probable tokens with their logprobs; empty where not asked for.
    """

    logprobs: tuple[float, ...] = ()
    is_cut: bool = False
    best: tuple[tuple[tuple[int, float], ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Running:
    """An iteration on the devices."""

    iteration: Iteration
    out: Out
    num_slots: int

    def results(self, num_best: Mapping[str, int]) -> tuple[dict[str, Result], dict[str, Told]]:
        """By name of each run; waits for the devices.

        Args:
            num_best: for which runs, and how many, the most probable tokens are wanted.
        """
        wanted = any(num_best.get(run.name) for run in self.iteration.runs)
        fetched = jax.device_get(self.out if wanted else self.out._replace(best_tokens=None, best_logprobs=None))
        results: dict[str, Result] = {}
        told: dict[str, Told] = {}
        for row, run in self._rows():
            num = int(fetched.num[row]) if run.samples else 0
            if run.samples and not fetched.is_sound[row]:
                results[run.name], told[run.name] = Result((), UNSOUND), Told()
                continue
            results[run.name] = Result(tuple(fetched.tokens[row, :num].tolist()))
            best = _best(fetched, row, num, num_best.get(run.name, 0))
            told[run.name] = Told(tuple(fetched.logprobs[row, :num].tolist()), bool(fetched.is_cut[row]), best)
        return results, told

    def _rows(self) -> list[tuple[int, Run]]:
        """Where each run stands in what came out."""
        chunks = [(self.num_slots + i, run) for i, run in enumerate(self.iteration.chunks)]
        return [(run.slot, run) for run in self.iteration.decodes] + chunks


def _best(fetched: Out, row: int, num: int, wanted: int) -> tuple[tuple[tuple[int, float], ...], ...]:
    """Of a row's tokens the most probable ones; of arrays on the host: a slice on a device is a program."""
    if not wanted or fetched.best_tokens is None or fetched.best_logprobs is None:
        return ()
    tokens, logprobs = (each[row, :num, :wanted].tolist() for each in (fetched.best_tokens, fetched.best_logprobs))
    return tuple(tuple(zip(t, p, strict=True)) for t, p in zip(tokens, logprobs, strict=True))


@dataclass(eq=False, slots=True)
class PageMemory:
    """The pages on the devices: of one model, or of several, each of which uses as many layers as it has."""

    pages: tuple[KVPages, ...]


class Runner:
    """The devices' side of an engine.

    Args:
        params: the weights, laid out as the programs' plans say.
        memory: another model's pages, around which these programs were planned; by default its own.
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
        """Programs that JAX has compiled, all before the first request."""
        return len(self.layout.programs)

    def _empty(self, *, whole: bool) -> Resident:
        """What stays on the devices; pages only if it is `whole`."""
        home = self.layout.programs[self.served.keys[0]]
        num_params = len(jax.tree.leaves(self.served.params))
        shapes = self.served.resident(self.layout.num_pages)
        leaves, structure = jax.tree.flatten(shapes)
        shardings = jax.tree.unflatten(structure, home.shardings[num_params : num_params + len(leaves)])
        if not whole:
            shapes, shardings = (each._replace(pages=()) for each in (shapes, shardings))
        return jax.tree.map(
            lambda leaf, sharding: jnp.zeros(leaf.shape, leaf.dtype, device=sharding), shapes, shardings
        )

    def _resident(self) -> Resident:
        return Resident(self.memory.pages[: self.served.model.config.num_layers], self._last)

    def _keep(self, resident: Resident) -> None:
        self.memory.pages = (*resident.pages, *self.memory.pages[len(resident.pages) :])
        self._last = resident.last

    def start(self, iteration: Iteration, sampling: Mapping[str, SamplingOptions]) -> Running:
        """Send an iteration to the devices.

        Args:
            sampling: of each run by name.
        """
        self._copy(iteration.copies)
        shape = iteration.shape
        slots = self._rows(iteration.decodes, self._num_slots, shape.width, sampling, by_slot=True)
        rows = [slots]
        if shape.rows:
            rows.append(self._rows(iteration.chunks, shape.rows, shape.length, sampling, by_slot=False))
        return Running(iteration, self._run(shape, *rows), self._num_slots)

    def _run(self, key: Key, *rows: NDArray[np.int32]) -> Out:
        resident, out = self.layout.programs[key].run(self._params, self._resident(), *rows)
        self._keep(resident)
        return out

    def _copy(self, copies: Sequence[Copy]) -> None:
        for start in range(0, len(copies), self._num_slots):
            some = copies[start : start + self._num_slots]
            pages = np.full((2, self._num_slots), self.layout.num_pages, np.int32)
            pages[:, : len(some)] = np.array(some, np.int32).T
            self._keep(self.layout.programs["copy"].run(self._resident(), pages))

    def _rows(
        self, runs: Sequence[Run], num: int, width: int, sampling: Mapping[str, SamplingOptions], *, by_slot: bool
    ) -> NDArray[np.int32]:
        rows = self.served.rows(num, width, self.layout.num_pages)
        for place, run in enumerate(runs):
            row = run.slot if by_slot else place
            rows.tokens[row, : len(run.tokens)] = run.tokens
            if not run.tokens:
                rows.tokens[row, 0] = -1
            rows.start[row] = run.start
            rows.num_tokens[row] = max(1, len(run.tokens))
            rows.slots[row] = run.slot if run.samples else self._num_slots
            rows.tables[row, : len(run.pages)] = run.pages
            asked = sampling[run.name]
            for field, value in zip(
                rows.sampling, (asked.temperature, asked.top_k, asked.top_p, asked.seed), strict=True
            ):
                field[row] = value
        return rows.packed()

    def warm_up(self) -> None:
        """Run each program once with nothing to do: what devices do at a first run alone is done, and memory that is not
        there is missed now."""
        for shape in self.served.options.shapes:
            self._run_idle(shape)
        self._copy([Copy(self.layout.num_pages, self.layout.num_pages)])
        jax.block_until_ready(self._resident())

    def seconds(self) -> dict[Shape, float]:
        """Of a run of each shape, which has run before."""
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
