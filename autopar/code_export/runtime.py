"""Run a step with the shardings of an exported file; `export` copies this code into every file that it writes.

In: a step, a mesh, example arguments, `Tables`. Out: `ShardedStep`. The code needs JAX only and must not import
autopar. Its lines are at most 120 characters, as those of the exported file.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import Literal
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# The rest of this file is the same for every plan.

Specs = Mapping[str, PartitionSpec]
#: A registered collective: its function on one device's shard, specs before and after, mesh axes, dims by name.
CollectiveCall = tuple[Callable[..., Any], PartitionSpec, PartitionSpec, tuple[str, ...], Mapping[str, int]]
#: Loops and branches -> their parameters that are jaxprs.
PROGRAMS = {"scan": ("jaxpr",), "while": ("cond_jaxpr", "body_jaxpr"), "cond": ("branches",)}
#: (name of a place, value) -> the value with its sharding constraint.
At = Callable[[str, Any], Any]


@dataclass(frozen=True)
class Tables:
    """Shardings by name.

    Args:
        arguments: names of the step's arguments.
        inputs: pattern of input paths -> spec; other inputs are replicated.
        carried: results that update an argument, and have its shardings.
        outputs: pattern of other result paths -> spec; the rest is replicated.
        inside: pattern of places -> specs to apply in order, or collectives that lead to the next one.
        donated: names of donated arguments.
        gpu_options: options of XLA's GPU compiler.
    """

    arguments: Sequence[str]
    inputs: Specs
    carried: Mapping[str, str]
    outputs: Specs
    inside: Mapping[str, Sequence[PartitionSpec | CollectiveCall]]
    donated: Sequence[str]
    gpu_options: Mapping[str, int]

    def of_input(self, path: str) -> PartitionSpec:
        return next((spec for pattern, spec in self.inputs.items() if matches(pattern, path)), PartitionSpec())

    def of_output(self, path: str) -> PartitionSpec:
        for pattern, spec in self.outputs.items():
            if matches(pattern, path):
                return spec
        for result, argument in self.carried.items():
            if path == result or path.startswith(f"{result}/"):
                return self.of_input(argument + path[len(result) :])
        return PartitionSpec()


class ShardedStep:
    """A step on a mesh, with the signature of the step.

    `place` puts arguments onto the mesh; `lower` is that of `jax.jit`.
    """

    def __init__(self, step: Callable[..., Any], mesh: Mesh, args: Sequence[Any], tables: Tables) -> None:
        if len(args) != len(tables.arguments):
            raise TypeError(f"the step takes {', '.join(tables.arguments)}; {len(args)} example arguments were given")
        leaves, self._tree = jax.tree.flatten(tuple(args))
        self._is_array = tuple(map(is_array, leaves))
        named = zip(tables.arguments, args, strict=True)
        paths = [path for name, arg in named for path in leaf_paths(arg, name)]
        paths = [path for path, is_one in zip(paths, self._is_array, strict=True) if is_one]
        self.program, self._outputs = traced(step, self._tree, leaves)
        constrainer = Constrainer(mesh, tables.inside)

        def run(*arrays: Any) -> list[Any]:
            results = interpret(self.program, arrays, constrainer.at)
            results = [constrainer.at(path, one) for path, one in zip(self._outputs.paths, results, strict=True)]
            constrainer.check_all_used()
            return results

        def sharding(spec: PartitionSpec) -> NamedSharding:
            return NamedSharding(mesh, spec)

        self._shardings = tuple(sharding(tables.of_input(path)) for path in paths)
        for pattern in tables.inputs:
            if not any(matches(pattern, path) for path in paths):
                raise ValueError(f"no argument has an array {pattern!r}: this file is for another step")
        on_gpus = isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == "gpu"
        self.jitted = jax.jit(
            run,
            compiler_options=dict(tables.gpu_options) if on_gpus else None,
            in_shardings=self._shardings,
            out_shardings=[sharding(tables.of_output(path)) for path in self._outputs.paths],
            donate_argnums=tuple(n for n, path in enumerate(paths) if path.split("/", 1)[0] in tables.donated),
        )

    def __call__(self, *args: Any) -> Any:
        return self._outputs.unflatten(self.jitted(*self._arrays(args)))

    def lower(self, *args: Any) -> jax.stages.Lowered:
        return self.jitted.lower(*self._arrays(args))

    def place(self, *args: Any) -> tuple[Any, ...]:
        """Put the arguments' arrays onto the mesh with the step's input shardings."""
        placed = iter(jax.device_put(self._arrays(args), list(self._shardings)))
        leaves = zip(self._is_array, jax.tree.leaves(tuple(args)), strict=True)
        return jax.tree.unflatten(self._tree, [next(placed) if is_one else leaf for is_one, leaf in leaves])

    def _arrays(self, args: Sequence[Any]) -> list[Any]:
        leaves, tree = jax.tree.flatten(tuple(args))
        if tree != self._tree:
            raise TypeError(f"the arguments are {tree}; the step was sharded for {self._tree}")
        return [leaf for leaf, is_one in zip(leaves, self._is_array, strict=True) if is_one]


# The step as a jaxpr. Leaves of its arguments that are no arrays (functions, strings) are constants.


class Outputs:
    """The structure of a step's result, known once the step has been traced."""

    paths: Sequence[str] = ()

    def flatten(self, result: Any) -> list[Any]:
        """The arrays of a result; this object keeps the rest."""
        leaves, self._tree = jax.tree.flatten(result)
        self.paths = [p for p, leaf in zip(leaf_paths(result, "out"), leaves, strict=True) if is_array(leaf)]
        self._rest = [None if is_array(leaf) else leaf for leaf in leaves]
        return [leaf for leaf in leaves if is_array(leaf)]

    def unflatten(self, arrays: Sequence[Any]) -> Any:
        given = iter(arrays)
        return jax.tree.unflatten(self._tree, [next(given) if leaf is None else leaf for leaf in self._rest])


def traced(step: Callable[..., Any], tree: Any, leaves: Sequence[Any]) -> tuple[Any, Outputs]:
    """A step as a jaxpr, and the structure of its result."""
    outputs = Outputs()

    def of_arrays(*arrays: Any) -> list[Any]:
        given = iter(arrays)
        args = jax.tree.unflatten(tree, [next(given) if is_array(leaf) else leaf for leaf in leaves])
        return outputs.flatten(step(*args))

    return jax.make_jaxpr(of_arrays)(*(shape_of(leaf) for leaf in leaves if is_array(leaf))), outputs


def is_array(leaf: Any) -> bool:
    """Whether a leaf is an array, or a number, which is traced as an array."""
    return isinstance(leaf, bool | int | float | complex) or (hasattr(leaf, "shape") and hasattr(leaf, "dtype"))


def shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype without a sharding; Python numbers stay weakly typed."""
    if not hasattr(leaf, "dtype"):
        return jax.ShapeDtypeStruct((), jax.numpy.result_type(leaf), weak_type=True)
    dtype = jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)  # of NumPy, silently as `jax.jit` does
    return jax.ShapeDtypeStruct(leaf.shape, dtype, weak_type=getattr(leaf, "weak_type", False))


def leaf_paths(tree: Any, root: str) -> list[str]:
    """The path of each leaf: `root/params/Dense_0/kernel`."""
    keys = [path for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    return ["/".join((root, *filter(None, map(key_text, path)))) for path in keys]


def key_text(key: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key).strip(".[]'\"")


def matches(pattern: str, text: str) -> bool:
    """Whether a pattern matches a text: `*` matches a number, `{0,3}` either number, `**/` any folders before."""
    expression = re.escape(pattern).replace(r"\*\*/", "(?:.*/)?").replace(r"\*", r"\d+")
    expression = re.sub(r"\\\{([\d,]+)\\\}", lambda numbers: f"(?:{numbers[1].replace(',', '|')})", expression)
    return re.fullmatch(expression, text) is not None


# Intermediate values and their sharding constraints.


class Constrainer:
    """Applies the sharding constraints of a table."""

    def __init__(self, mesh: Mesh, inside: Mapping[str, Sequence[PartitionSpec | CollectiveCall]]) -> None:
        self._mesh, self._unused = mesh, set(inside)
        self._by_form: dict[str, list[tuple[str, Sequence[PartitionSpec | CollectiveCall]]]] = defaultdict(list)
        for pattern, specs in inside.items():  # an index by form, so that few patterns are compared with a place
            self._by_form[without_numbers(pattern)].append((pattern, specs))

    def at(self, place: str, value: Any) -> Any:
        for pattern, specs in self._by_form.get(without_numbers(place), ()):
            if matches(pattern, place):
                self._unused.discard(pattern)
                for spec in specs:
                    if isinstance(spec, PartitionSpec):
                        value = jax.lax.with_sharding_constraint(value, NamedSharding(self._mesh, spec))
                    else:
                        value = resharded(spec, value, self._mesh)
        return value

    def check_all_used(self) -> None:
        if self._unused:
            raise ValueError(f"the step has no {min(self._unused)!r}: this file is for another step")


def resharded(call: CollectiveCall, value: Any, mesh: Mesh) -> Any:
    """Reshard a value by a registered collective."""
    run, before, after, axes, dims = call

    def part(own: Any) -> Any:
        return run(own, axes, **dims)

    moved = jax.custom_jvp(jax.shard_map(part, mesh=mesh, in_specs=(before,), out_specs=after, check_vma=False))
    moved.defjvp(lambda values, tangents: (moved(*values), *tangents))
    return moved(value)


def without_numbers(text: str) -> str:
    return re.sub(r"\d+|\{[\d,]+\}|\*", "0", text)


def interpret(program: Any, args: Sequence[Any], at: At) -> list[Any]:
    """Run a jaxpr, and apply `at` to each result and operand."""
    return Interpreter(at).run(program, args, "")


class Interpreter:
    """Runs a jaxpr operation by operation, and names operations by phase, module, primitive and a count."""

    def __init__(self, at: At) -> None:
        self.at = at
        self.count: Counter[str] = Counter()

    def run(self, program: Any, args: Sequence[Any], outer: str) -> list[Any]:
        """The results of a jaxpr under a name stack."""
        jaxpr, constants = getattr(program, "jaxpr", program), getattr(program, "consts", ())
        values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *args), strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else values[atom]

        for equation in jaxpr.eqns:
            stack = "/".join(filter(None, (outer, str(equation.source_info.name_stack))))
            results = self.results(equation, [read(atom) for atom in equation.invars], stack)
            values.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def results(self, equation: Any, operands: list[Any], stack: str) -> Sequence[Any]:
        name, params = equation.primitive.name, equation.params
        called = [params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in params]
        if called and name in ("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"):
            return self.run(called[0], operands, stack)
        place = self.place(name, stack)
        if name in ("checkpoint", "remat2"):  # JAX rematerializes its body behind an optimization barrier
            guarded = jax.lax.optimization_barrier(operands) if params["differentiated"] else operands
            return self.run(params["jaxpr"], guarded, stack)
        for n, atom in enumerate(equation.invars):
            if not isinstance(atom, Literal):
                operands[n] = self.at(f"{place}, operand {n}", operands[n])
        changed = {}
        for key in PROGRAMS.get(name, ()):
            whole, several = params[key], isinstance(params[key], tuple)
            inner = [
                self.inside(one, stack, f"{place}, {key} {n}") for n, one in enumerate(whole if several else [whole])
            ]
            changed[key] = tuple(inner) if several else inner[0]
        with jax.named_scope(stack) if stack else contextlib.nullcontext(), equation.ctx.manager:
            results = bind(equation, operands, changed)
        if len(results) == 1:
            return [self.at(place, results[0])]
        return [self.at(f"{place}, result {n}", one) for n, one in enumerate(results)]

    def place(self, name: str, stack: str) -> str:
        """`forward GPT/h_0/mlp/c_fc dot_general #1`."""
        phase = "backward" if "transpose(" in stack else "forward" if "jvp(" in stack else "update"
        of_kind = " ".join(filter(None, (phase, module_path(stack), name)))
        self.count[of_kind] += 1
        return f"{of_kind} #{self.count[of_kind]}"

    def inside(self, program: Any, stack: str, place: str) -> Any:
        """The body of a loop or a branch, with constraints on its values."""

        def run(*args: Any) -> list[Any]:
            taken = [self.at(f"{place} takes {n}", arg) for n, arg in enumerate(args)]
            return [self.at(f"{place} gives {n}", one) for n, one in enumerate(self.run(program, taken, stack))]

        return jax.make_jaxpr(run)(*map(shape_of, program.in_avals))


def module_path(stack: str) -> str:
    """The module path of a name stack: `GPT/h_0/attn` of `transpose(jvp(GPT))/h_0/attn`."""
    parts = []
    for part in stack.split("/"):
        while inner := re.fullmatch(r"(?:jvp|transpose|vmap|checkpoint|remat)\((.*)\)", part):
            part = inner[1]
        parts.append(part)
    return "/".join(filter(None, parts))


def bind(equation: Any, operands: Sequence[Any], changed: Mapping[str, Any]) -> Sequence[Any]:
    """Run one operation; returns a sequence of results."""
    params = equation.primitive.get_bind_params({**equation.params, **changed})
    if isinstance(params, tuple):  # some operations up to JAX 0.9
        functions, params = params
        operands = [*functions, *operands]
    results = equation.primitive.bind(*operands, **params)
    return results if equation.primitive.multiple_results else [results]
