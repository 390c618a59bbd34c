"""Random whole programs: operations on each other's results, some with gradients and updates of state.

In: a source of random choices (`random.Random`, or hypothesis's, which shrinks). Out: `RandomProgram`, a function with
its arguments, and its source as text. The operations are in `random_operations`.

A float is *exact* if any correct program computes the same bits: an input, moved or compared, never summed.
Discontinuous operations (rounding, comparing, reading bits) get exact values only, so that the order of a sum cannot
change their results.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

Kind = Literal["float", "int", "bool", "complex", "key"]
Shape = tuple[int, ...]
#: What a program does with its outputs: return them, also differentiate their sum, or update state with that.
Mode = Literal["forward", "gradient", "update"]

MODES: tuple[Mode, ...] = ("forward", "forward", "gradient", "update")
MESHES = ("8", "8", "2x4", "2x4", "4x2", "4x2", "2x3", "2x2x2")  # to plan for the last takes longest
#: Dims: even and odd, smaller and larger than the axes of a mesh, and none that is long.
SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 48)
#: Elements of an input. Values of 64 or fewer are left out of a plan; results of any size may come up.
FEWEST, MOST = 65, 1536


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of the program.

    Args:
        exact: see the module's words.
        loose: it has been rounded to bfloat16 on its way, so that it is compared with that tolerance.
    """

    position: int
    shape: Shape
    dtype: Any
    exact: bool
    loose: bool

    @property
    def kind(self) -> Kind:
        return kind_of(self.dtype)

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def kind_of(dtype: Any) -> Kind:
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return "key"
    if jnp.issubdtype(dtype, jnp.floating):
        return "float"
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return "complex"
    return "bool" if dtype == jnp.bool_ else "int"


@dataclass(frozen=True, slots=True)
class Step:
    """One operation: what it is in words, its function, positions of what it reads, how many values it makes."""

    words: str
    function: Callable[..., Any]
    operands: tuple[int, ...]
    results: tuple[Value, ...]

    def __str__(self) -> str:
        made = ", ".join(f"v{v.position}: {v.dtype}{list(v.shape)}" for v in self.results)
        return f"{made} = {self.words}({', '.join(f'v{p}' for p in self.operands)})"


@dataclass(slots=True)
class Builder:
    """A program while it is drawn."""

    rng: random.Random
    inputs: list[Value] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    mesh: str = "8"
    closed: bool = False  # the body of a loop takes no new inputs

    def __post_init__(self) -> None:
        self.sizes = self.sizes or [*self.rng.sample(SIZES, 3), self.rng.choice(SIZES[7:])]

    # -- values ------------------------------------------------------------------------------

    def shape(self, min_rank: int = 1, max_rank: int = 4) -> Shape:
        """A shape of the program's sizes, large enough to be planned."""
        for _ in range(20):
            rank = self.rng.randint(min_rank, max_rank)
            shape = tuple(self.rng.choice(self.sizes) for _ in range(rank))
            if FEWEST <= math.prod(shape) <= MOST:
                return shape
        return (*(1,) * (min_rank - 1), 96) if max_rank < 2 else (*(1,) * (min_rank - 2), 8, 12)

    def fresh(self, shape: Shape, dtype: Any) -> Value:
        """A new input; in the body of a loop, a constant."""
        if self.closed:
            constant = jnp.asarray(array(shape, dtype, seed=7))
            return self.add("constant", lambda: constant, exact=True)[0]
        plain = dtype if kind_of(dtype) == "key" else jnp.dtype(dtype)
        value = Value(len(self.values), shape, plain, True, plain == jnp.bfloat16)
        self.inputs.append(value)
        self.values.append(value)
        return value

    def dtype(self, kind: Kind) -> Any:
        floats = (jnp.float32, jnp.float32, jnp.bfloat16)
        rest = {"int": jnp.int32, "bool": jnp.bool_, "complex": jnp.complex64}
        return self.rng.choice(floats) if kind == "float" else rest[kind]

    def pick(
        self, kind: Kind = "float", *, min_rank: int = 1, max_rank: int = 5, exact: bool = False, dtype: Any = None
    ) -> Value:
        """A value made before, most likely a late one; or a new input."""
        found = [
            v
            for v in self.values
            if v.kind == kind
            and min_rank <= len(v.shape) <= max_rank
            and (v.exact or not exact)
            and (dtype is None or v.dtype == dtype)
        ]
        if not found or self.rng.random() < 0.1:
            return self.fresh(self.shape(min_rank, max(min_rank, min(max_rank, 4))), dtype or self.dtype(kind))
        late = found[-4:]
        return self.rng.choice(late if self.rng.random() < 0.7 else found)

    def like(self, shape: Shape, dtype: Any, *, exact: bool = False) -> Value:
        """A value of just this shape and dtype, made before or new."""
        found = [v for v in self.values if v.shape == shape and v.dtype == dtype and (v.exact or not exact)]
        if found and self.rng.random() < 0.8:
            return self.rng.choice(found)
        return self.fresh(shape, dtype)

    def dim(self, value: Value) -> int:
        return self.rng.randrange(len(value.shape))

    # -- steps -------------------------------------------------------------------------------

    def add(
        self,
        words: str,
        function: Callable[..., Any],
        *operands: Value,
        exact: bool = False,
        smooth: bool = True,
        within: Sequence[Value] = (),
    ) -> list[Value]:
        """Add an operation; the leaves of what it gives.

        Args:
            exact: it gives exact values where it is given such.
            smooth: JAX can differentiate it; where not, it stands for a constant.
            within: values that it makes on its way.
        """

        def run(*given: Any) -> list[Any]:
            return jax.tree.leaves(function(*(given if smooth else map(_constant, given))))

        structs = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in operands]
        results: list[Value] = []
        for made in jax.eval_shape(run, *structs):
            kind = kind_of(made.dtype)
            loose = made.dtype == jnp.bfloat16 or any(v.loose for v in (*operands, *within))
            is_exact = kind not in ("float", "complex") or (exact and all(v.exact for v in operands))
            results.append(Value(len(self.values) + len(results), made.shape, made.dtype, is_exact, loose))
        self.values += results
        self.steps.append(Step(words, run, tuple(v.position for v in operands), tuple(results)))
        return results

    def body(self, operands: Sequence[Value], operations: Sequence[Callable[[Builder], Any]], count: int) -> Builder:
        """A program of its own over values of these shapes, which a loop or a branch runs."""
        inner = Builder(self.rng, sizes=self.sizes, mesh=self.mesh, closed=True)
        inner.values += [Value(i, v.shape, v.dtype, v.exact, v.loose) for i, v in enumerate(operands)]
        for _ in range(count):
            self.rng.choice(operations)(inner)
        return inner

    def run(self, *operands: Any) -> list[Any]:
        """What the steps make of the first values, all of it."""
        env = list(operands)
        for step in self.steps:
            env += step.function(*(env[p] for p in step.operands))
        return env[len(operands) :]

    def words(self) -> str:
        return "; ".join(map(str, self.steps))


def _constant(operand: Any) -> Any:
    return operand if kind_of(operand.dtype) == "key" else jax.lax.stop_gradient(operand)


def array(shape: Shape, dtype: Any, seed: int) -> Any:
    """Values of an input: floats below 1 in size, small whole numbers, of either sign."""
    rng = np.random.default_rng(seed)
    kind = kind_of(dtype)
    if kind == "key":
        return jax.random.key(seed)
    if kind == "bool":
        return rng.random(shape) < 0.5
    if kind == "int":
        return rng.integers(0 if dtype == jnp.uint32 else -9, 10, shape).astype(dtype)
    numbers = rng.uniform(-1, 1, shape) + (1j * rng.uniform(-1, 1, shape) if kind == "complex" else 0)
    return np.asarray(jnp.asarray(numbers, dtype))


@dataclass(frozen=True, slots=True)
class RandomProgram:
    """A function, its arguments, and how it is to be planned.

    Args:
        state: how many inputs, all floats and the first, an update renews.
        strategies: seed of the assignment that is forced.
    """

    inputs: tuple[Value, ...]
    steps: tuple[Step, ...]
    outputs: tuple[Value, ...]
    mode: Mode
    mesh: str
    strategies: int

    def arguments(self) -> tuple[Any, ...]:
        leaves = [array(v.shape, v.dtype, seed) for seed, v in enumerate(self.inputs)]
        if self.mode != "update":
            return tuple(leaves)
        trained = {f"v{v.position}": leaf for v, leaf in zip(self.inputs, leaves, strict=True) if v in self.trained}
        rest = {f"v{v.position}": leaf for v, leaf in zip(self.inputs, leaves, strict=True) if v not in self.trained}
        return {"at": trained, "speed": {name: leaf * 0 for name, leaf in trained.items()}}, rest

    @property
    def trained(self) -> list[Value]:
        """Float inputs, all but every third: those stay data."""
        return [v for n, v in enumerate(v for v in self.inputs if v.kind == "float") if n % 3 != 2]

    def tolerances(self) -> list[bool]:
        """Per output leaf, whether bfloat16 is on its way."""
        loose = [v.loose for v in self.outputs]
        any_loose = any(v.loose for v in (*self.inputs, *self.outputs))
        if self.mode == "gradient":
            return [*loose, any_loose, *(any_loose for _ in self.trained)]
        return [any_loose] * (2 * len(self.trained) + 1) if self.mode == "update" else loose

    def step(self, *args: Any, noise: Any = None) -> Any:
        """The program. With noise (a key), every inexact float that it makes is a little off, as by rounding."""
        if self.mode == "update":
            state, rest = args
            _, (loss, gradient) = self._differentiated({**state["at"], **rest}, noise)
            speed = {name: 0.9 * state["speed"][name] + gradient[name] for name in gradient}
            at = {name: state["at"][name] - 0.1 * speed[name] for name in gradient}
            return {"at": at, "speed": speed}, loss
        given = {f"v{v.position}": leaf for v, leaf in zip(self.inputs, args, strict=True)}
        if self.mode == "gradient":
            return self._differentiated(given, noise)
        return self._outputs(given, noise)

    def _outputs(self, given: dict[str, Any], noise: Any) -> list[Any]:
        env = {int(name[1:]): leaf for name, leaf in given.items()}
        for n, step in enumerate(self.steps):
            results = step.function(*(env[p] for p in step.operands))
            for value, result in zip(step.results, results, strict=True):
                env[value.position] = result if noise is None else _shaken(value, result, noise, n)
        return [env[v.position] for v in self.outputs]

    def _differentiated(self, given: dict[str, Any], noise: Any) -> tuple[list[Any], tuple[Any, dict[str, Any]]]:
        names = {f"v{v.position}" for v in self.trained}

        def loss(trained: dict[str, Any]) -> tuple[Any, list[Any]]:
            made = self._outputs({**given, **trained}, noise)
            return sum((_scalar(leaf) for leaf in made), jnp.float32(0)), made

        gradient = jax.value_and_grad(loss, has_aux=True)
        (total, made), slopes = gradient({name: leaf for name, leaf in given.items() if name in names})
        return made, (total, slopes)

    def __repr__(self) -> str:
        lines = [f"{self.mode} on mesh {self.mesh}, strategies {self.strategies}"]
        lines += [f"  v{v.position}: {v.dtype}{list(v.shape)} given" for v in self.inputs]
        lines += [f"  {step}" for step in self.steps]
        return "\n".join([*lines, f"  gives {', '.join(f'v{v.position}' for v in self.outputs)}"])


def _scalar(leaf: Any) -> Any:
    kind = kind_of(leaf.dtype)
    if kind not in ("float", "complex"):
        return jnp.float32(0)
    parts = [leaf] if kind == "float" else [leaf.real, leaf.imag]
    return sum(jnp.sum(jnp.sin(part.astype(jnp.float32))) / math.sqrt(max(1, leaf.size)) for part in parts)


def _shaken(value: Value, result: Any, noise: Any, n: int) -> Any:
    if value.exact or value.kind != "float":
        return result
    key = jax.random.fold_in(jax.random.fold_in(noise, n), value.position)
    size = 4e-3 if value.loose else 1e-6
    return (result * (1 + size * jax.random.normal(key, result.shape))).astype(result.dtype)


def random_program(
    rng: random.Random, operations: Sequence[Callable[[Builder], Any]], *, least: int = 1, most: int = 5
) -> RandomProgram:
    """Draw a program of a few operations."""
    b = Builder(rng, mesh=rng.choice(MESHES))
    for _ in range(rng.randint(least, most)):
        rng.choice(operations)(b)
    read = {p for step in b.steps for p in step.operands}
    made = [v for v in b.values if v not in b.inputs]
    unread = [v for v in made if v.position not in read] or b.values[-1:]
    also = [v for v in made if v.position in read and rng.random() < 0.2]  # a value both returned and read
    modes = MODES if any(v.kind == "float" for v in b.inputs) else MODES[:1]
    return RandomProgram(
        inputs=tuple(b.inputs),
        steps=tuple(b.steps),
        outputs=tuple(unread + also),
        mode=rng.choice(modes),
        mesh=b.mesh,
        strategies=rng.randrange(1 << 16),
    )
