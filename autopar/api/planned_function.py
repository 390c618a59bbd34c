"""Plan a function of arrays for a mesh, and compile it there.

In: a function, the shapes of its arguments, planning options. Out: `Planned`, with the plan, the sharding of each
argument and the jitted function; `Compiled` after compilation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from autopar.api.make_plan import plan_program
from autopar.jax_interop.partition_spec import named_shardings
from autopar.planner.cache.plans import quietly
from autopar.plans.plan import Plan
from autopar.runtime import jit as execute
from autopar.transforms.program import Program, program_of


def plan_of(
    function: Callable[..., Any], arguments: tuple[Any, ...], options: Mapping[str, Any], carry: Sequence[str] = ()
) -> Plan:
    """Plan a function without compiling it; the devices need not exist.

    Args:
        arguments: shapes of arrays, or pytrees of them.
        options: the options of `autopar.plan`.
        carry: the names of arguments that are returned updated, whose buffers are reused.

    Raises:
        AutoparError: one of its subclasses; the text says what to change.
    """
    return _planned(function, arguments, options, carry)[1]


def _planned(
    function: Callable[..., Any], arguments: tuple[Any, ...], options: Mapping[str, Any], carry: Sequence[str]
) -> tuple[Program, Plan]:
    program = program_of(function, arguments, carry=carry, donate=carry)
    with quietly():
        plan = plan_program(program, **{"all_devices": True, **options})  # the caller's other arrays are on all
    assert isinstance(plan, Plan)
    return program.of(plan), plan


@dataclass(frozen=True, slots=True)
class Planned:
    """A planned function.

    Args:
        function: the function as written.
        arguments: shapes of arrays, or pytrees of them.
        shardings: the sharding of each array on `mesh`.
        run: the planned function, jitted. Its arguments have these shardings or are not placed yet.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    plan: Plan
    program: Program
    mesh: Mesh
    shardings: tuple[NamedSharding, ...]
    run: Any

    @classmethod
    def of(
        cls,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        options: Mapping[str, Any],
        carry: Sequence[str] = (),
    ) -> Planned:
        """Trace and plan a function; nothing is compiled.

        Args:
            options: the options of `autopar.plan`. If `mesh` is a `jax.sharding.Mesh`, the function runs there, else on
                the visible devices.
            carry: the names of arguments that are returned updated, whose buffers are reused.

        Raises:
            AutoparError: one of its subclasses; the text says what to change.
        """
        program, plan = _planned(function, arguments, options, carry)
        given = options.get("mesh")
        mesh = execute.auto_mesh(given) if isinstance(given, Mesh) else execute.make_mesh(plan.mesh)
        shardings = shardings_of(plan, mesh)
        return cls(function, arguments, plan, program, mesh, shardings, execute.jit_plan(plan, program.trace, mesh))

    def compiled(self) -> Compiled:
        """Compile the function for the shapes of its arguments."""
        return Compiled(self.plan, self.mesh, self.run.lower(*self.arguments).compile())


@dataclass(frozen=True, slots=True)
class Compiled:
    """A compiled function. A call never compiles; arguments of other shapes are refused.

    Args:
        run: the compiled function. Its arguments are arrays with these `shardings`, or NumPy arrays.
    """

    plan: Plan
    mesh: Mesh
    run: jax.stages.Compiled

    @property
    def shardings(self) -> tuple[NamedSharding, ...]:
        """The sharding of each array."""
        return shardings_of(self.plan, self.mesh)


def shardings_of(plan: Plan, mesh: Mesh) -> tuple[NamedSharding, ...]:
    """The sharding of each array that a planned function takes, on a mesh."""
    return tuple(named_shardings([tensor.sharding for tensor in plan.inputs], mesh))
