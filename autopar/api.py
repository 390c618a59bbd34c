"""`parallelize`: one decorator over planner and execute.

In: a user's step. Out: a callable that plans at its first call and from then on dispatches like `jit`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, overload

import jax
from jax.sharding import Mesh

from autopar import execute, plan_cache, planner
from autopar.compiled_cache import compiled_kept_in
from autopar.errors import PlanMismatchError, StepSignatureError
from autopar.jax_compat import shape_and_dtype, shape_struct
from autopar.plan import Plan, load_plan
from autopar.planner import Program, program_of
from autopar.trace import check_leaves


@overload
def parallelize(
    step: Callable[..., Any], /, *, plan: Plan | str | Path | None = None, **options: Any
) -> ParallelStep: ...
@overload
def parallelize(
    *, plan: Plan | str | Path | None = None, **options: Any
) -> Callable[[Callable[..., Any]], ParallelStep]: ...
def parallelize(
    step: Callable[..., Any] | None = None, /, *, plan: Plan | str | Path | None = None, **options: Any
) -> Any:
    """Run a step sharded over devices, by a plan that autopar finds.

    Use it bare, `@autopar.parallelize`, for every visible device; or with options,
    `@autopar.parallelize(mesh="2x4", memory_budget_bytes=40e9)`.

    Args:
        step: a function of pytrees of arrays that runs under `jax.jit`, e.g. a Flax train step
            `(state, batch) -> (state, loss)`. It is not changed.
        plan: a saved plan (a path, or a `Plan`) to run instead of planning; refused for another program.
        options: those of `autopar.plan`: mesh, num_devices, hardware, memory_budget_bytes, pin, carry,
            donate, solver, time_limit_s, progress, cache. Here `cache` is on unless it is said otherwise: the plan and
            the compiled program are kept on disk, and a second start finds both.

    Raises:
        TypeError: an option that `autopar.plan` does not have.
    """
    known = inspect.signature(planner.plan).parameters
    for name in options:
        if name not in known or known[name].kind is not inspect.Parameter.KEYWORD_ONLY:
            takes = ", ".join(n for n, p in known.items() if p.kind is inspect.Parameter.KEYWORD_ONLY)
            raise TypeError(f"`parallelize` got an unknown option {name!r}; it takes plan, {takes}")
    if step is None:
        return lambda decorated: ParallelStep(decorated, plan, options)
    return ParallelStep(step, plan, options)


class ParallelStep:
    """A step that runs by a plan. Made by `parallelize`."""

    def __init__(self, step: Callable[..., Any], fixed: Plan | str | Path | None, options: Mapping[str, Any]) -> None:
        functools.update_wrapper(self, step)
        self._step = step
        self._name = getattr(step, "__qualname__", None) or type(step).__name__
        self._options = dict(options)
        self._fixed = load_plan(fixed) if isinstance(fixed, str | Path) else fixed
        self._known: dict[Any, tuple[Plan, Program, Any]] = {}  # signature -> plan, program, jitted replay
        self._fast: Any = None  # the jitted replay of the last call
        self._fast_signature: Any = None

    @property
    def options(self) -> dict[str, Any]:
        """What it was decorated with, the plan aside."""
        return dict(self._options)

    @property
    def is_fixed(self) -> bool:
        """Whether it runs by a given plan, and makes none."""
        return self._fixed is not None

    @property
    def plans(self) -> tuple[Plan, ...]:
        """Those it has run by or laid a state out by, one for each shape of its arguments; the last one used comes last."""
        return tuple(plan for plan, *_ in self._known.values())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step. The first call with new shapes traces, plans and compiles."""
        if kwargs:
            args = self._positional(args, kwargs)
        if self._fast is not None:
            try:
                return self._fast(*args)
            except Exception:
                if _signature(self._step, args) == self._fast_signature:
                    raise
        plan, _, self._fast = self._prepare(args)
        self._fast_signature = _signature(self._step, args)
        with self._compiled_kept(plan):
            return self._fast(*args)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for these arguments (arrays or `jax.ShapeDtypeStruct`s); nothing is compiled."""
        return self.planned(*args, **kwargs)[0]

    def planned(self, *args: Any, **kwargs: Any) -> tuple[Plan, Program]:
        """The plan, and the traced program it was made for or has been compared with."""
        return self._plan(self._positional(args, kwargs))

    def init(self, create_state: Callable[..., Any], *create_args: Any, **step_args: Any) -> Any:
        """Build the carried state already sharded: it never exists whole on one device.

        Args:
            create_state: returns the state; must run under `jax.jit`.
            create_args: its arguments.
            step_args: the step's other arguments by name (arrays or `jax.ShapeDtypeStruct`s).

        Raises:
            StepSignatureError: where it is not clear which argument of the step the state is.
        """
        structure, _, shardings = self._planned_state("init", create_state, create_args, step_args)

        def leaves_of(*inner: Any) -> list[Any]:
            # Flat, so that a state that holds freshly made functions (an optax transformation built
            # inside `create_state`) keeps the structure that was planned.
            return jax.tree.leaves(create_state(*inner))

        with self._compiled_kept(self.plans[-1]):
            return jax.tree.unflatten(structure, jax.jit(leaves_of, out_shardings=shardings)(*create_args))

    def abstract_state(self, create_state: Any, *create_args: Any, **step_args: Any) -> Any:
        """The carried state as `jax.ShapeDtypeStruct`s with the shardings of the plan; nothing is run.

        That is what orbax restores into, as `ocp.args.StandardRestore(abstract_state)`.

        Args:
            create_state: as for `init`, or the state itself, as arrays or `jax.ShapeDtypeStruct`s.
            create_args, step_args: as for `init`.

        Raises:
            StepSignatureError: where it is not clear which argument of the step the state is.
        """
        structure, shapes, shardings = self._planned_state("abstract_state", create_state, create_args, step_args)
        laid = [
            jax.ShapeDtypeStruct(one.shape, one.dtype, weak_type=one.weak_type, sharding=sharding)
            for one, sharding in zip(shapes, shardings, strict=True)
        ]
        return jax.tree.unflatten(structure, laid)

    def lower(self, *args: Any, mesh: Mesh | None = None, **kwargs: Any) -> jax.stages.Lowered:
        """The planned step as `jax.stages.Lowered`.

        Args:
            mesh: devices to lower for, real or absent (`jax.experimental.topologies`); by default
                the visible ones.
        """
        args = self._positional(args, kwargs)
        plan, program = self._plan(args)
        mesh = self._mesh(plan) if mesh is None else mesh
        return execute.lower(execute.jit_plan(plan, program.trace, mesh), args, mesh)

    # -- inside ------------------------------------------------------------------------------

    def _planned_state(
        self, caller: str, create_state: Any, create_args: Sequence[Any], step_args: Mapping[str, Any]
    ) -> tuple[Any, list[jax.ShapeDtypeStruct], list[Any]]:
        """Structure, shapes and planned shardings of the arguments that are not among `step_args`: of one its tree, of
        several the tuple of theirs."""
        parameters = inspect.signature(self._step).parameters
        names = list(parameters)
        missing = [n for n in names if n not in step_args and parameters[n].default is inspect.Parameter.empty]
        is_function = callable(create_state) and jax.tree_util.all_leaves([create_state])
        state = jax.eval_shape(create_state, *create_args) if is_function else jax.tree.map(shape_struct, create_state)
        parts = state if len(missing) > 1 else (state,)
        if set(step_args) - set(names) or not missing or type(parts) is not tuple or len(parts) != len(missing):
            several = f". If {', '.join(missing)} are all state, it must return a tuple of them" if missing[1:] else ""
            raise StepSignatureError(
                f"`{caller}` needs every argument of `{self._name}` but the state, by name. It takes {', '.join(names)};"
                f" given: {', '.join(step_args) or 'none'}. Call `.{caller}(create_state, rng,"
                f" {', '.join(f'{n}=…' for n in names[1:])})`{several}"
            )
        args = self._positional((), {**dict(zip(missing, parts, strict=True)), **step_args})
        plan = self._prepare(args)[0]
        trees = dict(
            zip([n for n in names if n in missing or n in step_args], plan.in_shardings(self._mesh(plan)), strict=True)
        )
        shapes, structure = jax.tree.flatten(state)
        return structure, shapes, [sharding for name in missing for sharding in jax.tree.leaves(trees[name])]

    def _prepare(self, args: Sequence[Any]) -> tuple[Plan, Program, Any]:
        signature = _signature(self._step, args)
        if signature not in self._known:
            plan, program = self._plan(args)
            self._known[signature] = (plan, program, execute.jit_plan(plan, program.trace, self._mesh(plan)))
        self._known[signature] = self._known.pop(signature)  # the last one used comes last
        return self._known[signature]

    def _plan(self, args: Sequence[Any]) -> tuple[Plan, Program]:
        known = self._known.get(_signature(self._step, args))
        if known is not None:
            return known[0], known[1]
        carry, donate = self._options.get("carry"), self._options.get("donate")
        program = program_of(self._step, args, carry=carry, donate=donate)
        if self._fixed is None:
            plan = planner.plan_program(program, **self._planning_options())
            return plan, program.of(plan)
        program = program.of(self._fixed)
        difference = self._fixed.program.difference(program.signature)
        if difference is not None:
            raise PlanMismatchError(
                f"the given plan was made for another program than `{self._name}` with these arguments: {difference}."
                " Plan again, or call with what it was made for."
            )
        trees = {"in_tree": program.trace.in_tree, "out_tree": program.trace.out_tree}  # not in the file
        return dataclasses.replace(self._fixed, **trees), program

    def _planning_options(self) -> dict[str, Any]:
        given = {name: value for name, value in self._options.items() if name not in ("carry", "donate")}
        return {"cache": True} | given

    def _compiled_kept(self, plan: Plan) -> AbstractContextManager[None]:
        folder = plan_cache.folder_of(self._options.get("cache", True))
        return compiled_kept_in(folder and folder / "compiled" / plan.program.fingerprint)

    def _mesh(self, plan: Plan) -> Mesh:
        given = self._options.get("mesh")
        return given if isinstance(given, Mesh) else execute.make_mesh(plan.mesh)

    def _argument_names(self) -> list[str]:
        return list(inspect.signature(self._step).parameters)

    def _positional(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        if not kwargs:
            return tuple(args)
        try:
            bound = inspect.signature(self._step).bind(*args, **kwargs)
        except TypeError as error:
            takes = ", ".join(self._argument_names())
            raise StepSignatureError(f"`{self._name}` takes {takes}: {error}") from None
        return tuple(bound.arguments.values())


def _signature(step: Callable[..., Any], args: Sequence[Any]) -> Any:
    """What a plan depends on: structure, shapes and dtypes; refuses leaves that have none."""
    check_leaves(step, args)
    leaves, structure = jax.tree.flatten(tuple(args))
    return structure, tuple(map(shape_and_dtype, leaves))
