"""Write the result of each planner pass as text, for `diff`.

In: a plan and the candidate behind it. Out: a folder with one file for each pass, in their order; see
`docs/how-a-plan-is-made.md`. The files contain neither planning times nor memory addresses, so equal plans have equal files.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from autopar.errors import OptionError
from autopar.formulate.formulation import Decision, Formulation
from autopar.frontend.equations import LiteralOperand
from autopar.ir.explicit_program import Communicate, Compute, Extend
from autopar.ir.graph import Graph
from autopar.planner.candidate import Candidate
from autopar.planner.fewer_devices import smaller_meshes
from autopar.planner.mesh_search import Found
from autopar.planner.request import PlanRequest
from autopar.plans.plan import Plan
from autopar.rules.factors import DimFactors
from autopar.system.atomic_file import write_whole
from autopar.system.units import human_bytes, human_seconds, printable


@dataclass(frozen=True, slots=True)
class _Passes:
    """The results of the passes."""

    request: PlanRequest
    plan: Plan
    candidate: Candidate


def make_folder(folder: str | os.PathLike[str]) -> Path:
    """Create the folder of a dump. The planner calls it first, so that an invalid folder fails before planning.

    Raises:
        OptionError: the name is empty, or the folder cannot be created.
    """
    if not os.fspath(folder):
        raise OptionError("`dump` is empty: give a folder, or leave it out")
    with _refused(folder):
        Path(folder).mkdir(parents=True, exist_ok=True)
    return Path(folder)


def dump(folder: str | os.PathLike[str], request: PlanRequest, found: Found) -> None:
    """Write all files; the files of an earlier dump are replaced.

    Raises:
        OptionError: the folder cannot be written.
    """
    assert found.candidate is not None, "a dump is planned without worker processes"
    passes = _Passes(request, found.plan, found.candidate)
    with _refused(folder):
        for name, lines in FILES.items():
            write_whole("".join(f"{printable(line)}\n" for line in lines(passes)), Path(folder) / name)


@contextlib.contextmanager
def _refused(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Turn an `OSError` into an error that names the folder."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise OptionError(f"`dump` cannot write into {os.fspath(folder)!r} ({reason}): give another folder") from None


# -- one function for each file ----------------------------------------------------------------


def _request(passes: _Passes) -> Iterator[str]:
    request = passes.request
    yield f"hardware  {request.profile.name}"
    yield f"meshes    {', '.join(mesh.describe() for mesh in request.meshes)}"
    parts = smaller_meshes(request, passes.candidate.program.graph, request.pin or {})
    if parts:
        numbers = ", ".join(str(part[0].num_devices) for part in parts)
        yield f"parts     {numbers} of the devices, if they can be as fast"
    yield f"memory    {human_bytes(request.budget.total_bytes)} per device, of which a plan may fill"
    yield f"          {human_bytes(request.budget.plan_bytes)}"
    known = ("meshes", "any_part", "hardware", "memory_budget_bytes")
    for name, value in request.key().items():
        if name not in known:
            yield f"{name}  {value}"


def _jaxpr(passes: _Passes) -> Iterator[str]:
    trace, graph = passes.candidate.program.trace, passes.candidate.program.graph
    yield f"{trace.name}({', '.join(_typed(graph, [value]) for value in trace.inputs)})"
    for equation in trace.equations:
        operands = [_literal(one) if isinstance(one, LiteralOperand) else f"%{one}" for one in equation.operands]
        times = f"  x{equation.repeat:g}" if equation.repeat != 1 else ""
        yield f"  {_typed(graph, equation.results)} = {equation.primitive} {', '.join(operands)}{times}"
    yield f"  return {', '.join('-' if isinstance(one, LiteralOperand) else f'%{one}' for one in trace.outputs)}"


def _graph(passes: _Passes) -> Iterator[str]:
    graph = passes.candidate.program.graph
    updates = dict(graph.carried)
    for position, (value, path) in enumerate(zip(graph.inputs, graph.input_paths, strict=True)):
        update = f"  updated by {graph.output_paths[updates[position]]}" if position in updates else ""
        yield f"input   {_typed(graph, [value])}  {path}{update}"
    for n, node in enumerate(graph.nodes):
        operands = ", ".join("literal" if value is None else f"%{value}" for value in node.operands)
        params = " ".join(f"{name}={value}" for name, value in sorted(node.params.items()))
        times = f" x{node.repeat:g}" if node.repeat != 1 else ""
        where = "  ".join(one for one in (node.phase + times, node.path, params) if one)
        yield f"n{n:<5}  {_typed(graph, node.results)} = {node.primitive} {operands}  {where}"
    for value, path in zip(graph.outputs, graph.output_paths, strict=True):
        yield f"output  {'literal' if value is None else f'%{value}'}  {path}"


def _factors(passes: _Passes) -> Iterator[str]:
    f = passes.candidate.formulation
    for index, group in enumerate(f.groups):
        sizes = [
            f"f{i}={one.size}{f' ({one.reduction})' if one.reduction else ''}" for i, one in enumerate(group.factors)
        ]
        yield f"group {index}: nodes {', '.join(f'n{n}' for n in group.nodes)}; factors {', '.join(sizes) or 'none'}"
        for value, dims in group.inputs:
            yield f"  input  %{value}[{_dims(dims)}]"
        for read in group.reads:
            yield f"  reads  %{read.value}[{_dims(read.dims)}]"
        for define in group.defines:
            pending = f"  unreduced over {_dims([(p,) for p in define.pending])}" if define.pending else ""
            yield f"  writes %{define.value}[{_dims(define.dims)}]{pending}"


def _problem(passes: _Passes) -> Iterator[str]:
    f = passes.candidate.formulation
    problem = f.problem
    counts = [decision.num_strategies for decision in f.decisions]
    yield f"mesh {f.mesh.describe()}: {len(counts)} nodes, {sum(counts)} strategies, {len(problem.edges)} edges"
    limit = "none" if problem.memory_limit is None else human_bytes(problem.memory_limit)
    yield f"memory limit {limit}, {len(problem.usages)} live ranges"
    for node, (decision, costs) in enumerate(zip(f.decisions, problem.node_costs, strict=True)):
        finite = costs[np.isfinite(costs)]
        low, high = (float(finite.min()), float(finite.max())) if len(finite) else (np.inf, np.inf)
        spread = f"{human_seconds(low)} to {human_seconds(high)}" if high > low else human_seconds(low)
        yield f"d{node:<5} {_decision_text(f, decision)}: {decision.num_strategies} strategies, {spread}"
    for edge in problem.edges:
        yield f"d{edge.source} - d{edge.target}: {'x'.join(map(str, edge.costs.shape))} prices of resharding"


def _solution(passes: _Passes) -> Iterator[str]:
    f, solution = passes.candidate.formulation, passes.candidate.solution
    yield f"{solution.status.value}: cost {solution.cost:.6g} s, lower bound {solution.lower_bound:.6g} s"
    for node, (decision, choice) in enumerate(zip(f.decisions, solution.choices, strict=True)):
        yield f"d{node:<5} {_decision_text(f, decision)}: {_strategy_text(decision, choice)}"


def _explicit(passes: _Passes) -> Iterator[str]:
    explicit, graph = passes.candidate.parts.explicit, passes.candidate.formulation.graph

    def array(index: int | None) -> str:
        return "-" if index is None else f"@{index}"

    def definition(index: int | None) -> str:
        return "-" if index is None else f"@{index}: %{explicit.arrays[index].value} {explicit.arrays[index].sharding}"

    for value in (*graph.inputs, *graph.constants):
        yield f"{definition(explicit.made[value])} = given"
    for op in explicit.ops:
        if isinstance(op, Compute):
            node = graph.nodes[op.node]
            results = ", ".join(definition(explicit.made.get(value)) for value in node.results) or "()"
            times = f" x{op.num_times:g}" if op.num_times != 1 else ""
            cause = f"  (rematerialization{times})" if op.cause == "rematerialization" else ""
            yield f"{results} = {node.primitive} {', '.join(map(array, op.operands))}{cause}"
        elif isinstance(op, Extend):
            size = f"to {'x'.join(map(str, op.shape))} elements, {human_bytes(op.num_bytes)}"
            yield f"EXTEND operand {op.operand} of n{op.node} {size}"
        else:
            yield f"{definition(op.result)} = {_collective_text(op)} of {array(op.operand)}"
    yield f"return {', '.join(map(array, explicit.outputs))}"


def _collective_text(op: Communicate) -> str:
    times = f" x{op.num_times:g}" if op.num_times != 1 else ""
    merged = ", combinable" if op.combinable else ""
    return f"{op.by or op.kind.upper()} over {', '.join(op.axes) or '-'} ({op.cause}, {human_bytes(op.num_bytes)}{times}{merged})"


def _device(passes: _Passes) -> Iterator[str]:
    graph, device = passes.candidate.formulation.graph, passes.candidate.parts.device
    for position, buffer in enumerate(device.buffers):
        kinds = [name for name in ("argument", "output", "moved") if getattr(buffer, name)]
        yield f"b{position:<5} {human_bytes(buffer.num_bytes)} of %{buffer.value}  {' '.join(kinds)}".rstrip()
    for op in device.ops:
        read, written = (", ".join(f"b{one}" for one in side) for side in (op.reads, op.writes))
        name = op.collective or f"{op.kind} of {op.num_nodes}: {graph.nodes[op.node].primitive} (n{op.node})"
        size = human_bytes(op.payload_bytes if op.collective else op.read_bytes + op.written_bytes)
        yield f"{name}  {read} -> {written}  {size}"


def _timeline(passes: _Passes) -> Iterator[str]:
    timeline, graph = passes.candidate.parts.timeline, passes.candidate.formulation.graph
    yield f"step {human_seconds(timeline.step_time_s)}, kernels {human_seconds(timeline.compute_s)}"
    for kind, seconds in sorted(timeline.exposed_s.items()):
        yield f"exposed {kind} {human_seconds(seconds)}"
    yield f"temporary buffers {human_bytes(timeline.temporary_bytes)} at the peak"
    for ran in timeline.ran:
        name = ran.op.collective or f"{ran.op.kind} {graph.nodes[ran.op.node].primitive} (n{ran.op.node})"
        exposed = f", {human_seconds(ran.exposed_s)} exposed" if ran.exposed_s else ""
        yield f"{1e6 * ran.start_s:>12.2f} us to {1e6 * ran.end_s:>12.2f} us  {name}{exposed}"


def _meshes(passes: _Passes) -> Iterator[str]:
    plan = passes.plan
    prediction = plan.prediction
    yield f"chosen    {plan.mesh}: {human_seconds(prediction.step_time_s)}, {human_bytes(prediction.peak_bytes)}: {plan.strategy}"
    for one in plan.rejected:
        if one.step_time_s == float("inf"):
            yield f"rejected  {one.mesh}: {one.strategy}"
        else:
            yield f"rejected  {one.mesh}: {human_seconds(one.step_time_s)}, {human_bytes(one.peak_bytes)}: {one.strategy}"


#: The files, in the order of the passes.
FILES: dict[str, Callable[[_Passes], Iterable[str]]] = {
    "01-request.txt": _request,
    "02-jaxpr.txt": _jaxpr,
    "03-graph.txt": _graph,
    "04-factors.txt": _factors,
    "05-problem.txt": _problem,
    "06-solution.txt": _solution,
    "07-explicit-program.txt": _explicit,
    "08-device-program.txt": _device,
    "09-timeline.txt": _timeline,
    "10-meshes.txt": _meshes,
}


# -- formatting --------------------------------------------------------------------------------


def _literal(one: LiteralOperand) -> str:
    array = np.asarray(one.value)
    return str(array.item()) if array.ndim == 0 and array.dtype.kind in "biufc" else f"a {array.dtype.name} literal"


def _typed(graph: Graph, values: Sequence[int]) -> str:
    infos = ((value, graph.values[value]) for value in values)
    return ", ".join(f"%{value}:{info.dtype}[{','.join(map(str, info.shape))}]" for value, info in infos) or "()"


def _dims(dims: DimFactors | Sequence[tuple[int, ...]]) -> str:
    return ", ".join("*".join(f"f{factor}" for factor in dim) or "." for dim in dims)


def _decision_text(f: Formulation, decision: Decision) -> str:
    if decision.kind == "group":
        return f"group {decision.group}"
    paths = {"input": f.graph.input_paths, "output": f.graph.output_paths}.get(decision.kind)
    return f"{decision.kind} {paths[decision.position] if paths else f'of %{decision.value}'}"


def _strategy_text(decision: Decision, choice: int) -> str:
    if decision.kind != "group":
        return str(decision.shardings[choice])
    axes = decision.strategies[choice].axes
    split = [f"f{factor} over {', '.join(over)}" for factor, over in enumerate(axes) if over]
    return "; ".join(split) or "replicated"
