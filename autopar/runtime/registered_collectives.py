"""Run a registered collective in a plan, by `jax.shard_map` over the plan's mesh.

In: a value, and its shardings before and after.
Out: the value with the sharding after.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from autopar.cost.user_collectives import OPEN, runner_of
from autopar.errors import CollectiveError
from autopar.ir.sharding import TensorSharding
from autopar.ir.sharding_changes import Change, Moved, moved
from autopar.jax_interop.partition_spec import partition_spec
from autopar.plans.records import Constraint


@dataclass(frozen=True, slots=True)
class RegisteredResharding:
    """A change from one sharding to another by a registered collective."""

    name: str
    before: TensorSharding
    after: TensorSharding

    @property
    def moved(self) -> Moved:
        change = moved(self.before, self.after)
        assert change is not None, f"{self} moves no dim"
        return change

    @property
    def like(self) -> Change:
        return "all-gather" if self.moved.to is None else "all-to-all"

    @property
    def dims(self) -> dict[str, int]:
        """The dims that the collective's function receives, by name."""
        dims = {"dim": self.moved.dim, "to": self.moved.to}
        return {name: dim for name in OPEN[self.like] if (dim := dims[name]) is not None}

    def run(self, value: Any, mesh: Mesh | AbstractMesh) -> Any:
        """The value with the new sharding.

        Raises:
            CollectiveError: the collective is not registered here, or its result has a wrong shape or dtype.
        """
        if jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
            before, after = (TensorSharding((*s.dims, ())) for s in (self.before, self.after))
            words = replace(self, before=before, after=after).run(jax.random.key_data(value), mesh)
            return jax.random.wrap_key_data(words, impl=jax.random.key_impl(value))
        function, to = runner_of(self.name, self.like), self.moved

        def part(own: Any) -> Any:
            result = function(own, to.axes, **self.dims)
            num_devices, expected = math.prod(mesh.shape[axis] for axis in to.axes), list(own.shape)
            expected[to.dim] *= num_devices
            if to.to is not None:
                expected[to.to] //= num_devices
            _check(self.name, result, tuple(expected), own.dtype)
            return result

        specs = partition_spec(self.before), partition_spec(self.after)
        sent = jax.custom_jvp(jax.shard_map(part, mesh=mesh, in_specs=specs[:1], out_specs=specs[1], check_vma=False))
        sent.defjvp(lambda values, tangents: (sent(*values), *tangents))  # resharding is the identity on values
        return sent(value)


def steps_of(constraint: Constraint) -> tuple[TensorSharding | RegisteredResharding, ...]:
    """A constraint's shardings in order; where a registered collective produces one, a `RegisteredResharding`.

    Raises:
        CollectiveError: a collective is not registered here.
    """
    if not constraint.by:
        return constraint.shardings
    pairs = zip(constraint.by[1:], pairwise(constraint.shardings), strict=True)
    steps = [RegisteredResharding(name, before, after) if name else after for name, (before, after) in pairs]
    for one in steps:
        if isinstance(one, RegisteredResharding):
            runner_of(one.name, one.like)
    return (constraint.shardings[0], *steps)


def reached(step: TensorSharding | RegisteredResharding) -> TensorSharding:
    """The sharding after a step."""
    return step.after if isinstance(step, RegisteredResharding) else step


def _check(name: str, result: Any, shape: tuple[int, ...], dtype: Any) -> None:
    type_of_result = (getattr(result, "shape", None), getattr(result, "dtype", None))
    if type_of_result != (shape, dtype):
        raise CollectiveError(
            f"`run` of the collective {name!r} returns a {type(result).__name__} of shape {type_of_result[0]} and dtype"
            f" {type_of_result[1]}, but the plan needs one of shape {shape} and dtype {dtype}"
        )
