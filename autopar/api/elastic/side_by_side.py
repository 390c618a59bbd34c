"""Run several pipelines side by side, of as many nodes as there are: the pipelines of a cover by templates (Oobleck).

In: the plan of a step, which says where its state is. Out: `SideBySideStep`, which stands where a jitted step stands. A call

1. gives each pipeline what it reads of the state and of the batch,
2. runs its microbatches through the stages of its template, and adds up their terms: gradients and losses,
3. adds up the terms of all pipelines, layer by layer, and updates the state, which is divided over all devices once.

Pipelines may have other numbers of nodes, stages and microbatches. The cut is that of gradient accumulation
(`transforms/microbatch/worker_programs.py`), so results are those of as many microbatches, summed in another order.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar.api.elastic.term_update import TermUpdate, check_terms
from autopar.api.pipeline_templates import templates_for, templates_from
from autopar.errors import MeshError, MicrobatchError, OptionError, ScheduleError
from autopar.hardware.profile import HardwareProfile
from autopar.jax_interop.partition_spec import named_shardings
from autopar.pipeline.cut.extract_stages import LeafKey
from autopar.pipeline.plan import PipelinePlan
from autopar.pipeline.run.stacked_leaves import StackedLeaf
from autopar.pipeline.run.step import PipelinedStep
from autopar.pipeline.schedule.table import find
from autopar.pipeline.templates.templates import PipelineTemplates
from autopar.planner.request import requested_profile
from autopar.plans.plan import Plan
from autopar.runtime import jit as execute
from autopar.runtime.distributed.box_exchange import BoxExchange, Moved, Part, box_of
from autopar.runtime.distributed.device_order import in_host_order
from autopar.runtime.distributed.exchange import among_processes
from autopar.runtime.distributed.plan_agreement import with_hosts
from autopar.runtime.distributed.routes import Box
from autopar.runtime.own_arrays import OwnArguments
from autopar.transforms.microbatch.batch_dims import leading_dim
from autopar.transforms.microbatch.slices import COMBINE
from autopar.transforms.microbatch.worker_programs import WorkerCut, cut_before_update
from autopar.transforms.program import Program

#: Options of `autopar.plan` that hold for the stages of each pipeline.
_OF_STAGES = (
    "hardware",
    "memory_budget_bytes",
    "per_microbatch_statistics",
    "solver",
    "time_limit_s",
    "progress",
    "cache",
)


@dataclass(frozen=True, slots=True)
class Pipelines:
    """What is requested.

    Args:
        at_least: the number of pipelines, where there are nodes and microbatches for so many.
        stages, schedule: of each.
        num_microbatches: of the batch.
    """

    at_least: int
    stages: int | str
    schedule: str
    num_microbatches: int

    @classmethod
    def taken_from(cls, options: Mapping[str, Any]) -> tuple[Pipelines | None, dict[str, Any]]:
        """The pipelines that options ask for, None if they do not, and the options of the whole step.

        Raises:
            OptionError, ScheduleError: options that do not go together.
        """
        left = dict(options)
        number = left.pop("pipelines", None)
        if number is None:
            return None, left
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise OptionError(f"`pipelines` is {number!r}: give a number of pipelines, 1 or more")
        for name in ("mesh", "like", "everything", "num_devices", "pin"):
            if left.get(name) is not None:
                raise OptionError(
                    f"`{name}` does not go with `pipelines`, whose templates decide it: leave one of both out"
                )
        count = left.get("num_microbatches")
        if not isinstance(count, int) or isinstance(count, bool) or count < number:
            raise OptionError(
                f"{number} pipelines need a microbatch each, and `num_microbatches` is {count!r}: give at least {number}, four or more for"
                " each stage"
            )
        stages, schedule = left.pop("stages", "auto"), left.pop("schedule", "1f1b")
        kind = None if schedule == "auto" else find(schedule)
        if kind is not None and (kind.has_replicas or kind.is_asynchronous):
            raise ScheduleError(
                f"{kind.name!r} does not go with `pipelines`: its stages "
                + ("are on two submeshes each" if kind.has_replicas else "do not wait for the update")
                + ', and each pipeline computes its microbatches once, by one version of the weights. Choose another `schedule`, such as "1f1b"'
            )
        return cls(number, stages, schedule, count), {**left, "all_devices": True}


class SideBySideStep:
    """A step that several pipelines run.

    Args:
        plan, program, mesh: of the whole step, whose shardings the state keeps.
        options: of `parallelize`.
        may_take: whether donated arrays that the user made may be overwritten.

    Attributes:
        templates: the templates and the pipelines.

    Raises:
        MicrobatchError: the batch cannot be split.
        MeshError: processes have unequal numbers of devices.
        BudgetError: all nodes together do not hold the model.
    """

    def __init__(
        self,
        plan: Plan,
        program: Program,
        mesh: Mesh,
        requested: Pipelines,
        options: Mapping[str, Any],
        *,
        may_take: bool,
    ) -> None:
        name = program.signature.name
        self._cut = cut_before_update(program, own_statistics=bool(options.get("per_microbatch_statistics")))
        check_terms(self._cut.terms, name, "leave `pipelines` out")
        _check_batch(self._cut, name)
        devices = in_host_order(list(mesh.devices.flat))
        profile = _profile(options.get("hardware"), devices)
        per_node = profile.devices_per_host
        of_stages = {one: options[one] for one in _OF_STAGES if options.get(one) is not None}
        of_stages = {"cache": True, **of_stages, "stages": requested.stages, "schedule": requested.schedule}
        self.templates = _agreed_templates(
            self._cut.worker.program,
            profile,
            {**of_stages, "num_microbatches": requested.num_microbatches},
            num_nodes=len(devices) // per_node,
            survive=requested.at_least - 1,
        )
        nodes = [devices[start : start + per_node] for start in range(0, len(devices), per_node)]
        self._pipelines = [
            PipelinedStep(
                _template(self.templates, len(of)),
                self._cut.worker.program,
                list(itertools.chain.from_iterable(nodes[node] for node in of)),
                own=own,
            )
            for of, own in zip(self.templates.pipelines, _shares(self.templates.microbatches), strict=True)
        ]
        trace = program.as_traced.trace
        self.in_tree, self.out_tree = trace.in_tree, trace.out_tree
        structs = jax.tree.leaves(trace.arguments)
        self.own_arguments = OwnArguments(self.in_tree, structs, plan.donated, dict(plan.carried), may_take=may_take)
        self._held = held = named_shardings([tensor.sharding for tensor in plan.inputs], mesh)
        self._given = [_leaves_read(one, self._cut) for one in self._pipelines]
        self._give = BoxExchange(
            devices, [self._given_value(leaf, held, one) for one, leaves in self._each() for leaf in leaves]
        )
        terms = self._cut.terms
        self._places = [_divided(term.shape, mesh) for term in terms]
        self._results = [[_results(one, n) for n in range(len(terms))] for one in self._pipelines]
        self._add = BoxExchange(devices, [self._added_value(n) for n in range(len(terms))])
        self._update = TermUpdate(plan, self._cut, mesh, self._places, lambda given: given)

    def __call__(self, *trees: Any) -> Any:
        """Run the step on pytrees with the structure that it was planned for."""
        return self.dispatch(execute.flat(self.in_tree, trees))

    def dispatch(self, leaves: Sequence[Any]) -> Any:
        """Run the step on the leaves of its arguments. Later calls may reuse the memory of the returned state."""
        inputs = self._cut.worker.inputs
        places = {inputs[leaf[0]].index for _, own in self._each() for leaf in own}
        held = {n: _placed(leaves[n], self._held[n]) for n in places}
        sent = [held[inputs[leaf[0]].index] for _, own in self._each() for leaf in own]
        arrived = iter(self._give([[[one]] for one in sent]))
        values = []
        for one, own in self._each():
            parts: dict[int, dict[Any, Any]] = {}
            for position, rows in own:
                parts.setdefault(position, {})[rows] = next(arrived)
            given = [_whole(parts[n]) if n in parts else _local(leaves[inputs[n].index]) for n in range(len(inputs))]
            values.append(one.pipeline.begin(given))
            for instruction in one.pipeline.instructions.steps:
                instruction.run(values[-1])
        made = [
            [
                [found.read(registers) for found, _ in results[n]]
                for results, registers in zip(self._results, values, strict=True)
            ][: 1 if term.kind == "same" else None]
            for n, term in enumerate(self._cut.terms)
        ]
        results = self._update(leaves, self._add(made))
        self.own_arguments.returned(results)
        return self.out_tree.unflatten(results)

    # -- helpers -----------------------------------------------------------------------------

    def _each(self) -> Any:
        return zip(self._pipelines, self._given, strict=True)

    def _given_value(self, leaf: LeafKey, held: Sequence[NamedSharding], one: PipelinedStep) -> Moved:
        """What a pipeline reads: one argument, or some layers of it."""
        position, rows = leaf
        source = self._cut.worker.inputs[position]
        stage, port = one.pipeline.homes[leaf]
        box = box_of(source.shape)
        if rows is not None:
            box = tuple((rows.start, rows.stop) if d == rows.dim else ends for d, ends in enumerate(box))
        wanted = one.pipeline.pieces[stage].shardings[port]
        dtype = one.plan.inputs[position].dtype
        return Moved(source.shape, dtype, (((held[source.index], box_of(source.shape)),),), (wanted, box))

    def _added_value(self, n: int) -> Moved:
        """A term of all pipelines."""
        term = self._cut.terms[n]
        sources = tuple(tuple(part for _, part in results[n]) for results in self._results)
        wanted = self._places[n], box_of(term.shape)
        if term.kind == "same":
            return Moved(term.shape, term.dtype, sources[:1], wanted)
        return Moved(term.shape, term.dtype, sources, wanted, COMBINE[term.kind])


def _leaves_read(one: PipelinedStep, cut: WorkerCut) -> list[LeafKey]:
    """The arguments, or parts of them, that a pipeline gets from others. PRNG keys are on every device already."""
    return [leaf for leaf in one.pipeline.homes if not one.plan.inputs[leaf[0]].dtype.startswith("key")]


def _results(one: PipelinedStep, n: int) -> list[tuple[Any, Part]]:
    """Where a pipeline has a term: each part, with its sharding and its box of the whole."""
    shape = one.plan.outputs[n].shape
    found: list[tuple[Any, Part]] = []
    for (position, rows), result in one.pipeline.instructions.results.items():
        if position == n:
            box: Box = box_of(shape)
            if rows is not None:
                box = tuple((rows.start, rows.stop) if d == rows.dim else ends for d, ends in enumerate(box))
            found.append((result, (result.sharding, box)))
    return found


def _whole(parts: Mapping[Any, Any]) -> Any:
    return parts[None] if None in parts else StackedLeaf(parts)


def _placed(leaf: Any, sharding: NamedSharding) -> Any:
    """An argument as the plan has it; one that the user gave whole, as NumPy's, is not yet."""
    is_placed = isinstance(leaf, jax.Array) and leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    return leaf if is_placed else jax.device_put(leaf, sharding)


def _local(leaf: Any) -> Any:
    """This process's copy of an array that all devices have."""
    return leaf.addressable_data(0) if isinstance(leaf, jax.Array) else leaf


def _divided(shape: Sequence[int], mesh: Mesh) -> NamedSharding:
    """A sharding that divides an array over all devices, where a dim can be divided so."""
    axes = tuple(mesh.axis_names)
    for dim, size in enumerate(shape):
        if size and size % mesh.size == 0:
            return NamedSharding(mesh, PartitionSpec(*(None,) * dim, axes))
    return NamedSharding(mesh, PartitionSpec())


def _shares(counts: Sequence[int]) -> list[range]:
    """The microbatches of each pipeline."""
    stops = list(itertools.accumulate(counts))
    return [range(stop - count, stop) for stop, count in zip(stops, counts, strict=True)]


def _template(templates: PipelineTemplates, size: int) -> PipelinePlan:
    plan = templates.templates[size].plan
    assert isinstance(plan, PipelinePlan)
    return plan


def _profile(hardware: Any, devices: Sequence[Any]) -> HardwareProfile:
    """The hardware, with the devices of a node as its host: those of a process, if there are several.

    Raises:
        MeshError: nodes would have unequally many devices.
    """
    if among_processes() is None:
        profile = requested_profile(hardware)
        per_node = min(profile.devices_per_host, len(devices))
    else:
        profile = with_hosts(hardware)
        counts = [sum(1 for _ in of) for _, of in itertools.groupby(devices, key=lambda one: one.process_index)]
        if len(set(counts)) > 1:
            raise MeshError(
                f"pipelines run on nodes with equally many devices, and the {len(counts)} processes have {', '.join(map(str, counts))}: give"
                " each as many"
            )
        per_node = counts[0]
    if len(devices) % per_node:
        raise MeshError(
            f"{len(devices)} devices are not whole nodes of {per_node}, as the hardware profile has them: give `hardware` with another"
            " `devices_per_host`"
        )
    return replace(profile, devices_per_host=per_node, nvlink_domain_devices=None)


def _agreed_templates(
    program: Program, profile: HardwareProfile, options: dict[str, Any], *, num_nodes: int, survive: int
) -> PipelineTemplates:
    """The templates of process 0."""
    exchange = among_processes()
    if exchange is None:
        return _templates(program, profile, options, num_nodes=num_nodes, survive=survive)

    def made() -> dict[str, Any]:
        found = _templates(program, profile, options, num_nodes=num_nodes, survive=survive)
        return {str(size): _template(found, size).to_json() for size in found.templates}

    plans = exchange.made_once(f"the pipelines of `{program.signature.name}`", made)
    sizes = {int(size): PipelinePlan.from_json(plan) for size, plan in plans.items()}
    return templates_from(sizes, profile, num_nodes=num_nodes, survive=survive, shares_state=True)


def _templates(
    program: Program, profile: HardwareProfile, options: dict[str, Any], *, num_nodes: int, survive: int
) -> PipelineTemplates:
    """The templates.

    Raises:
        ScheduleError: the schedule takes some numbers of microbatches only.
    """
    try:
        return templates_for(program, profile, options, num_nodes=num_nodes, survive=survive, shares_state=True)
    except ScheduleError as error:
        raise ScheduleError(
            f"{options['schedule']!r} does not go with `pipelines`, which divide the microbatches in any way: {error}. Choose another"
            ' `schedule`, such as "1f1b"'
        ) from error


def _check_batch(cut: WorkerCut, name: str) -> None:
    """Refuse a step whose batch the pipelines would find elsewhere.

    Raises:
        MicrobatchError: they would.
    """
    found = leading_dim(cut.worker.program.as_written.graph)[0]
    if found != cut.batch_size:
        raise MicrobatchError(
            f"`{name}` has {cut.batch_size} examples, and its pipelines would take {found} for them, the leading dim of another argument:"
            " make that state, or leave `pipelines` out"
        )
