"""Price how stages reshard the values that they send to each other.

In: the planned stages of a step. Out: the same stages; the cost and the plan of each also have the collectives by which
its pieces bring values into the sharding in which they pass (`cut.wires`), or from it into the planned one. The plan of a
stage by itself lacks them, because they depend on the submesh and the sharding of the stage on the other side.

A value is resharded once for all receivers that get it in the same sharding, and in each piece of a receiver that reads
it. What hides these collectives is simulated (`exposed_reshards.py`), but for those over parts of mesh axes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.cost.collectives import collective_time
from autopar.cost.resharding_paths import Move
from autopar.hardware.profile import HardwareProfile
from autopar.ir.graph import Phase, Value
from autopar.ir.mesh import MeshShape
from autopar.pipeline.cut.extract_stages import Port
from autopar.pipeline.cut.pieces import Layout
from autopar.pipeline.cut.wires import Split, changes_between, named_axes, taken_shardings, wire_between
from autopar.pipeline.partition.problem import Stage
from autopar.pipeline.search.exposed_reshards import Passed, added_s
from autopar.pipeline.search.stage_costs import PlannedRun
from autopar.plans.records import CollectiveUse

#: The field of `StageCost` for the seconds of each phase.
_SECONDS = {"forward": "forward_s", "backward": "backward_s", "input": "backward_s", "weight": "weight_s"}
#: The phase of the step in which pieces of a phase run, where it is not the backward pass.
_STEP_PHASE: dict[str, Phase] = {"forward": "forward", "update": "update"}


def with_sent_values(
    runs: Sequence[PlannedRun],
    stages: Sequence[Stage],
    profiles: Mapping[str, HardwareProfile],
    num_microbatches: int,
    *,
    splits_backward: bool,
) -> tuple[PlannedRun, ...]:
    """The planned stages with the collectives that reshard what they send and receive.

    Args:
        profiles: the hardware profile of each kind of device.
        splits_backward: whether the backward pass has an input part and a weight part.
    """
    shapes, devices = [stage.submesh.shape for stage in stages], [stage.submesh.devices for stage in stages]
    of_shapes = [replace(profiles[shape.kind], devices_per_host=shape.devices_per_host) for shape in shapes]
    ends = [_End(*one, num_microbatches, splits_backward) for one in zip(runs, of_shapes, strict=True)]
    for s, sender in enumerate(ends):
        for port, split in sender.sent.items():
            receivers: dict[tuple[Split, bool], list[int]] = defaultdict(list)
            for t, receiver in enumerate(ends):
                if t != s and port in receiver.taken:
                    here, there = wire_between(sender.infos[port].shape, split, receiver.taken[port])
                    receiver.reshard(port, there, receiver.taken[port], f"received from stage {s}")
                    receivers[here, devices[s] == devices[t]].append(t)
            for (here, _), targets in receivers.items():
                sender.reshard(port, split, here, f"sent to stage {' and '.join(map(str, targets))}")
    return tuple(end.priced() for end in ends)


@dataclass
class _End:
    """A planned stage, and how it reshards what it sends and receives.

    Attributes:
        sent, taken: the planned splits of what it sends and receives.
        infos: the values that these are.
        phases_of: the phases of the pieces that make or read them.
    """

    run: PlannedRun
    profile: HardwareProfile
    num_microbatches: int
    splits_backward: bool
    uses: list[CollectiveUse] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    passed: dict[str, list[Passed]] = field(default_factory=lambda: defaultdict(list))
    bytes_of: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def __post_init__(self) -> None:
        stage, plan, self.mesh = self.run.program, self.run.plan, self.run.plan.mesh
        program = stage.program.of(plan)
        self.graph = program.graph
        layout = Layout(program.trace, stage.inputs)
        taken = taken_shardings(plan, layout, stage.inputs)
        self.sent, self.taken = dict[Port, Split](), dict[Port, Split]()
        self.infos, self.values = dict[Port, Value](), dict[Port, int]()
        for port, value in zip(stage.inputs, self.graph.inputs, strict=True):
            self._add(self.taken, port, value, Split(plan.mesh, taken[port].resolved()))
        for port, tensor, value in zip(stage.outputs, plan.outputs, self.graph.outputs, strict=True):
            self._add(self.sent, port, value, Split(plan.mesh, tensor.sharding.resolved()))
        self.phases_of = {port: self._phases(port, layout) for port in self.infos}

    def reshard(self, port: Port, before: Split, after: Split, which: str) -> None:
        """Reshard a value in the pieces that make or read it.

        Args:
            which: e.g. `sent to stage 1`.
        """
        shape, itemsize = self.infos[port].shape, self.infos[port].itemsize
        mesh, moves = changes_between(shape, itemsize, before, after)
        sent = [move for move in moves if move.kind != "cut"]
        named = tuple((one.kind, named_axes(one.axes, mesh, self.mesh), one.num_bytes) for one in sent)
        is_named = all(set(axes) <= set(self.mesh.axis_names) for _, axes, _ in named)
        copies = sum(2 * one.num_bytes for one in sent if one.is_inner)  # transposed
        for phase in self.phases_of[port] if moves else ():
            seconds = sum(self._add_collective(port, move, mesh, phase, which) for move in sent)
            if sent and is_named and phase != "update":
                self.passed[phase].append(Passed(self.values[port], port in self.sent, named))
                seconds = 0.0
            self.seconds[phase] += seconds + copies / self.profile.memory_bytes_per_s
            self.bytes_of[phase] += itemsize * after.sharding.local_size(shape, after.mesh)

    def priced(self) -> PlannedRun:
        """The stage with these collectives."""
        cost, plan = self.run.cost, self.run.plan
        for phase, passed in self.passed.items():
            whole = ("backward", "input", "weight") if phase == "backward" else (phase,)
            self.seconds[phase] += added_s(self.run.figures, whole, passed)
        for phase, seconds in self.seconds.items():
            name = _SECONDS.get(phase, "update_s")
            cost = replace(cost, **{name: getattr(cost, name) + seconds})
        working = max((size for phase, size in self.bytes_of.items() if phase != "update"), default=0.0)
        cost = replace(cost, working_bytes=cost.working_bytes + working)
        return replace(self.run, cost=cost, plan=replace(plan, collectives=(*plan.collectives, *self.uses)))

    # -- helpers -----------------------------------------------------------------------------

    def _add(self, found: dict[Port, Split], port: Port, value: int | None, split: Split) -> None:
        """Note a value that passes between stages; not PRNG keys, which are sharded by their raw words."""
        if port.kind not in ("inside", "outside") or value is None:
            return
        info = self.graph.values[value]
        if len(split.sharding.dims) == len(info.shape):
            found[port], self.infos[port], self.values[port] = split, info, value

    def _phases(self, port: Port, layout: Layout) -> Iterable[str]:
        """The phases of the pieces that make a value that is sent, or read one that is received."""
        if port.kind == "outside":
            return ("update",)
        is_sent, phases = port in self.sent, layout.phases(self.splits_backward)
        value = (layout.gives_inside if is_sent else layout.takes_inside)[port.value]
        self.values[port] = value
        units = (unit for unit in layout.body if value in (unit.results if is_sent else unit.operands))
        return sorted({phases[unit.start] for unit in units}) or ("forward",) * is_sent

    def _add_collective(self, port: Port, move: Move, mesh: MeshShape, phase: str, which: str) -> float:
        """List a collective; the seconds of each run."""
        times = 1 if port.kind == "outside" else self.num_microbatches
        seconds = collective_time(move.kind, move.num_bytes, move.axes, mesh, self.profile)
        made = self.graph.producer(self.values[port])
        self.uses.append(
            CollectiveUse(
                kind=move.kind,
                axes=named_axes(move.axes, mesh, self.mesh),
                num_bytes=move.num_bytes,
                time_s=times * seconds,
                cause=f"reshard a value {which}",
                path=made.path if made else "",
                source=made.source if made else "",
                phase=_STEP_PHASE.get(phase, "backward"),
                num_times=times,
            )
        )
        return seconds
