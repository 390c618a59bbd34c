"""Plan pipelines that survive failures of nodes: a plan in stages for each number of nodes, and pipelines that use all.

In: a step, a number of nodes, the number of failures to survive. Out: `PipelineTemplates`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from autopar.api.make_plan import check_options, option_names, planning
from autopar.errors import BudgetError, ClusterError, OptionError
from autopar.hardware.profile import HardwareProfile
from autopar.ir.mesh import factorisations
from autopar.pipeline.partition.exact import ExactPartitioner
from autopar.pipeline.partition.problem import Partition, PartitionProblem
from autopar.pipeline.plan import PipelinePlan
from autopar.pipeline.schedule.kind import ScheduleKind
from autopar.pipeline.template_plans import stages_on_nodes, templates_of
from autopar.pipeline.templates.templates import PipelineTemplates, Setting, assembled, sizes_needed
from autopar.planner.request import requested_profile
from autopar.transforms.program import Program, program_of

#: Options of `plan` that templates decide themselves.
_DECIDED = ("num_devices", "all_devices", "mesh", "everything", "like", "partitioner", "dump")


@dataclass(frozen=True, slots=True)
class _OnAllDevices:
    """A partitioner that leaves no device idle."""

    def partition(self, problem: PartitionProblem) -> Partition:
        return ExactPartitioner().partition(replace(problem, all_devices=True))


def plan_templates(
    step: Callable[..., Any],
    *args: Any,
    num_nodes: int,
    num_microbatches: int,
    survive: int = 1,
    devices_per_node: int | None = None,
    hardware: str | HardwareProfile | None = None,
    schedule: str | ScheduleKind = "1f1b",
    **options: Any,
) -> PipelineTemplates:
    """Plan pipelines over nodes so that any `survive` of them may fail (Oobleck, arXiv 2309.08125). `parallelize(pipelines=…)` runs several.

    A *template* is a plan in stages for a number of nodes. Templates of n0 (the fewest nodes that hold the model), n0 + 1, ... nodes are planned
    ahead, so that the nodes that are left after a failure are covered by templates again, with none idle, and every layer is
    copied from a node that has it.

    Args:
        step, args: as for `plan`; the batch is the global batch.
        num_nodes: the number of nodes.
        num_microbatches: the number of microbatches of the global batch; pipelines of different speed compute different numbers of
            them.
        survive: the number of failures, of any nodes, that must leave every layer on some node. It takes one more pipelines than
            that. With too few nodes, the result says how many failures it survives (`survives`).
        devices_per_node: by default the devices of a host of the hardware profile.
        hardware: as for `plan`.
        schedule: of all pipelines.
        options: other options of `plan`, such as `memory_budget_bytes` and `stages`, which is `"auto"` by default.

    Raises:
        BudgetError: all nodes together do not hold the model.
        AutoparError: as `plan`.
    """
    check_options(options.keys() - set(option_names()), "num_nodes", "survive", "devices_per_node")
    for name in _DECIDED:
        if name in options:
            raise OptionError(f"`{name}` is decided by the templates: leave it out, and give `num_nodes` and `survive`")
    for name, value, least in (
        ("num_nodes", num_nodes, 1),
        ("survive", survive, 0),
        ("num_microbatches", num_microbatches, 1),
        ("devices_per_node", 1 if devices_per_node is None else devices_per_node, 1),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ClusterError(f"`{name}` is {value!r}: give a whole number of at least {least}")
    profile = requested_profile(hardware)
    if devices_per_node is not None and devices_per_node != profile.devices_per_host:
        profile = replace(profile, devices_per_host=devices_per_node, nvlink_domain_devices=None)
    names = ("carry", "donate", "kwargs", "static_argnames")
    program = program_of(step, args, **{name: options.pop(name, None) for name in names})
    options = {"stages": "auto", **options, "num_microbatches": num_microbatches, "schedule": schedule}

    return templates_for(program, profile, options, num_nodes=num_nodes, survive=survive)


def templates_for(
    program: Program,
    profile: HardwareProfile,
    options: dict[str, Any],
    *,
    num_nodes: int,
    survive: int,
    shares_state: bool = False,
) -> PipelineTemplates:
    """The templates of a traced step, and the pipelines on all nodes.

    Args:
        options: of `plan`, with `stages`, `num_microbatches` and `schedule`.
        shares_state: as in `Setting`.

    Raises:
        BudgetError: all nodes together do not hold the model.
    """

    def planned(size: int) -> PipelinePlan:
        return _stages_on(program, size, profile, options)

    _, plans = _plans(planned, num_nodes, survive)
    return templates_from(plans, profile, num_nodes=num_nodes, survive=survive, shares_state=shares_state)


def templates_from(
    plans: Mapping[int, PipelinePlan],
    profile: HardwareProfile,
    *,
    num_nodes: int,
    survive: int,
    shares_state: bool = False,
) -> PipelineTemplates:
    """The pipelines on all nodes, of plans by the number of nodes."""
    fewest = min(plans)
    setting = Setting(
        program=plans[fewest].program.name,
        hardware=profile.name,
        devices_per_node=profile.devices_per_host,
        requested=survive,
        fewest=fewest,
        num_microbatches=plans[fewest].num_microbatches,
        network_bytes_per_s=profile.devices_per_host * profile.network_link.bytes_per_s,
        shares_state=shares_state,
    )
    templates, cells = templates_of(plans, profile.devices_per_host)
    return assembled(setting, templates, cells, range(num_nodes))


def _stages_on(program: Program, num_nodes: int, profile: HardwareProfile, options: dict[str, Any]) -> PipelinePlan:
    """The fastest plan in stages that leaves no node idle; of one stage too, but not of one program, whose time is not known for other
    numbers of microbatches.

    Raises:
        BudgetError: nothing fits.
        ClusterError: what fits leaves a node idle.
    """
    devices = num_nodes * profile.devices_per_host
    one_stage = [{"stages": 1, "mesh": mesh} for mesh in factorisations(devices)]  # on all devices, as stages are
    on_all = {"partitioner": _OnAllDevices()}
    ways = [*one_stage, on_all] if options["stages"] == "auto" else [{}, on_all]
    found: list[PipelinePlan] = []
    error: BudgetError | None = None
    for way in ways:
        try:
            request = {**options, "hardware": profile, "num_devices": devices, "stages_only": True, **way}
            plan = planning(**request)(program)
        except BudgetError as failure:  # the last one says what stages need
            error = failure
            continue
        assert isinstance(plan, PipelinePlan), "stages only"
        found.append(plan)
        if options["stages"] != "auto" and all(stages_on_nodes(plan, num_nodes, profile.devices_per_host)):
            break
    if not found:
        assert error is not None
        raise error
    full = [plan for plan in found if all(stages_on_nodes(plan, num_nodes, profile.devices_per_host))]
    if not full:
        raise ClusterError(
            f"the stages of `{found[0].program.name}` on {num_nodes} nodes leave a node idle: leave `stages` out, or use fewer nodes"
        )
    return min(full, key=lambda plan: plan.prediction.step_time_s)


def _plans(planned: Callable[[int], PipelinePlan], num_nodes: int, survive: int) -> tuple[int, dict[int, PipelinePlan]]:
    """The fewest nodes from which on every number has a template, and the templates.

    Raises:
        BudgetError, ClusterError: all nodes together do not hold the model.
    """
    plans: dict[int, PipelinePlan] = {}
    fewest, most = 1, num_nodes
    while True:
        sizes = range(fewest, min(most, sizes_needed(fewest, num_nodes, survive)[-1]) + 1)
        missing = next((size for size in sizes if size not in plans), None)
        if missing is None:
            return fewest, {size: plans[size] for size in sizes}
        try:
            plans[missing] = planned(missing)
        except (BudgetError, ClusterError) as error:
            if missing >= 2 * fewest:  # larger ones are for speed only
                most = missing - 1
            elif missing < num_nodes:
                fewest = missing + 1
            else:
                error.add_note(f"That is on {num_nodes} nodes, all that there are: give more nodes")
                raise
