"""Define pipelines over nodes that survive failures: templates, the pipelines that run, and those after a failure.

In: templates as numbers. Out: `PipelineTemplates`, whose `after(failed)` is the next cover with what it copies.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autopar.pipeline.templates.batch import best_sizes, divided
from autopar.pipeline.templates.cover import Change, Nodes, cover, template_sizes
from autopar.pipeline.templates.state import Cells, Copy, Held, copies, holders, num_copies, placed


@dataclass(frozen=True, slots=True, eq=False)
class Template:
    """A pipeline plan on a number of nodes.

    Args:
        held: the cells of the state on each node, bool[nodes, cells].
        seconds: of a step with a number of microbatches, without the sum of gradients over pipelines.
        stages: the stages on each node.
        plan: the plan from which it was made.
    """

    held: np.ndarray
    seconds: Callable[[int], float]
    stages: tuple[tuple[int, ...], ...]
    plan: object = None

    @property
    def num_nodes(self) -> int:
        return len(self.held)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is given.

    Args:
        program: the name of the step.
        hardware: the kind of device.
        requested: the number of failures to survive.
        fewest: the fewest nodes that hold the model.
        network_bytes_per_s: of all devices of a node together, in one direction.
        shares_state: whether the state is divided over all nodes once, and each pipeline gets what it reads, as pipelines that run
            have it; else each pipeline holds all of the state.
    """

    program: str
    hardware: str
    devices_per_node: int
    requested: int
    fewest: int
    num_microbatches: int
    network_bytes_per_s: float
    shares_state: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineTemplates:
    """Templates, and the pipelines that use every node.

    Args:
        templates: by the number of nodes.
        pipelines: the nodes of each, in the order of its template.
        numbers: of the pipelines; one that goes on after a failure keeps its number.
        failed: the nodes that have failed.
        changes, copies: how the pipelines were made from those before the last failure; empty at first.
        before: the pipelines before the last failure; None at first.
    """

    setting: Setting
    templates: Mapping[int, Template] = field(repr=False)
    cells: Cells = field(repr=False)
    pipelines: tuple[Nodes, ...]
    numbers: tuple[int, ...]
    failed: tuple[int, ...] = ()
    changes: tuple[Change, ...] = ()
    copies: tuple[Copy, ...] = ()
    before: PipelineTemplates | None = field(default=None, repr=False)

    @property
    def num_nodes(self) -> int:
        """The nodes that run."""
        return sum(map(len, self.pipelines))

    @property
    def held(self) -> Held:
        """The cells on each node of each template."""
        return {size: one.held for size, one in self.templates.items()}

    @property
    def microbatches(self) -> tuple[int, ...]:
        """The microbatches of each pipeline."""
        seconds = [self.templates[len(nodes)].seconds for nodes in self.pipelines]
        return divided(self.setting.num_microbatches, seconds)

    @property
    def pipeline_s(self) -> tuple[float, ...]:
        """The predicted seconds of each pipeline, without the sum of gradients."""
        each = zip(self.pipelines, self.microbatches, strict=True)
        return tuple(self.templates[len(nodes)].seconds(m) for nodes, m in each)

    @property
    def sync_s(self) -> float:
        """The predicted seconds of the sum of gradients over the pipelines, a ring over the network after the last microbatch."""
        return sync_seconds(self.setting, self.templates, self.cells, len(self.pipelines), {*map(len, self.pipelines)})

    @property
    def step_time_s(self) -> float:
        """The predicted step time."""
        return max(self.pipeline_s) + self.sync_s

    @property
    def survives(self) -> int:
        """How many further failures are survived, whichever nodes fail: all state stays on some node, and enough nodes are left."""
        if self.setting.shares_state:
            return 0
        return max(0, min(num_copies(self.pipelines, self.held) - 1, self.num_nodes - self.setting.fewest))

    @property
    def copied_bytes(self) -> int:
        """All bytes that nodes get after the last failure."""
        return sum(one.num_bytes for one in self.copies)

    @property
    def copy_s(self) -> float:
        """The predicted seconds of the copies between nodes: the most that one node sends or gets, over its link."""
        moved: dict[tuple[str, int], int] = {}
        for one in self.copies:
            for end in (("sends", one.source), ("gets", one.target)):
                if one.source is not None and end[1] is not None:
                    moved[end[0], end[1]] = moved.get((end[0], end[1]), 0) + one.num_bytes
        return max(moved.values(), default=0) / self.setting.network_bytes_per_s

    def after(self, failed: Collection[int]) -> PipelineTemplates:
        """The pipelines after these nodes have failed too.

        Raises:
            ClusterError: too few nodes are left, or a node is in no pipeline.
        """
        found = cover(self.pipelines, failed, self.setting.fewest)
        has = {node: cells for node, cells in holders(self.pipelines, self.held).items() if node not in failed}
        old = {frozenset(nodes): nodes for nodes in self.pipelines}
        pipelines = tuple(
            old.get(frozenset(nodes)) or placed(nodes, has, self.templates[len(nodes)].held, self.cells.num_bytes)
            for nodes in found.pipelines
        )
        return replace(
            self,
            pipelines=pipelines,
            numbers=tuple(self.numbers[n] for n in found.before),
            failed=(*self.failed, *sorted(failed)),
            changes=tuple(
                replace(
                    one,
                    pipeline=self.numbers[one.pipeline],
                    other=None if one.other is None else self.numbers[one.other],
                )
                for one in found.changes
            ),
            copies=copies(pipelines, has, self.held, self.cells),
            before=self,
        )


def assembled(
    setting: Setting, templates: Mapping[int, Template], cells: Cells, nodes: Sequence[int]
) -> PipelineTemplates:
    """The fastest pipelines on these nodes, as many as survive the failures requested, or else as many as there can be.

    Raises:
        ClusterError, MicrobatchError: there are none.
    """
    at_least = max(1, min(setting.requested + 1, len(nodes) // setting.fewest))
    sizes = [size for size in templates if size <= len(nodes)]
    chosen = best_sizes(
        len(nodes),
        sizes,
        setting.num_microbatches,
        lambda size, m: templates[size].seconds(m),
        at_least,
        lambda count: sync_seconds(setting, templates, cells, count, sizes),
    )
    left = iter(nodes)
    pipelines = tuple(tuple(next(left) for _ in range(size)) for size in chosen.sizes)
    return PipelineTemplates(
        setting=setting, templates=templates, cells=cells, pipelines=pipelines, numbers=tuple(range(len(pipelines)))
    )


def sync_seconds(
    setting: Setting, templates: Mapping[int, Template], cells: Cells, count: int, sizes: Collection[int]
) -> float:
    """Seconds of a ring all-reduce of the gradients over `count` pipelines: 2 (r - 1) / r of the bytes of the fullest node. Where pipelines
    share the state, a node gets its parameters and sends its gradients."""
    most = max(cells.bytes_of(node & cells.synced) for size in sizes for node in templates[size].held)
    share = 1.0 if setting.shares_state else (count - 1) / count
    return 2 * share * most / setting.network_bytes_per_s


def sizes_needed(fewest: int, num_nodes: int, survive: int) -> range:
    """The sizes for which templates are made, if fewer failures are survived where there are too few nodes."""
    return template_sizes(fewest, num_nodes, max(0, min(survive, num_nodes // fewest - 1)))
