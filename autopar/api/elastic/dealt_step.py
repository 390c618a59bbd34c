"""Run a step whose microbatches are dealt to processes by their speed.

In: the plan of a step, a `Deal`. Out: `DealtStep`, which stands where a jitted step stands. A call

1. gathers what microbatches read of the state in each process (one program over all devices),
2. computes this process's microbatches one after another on its own devices, and adds up their terms: gradients and losses,
3. adds up the terms of all processes and updates the state, in the plan's shardings (one program over all devices).

There is no collective during 2, so a process with more microbatches delays nobody else before the end. The cut is that of gradient
accumulation (`transforms/microbatch/worker_programs.py`), so results are those of as many microbatches, summed in another order.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from autopar.api.elastic.own_rows import Rows, check_divides
from autopar.api.elastic.term_update import TermUpdate, check_terms
from autopar.api.workers.division import PASSED
from autopar.api.workers.planned_part import PlannedPart
from autopar.errors import MeshError, MicrobatchError
from autopar.jax_interop.partition_spec import named_shardings
from autopar.membership.deal import Deal
from autopar.plans.plan import Plan
from autopar.runtime import jit as execute
from autopar.runtime.distributed.exchange import Exchange, Given, among_processes
from autopar.runtime.own_arrays import OwnArguments
from autopar.transforms.microbatch.batch_dims import leading_dim
from autopar.transforms.microbatch.slices import COMBINE
from autopar.transforms.microbatch.worker_programs import Term, cut_for_workers
from autopar.transforms.program import Program

#: The mesh axis that spans processes.
_AXIS = "process"
#: Measured steps: the first few after compilation, and then one of so many. The median of the last ones counts.
_FIRST, _SELDOM, _KEPT = 6, 8, 5


class DealtStep:
    """A step whose microbatches are dealt.

    Args:
        plan, program, mesh: of the whole step, whose shardings the state keeps.
        options: of `parallelize`.
        may_take: whether donated arrays that the user made may be overwritten.

    Raises:
        BatchError, MicrobatchError: the batch cannot be divided so.
        MeshError: processes have unequal numbers of devices.
    """

    def __init__(
        self, plan: Plan, program: Program, mesh: Mesh, deal: Deal, options: Mapping[str, Any], *, may_take: bool
    ) -> None:
        _check_same(among_processes(), deal)
        self._deal = deal
        own_statistics = bool(options.get("per_microbatch_statistics"))
        check_divides(deal, leading_dim(program.as_written.graph)[0])
        self._cut = cut_for_workers(program, deal.num_microbatches, own_statistics=own_statistics, wide=True)
        check_terms(self._cut.terms, program.signature.name, "leave --microbatches out")
        groups = _by_process(mesh, len(deal.counts))
        self._worker = _planned(self._cut.worker.program, options, len(groups[0]), among_processes())
        meshes = [execute.make_mesh(self._worker.plan.mesh, group) for group in groups]
        names = (_AXIS, *self._worker.plan.mesh.axis_names)
        grid = np.stack([np.asarray(one.devices) for one in meshes])
        if [*grid.flat] != [*mesh.devices.flat]:
            raise MeshError(
                f"the mesh of `{program.signature.name}` does not have the devices of each process side by side, as microbatches that"
                " are dealt need: leave `mesh` out, or give its sizes"
            )
        axes = (AxisType.Auto,) * len(names)
        self._everywhere, self._own_mesh = Mesh(grid, names, axis_types=axes), meshes[deal.rank]
        self._own_part = Mesh(grid[deal.rank : deal.rank + 1], names, axis_types=axes)

        trace = program.as_traced.trace
        self.in_tree, self.out_tree = trace.in_tree, trace.out_tree
        structs = jax.tree.leaves(trace.arguments)
        self.own_arguments = OwnArguments(self.in_tree, structs, plan.donated, dict(plan.carried), may_take=may_take)
        in_shardings = named_shardings([tensor.sharding for tensor in plan.inputs], mesh)
        self.rows = Rows(deal, self._cut, program)
        self._gathered = [
            (n, one.index)
            for n, one in enumerate(self._cut.worker.inputs)
            if one.cut is None and one.source in ("state", "argument")
        ]
        self._on = self._worker.on(groups[deal.rank])
        self._gather = jax.jit(
            lambda values: values,
            in_shardings=([in_shardings[i] for _, i in self._gathered],),
            out_shardings=[NamedSharding(self._everywhere, self._on.in_shardings[n].spec) for n, _ in self._gathered],
        )
        self._whole = self._whole_program(options, groups[deal.rank])
        kinds = [one.kind for one in self._cut.terms]
        self._add = jax.jit(
            lambda one, other: tuple(
                a if kind == "same" else COMBINE[kind](a, b) for kind, a, b in zip(kinds, one, other, strict=True)
            ),
            donate_argnums=(0,),
        )
        self._apart = jax.jit(
            lambda terms: tuple(term[None] for term in terms),
            out_shardings=tuple(
                NamedSharding(self._own_part, PartitionSpec(_AXIS, *one.spec)) for one in self._on.out_shardings
            ),
        )
        combined = functools.partial(_combined, self._cut.terms)
        places = [NamedSharding(self._everywhere, PartitionSpec(_AXIS, *one.spec)) for one in self._on.out_shardings]
        self._update = TermUpdate(plan, self._cut, mesh, places, combined)
        self._num_steps = 0
        self._seconds: deque[float] = deque(maxlen=_KEPT)

    @property
    def seconds(self) -> float:
        """Seconds that this process needs for one microbatch, the median of the last measured steps; 0 if there were too few."""
        return statistics.median(self._seconds) if len(self._seconds) == _KEPT else 0.0

    def __call__(self, *trees: Any) -> Any:
        """Run the step on pytrees with the structure that it was planned for."""
        return self.dispatch(execute.flat(self.in_tree, trees))

    def dispatch(self, leaves: Sequence[Any]) -> Any:
        """Run the step on the leaves of its arguments. Later calls may reuse the memory of the returned state."""
        gathered = self._gather([leaves[i] for _, i in self._gathered])
        inputs: list[Any] = [None] * len(self._cut.worker.inputs)
        for (n, _), array in zip(self._gathered, gathered, strict=True):
            inputs[n] = self._here(array, self._on.in_shardings[n])
        whole = () if self._whole is None else self._whole(self.rows.whole_inputs(leaves))
        terms = self._computed(inputs, leaves, whole)
        stacked = tuple(
            jax.make_array_from_single_device_arrays(
                (len(self._deal.counts), *term.shape[1:]),
                NamedSharding(self._everywhere, term.sharding.spec),
                [shard.data for shard in term.addressable_shards],
                dtype=term.dtype,
            )
            for term in self._apart(terms)
        )
        results = self._update(leaves, stacked)
        self.own_arguments.returned(results)
        return self.out_tree.unflatten(results)

    # -- helpers -----------------------------------------------------------------------------

    def _computed(self, inputs: list[Any], leaves: Sequence[Any], whole: Sequence[Any]) -> tuple[jax.Array, ...]:
        """The terms of this process's microbatches, added up."""
        number = self._num_steps
        self._num_steps += 1
        is_measured = 0 < number < _FIRST or number % _SELDOM == _SELDOM - 1
        if is_measured:
            jax.block_until_ready(inputs)
        start_s = time.monotonic()
        total: tuple[jax.Array, ...] | None = None
        for microbatch in self._deal.own:
            for n, one in enumerate(self._cut.worker.inputs):
                if one.source == "number":
                    inputs[n] = np.uint32(microbatch)
                elif one.source == "whole" or one.cut is not None:
                    inputs[n] = self.rows.part(one, leaves, whole, microbatch)
            terms = self._on(inputs)
            total = terms if total is None else self._add(total, terms)
        assert total is not None, "a member has at least one microbatch"
        if is_measured:
            jax.block_until_ready(total)
            self._seconds.append((time.monotonic() - start_s) / len(self._deal.own))
        return total

    def _here(self, array: jax.Array, sharding: NamedSharding) -> jax.Array:
        """This process's replica of an array that every process has."""
        shards = [shard.data for shard in array.addressable_shards]
        return jax.make_array_from_single_device_arrays(array.shape, sharding, shards, dtype=array.dtype)

    def _whole_program(self, options: Mapping[str, Any], group: Sequence[Any]) -> Any:
        """What microbatches read of the whole batch, such as a number of marked examples, computed by each process."""
        if self._cut.whole is None:
            return None
        return _planned(self._cut.whole.program, options, len(group), among_processes()).on(group)


def _combined(terms: Sequence[Term], given: Sequence[jax.Array]) -> list[jax.Array]:
    """The terms of the whole batch from those of all processes, on the first dim; traced."""
    return [_of_all(term, one) for term, one in zip(terms, given, strict=True)]


def _of_all(term: Term, given: jax.Array) -> jax.Array:
    if term.kind == "same":
        return given[0]
    if term.kind == "sum":
        return jnp.sum(given, 0, dtype=given.dtype).astype(term.dtype)
    whole = given[0]
    for n in range(1, given.shape[0]):
        whole = COMBINE[term.kind](whole, given[n])
    return whole


def _planned(program: Program, options: Mapping[str, Any], num_devices: int, exchange: Exchange | None) -> PlannedPart:
    """A part of the step, planned for the devices of one process; the plan of process 0."""
    passed = {name: options[name] for name in PASSED if name in options}
    passed = {"cache": True, "all_devices": True, **passed, "num_devices": num_devices}
    if exchange is None:
        return PlannedPart.of(program, passed)
    name = program.signature.name
    made = exchange.made_once(f"the plan of `{name}`", lambda: PlannedPart.of(program, passed).plan.to_json())
    trees = {"in_tree": program.trace.in_tree, "out_tree": program.trace.out_tree}
    plan = replace(Plan.from_json(made), **trees)
    return PlannedPart(plan, program.of(plan))


def _by_process(mesh: Mesh, count: int) -> list[list[Any]]:
    """The devices of each process.

    Raises:
        MeshError: they are unequally many.
    """
    groups: dict[int, list[Any]] = {}
    for device in mesh.devices.flat:
        groups.setdefault(device.process_index, []).append(device)
    sizes = {len(group) for group in groups.values()}
    if len(groups) != count or len(sizes) > 1:
        numbers = ", ".join(str(len(group)) for group in groups.values())
        raise MeshError(
            f"microbatches are dealt to processes with equally many devices, and the {count} have {numbers}: give each member as many, or"
            " leave --microbatches out"
        )
    return [groups[process] for process in sorted(groups)]


def _check_same(exchange: Exchange | None, deal: Deal) -> None:
    """Refuse deals that differ between processes.

    Raises:
        ProcessError: they do.
    """

    def judge(given: Sequence[Given]) -> None:
        for one in given:
            if one.value != [list(deal.counts), one.by.index]:
                raise MicrobatchError(
                    f"{one.by} has the deal {one.value[0]} as number {one.value[1]}, and process 0 {list(deal.counts)}: are there two keepers?"
                )

    if exchange is not None:
        exchange.judged("dealing microbatches", [list(deal.counts), deal.rank], judge)
