"""Dispatch iterations to the devices, and fetch their results.

In: the planned programs, weights, and `Iteration`s. Out: a `DispatchedIteration` for each, whose results are fetched later
while the devices work on the next. The KV cache and the last token of each slot stay on the devices, in donated buffers.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from numpy.typing import NDArray

from autopar.api.planned_function import Compiled
from autopar.inference.kv_cache.device_pages import KVPages
from autopar.inference.kv_cache.page_tables import Copy
from autopar.inference.model.sharded_load import load_sharded
from autopar.inference.schedule.requests import Iteration, Run, Shape
from autopar.inference.serve.layout import Layout, Served
from autopar.inference.step.host_inputs import sampling_block
from autopar.inference.step.sampling_params import NEUTRAL, SamplingOptions, TokenCounts
from autopar.inference.step.step import Out, Resident


@dataclass(frozen=True, slots=True)
class DispatchedIteration:
    """An iteration that runs on the devices."""

    iteration: Iteration
    out: Out

    def fetch(self, *, needs_best: bool, needs_states: bool) -> Out:
        """Wait for the devices, and copy the results to the host.

        Args:
            needs_best: whether to fetch the most probable tokens, too. needs_states: whether to fetch hidden states, too.
        """
        out = self.out
        if not needs_best:
            out = out._replace(best_tokens=None, best_logprobs=None)
        if not needs_states:
            out = out._replace(states=None)
        if out.prompt is not None and all(run.next_token < 0 for run in self.iteration.chunks):
            out = out._replace(prompt=None)
        return jax.device_get(out)


@dataclass(eq=False, slots=True)
class PageMemory:
    """The KV cache pages on the devices. Several models can share them; each uses its first layers."""

    pages: tuple[KVPages, ...]
    _freed: Any = None

    def free(self) -> None:
        """Free the pages, until `allocate`."""
        if self._freed is None:
            self._freed = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding), self.pages)
            self.pages = ()

    def allocate(self) -> None:
        """Allocate the pages again, empty. Without effect if they are there."""
        if self._freed is not None:
            self.pages = tuple(
                KVPages(*(jnp.zeros(*each[:2], device=each[2]) for each in layer)) for layer in self._freed
            )
            self._freed = None


class Runner:
    """Run the programs of an engine on the devices.

    Args:
        layout: the compiled programs.
        params: the weights, in the shardings of the plans.
        memory: the pages of another model to share; by default the runner allocates its own.

    Attributes:
        clock: the seconds at which iterations begin and end; a simulation has another one.
    """

    clock: Callable[[], float] = staticmethod(time.perf_counter)

    def __init__(self, served: Served, layout: Layout[Compiled], params: Any, memory: PageMemory | None = None) -> None:
        self.served, self.layout = served, layout
        self._params = params
        self._asleep: Any = None
        self._masks: dict[Shape, jax.Array] = {}
        self._num_slots = served.options.num_slots
        self._sampling = np.tile(NEUTRAL, (self._num_slots, 1))
        empty = self._empty(whole=memory is None)
        self.memory = memory or PageMemory(empty.pages)
        self._own: Any = empty._replace(pages=())

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
        return self._own._replace(pages=self.memory.pages[: self.served.model.config.num_layers])

    def _store(self, resident: Resident) -> None:
        self.memory.pages = (*resident.pages, *self.memory.pages[len(resident.pages) :])
        self._own = resident._replace(pages=())

    @property
    def mesh(self) -> Mesh:
        """The mesh of the programs."""
        return self.layout.programs[self.served.keys[0]].mesh

    @property
    def is_asleep(self) -> bool:
        """Whether the weights are not on the devices, so that nothing can run."""
        return self._params is None

    @property
    def weight_bytes(self) -> int:
        """The bytes of the weights on one device."""
        each = zip(jax.tree.leaves(self.served.params), self.shardings, strict=True)
        return sum(math.prod(place.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf, place in each)

    @property
    def shardings(self) -> tuple[Any, ...]:
        """The sharding of each weight."""
        primary = self.layout.programs[self.served.keys[0]]
        return primary.shardings[: len(jax.tree.leaves(self.served.params))]

    def sleep(self, *, keeps_weights: bool) -> None:
        """Free the weights and the state of the slots; the pages stay. `wake_up` or `place` comes before the next iteration.

        Args:
            keeps_weights: whether to keep the weights on the host.
        """
        self._asleep = [np.asarray(leaf) for leaf in jax.tree.leaves(self._params)] if keeps_weights else None
        self._params = self._own = None
        self._masks.clear()

    def wake_up(self) -> bool:
        """Move the weights that are kept on the host to the devices. Returns False, without a change, if none are."""
        if self._asleep is None:
            return False
        pairs = zip(self._asleep, self.shardings, strict=True)
        self.place([(leaf, functools.partial(load_sharded, dtype=leaf.dtype, sharding=place)) for leaf, place in pairs])
        return True

    def place(self, moving: Iterable[tuple[Any, Callable[[Any], jax.Array]]]) -> None:
        """Replace the weights, one after the other, so that there is memory for one more; also those of a runner that sleeps.

        Args:
            moving: the new weights, each with what moves it to the devices in the sharding of the plans.
        """
        old = None if self._params is None else jax.tree.leaves(self._params)
        self._params, new = None, list[jax.Array]()
        for number, (array, move) in enumerate(moving):
            if old is not None:
                old[number] = None
            new.append(move(array))
        if self._own is None:
            self.memory.allocate()
            self._own = self._empty(whole=False)
        self._params, self._asleep = jax.tree.unflatten(jax.tree.structure(self.served.params), new), None

    def close(self, *, frees_pages: bool = True) -> None:
        """Free the weights and the pages. Nothing can run any more."""
        self._params = self._own = self._asleep = None
        if frees_pages:
            self.memory.pages = ()
        self._masks.clear()

    def start(self, slot: int, options: SamplingOptions, prompt: Sequence[int], generated: Sequence[int]) -> None:
        """Set the sampling options of a slot, until another request starts in it.

        Args:
            prompt, generated: the request's tokens so far, which penalties depend on.
        """
        self._sampling[slot] = options.packed()
        if options.has_penalty or options.logit_bias:
            row = TokenCounts.of(options, prompt, generated, self.served.model.config.vocab_size)
            self._store(self.layout.programs["start"].run(self._resident(), np.array([slot], np.int32), row))

    def dispatch(self, iteration: Iteration, allowed: NDArray[np.int32] | None = None) -> DispatchedIteration:
        """Dispatch an iteration to the devices, without waiting for it.

        Args:
            allowed: the mask of tokens for all rows, as in `only_allowed`; None allows all tokens in all rows.
        """
        self._copy(iteration.copies)
        shape = iteration.shape
        rows = [self._slot_rows(iteration)]
        if shape.rows:
            rows.append(self._chunk_rows(iteration.chunks, shape))
        return DispatchedIteration(iteration, self._run(shape, *rows, allowed=allowed))

    def forward(self, iteration: Iteration) -> NDArray[np.int32]:
        """Dispatch the logits of a decode step. `sample` is next, with what this returns.

        Only with `Options.samples_apart`, and for iterations of the shape `Shape()`.
        """
        self._copy(iteration.copies)
        packed = self._slot_rows(iteration)
        self._store(self.layout.programs["forward"].run(self._params, self._resident(), packed))
        return packed

    def sample(
        self, iteration: Iteration, packed: NDArray[np.int32], allowed: NDArray[np.int32] | None
    ) -> DispatchedIteration:
        """Dispatch the sampling from the logits that were dispatched before, as `dispatch` does."""
        mask: Any = self._all_allowed(Shape(), self.layout.programs[Shape()]) if allowed is None else allowed
        resident, out = self.layout.programs["sample"].run(self._resident(), mask, packed)
        self._store(resident)
        return DispatchedIteration(iteration, out)

    def _run(self, key: Shape, *rows: NDArray[np.int32], allowed: NDArray[np.int32] | None = None) -> Out:
        program = self.layout.programs[key]
        mask: Any = self._all_allowed(key, program) if allowed is None else allowed
        resident, out = program.run(self._params, self._resident(), mask, *rows)
        self._store(resident)
        return out

    def _all_allowed(self, key: Shape, program: Compiled) -> jax.Array:
        """The mask that allows all tokens, which stays on the devices."""
        if key not in self._masks:
            place = program.shardings[len(jax.tree.leaves((self._params, self._resident())))]
            self._masks[key] = jax.device_put(self.served.all_allowed(key), place)
        return self._masks[key]

    def _copy(self, copies: Sequence[Copy]) -> None:
        for start in range(0, len(copies), self._num_slots):
            batch = copies[start : start + self._num_slots]
            pages = np.full((2, self._num_slots), self.layout.num_pages, np.int32)
            pages[:, : len(batch)] = np.array(batch, np.int32).T
            self._store(self.layout.programs["copy"].run(self._resident(), pages))

    def _slot_rows(self, iteration: Iteration) -> NDArray[np.int32]:
        """The rows of all slots. Those that do not decode are idle."""
        decodes, tables = iteration.decodes, iteration.tables
        width = iteration.shape.width
        packed, rows = self.served.rows(self._num_slots, width, self.layout.num_pages)
        chosen = decodes.slots
        rows.tables[:] = tables
        rows.tokens[chosen] = decodes.tokens
        rows.start[chosen], rows.num_tokens[chosen], rows.slots[chosen] = decodes.starts, decodes.num_tokens, chosen
        sampling_block(packed, width)[chosen] = self._sampling[chosen]
        return packed

    def _chunk_rows(self, runs: Sequence[Run], shape: Shape) -> NDArray[np.int32]:
        """The rows of prefill chunks."""
        packed, rows = self.served.rows(shape.rows, shape.length, self.layout.num_pages)
        for row, run in enumerate(runs):
            rows.tokens[row, : run.num_tokens] = run.tokens
            rows.start[row], rows.num_tokens[row] = run.start, run.num_tokens
            rows.slots[row] = run.slot if run.samples else self._num_slots
            rows.next_token[row] = run.next_token
            rows.tables[row, : len(run.pages)] = run.pages
        sampling_block(packed, shape.length)[: len(runs)] = self._sampling[[run.slot for run in runs]]
        return packed

    def warm_up(self) -> None:
        """Run each program once on idle rows, so that first-run costs and out-of-memory errors come before any request."""
        for shape in self.served.options.shapes:
            self._run_idle(shape)
        self._copy([Copy(self.layout.num_pages, self.layout.num_pages)])
        self.start(0, SamplingOptions(logit_bias={0: 0.0}), (), ())
        self._sampling[0] = NEUTRAL
        if self.served.options.samples_apart:
            rows = self.served.rows(self._num_slots, 1, self.layout.num_pages)[0]
            self._store(self.layout.programs["forward"].run(self._params, self._resident(), rows))
            self._store(self.layout.programs["sample"].run(self._resident(), self.served.all_allowed(Shape()), rows)[0])
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
        rows = [self.served.rows(num, width, self.layout.num_pages)[0] for num, width in sizes]
        return self._run(shape, *rows)
