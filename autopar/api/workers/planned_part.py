"""Plan a part of a step once, and run it on the devices of each worker.

In: a program, devices. Out: `PlannedPart`, whose `on` is the compiled part on one worker's devices.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import NamedSharding

from autopar.api import make_plan as plan_step
from autopar.jax_interop.partition_spec import named_shardings
from autopar.plans.plan import Plan
from autopar.runtime import jit as execute
from autopar.system.progress import announced_by_progress
from autopar.transforms.program import Program


@dataclass(frozen=True, slots=True)
class PartOn:
    """A part on certain devices.

    Args:
        in_shardings, out_shardings: of its flat inputs and outputs.
        run: the jitted part, from flat inputs to a tuple of flat outputs.
    """

    in_shardings: tuple[NamedSharding, ...]
    out_shardings: tuple[NamedSharding, ...]
    run: Any

    def __call__(self, inputs: Sequence[Any]) -> tuple[jax.Array, ...]:
        """Run the part on inputs that may be anywhere."""
        return self.run(*jax.device_put(list(inputs), list(self.in_shardings)))


@dataclass(frozen=True)
class PlannedPart:
    """A part of a step with its plan.

    Args:
        program: in the form that the plan was made for.
    """

    plan: Plan
    program: Program
    _on: dict[tuple[int, ...], PartOn] = field(default_factory=dict, repr=False, compare=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    @classmethod
    def of(cls, program: Program, options: Mapping[str, Any]) -> PlannedPart:
        """Plan a part.

        Raises:
            AutoparError: see `autopar.plan`.
        """
        options = dict(options)
        if options.get("progress") is None:
            options["progress"] = announced_by_progress(f"planning {program.signature.name}")
        plan = plan_step.plan_program(program, **options)
        assert isinstance(plan, Plan), "of one program"
        return cls(plan, program.of(plan))

    def on(self, devices: Sequence[Any]) -> PartOn:
        """The part on devices, as many as it was planned for; compiled at its first call."""
        key = tuple(device.id for device in devices)
        with self._lock:
            if key not in self._on:
                mesh = execute.make_mesh(self.plan.mesh, devices)
                inputs = named_shardings([tensor.sharding for tensor in self.plan.inputs], mesh)
                outputs = named_shardings([tensor.sharding for tensor in self.plan.outputs], mesh)
                run = execute.jit_plan(self.plan, self.program.trace, mesh)
                self._on[key] = PartOn(tuple(inputs), tuple(outputs), run)
            return self._on[key]

    @functools.cached_property
    def output_shapes(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The shape and dtype of each output."""
        trace = self.program.trace
        avals = [trace.avals[v] if isinstance(v, int) else jax.typeof(v.value) for v in trace.outputs]
        return tuple(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals)
