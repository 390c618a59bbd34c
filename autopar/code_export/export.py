"""A plan as the JAX that an expert would have written: a Python file that runs without autopar.

    Plan, step -> shardings by name -> the text of a file

In: a plan and the step that it was made for. Out: `export`'s text: the mesh, the shardings of arguments and results as
rules over their names, those of values inside the step by module and operation; and, the same in all files, what runs a
step with them (`export_runtime`). What such a file cannot say is refused.
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
from autopar.runtime.registered_collectives import Through, steps_of
from autopar.runtime.xla_options import compiler_options
from autopar.system.text_tables import short_source
from autopar.system.units import human_bytes, human_seconds, printable
from autopar.transforms.program import Program, program_of_call
from autopar.version import __version__

_COPIED_FROM = "# The rest of this file is the same whatever the plan.\n"
_WIDTH = 118

#: What is said of a place: the shardings and what leads to them, the line of the user's that it comes from, and whether an expert would say it.
_Said = tuple[tuple[TensorSharding | Through, ...], str, bool]


#: By name of a registered collective, the line that imports what runs it, and its name in the file.
_Functions = Mapping[str, tuple[str, str]]


@dataclass(frozen=True, slots=True)
class _Paths:
    """Of arguments' arrays and of results, as the exported file reads them."""

    inputs: Sequence[str]
    outputs: Sequence[str]


def export(plan: AnyPlan, step: Callable[..., Any], *args: Any) -> str:
    """A plan as a Python file that needs JAX alone: `shard(step, mesh, *args)` in it is the step, jitted by the plan.

    Args:
        step: the planned function of trees of arrays. args: as it was planned for, arrays or their shapes.

    Raises:
        ExportError: the plan says what such a file cannot, or the step changes objects in place.
        PlanMismatchError: the plan is of another program.
    """
    one = _of_one_program(plan)
    with opened(Step.of(step), args, {}) as call:
        _refuse_call(call)
        program = program_of_call(call, carry=None, donate=None)
        program = program.of(one)
        difference = one.program.difference(program.signature)
        if difference is not None:
            raise PlanMismatchError(
                f"the plan was made for another program: {difference}. Plan this one, and export that plan"
            )
        _refuse(one, program)
        places = places_of(call.function, call.trees, program.trace)
        paths = [path for n, tree in zip(call.names, call.trees, strict=True) for path in leaf_paths(tree, n)]
        results = leaf_paths(jax.tree.unflatten(program.trace.out_tree, program.trace.outputs), "out")
        given = {(len(program.graph.nodes), i): path for i, path in enumerate(results)}
        said = dict(_inside(one, program, places.made, {**places.read, **given}))
        inside = _patterns_inside(said, [*places.made.values(), *places.read.values(), *results])
        return _written(one, call.names, _Paths(paths, results), inside)


def _of_one_program(plan: AnyPlan) -> Plan:
    """Refuse stages.

    Raises:
        ExportError: so.
    """
    if isinstance(plan, PipelinePlan):
        raise ExportError(
            f"the plan of `{plan.program.name}` runs it in {len(plan.stages)} stages by a schedule, and an exported file"
            " holds one program: export a plan made with `stages=1`, or run this one by `autopar.parallelize`"
        )
    return plan


def _refuse(plan: Plan, program: Program) -> None:
    """Refuse what an exported file cannot say.

    Raises:
        ExportError: naming it, and what to do.
    """
    name = plan.program.name
    run = "or run the plan by `autopar.parallelize(step, plan=...)`"
    if plan.microbatches is not None:
        raise ExportError(
            f"the plan of `{name}` splits the batch over time into {plan.microbatches.count} parts, which an exported"
            f" file cannot: plan with `num_microbatches=1`, {run}"
        )
    if plan.recomputed:
        raise ExportError(
            f"the plan of `{name}` computes values again in the backward pass at {len(plan.recomputed)} places, which an"
            f" exported file cannot: plan with `rematerialize=False`, put `jax.checkpoint` into the model yourself, {run}"
        )
    if program.whole is not None:
        raise ExportError(
            f"the plan of `{name}` splits dims that the model cuts into equal parts, such as a product for queries, keys"
            " and values in one, as two dims, which no PartitionSpec can say: plan with `dims_as_written=True`"
            f" (`--dims-as-written`), give each part an array of its own, {run}"
        )
    if plan.regions:
        named = ", ".join(sorted({f"{region.primitive} in {region.path or 'the step'}" for region in plan.regions})[:3])
        raise ExportError(
            f"the plan of `{name}` runs {len(plan.regions)} operations in parts, device by device ({named}), which an"
            f" exported file cannot: pin what they read to be whole there, {run}"
        )


def _refuse_call(call: Call) -> None:
    """Refuse a step that is no function of pytrees.

    Raises:
        ExportError: so.
    """
    if call.objects.graph is not None or call.static or call.num_positional != len(call.all_names):
        raise ExportError(
            f"`{call.step.name}` changes objects in place, or has static or keyword arguments: an exported file takes a function of"
            " pytrees alone. Write the step so (`nnx.split` and `nnx.merge`, `functools.partial`) and plan that"
        )


# -- values inside ---------------------------------------------------------------------------


def _inside(
    plan: Plan, program: Program, made: Mapping[int, str], read: Mapping[tuple[int, int], str]
) -> Iterator[tuple[str, _Said]]:
    """Places, and what the plan says of them."""
    graph = program.graph
    end = len(graph.nodes)
    renewed = {graph.outputs[after]: plan.outputs[after].sharding for _, after in plan.carried}
    for constraint in plan.constraints:
        place, n = _place_of(constraint, made, read), constraint.node
        if place is None:  # a scalar
            continue
        if not constraint.by and (n == end or renewed.get(constraint.value) == constraint.shardings[-1]):
            continue  # a result, of which the jitted step says it
        node = graph.nodes[graph.producers[constraint.value] if n in (None, end) else n]
        traits = traits_of(node.primitive)  # an expert lays out results where the partitioner has a choice
        matters = n is not None or traits.library or traits.in_place == "scatter" or traits.moves == "indexed"
        if constraint.barrier:
            raise ExportError(
                f"the plan of `{plan.program.name}` sums the result of {node.primitive} ({node.path or 'the step'}, at"
                f" {short_source(node.source)}) over one axis and then over another, which an exported file cannot: plan"
                " for a mesh of one axis, or run the plan by `autopar.parallelize(step, plan=...)`"
            )
        yield place, (steps_of(constraint), short_source(node.source), matters)


def _place_of(constraint: Constraint, made: Mapping[int, str], read: Mapping[tuple[int, int], str]) -> str | None:
    if constraint.node is None or constraint.operand is None:
        return made.get(constraint.value)
    return read.get((constraint.node, constraint.operand))


def _patterns_inside(said: Mapping[str, _Said], places: Sequence[str]) -> dict[str, _Said]:
    """Layers that are alike in one pattern, in the order of the step."""
    unsaid = sorted({place for place in places if place not in said})
    return dict(as_patterns(said, unsaid))


# -- the text --------------------------------------------------------------------------------


def _written(plan: Plan, names: Sequence[str], paths: _Paths, inside: Mapping[str, _Said]) -> str:
    matter = {pattern: said for pattern, said in inside.items() if said[-1]}
    repeat = {pattern: said for pattern, said in inside.items() if not said[-1]}
    functions = _functions(step for steps, *_ in inside.values() for step in steps)
    tables = [
        *_arguments(plan, names, paths),
        _table(
            "CONSTRAINTS",
            "Mapping[str, Sequence[P | Sent]]" if functions else "Mapping[str, Sequence[P]]",
            "Values inside the step where the compiler would have to guess, as one would write\n"
            "`with_sharding_constraint` into the model: by phase, module, operation, and which of these in the module. A\n"
            "value is laid out where it is made, or for one `operand` of what reads it. `*` is a number, as of a layer.",
            [(pattern, _specs(specs, functions), source) for pattern, (specs, source, _) in matter.items()],
        ),
        _table(
            "REPEATED",
            "Mapping[str, Sequence[P]]",
            "What mostly follows from the above: said all the same, so that the compiler makes the planned program.",
            [(pattern, _specs(specs, functions), source) for pattern, (specs, source, _) in repeat.items()],
        ),
    ]
    imports, runtime = _runtime()
    imports = "\n".join([imports, *(line for line, _ in functions.values())])
    one = "\n\n".join(tables)
    return f"{_head(plan)}\n\n{imports}\n\n{_mesh(plan)}\n\n\n{one}\n\n\n{_SHARD}\n\n\n{_COPIED_FROM}\n{runtime}"


def _head(plan: Plan) -> str:
    told, name = plan.prediction, printable(plan.program.name.rpartition(".")[2])
    of = ", ".join(f"{axis}={size}" for axis, size in plan.mesh.size_of.items())
    given = printable(", ".join(dict.fromkeys(path.split("/", 1)[0] for path, _, _ in plan.program.inputs)))
    about = f"Written by autopar {__version__}, which is not needed to run it, from a plan of {human_seconds(told.step_time_s)} a"
    about += f" step and {human_bytes(told.peak_bytes)} at the peak of a device, as predicted. It holds shardings and nothing"
    about += " else: no values computed again but those of the model's own `jax.checkpoint`, no batch split over time."
    if plan.awaited:
        about += " Nor does it start the sums of gradients early, as the plan does: the step may take longer."
    if plan.separate:
        about += (
            " Nor does it give sums kernels of their own, as the plan does, where XLA would slow others down with them."
        )
    if any(constraint.by for constraint in plan.constraints):
        about += " It imports what runs the collectives of your own."
    words = printable(plan.words)
    return _docstring(f"""`{name}` on {plan.num_devices} devices ({printable(plan.hardware)}), mesh {of}.

{textwrap.fill(words[:1].upper() + words[1:] + ".", _WIDTH)}

    mesh = make_mesh()
    sharded_step = shard({name}, mesh, {given})  # arrays, or their shapes and dtypes
    {given} = sharded_step.place({given})
    results = sharded_step({given})

{textwrap.fill(about, _WIDTH)}
""")


def _docstring(text: str) -> str:
    """A text that nothing in it ends early."""
    return '"""' + text.replace("\\", "\\\\").replace('"""', r"\"\"\"") + '"""'


def _runtime() -> tuple[str, str]:
    """Imports, and what all files have in common."""
    head, found, rest = inspect.getsource(export_runtime).partition(_COPIED_FROM)
    assert found
    return head[head.index("from __future__") :].strip(), rest.lstrip()


def _mesh(plan: Plan) -> str:
    sizes, names = plan.mesh.axis_sizes, plan.mesh.axis_names
    return f'''P = PartitionSpec


def make_mesh(devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh of the plan, of {plan.num_devices} devices: the last axis varies fastest, so that it stays inside a host."""
    types = (jax.sharding.AxisType.Auto,) * {len(names)}
    return jax.make_mesh({_literal(sizes)}, {_literal(names)}, axis_types=types, devices=devices)'''


def _arguments(plan: Plan, names: Sequence[str], paths: _Paths) -> Iterator[str]:
    """The tables of arguments and results."""
    inputs = dict(inputs_as_patterns(plan.inputs, paths.inputs))
    carried = carried_roots([(paths.outputs[after], paths.inputs[before]) for before, after in plan.carried])
    told = export_runtime.Tables(names, {p: partition_spec(one) for p, one in inputs.items()}, carried, {}, {}, (), {})
    others = {
        path: tensor.sharding.resolved()
        for path, tensor in zip(paths.outputs, plan.outputs, strict=True)
        if told.of_output(path) != partition_spec(tensor.sharding)
    }
    outputs = as_patterns(others, [path for path in paths.outputs if path not in others])
    of_argument = {name: {i for i, path in enumerate(paths.inputs) if path.split("/", 1)[0] == name} for name in names}
    donated = [name for name, positions in of_argument.items() if positions and positions <= set(plan.donated)]
    yield f"ARGUMENTS = {_literal(names)}\n#: Arguments whose buffers are given to the results.\nDONATED = {_literal(donated)}"
    about = "Arrays of the arguments that are split; all others are whole on every device. `*` is a number, `**/` any folders:"
    about += "\nwhat the optimizer keeps of a parameter has its name at the end of its own."
    yield _table("SHARDINGS", "Mapping[str, P]", about, [(p, _spec(one), "") for p, one in inputs.items()])
    about = "Results that are the new value of an argument, and lie as that does."
    yield _table(
        "CARRIED", "Mapping[str, str]", about, [(after, _literal(before), "") for after, before in carried.items()]
    )
    about = "Results that lie otherwise than these, or are split."
    yield _table("OUTPUTS", "Mapping[str, P]", about, [(p, _spec(one), "") for p, one in outputs])
    about = "What XLA's compiler for GPUs is told besides."
    options = compiler_options(plan).items()
    yield _table("GPU_OPTIONS", "Mapping[str, int]", about, [(name, str(value), "") for name, value in options])


def _table(name: str, kind: str, about: str, rows: Sequence[tuple[str, str, str]]) -> str:
    """A dict, with the source lines of its rows as comments over them."""
    lines = [f"#: {line}" for line in about.splitlines()]
    if not rows:
        return "\n".join([*lines, f"{name}: {kind} = {{}}"])
    lines.append(f"{name}: {kind} = {{")
    for source, alike in groupby(rows, key=lambda row: row[2]):
        of_line = printable(source) or "no line of the model"
        lines += [f"    # {of_line}"] if any(source for *_, source in rows) else []
        lines += [f"    {_literal(pattern)}: {value}," for pattern, value, _ in alike]
    return "\n".join([*lines, "}"])


def _specs(steps: Sequence[TensorSharding | Through], functions: _Functions) -> str:
    return f"[{', '.join(_sent(one, functions) if isinstance(one, Through) else _spec(one) for one in steps)}]"


def _sent(one: Through, functions: _Functions) -> str:
    """`(collective_0, P("data"), P(), ("data",), {"dim": 0})`: as `Sent` of the exported file has it."""
    dims = ", ".join(f"{_literal(name)}: {dim}" for name, dim in one.dims.items())
    _, function = functions[one.name]
    return f"({function}, {_spec(one.before)}, {_spec(one.after)}, {_literal(one.moved.axes)}, {{{dims}}})"


def _functions(steps: Iterable[TensorSharding | Through]) -> _Functions:
    """What runs the registered collectives among some steps.

    Raises:
        ExportError: an exported file cannot import it.
    """
    names = {one.name: one.like for one in steps if isinstance(one, Through)}
    found = {}
    for n, (name, like) in enumerate(names.items()):
        run = runner_of(name, like)
        module, within = _importable(run), getattr(run, "__qualname__", "")
        if module is None:
            raise ExportError(
                f"the collective {name!r} is run by {run!r}, which an exported file cannot import: register a function that"
                " stands in a module by its own name, in a folder on the Python path"
            )
        first, *rest = within.split(".")
        found[name] = (f"from {module} import {first} as collective_{n}", ".".join((f"collective_{n}", *rest)))
    return found


def _importable(run: Callable[..., Any]) -> str | None:
    """The module that has a function by its own name, as another process imports it."""
    there: Any = sys.modules.get(getattr(run, "__module__", None) or "")
    found = there
    for part in getattr(run, "__qualname__", "").split("."):
        found = getattr(found, part, None)
    if found is not run or there.__name__ == "__main__":
        return None
    file = getattr(there, "__file__", None) or ""
    for name in (there.__name__, Path(file).stem):  # a command's TARGET has another name here
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
    """A value as code: whatever is in a name, it stays a text. In double quotes, where it has none."""
    if isinstance(value, str):
        text = repr(value)
        return text if '"' in text else f'"{text[1:-1]}"'
    if value is None or isinstance(value, int):
        return repr(value)
    items = [_literal(item) for item in value]
    return f"({', '.join(items)}{',' if len(items) == 1 else ''})"


_SHARD = '''def shard(step: Callable[..., Any], mesh: Mesh, *example_args: Any, exactly: bool = True) -> ShardedStep:
    """The step, jitted with these shardings.

    Args:
        example_args: the step's arguments, or their shapes and dtypes.
        exactly: whether to say what is `REPEATED`, too.
    """
    inside = {**CONSTRAINTS, **REPEATED} if exactly else CONSTRAINTS
    tables = Tables(ARGUMENTS, SHARDINGS, CARRIED, OUTPUTS, inside, DONATED, GPU_OPTIONS)
    return ShardedStep(step, mesh, example_args, tables)'''
