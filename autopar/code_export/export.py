"""Export a plan as a Python file that needs JAX only, with the sharding constraints that an expert would write.

    Plan, step -> shardings by name -> the text of a file

In: a plan, its step. Out: the text of the file. It has the mesh, the shardings of arguments and results as patterns of
their names, the shardings of intermediate values by module and operation, and the code that applies them (`runtime`),
which is the same in all files. A plan that needs more than shardings raises an error.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from itertools import groupby
from pathlib import Path
from typing import Any

import jax

from autopar.code_export import runtime as export_runtime
from autopar.code_export.name_patterns import as_patterns, carried_roots, inputs_as_patterns
from autopar.code_export.runtime import leaf_paths
from autopar.code_export.value_places import places_of
from autopar.cost.user_collectives import runner_of
from autopar.errors import ExportError, PlanMismatchError
from autopar.frontend.call import Call, opened
from autopar.frontend.step import Step
from autopar.ir.sharding import TensorSharding
from autopar.jax_interop.partition_spec import partition_spec
from autopar.pipeline.plan import AnyPlan, PipelinePlan
from autopar.plans.plan import Plan
from autopar.plans.records import Constraint
from autopar.rules.table import traits_of
from autopar.runtime.registered_collectives import RegisteredResharding, steps_of
from autopar.runtime.xla_options import compiler_options
from autopar.system.text_tables import short_source
from autopar.system.units import human_bytes, human_seconds, printable
from autopar.transforms.program import Program, program_of_call
from autopar.version import __version__

_COPIED_FROM = "# The rest of this file is the same for every plan.\n"
_WIDTH = 118

#: Constraints on a value: shardings and collectives in order, the source line, whether an expert would write them.
_Row = tuple[tuple[TensorSharding | RegisteredResharding, ...], str, bool]


#: Name of a registered collective -> the line that imports its function, and the function's name in the file.
_Functions = Mapping[str, tuple[str, str]]


@dataclass(frozen=True, slots=True)
class _Paths:
    """Paths of inputs and outputs in the exported file."""

    inputs: Sequence[str]
    outputs: Sequence[str]


def export(plan: AnyPlan, step: Callable[..., Any], *args: Any) -> str:
    """Export a plan as a Python file that needs JAX only; its `shard(step, mesh, *args)` returns the jitted step.

    Args:
        plan: the plan.
        step: the planned step, a function of pytrees of arrays.
        args: arguments of the step: arrays or their shapes.

    Raises:
        ExportError: the plan needs more than shardings, or the step modifies objects in place.
        PlanMismatchError: the plan was made for another program.
    """
    one = _of_one_program(plan)
    with opened(Step.of(step), args, {}) as call:
        _check_call(call)
        program = program_of_call(call, carry=None, donate=None)
        program = program.of(one)
        difference = one.program.difference(program.signature)
        if difference is not None:
            raise PlanMismatchError(
                f"the plan was made for another program: {difference}. Plan this program, and export that plan"
            )
        _check_plan(one, program)
        places = places_of(call.function, call.trees, program.trace)
        paths = [path for n, tree in zip(call.names, call.trees, strict=True) for path in leaf_paths(tree, n)]
        results = leaf_paths(jax.tree.unflatten(program.trace.out_tree, program.trace.outputs), "out")
        given = {(len(program.graph.nodes), i): path for i, path in enumerate(results)}
        rows = dict(_inside(one, program, places.made, {**places.read, **given}))
        inside = _patterns_inside(rows, [*places.made.values(), *places.read.values(), *results])
        return _file_text(one, call.names, _Paths(paths, results), inside)


def _of_one_program(plan: AnyPlan) -> Plan:
    """The plan; ExportError if it has pipeline stages."""
    if isinstance(plan, PipelinePlan):
        raise ExportError(
            f"the plan of `{plan.program.name}` has {len(plan.stages)} pipeline stages, but an exported file has a single"
            " program: export a plan made with `stages=1`, or run this one by `autopar.parallelize`"
        )
    return plan


def _check_plan(plan: Plan, program: Program) -> None:
    """Raise ExportError for a plan with microbatches, rematerialization, split dims or regions."""
    name = plan.program.name
    run = "or run the plan by `autopar.parallelize(step, plan=...)`"
    if plan.microbatches is not None:
        raise ExportError(
            f"the plan of `{name}` accumulates gradients over {plan.microbatches.count} microbatches, which an exported file"
            f" cannot express: plan with `num_microbatches=1`, {run}"
        )
    if plan.attention_kernel is not None:
        raise ExportError(
            f"the plan of `{name}` runs attention in a fused kernel, and an exported file runs the step as written: plan with"
            f' `attention="as_written"`, call `jax.nn.dot_product_attention(implementation="cudnn")` in the model, {run}'
        )
    if plan.rematerialized:
        raise ExportError(
            f"the plan of `{name}` rematerializes values in the backward pass at {len(plan.rematerialized)} places, which an"
            f" exported file cannot express: plan with `rematerialize=False`, put `jax.checkpoint` into the model, {run}"
        )
    if program.whole is not None:
        raise ExportError(
            f"the plan of `{name}` treats a dim that the model cuts into equal parts, such as a fused projection to queries,"
            " keys and values, as two dims, which no PartitionSpec can express: plan with `dims_as_written=True`"
            f" (`--dims-as-written`), use one array per part, {run}"
        )
    if plan.regions:
        named = ", ".join(sorted({f"{region.primitive} in {region.path or 'the step'}" for region in plan.regions})[:3])
        raise ExportError(
            f"the plan of `{name}` runs {len(plan.regions)} operations by `shard_map` ({named}), which an exported file"
            f" cannot express: pin their operands to be replicated, {run}"
        )


def _check_call(call: Call) -> None:
    """Raise ExportError for a step that is no function of positional pytrees."""
    if call.objects.graph is not None or call.static or call.num_positional != len(call.all_names):
        raise ExportError(
            f"`{call.step.name}` changes objects in place, or has static or keyword arguments, but an exported file needs a"
            " function of positional pytrees: rewrite the step (`nnx.split` and `nnx.merge`, `functools.partial`) and plan"
            " that"
        )


# -- intermediate values ---------------------------------------------------------------------


def _inside(
    plan: Plan, program: Program, made: Mapping[int, str], read: Mapping[tuple[int, int], str]
) -> Iterator[tuple[str, _Row]]:
    """Names of intermediate values with the plan's constraints on them."""
    graph = program.graph
    end = len(graph.nodes)
    renewed = {graph.outputs[after]: plan.outputs[after].sharding for _, after in plan.carried}
    for constraint in plan.constraints:
        place, n = _place_of(constraint, made, read), constraint.node
        if place is None:  # a scalar
            continue
        if not constraint.by and (n == end or renewed.get(constraint.value) == constraint.shardings[-1]):
            continue  # an output, which `out_shardings` covers
        node = graph.nodes[graph.producers[constraint.value] if n in (None, end) else n]
        traits = traits_of(node.primitive)  # an expert lays out results where the partitioner has a choice
        matters = n is not None or traits.library or traits.in_place == "scatter" or traits.moves == "indexed"
        if constraint.barrier:
            raise ExportError(
                f"the plan of `{plan.program.name}` reduces the result of {node.primitive} ({node.path or 'the step'}, at"
                f" {short_source(node.source)}) over one mesh axis and then over another, which an exported file cannot"
                " express: plan for a mesh with one axis, or run the plan by `autopar.parallelize(step, plan=...)`"
            )
        yield place, (steps_of(constraint), short_source(node.source), matters)


def _place_of(constraint: Constraint, made: Mapping[int, str], read: Mapping[tuple[int, int], str]) -> str | None:
    if constraint.node is None or constraint.operand is None:
        return made.get(constraint.value)
    return read.get((constraint.node, constraint.operand))


def _patterns_inside(rows: Mapping[str, _Row], places: Sequence[str]) -> dict[str, _Row]:
    """Patterns of the constrained values, one for equal layers, in the order of the step."""
    others = sorted({place for place in places if place not in rows})
    return dict(as_patterns(rows, others))


# -- the text --------------------------------------------------------------------------------


def _file_text(plan: Plan, names: Sequence[str], paths: _Paths, inside: Mapping[str, _Row]) -> str:
    constraints = {pattern: row for pattern, row in inside.items() if row[-1]}
    repeated = {pattern: row for pattern, row in inside.items() if not row[-1]}
    functions = _functions(step for steps, *_ in inside.values() for step in steps)
    tables = [
        *_arguments(plan, names, paths),
        _table(
            "CONSTRAINTS",
            "Mapping[str, Sequence[P | CollectiveCall]]" if functions else "Mapping[str, Sequence[P]]",
            "Shardings of intermediate values where the compiler has a choice, as for `with_sharding_constraint` in the\n"
            "model. A key has the phase, the module, the operation and its number in the module. It names the result, or one\n"
            "`operand` of the operation. `*` matches a number, such as that of a layer.",
            [(pattern, _specs(specs, functions), source) for pattern, (specs, source, _) in constraints.items()],
        ),
        _table(
            "REPEATED",
            "Mapping[str, Sequence[P]]",
            "Shardings that mostly follow from the above; with them, the compiled program is the planned one.",
            [(pattern, _specs(specs, functions), source) for pattern, (specs, source, _) in repeated.items()],
        ),
    ]
    imports, runtime = _runtime()
    imports = "\n".join([imports, *(line for line, _ in functions.values())])
    one = "\n\n".join(tables)
    return f"{_head(plan)}\n\n{imports}\n\n{_mesh(plan)}\n\n\n{one}\n\n\n{_SHARD}\n\n\n{_COPIED_FROM}\n{runtime}"


def _head(plan: Plan) -> str:
    prediction, name = plan.prediction, printable(plan.program.name.rpartition(".")[2])
    of = ", ".join(f"{axis}={size}" for axis, size in plan.mesh.size_of.items())
    given = printable(", ".join(dict.fromkeys(path.split("/", 1)[0] for path, _, _ in plan.program.inputs)))
    about = f"Written by autopar {__version__}, which is not needed to run it, from a plan of {human_seconds(prediction.step_time_s)} a"
    about += f" step and a peak of {human_bytes(prediction.peak_bytes)} per device, as predicted. It contains shardings only:"
    about += " rematerialization is that of the model's own `jax.checkpoint`, and there is no gradient accumulation."
    if plan.early_reductions:
        about += " It does not start gradient reductions early, as the plan does, so the step may take longer."
    if plan.unfused_reductions:
        about += (
            " It does not keep column reductions out of multi-output fusions, as the plan does, which may cost time."
        )
    if any(constraint.by for constraint in plan.constraints):
        about += " It imports the functions of your registered collectives."
    text = printable(plan.strategy)
    return _docstring(f"""`{name}` on {plan.num_devices} devices ({printable(plan.hardware)}), mesh {of}.

{textwrap.fill(text[:1].upper() + text[1:] + ".", _WIDTH)}

    mesh = make_mesh()
    sharded_step = shard({name}, mesh, {given})  # arrays, or their shapes and dtypes
    {given} = sharded_step.place({given})
    results = sharded_step({given})

{textwrap.fill(about, _WIDTH)}
""")


def _docstring(text: str) -> str:
    """A docstring literal with escaped quotes and backslashes."""
    return '"""' + text.replace("\\", "\\\\").replace('"""', r"\"\"\"") + '"""'


def _runtime() -> tuple[str, str]:
    """The imports and the code that all exported files share."""
    head, found, rest = inspect.getsource(export_runtime).partition(_COPIED_FROM)
    assert found
    return head[head.index("from __future__") :].strip(), rest.lstrip()


def _mesh(plan: Plan) -> str:
    sizes, names = plan.mesh.axis_sizes, plan.mesh.axis_names
    return f'''P = PartitionSpec


def make_mesh(devices: Sequence[Any] | None = None) -> Mesh:
    """The plan's mesh of {plan.num_devices} devices; the last axis varies fastest, so that it stays within a host."""
    types = (jax.sharding.AxisType.Auto,) * {len(names)}
    return jax.make_mesh({_literal(sizes)}, {_literal(names)}, axis_types=types, devices=devices)'''


def _arguments(plan: Plan, names: Sequence[str], paths: _Paths) -> Iterator[str]:
    """The tables of arguments and results."""
    inputs = dict(inputs_as_patterns(plan.inputs, paths.inputs))
    carried = carried_roots([(paths.outputs[after], paths.inputs[before]) for before, after in plan.carried])
    tables = export_runtime.Tables(
        names, {p: partition_spec(one) for p, one in inputs.items()}, carried, {}, {}, (), {}
    )
    others = {
        path: tensor.sharding.resolved()
        for path, tensor in zip(paths.outputs, plan.outputs, strict=True)
        if tables.of_output(path) != partition_spec(tensor.sharding)
    }
    outputs = as_patterns(others, [path for path in paths.outputs if path not in others])
    of_argument = {name: {i for i, path in enumerate(paths.inputs) if path.split("/", 1)[0] == name} for name in names}
    donated = [name for name, positions in of_argument.items() if positions and positions <= set(plan.donated)]
    yield f"ARGUMENTS = {_literal(names)}\n#: Donated arguments.\nDONATED = {_literal(donated)}"
    about = "Shardings of the arguments' arrays; all others are replicated. `*` matches a number, `**/` any folders: the path of"
    about += "\noptimizer state ends with its parameter's path."
    yield _table("SHARDINGS", "Mapping[str, P]", about, [(p, _spec(one), "") for p, one in inputs.items()])
    about = "Results that update an argument, with its sharding."
    yield _table(
        "CARRIED", "Mapping[str, str]", about, [(after, _literal(before), "") for after, before in carried.items()]
    )
    about = "Shardings of all other results that are not replicated."
    yield _table("OUTPUTS", "Mapping[str, P]", about, [(p, _spec(one), "") for p, one in outputs])
    about = "Options of XLA's GPU compiler."
    options = compiler_options(plan).items()
    yield _table("GPU_OPTIONS", "Mapping[str, int]", about, [(name, str(value), "") for name, value in options])


def _table(name: str, kind: str, about: str, rows: Sequence[tuple[str, str, str]]) -> str:
    """The code of a dict, with the source lines of its rows as comments."""
    lines = [f"#: {line}" for line in about.splitlines()]
    if not rows:
        return "\n".join([*lines, f"{name}: {kind} = {{}}"])
    lines.append(f"{name}: {kind} = {{")
    for source, of_source in groupby(rows, key=lambda row: row[2]):
        of_line = printable(source) or "no line of the model"
        lines += [f"    # {of_line}"] if any(source for *_, source in rows) else []
        lines += [f"    {_literal(pattern)}: {value}," for pattern, value, _ in of_source]
    return "\n".join([*lines, "}"])


def _specs(steps: Sequence[TensorSharding | RegisteredResharding], functions: _Functions) -> str:
    return f"[{', '.join(_collective_call(one, functions) if isinstance(one, RegisteredResharding) else _spec(one) for one in steps)}]"


def _collective_call(one: RegisteredResharding, functions: _Functions) -> str:
    """The code of a `CollectiveCall`: `(collective_0, P("data"), P(), ("data",), {"dim": 0})`."""
    dims = ", ".join(f"{_literal(name)}: {dim}" for name, dim in one.dims.items())
    _, function = functions[one.name]
    return f"({function}, {_spec(one.before)}, {_spec(one.after)}, {_literal(one.moved.axes)}, {{{dims}}})"


def _functions(steps: Iterable[TensorSharding | RegisteredResharding]) -> _Functions:
    """The functions of the registered collectives among some steps; ExportError if a file cannot import one."""
    names = {one.name: one.like for one in steps if isinstance(one, RegisteredResharding)}
    found = {}
    for n, (name, like) in enumerate(names.items()):
        run = runner_of(name, like)
        module, within = _importable(run), getattr(run, "__qualname__", "")
        if module is None:
            raise ExportError(
                f"the collective {name!r} runs {run!r}, which an exported file cannot import: register a function that a"
                " module on the Python path defines under its own name"
            )
        first, *rest = within.split(".")
        found[name] = (f"from {module} import {first} as collective_{n}", ".".join((f"collective_{n}", *rest)))
    return found


def _importable(run: Callable[..., Any]) -> str | None:
    """The name under which another process can import a function's module; None where it cannot."""
    there: Any = sys.modules.get(getattr(run, "__module__", None) or "")
    found = there
    for part in getattr(run, "__qualname__", "").split("."):
        found = getattr(found, part, None)
    if found is not run or there.__name__ == "__main__":
        return None
    file = getattr(there, "__file__", None) or ""
    for name in (there.__name__, Path(file).stem):  # the module of a command's TARGET has another name in this process
        spec = PathFinder.find_spec(name.partition(".")[0])
        if spec is not None and ("." in name or spec.origin == file):
            return name
    return None


def _spec(sharding: TensorSharding) -> str:
    """`P(None, "model")`."""
    dims = [None if not axes else axes[0] if len(axes) == 1 else axes for axes in sharding.dims]
    while dims and dims[-1] is None:
        dims.pop()
    return f"P({', '.join(map(_literal, dims))})"


def _literal(value: str | int | Sequence[Any] | None) -> str:
    """A value as code; strings are escaped, in double quotes unless they contain one."""
    if isinstance(value, str):
        text = repr(value)
        return text if '"' in text else f'"{text[1:-1]}"'
    if value is None or isinstance(value, int):
        return repr(value)
    items = [_literal(item) for item in value]
    return f"({', '.join(items)}{',' if len(items) == 1 else ''})"


_SHARD = '''def shard(step: Callable[..., Any], mesh: Mesh, *example_args: Any, exactly: bool = True) -> ShardedStep:
    """The step, jitted with the shardings of this file.

    Args:
        example_args: the step's arguments, or their shapes and dtypes.
        exactly: whether to apply the constraints of `REPEATED` too.
    """
    inside = {**CONSTRAINTS, **REPEATED} if exactly else CONSTRAINTS
    tables = Tables(ARGUMENTS, SHARDINGS, CARRIED, OUTPUTS, inside, DONATED, GPU_OPTIONS)
    return ShardedStep(step, mesh, example_args, tables)'''
