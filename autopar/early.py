"""Which of a plan's reductions to have XLA start early: what waits for them, long before their result is read.

In: a device's program, the mesh, a hardware profile. Out: `Awaited`s. Gradients are summed over devices as the backward pass
makes them, but nothing reads the sums before the update, and XLA's scheduler, which works from the end, puts off what nobody
reads: reductions end up one after another behind the backward pass, with nothing left to hide them. So a later product of
the backward pass is made to wait for those that should be over by then (`jax.lax.optimization_barrier`, which costs nothing).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from autopar.cost.hardware import HardwareProfile
from autopar.cost.kernels import op_seconds
from autopar.device_program import DeviceProgram, Op
from autopar.graph.ir import Graph
from autopar.mesh import MeshShape
from autopar.plan import Awaited
from autopar.timeline import predecessors

REDUCTIONS = ("all-reduce", "reduce-scatter")
#: Pieces of branches: what is in one is not run each time.
_BRANCHES = frozenset(["enter_branch", "exit_branch"])


def tied(
    program: DeviceProgram,
    graph: Graph,
    mesh: MeshShape,
    profile: HardwareProfile,
    *,
    merge_bytes: float,
    slack: float,
) -> tuple[DeviceProgram, tuple[Awaited, ...]]:
    """The program with its reductions awaited early, and where: nowhere, in a program with loops or branches.

    Args:
        merge_bytes: so much is reduced at once, at the most: what waits for one does not merge with another.
        slack: a reduction gets this much more than its own time before something waits for it.
    """
    if graph.loops or any(node.primitive in _BRANCHES for node in graph.nodes):
        return program, ()
    clock = _Clock(program, mesh, profile)
    products = _products(program, graph)
    ops, awaited = list(program.ops), list[Awaited]()
    free = 0.0
    for bucket in _buckets(_chains(program, clock), program.ops, merge_bytes):
        ready = max(clock.starts[min(chain)] for chain in bucket)
        seconds = clock.together(bucket)
        free = max(free, ready) + seconds
        last = [chain[-1] for chain in bucket]
        values = tuple(sorted({program.buffers[ops[i].writes[0]].value for i in last}))
        before = min(clock.first_read[i] for i in last)
        at = next(
            (
                (i, node, operand)
                for i, node, operand in products
                if clock.starts[i] >= free + slack * seconds and i > max(last) and node > _made(graph, values)
            ),
            None,
        )
        if at is None or at[0] >= before:
            continue
        i, node, operand = at
        awaited.append(Awaited(node=node, operand=operand, values=values))
        ops[i] = replace(ops[i], reads=(*ops[i].reads, *(ops[j].writes[0] for j in last)))
    return replace(program, ops=tuple(ops)), tuple(awaited)


class _Clock:
    """When operations start if each runs as soon as it can, in the program's own order, by the mean of the device's rates
    and of XLA's opinion of them."""

    def __init__(self, program: DeviceProgram, mesh: MeshShape, profile: HardwareProfile) -> None:
        self.mesh, self.opinions = mesh, (profile, replace(profile, xla_estimator=None))
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
        return sum(op_seconds(op, self.mesh, profile) for profile in self.opinions) / len(self.opinions)

    def together(self, chains: Sequence[Sequence[int]]) -> float:
        """Seconds of reductions that are merged, those of a kind into one."""
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
    """Reductions for which nobody waits soon, each with those of the same value that it waits for, first to last."""
    ops = program.ops
    reductions = [i for i, op in enumerate(ops) if op.combinable and op.collective in REDUCTIONS]
    inner = {j for i in reductions for j in clock.waits_for[i]}
    chains = []
    for last in reductions:
        if last in inner:
            continue
        chain = [last]
        while before := [j for j in clock.waits_for[chain[0]] if ops[j].combinable and ops[j].collective in REDUCTIONS]:
            chain.insert(0, before[0])
        first_read = clock.first_read[last]
        over = clock.starts[chain[0]] + sum(clock.seconds(ops[i]) for i in chain)
        if first_read == len(ops) or clock.starts[first_read] > over:
            chains.append(chain)
    return chains


def _buckets(chains: Sequence[Sequence[int]], ops: Sequence[Op], merge_bytes: float) -> list[list[Sequence[int]]]:
    """Chains in the order in which they start, so many together as are merged."""
    buckets: list[list[Sequence[int]]] = []
    size = 0.0
    for chain in sorted(chains, key=lambda chain: chain[0]):
        more = ops[chain[-1]].payload_bytes
        if not buckets or size + more > merge_bytes:
            buckets.append([])
            size = 0.0
        buckets[-1].append(chain)
        size += more
    return buckets


def _products(program: DeviceProgram, graph: Graph) -> list[tuple[int, int, int]]:
    """Matrix products and convolutions that read, from memory, a value that the program has computed: operation, node, and
    which operand. Of two such the one computed last."""
    maker = {value: n for n, node in enumerate(graph.nodes) for value in node.results}
    written: set[int] = set()
    found = []
    for i, op in enumerate(program.ops):
        if op.kind in ("gemm", "convolution"):
            operands = graph.nodes[op.node].operands
            computed = [(maker[v], n) for n, v in enumerate(operands) if v is not None and v in written and v in maker]
            if computed:
                found.append((i, op.node, max(computed)[1]))
        written.update(program.buffers[b].value for b in op.writes)
    return found


def _made(graph: Graph, values: Sequence[int]) -> int:
    """The last of the nodes that make values."""
    wanted = set(values)
    return max(n for n, node in enumerate(graph.nodes) if wanted & set(node.results))
