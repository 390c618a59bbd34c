"""Plan a function of arrays for a mesh, and compile it there.

In: a function, the shapes of its arguments, planning options. Out: `Planned`: its plan, the sharding of each argument, and the
jitted function; `Compiled`, once it is compiled.
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
    """Plan a function without devices.

    Args:
        arguments: shapes of arrays, or pytrees of these. options: options of `autopar.plan`. carry: names of arguments
            that come back updated, whose buffers are reused.

    Raises:
        AutoparError: a subclass; the text says what to change.
    """
    return _planned(function, arguments, options, carry)[1]


def _planned(
    function: Callable[..., Any], arguments: tuple[Any, ...], options: Mapping[str, Any], carry: Sequence[str]
) -> tuple[Program, Plan]:
    program = program_of(function, arguments, carry=carry, donate=carry)
    with quietly():
        plan = plan_program(program, **options)
    assert isinstance(plan, Plan)
    return program.of(plan), plan


@dataclass(frozen=True, slots=True)
class Planned:
    """A planned function.

    Args:
        function: the user's function. arguments: shapes of arrays, or pytrees of these.
        shardings: the sharding of each array, on `mesh`.
        run: the planned function, jitted; it also takes arguments without a sharding.
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
        """Trace and plan a function, without compiling it.

        Args:
            options: options of `autopar.plan`. The function runs on `mesh` if that is a `jax.sharding.Mesh`, else on
                the visible devices.
            carry: names of arguments that come back updated, whose buffers are reused.

        Raises:
            AutoparError: a subclass; the text says what to change.
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
    """A compiled function. Calls never compile; a call with other shapes is refused.

    Args:
        run: the compiled function; its arguments are arrays with these `shardings`, or NumPy arrays.
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
