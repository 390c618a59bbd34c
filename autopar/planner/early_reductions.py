"""Insert barriers so that XLA starts gradient reductions during the backward pass.

In: a device program, the mesh, a hardware profile. Out: the program with barriers, and the early reductions. Gradients can be
reduced as soon as the backward pass has computed them. But only the update reads the results, and XLA's scheduler works from
the end of the program: it postpones the reductions until after the backward pass, where they are exposed. A barrier
(`jax.lax.optimization_barrier`, which costs nothing) makes a later matmul of the backward pass wait for the reductions that
can be complete by then.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from autopar.cost.collectives import collective
from autopar.cost.kernel_time import op_seconds
from autopar.hardware.profile import HardwareProfile
from autopar.ir.device_program import DeviceProgram, Op
from autopar.ir.graph import Graph
from autopar.ir.mesh import MeshShape
from autopar.plans.records import EarlyReduction
from autopar.xla_model.collective_combiner import predecessors

#: Borders of branches: their bodies do not run in every step.
_BRANCHES = frozenset(["enter_branch", "exit_branch"])


class EarlyStart:
    """Barriers that start a program's reductions early; none in a program with loops or branches."""

    def __init__(self, program: DeviceProgram, graph: Graph, mesh: MeshShape, profile: HardwareProfile) -> None:
        self.program, self.clock = program, _Clock(program, mesh, profile)
        self.producers = graph.producers
        has_parts = graph.loops or any(node.primitive in _BRANCHES for node in graph.nodes)
        self.chains = [] if has_parts else _chains(program, self.clock)
        self.matmuls = _matmuls(program, graph)

    def with_barriers(
        self, combine_threshold_bytes: float, slack: float
    ) -> tuple[DeviceProgram, tuple[EarlyReduction, ...]]:
        """The program with barriers, and the early reductions that they cause.

        Args:
            combine_threshold_bytes: maximum bytes of the reductions before one barrier. XLA does not combine reductions
                before different barriers.
            slack: extra time between a reduction and its barrier, relative to the time of the reduction.
        """
        ops, starts, early = list(self.program.ops), self.clock.starts, list[EarlyReduction]()
        idle_from = 0.0  # when the reductions of the buckets so far are complete
        for bucket in _buckets(self.chains, self.program.ops, combine_threshold_bytes):
            ready = max(starts[min(chain)] for chain in bucket)
            seconds = self.clock.together(bucket)
            idle_from = max(idle_from, ready) + seconds
            last = [chain[-1] for chain in bucket]
            values = tuple(sorted({self.program.buffers[ops[i].writes[0]].value for i in last}))
            produced = max(self.producers[value] for value in values)
            barrier = next(
                (
                    (i, node, operand)
                    for i, node, operand in self.matmuls
                    if starts[i] >= idle_from + slack * seconds and i > max(last) and node > produced
                ),
                None,
            )
            if barrier is None or barrier[0] >= min(self.clock.first_read[i] for i in last):
                continue
            i, node, operand = barrier
            early.append(EarlyReduction(node=node, operand=operand, values=values))
            ops[i] = replace(ops[i], reads=(*ops[i].reads, *(ops[j].writes[0] for j in last)))
        return (replace(self.program, ops=tuple(ops)), tuple(early)) if early else (self.program, ())


class _Clock:
    """Start times of the operations in program order, without waiting for collectives."""

    def __init__(self, program: DeviceProgram, mesh: MeshShape, profile: HardwareProfile) -> None:
        self.mesh, self.profile = mesh, profile
        self.ops, self.waits_for = program.ops, predecessors(program.ops)
        self.starts: list[float] = []
        now = 0.0
        for op in program.ops:
            self.starts.append(now)
            now += 0.0 if op.kind == "collective" else self.seconds(op)
        self.first_read = [len(program.ops)] * len(program.ops)
        for i, before in enumerate(self.waits_for):
            for j in before:
                self.first_read[j] = min(self.first_read[j], i)

    def seconds(self, op: Op) -> float:
        return op_seconds(op, self.mesh, self.profile)

    def together(self, chains: Sequence[Sequence[int]]) -> float:
        """Seconds of several reductions, with reductions of equal kind and axes combined into one."""
        kinds: dict[tuple[str, tuple[str, ...]], list[Op]] = defaultdict(list)
        for i in {i for chain in chains for i in chain}:
            kinds[self.ops[i].collective, self.ops[i].axes].append(self.ops[i])
        return sum(
            self.seconds(
                replace(
                    ops[0],
                    payload_bytes=sum(op.payload_bytes for op in ops),
                    writes=tuple(b for op in ops for b in op.writes),
                )
            )
            for ops in kinds.values()
        )


def _chains(program: DeviceProgram, clock: _Clock) -> list[list[int]]:
    """Chains of reductions of one value, whose result is read only after they can be complete."""
    ops = program.ops
    reductions = [i for i, op in enumerate(ops) if _is_reduction(op)]
    inner = {j for i in reductions for j in clock.waits_for[i]}
    chains = []
    for last in reductions:
        if last in inner:
            continue
        chain = [last]
        while before := [j for j in clock.waits_for[chain[0]] if _is_reduction(ops[j])]:
            chain.insert(0, before[0])
        first_read = clock.first_read[last]
        end = clock.starts[chain[0]] + sum(clock.seconds(ops[i]) for i in chain)
        if first_read == len(ops) or clock.starts[first_read] > end:
            chains.append(chain)
    return chains


def _is_reduction(op: Op) -> bool:
    return op.combinable and op.kind == "collective" and collective(op.collective).is_sum


def _buckets(
    chains: Sequence[Sequence[int]], ops: Sequence[Op], combine_threshold_bytes: float
) -> list[list[Sequence[int]]]:
    """Chains in order of their start, grouped up to the combine threshold."""
    buckets: list[list[Sequence[int]]] = []
    size = 0.0
    for chain in sorted(chains, key=lambda chain: chain[0]):
        more = ops[chain[-1]].payload_bytes
        if not buckets or size + more > combine_threshold_bytes:
            buckets.append([])
            size = 0.0
        buckets[-1].append(chain)
        size += more
    return buckets


def _matmuls(program: DeviceProgram, graph: Graph) -> list[tuple[int, int, int]]:
    """Matmuls and convolutions that read a computed value from memory, as (operation, node, operand). Of two computed operands,
    the one that is computed later."""
    written: set[int] = set()
    found = []
    for i, op in enumerate(program.ops):
        if op.kind in ("gemm", "convolution"):
            operands = graph.nodes[op.node].operands
            in_memory = [(v, n) for n, v in enumerate(operands) if v is not None and v in written]
            computed = [(graph.producers[v], n) for v, n in in_memory if v in graph.producers]
            if computed:
                found.append((i, op.node, max(computed)[1]))
        written.update(program.buffers[b].value for b in op.writes)
    return found
