"""What the programs of a diagnosis cost: predicted, and as XLA's GPU compiler makes them.

In: a step sharded by hand, and plans of it. Out: XLA's programs of it as it is, as planned, or with other shardings and
nothing else; their `Cost`s, and the `Extra` collectives that a plan does not account for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import jax

from autopar.cost.hardware_profile import HardwareProfile
from autopar.diagnosis.hand_sharded import HandSharded
from autopar.diagnosis.unintended_collectives import Extra, extras, missing_time
from autopar.jax_interop.compilation import module_bytes
from autopar.plans.plan import Plan
from autopar.runtime import jit as execute
from autopar.transforms.program import Program
from autopar.verification.figures import match_collectives
from autopar.xla_compiler.compiler import CompiledStep, Compiler
from autopar.xla_compiler.hlo_collectives import has_loops


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """What XLA's GPU compiler made of a program. Bytes are per device.

    Args:
        step_time_s: the estimate of XLA's scheduler; None where it is not to be believed (loops, a GPU before Hopper).
        exposed_s: by kind of collective, the part of it that no kernel hides.
        sent_bytes: what one device sends in a step.
        counts: collectives that a step runs, by kind. unmeant_counts: of them, those that nobody meant.
        unmeant_bytes: what these send.
    """

    step_time_s: float | None
    exposed_s: Mapping[str, float]
    peak_bytes: float
    sent_bytes: float
    counts: Mapping[str, int]
    unmeant_counts: Mapping[str, int]
    unmeant_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """A program's step: predicted by autopar, and as compiled; None where it was not compiled.

    Args:
        predicted_s: of the program as its user wrote it: the prediction for its shardings, and the seconds of what
            XLA's program sends besides; what XLA computes on several devices alike is not in it.
    """

    predicted_s: float
    predicted_peak_bytes: float
    compiled: Compiled | None

    @property
    def xla_s(self) -> float | None:
        """XLA's estimate, where there is one."""
        return None if self.compiled is None else self.compiled.step_time_s


@dataclass(frozen=True, slots=True)
class CompiledCosts:
    """Programs for XLA's GPU compiler, and what it makes of them.

    Args:
        check: compile plans too, and not only the program as it is.
    """

    hand: HandSharded
    program: Program
    profile: HardwareProfile
    num_hosts: int
    compiler: Compiler
    check: bool

    def as_it_is(self) -> CompiledStep:
        return self._compile(self.hand.lower("cuda"))

    def planned(self, plan: Plan) -> CompiledStep | None:
        """The step with all that a plan says."""
        if not self.check:
            return None
        jitted = execute.jit_plan(plan, self.program.of(plan).trace, execute.abstract_mesh(plan.mesh))
        return self._compile(execute.lower_for("cuda", jitted, self.hand.args))

    def resharded(self, plan: Plan) -> CompiledStep | None:
        """The user's own program with the shardings of a plan's inputs in place of theirs, and nothing else."""
        if not self.check:
            return None
        renewed = {out: plan.inputs[n].sharding for n, out in plan.carried}
        said = self.hand.inputs
        inputs = [None if was is None else now.sharding for was, now in zip(said, plan.inputs, strict=True)]
        outputs = [None if was is None else renewed.get(n, was) for n, was in enumerate(self.hand.outputs)]
        return self._compile(self.hand.lower_otherwise("cuda", inputs, outputs))

    def _compile(self, lowered: jax.stages.Lowered) -> CompiledStep:
        return self.compiler.compile(module_bytes(lowered), self.profile, self.hand.mesh.num_devices, self.num_hosts)

    def cost(self, plan: Plan, compiled: CompiledStep | None) -> tuple[Cost, tuple[Extra, ...]]:
        """What a program comes to that was to be as a plan says, and what XLA sends in it that the plan does not."""
        predicted = plan.prediction
        if compiled is None:
            return Cost(predicted_s=predicted.step_time_s, predicted_peak_bytes=predicted.peak_bytes, compiled=None), ()
        found = match_collectives(plan, compiled.hlo_text, compiled.hosts)
        rows = extras(found, self.hand.mesh, self.profile)
        over_s = max(0.0, sum(row.time_s for row in rows) - missing_time(found, plan))
        # V100 and A100 have no such figures; and a loop XLA takes for one short operation.
        believable = "matrix_unit_description" in (self.profile.xla_target or {}) and not has_loops(compiled.hlo_text)
        counts: Counter[str] = Counter()
        for one in found.compiled:
            counts[one.kind] += one.num_times
        nobody_meant: Counter[str] = Counter()
        for row in rows:
            if not row.is_sum:
                nobody_meant[row.kind] += row.count
        made = Compiled(
            step_time_s=compiled.step_time_s if believable else None,
            exposed_s=compiled.exposed_s,
            peak_bytes=compiled.peak_bytes,
            sent_bytes=sum(one.num_bytes for one in found.compiled),
            counts=dict(counts),
            unmeant_counts=dict(nobody_meant),
            unmeant_bytes=sum(row.num_bytes for row in rows if not row.is_sum),
        )
        cost = Cost(
            predicted_s=predicted.step_time_s + over_s, predicted_peak_bytes=predicted.peak_bytes, compiled=made
        )
        return cost, rows
