"""Plan real models from their libraries for 8 and 64 absent H100s, and compile the plans by XLA.

For each: whether XLA's program fits, which collectives no decision predicted, and which nodes ran replicated for lack
of a rule. The planner chooses among all meshes of the GPUs; 64 GPUs are 8 hosts.
"""

from __future__ import annotations

import math
import os
import time
from typing import Any

import autopar
from autopar.ir.mesh import parse_mesh
from autopar.rules.factors import Rule
from autopar.rules.node_view import NodeView
from autopar.rules.table import rule_for, unknown_rule
from autopar.transforms.program import Program, program_of
from autopar.verification.verification import Verification
from benchmarks.compile_cache import CachingCompiler, default_folder
from benchmarks.zoo.real import REAL

Row = dict[str, Any]

HARDWARE = "h100-sxm"
NUM_GPUS = (8, 64)
#: Memory of a GPU, which XLA's program may use; it is more than the memory budget.
MEMORY_BYTES = 80e9
#: Smaller collectives and results, in bytes, are ignored.
MEGABYTE = 1e6
#: Nodes with a smaller share of the step's FLOPs are ignored.
SHARE = 0.01
MESH_SEPARATOR = "@"


def measure(program: str) -> list[Row]:
    """One row for each number of GPUs, or one for a `MODEL@MESH`. A failed row has its error."""
    model, _, mesh = program.partition(MESH_SEPARATOR)
    rows = []
    with CachingCompiler(default_folder()) as compiler:
        for num_gpus in [parse_mesh(mesh).num_devices] if mesh else NUM_GPUS:
            about: Row = {"model": model, "gpus": num_gpus}
            try:
                rows.append(about | _row(model, num_gpus, mesh or None, compiler))
            except Exception as error:  # continue with the other rows
                rows.append(about | {"failed": f"{type(error).__name__}: {error}"})
    return rows


def _row(model: str, num_gpus: int, mesh: str | None, compiler: CachingCompiler) -> Row:
    step, args = REAL[model](num_gpus).target
    at = {"begun": _clocks()}

    def note(_: str, fraction: float) -> None:
        at.setdefault("planned" if fraction == 1.0 else "traced", _clocks())

    devices: dict[str, Any] = {"mesh": mesh} if mesh else {"num_devices": num_gpus}
    devices |= {"cache": False}  # the time of planning is measured
    verified = autopar.verify(step, *args, hardware=HARDWARE, compiler=compiler, progress=note, **devices)
    plan, program = verified.plan, program_of(step, args, carry=None, donate=None).of(verified.plan)
    return _figures(verified) | {
        "failed": "",
        "trace_s": at["traced"][0] - at["begun"][0],
        "plan_s": at["planned"][0] - at["begun"][0],
        "plan_cpu_s": at["planned"][1] - at["begun"][1],
        "mesh": str(plan.mesh),
        "words": plan.strategy,
        "attempts": len(verified.attempts),
        "equations": len(program.graph.nodes),
        "decisions": plan.outcome.num_nodes,
        "status": plan.outcome.status,
        "gap": plan.outcome.gap,
        "fallbacks": fallbacks(program),
        "compile_s": verified.compiled.compile_s,
        "key": compiler.last_key,
    }


def _clocks() -> tuple[float, float]:
    """Wall time, and CPU time of this process and its child processes, in seconds."""
    return time.perf_counter(), sum(os.times()[:4])


def _figures(verified: Verification) -> Row:
    memory = {figure.name: figure for figure in verified.memory}
    times = verified.times
    strangers = [one for one in verified.unpredicted if one.unpredicted_bytes > MEGABYTE]
    return {
        "peak_predicted": memory["peak"].predicted,
        "peak_compiled": memory["peak"].compiled,
        "fits": verified.compiled.peak_bytes <= MEMORY_BYTES,
        "unpredicted": [[one.kind, one.unpredicted_bytes, one.path] for one in strangers],
        "wire_predicted": sum(match.predicted_bytes for match in verified.collectives),
        "wire_compiled": sum(match.compiled_bytes for match in verified.collectives),
        "step_predicted_s": verified.plan.prediction.step_time_s,
        "step_replayed_s": times.replay.step_time_s if times.replay else None,
        "replayed_kernels_s": times.replay.by_kind() if times.replay else {},
        "step_xla_s": times.xla_s,
        "estimate_errors": list(times.estimate_errors),
        "step_xla_predicted": verified.step_time.predicted,
        "step_xla": verified.step_time.compiled,
        "off": list(verified.off),
    }


def fallbacks(program: Program) -> list[list[Any]]:
    """Nodes without a rule that matter: primitive, its share of the step's FLOPs, bytes of its results."""
    graph = program.graph
    rules = [(node, rule_for(NodeView.of(node, graph))) for node in graph.nodes]
    flops = [_flops(rule or unknown_rule(NodeView.of(node, graph))) for node, rule in rules]
    total = math.fsum(flops)
    found = []
    for (node, rule), own in zip(rules, flops, strict=True):
        num_bytes = sum(graph.values[value].num_bytes for value in node.results)
        if rule is None and (own > SHARE * total or num_bytes > MEGABYTE):
            found.append([node.primitive, own / total, num_bytes, node.source])
    return found


def _flops(rule: Rule) -> float:
    return rule.flops_per_point * math.prod(factor.size for factor in rule.factors)
