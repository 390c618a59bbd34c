"""Find what the replicas of a stage combine after their microbatches.

In: the layout of a stage that several submeshes run, each for some of the microbatches.
Out: its accumulators: the carries that each replica accumulates over its own microbatches, such as gradients and sums of
losses. They begin with the identity of their operation, so the accumulators of all replicas, combined by the same
operation, are those of all microbatches. A carry that is equal in all microbatches needs no exchange. Anything else is
refused, and what has a side effect once per step, because each replica would run it.
"""

from __future__ import annotations

from autopar.errors import EffectError, ScheduleError
from autopar.frontend.equations import Equation
from autopar.jax_interop import compat as jax_compat
from autopar.pipeline.cut.pieces import Layout
from autopar.rules.table import traits_of


def accumulators(layout: Layout) -> dict[int, Equation]:
    """The equation that adds a microbatch's term, by the accumulator's value in the loop.

    Raises:
        ScheduleError: a microbatch reads what earlier ones left, so they cannot be divided among replicas.
    """
    found: dict[int, Equation] = {}
    equations = layout.trace.equations
    for enter, leave in layout.carries.items():
        (carry,) = equations[enter].results
        users = layout.trace.users.get(carry, [])
        if not users:  # equal in all microbatches
            continue
        step = equations[users[0]]
        combines = traits_of(step.primitive).accumulates and step.results == equations[leave].operands
        if len(users) > 1 or not combines:
            raise ScheduleError(
                f"each microbatch continues from what `{step.primitive}` at {_line(step)} made in the one before, but a"
                " schedule with replicas of a stage divides the microbatches among them: choose a schedule that has each"
                " stage on one submesh, such as '1f1b'"
            )
        found[carry] = step
    return found


def check_effects(layout: Layout) -> None:
    """Refuse side effects outside the loop over microbatches.

    Raises:
        EffectError: there is one; the text names it.
    """
    for unit in layout.outside:
        for equation in layout.trace.equations[unit.start : unit.stop]:
            if equation.effects:
                raise EffectError(
                    f"`{equation.primitive}` at {_line(equation)} has a side effect once per step, and a schedule with"
                    " replicas of a stage would run it on each. Move it out of the step, or choose a schedule that has"
                    " each stage on one submesh, such as '1f1b'"
                )


def _line(equation: Equation) -> str:
    return jax_compat.user_source(equation.source) or "an unknown line"
