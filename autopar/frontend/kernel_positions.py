"""Find what a Pallas kernel depends on besides its blocks: its position in the grid, and scratch memory.

In: the jaxpr of a kernel, which numbers the axes of the grid without those that `vmap` has added.
Out: by axis, the period of the positions that it reads; for each scratch array, the axes that decide where it is
initialized.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from autopar.frontend.kernel_flops import scalar_results
from autopar.jax_interop import compat as jax_compat

#: Random bits follow from a state that programs pass on from one position to the next.
_STATEFUL = ("prng_seed", "prng_random_bits")


def is_stateful(jaxpr: Any) -> bool:
    """Whether a kernel draws random bits of the device."""
    return any(
        equation.primitive.name in _STATEFUL or any(map(is_stateful, jax_compat.programs_in(equation)))
        for equation in jaxpr.eqns
    )


def periods_of(jaxpr: Any) -> dict[int, int]:
    """The axes of the grid whose position or size a program uses, with the period of what it uses: `c` where it uses
    positions modulo `c` alone, as of grouped heads, and 0 where it uses more."""
    found: dict[int, int] = {}
    users: dict[Any, list[Any]] = {}  # of each variable, with `jaxpr` for a result of the program
    for atom in jaxpr.outvars:
        if not isinstance(atom, jax_compat.Literal):
            users.setdefault(atom, []).append(jaxpr)
    for equation in reversed(jaxpr.eqns):
        if not equation.effects and not any(variable in users for variable in equation.outvars):
            continue
        for atom in equation.invars:
            if not isinstance(atom, jax_compat.Literal):
                users.setdefault(atom, []).append(equation)
        periods = [periods_of(program) for program in jax_compat.programs_in(equation)]
        if equation.primitive.name == "num_programs":
            periods.append({equation.params["axis"]: 0})
        elif equation.primitive.name == "program_id":
            moduli = map(_modulus, users.get(equation.outvars[0], ()))
            periods.append({equation.params["axis"]: math.lcm(*moduli)})
        for each in periods:
            found |= {axis: math.lcm(found.get(axis, 1), period) for axis, period in each.items()}
    return found


def _modulus(user: Any) -> int:
    """`c` if an equation computes a position modulo `c`, else 0."""
    primitive = getattr(user, "primitive", None)
    divisor = user.invars[1] if primitive is not None and primitive.name == "rem" else None
    return int(divisor.val) if isinstance(divisor, jax_compat.Literal) else 0


def initialized_by(jaxpr: Any, num_scratch: int) -> list[frozenset[int] | None]:
    """For each scratch array, the axes that decide whether a kernel overwrites it before it reads it, as `k` for
    `pl.when(pl.program_id(k) == 0)`. None if the kernel, at position 0 of all axes, does not overwrite it first, or the
    position does not decide that."""
    scratch = list(jaxpr.invars[len(jaxpr.invars) - num_scratch :]) if num_scratch else []
    found: dict[Any, frozenset[int] | None] = {}
    values: dict[Any, int | None] = {}
    axes: dict[Any, frozenset[int] | None] = dict.fromkeys(jaxpr.invars)  # None: more than the position decides

    def value_of(atom: Any) -> int | None:
        if not isinstance(atom, jax_compat.Literal):
            return values.get(atom)
        whole = getattr(atom.aval, "shape", None) == () and getattr(atom.aval, "dtype", np.dtype(float)).kind in "iub"
        return int(atom.val) if whole else None

    for equation in jaxpr.eqns:
        name = equation.primitive.name
        for one in scratch:
            if one in equation.invars and one not in found:
                overwrites = _overwrites(jaxpr, equation, one, value_of(equation.invars[0]))
                when = frozenset() if name != "cond" else _axes_of(axes, equation.invars[0])
                found[one] = when if overwrites else None
        if name == "program_id":
            axes[equation.outvars[0]], values[equation.outvars[0]] = frozenset([equation.params["axis"]]), 0
            continue
        read = [_axes_of(axes, atom) for atom in equation.invars]
        union = None if None in read else frozenset[int]().union(*(each for each in read if each is not None))
        results = scalar_results(equation, [value_of(atom) for atom in equation.invars]) if union is not None else ()
        for i, variable in enumerate(equation.outvars):
            axes[variable] = union
            values[variable] = results[i] if i < len(results) else None
    return [found.get(one, frozenset()) for one in scratch]  # one that is never used needs no value


def _axes_of(axes: dict[Any, frozenset[int] | None], atom: Any) -> frozenset[int] | None:
    return frozenset() if isinstance(atom, jax_compat.Literal) else axes.get(atom)


def _overwrites(jaxpr: Any, equation: Any, ref: Any, index: int | None) -> bool:
    """Whether an equation's first use of an array overwrites all of it. For a `cond`, `index` is the branch taken."""
    if equation.primitive.name == "cond":
        if index is None:
            return False
        branch, _ = jax_compat.open_jaxpr(equation.params["branches"][index])
        inner = branch.invars[equation.invars.index(ref) - 1]
        first = next((one for one in branch.eqns if inner in one.invars), None)
        return first is not None and first.primitive.name != "cond" and _overwrites(branch, first, inner, None)
    if equation.primitive.name != "swap" or equation.invars[0] is not ref:
        return False
    before = equation.outvars[0]  # what it overwrites
    is_read = before in jaxpr.outvars or any(before in one.invars for one in jaxpr.eqns)
    return not is_read and equation.invars[1].aval.shape == ref.aval.shape
