"""Compile the programs of a diagnosis by XLA's GPU compiler, and compute their costs.

In: a hand-sharded step, plans for it. Out: compiled steps of the user's program, of plans, and of the user's program
with other input shardings; their `Cost`s, and the `Extra` collectives that no plan predicted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import jax

from autopar.diagnosis.hand_sharded import HandSharded
from autopar.diagnosis.unintended_collectives import Extra, extras, missing_time
from autopar.hardware.profile import HardwareProfile
from autopar.jax_interop.compilation import module_bytes
from autopar.plans.plan import Plan
from autopar.runtime import jit as execute
from autopar.transforms.program import Program
from autopar.verification.figures import match_collectives
from autopar.verification.step_times import replayed
from autopar.xla_compiler.compiler import CompiledStep, Compiler
from autopar.xla_compiler.gpu_target import gpus_per_slice
from autopar.xla_compiler.hlo_text import parse_module


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """Figures of a compiled program. Bytes are per device and step.

    Args:
        step_time_s: replayed step time; None for a device without replay rates.
        exposed_s: kind of collective -> exposed time in the replay.
        sent_bytes: bytes sent.
        counts: kind of collective -> executions.
        unintended_counts: kind of collective -> executions of unintended ones.
        unintended_bytes: bytes sent by unintended collectives.
    """

    step_time_s: float | None
    exposed_s: Mapping[str, float]
    peak_bytes: float
    sent_bytes: float
    counts: Mapping[str, int]
    unintended_counts: Mapping[str, int]
    unintended_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The cost of a program's step.

    Args:
        predicted_s: predicted step time; for a compiled program, plus the time of its extra collectives. Redundant
            computation that XLA adds is not included.
        predicted_peak_bytes: predicted peak memory per device.
        compiled: figures of the compiled program; None where it was not compiled.
    """

    predicted_s: float
    predicted_peak_bytes: float
    compiled: Compiled | None

    @property
    def replayed_s(self) -> float | None:
        """The replayed step time of the compiled program, where there is one."""
        return None if self.compiled is None else self.compiled.step_time_s


@dataclass(frozen=True, slots=True)
class CompiledCosts:
    """Compiles programs of one step and computes their costs.

    Args:
        check: whether to compile plans too, and not only the user's program.
    """

    hand: HandSharded
    program: Program
    profile: HardwareProfile
    num_hosts: int
    compiler: Compiler
    check: bool

    def as_is(self) -> CompiledStep:
        return self._compile(self.hand.lower("cuda"))

    def planned(self, plan: Plan) -> CompiledStep | None:
        """Compile the planned step; None without `check`."""
        if not self.check:
            return None
        jitted = execute.jit_plan(plan, self.program.of(plan).trace, execute.abstract_mesh(plan.mesh, self.profile))
        return self._compile(execute.lower_for("cuda", jitted, self.hand.args))

    def resharded(self, plan: Plan) -> CompiledStep | None:
        """Compile the user's program with a plan's input shardings and no other change; None without `check`."""
        if not self.check:
            return None
        renewed = {out: plan.inputs[n].sharding for n, out in plan.carried}
        given = self.hand.inputs
        inputs = [None if was is None else now.sharding for was, now in zip(given, plan.inputs, strict=True)]
        outputs = [None if was is None else renewed.get(n, was) for n, was in enumerate(self.hand.outputs)]
        return self._compile(self.hand.lower_otherwise("cuda", inputs, outputs))

    def _compile(self, lowered: jax.stages.Lowered) -> CompiledStep:
        return self.compiler.compile(module_bytes(lowered), self.profile, self.hand.mesh.num_devices, self.num_hosts)

    def cost(self, plan: Plan, compiled: CompiledStep | None) -> tuple[Cost, tuple[Extra, ...]]:
        """The cost of a compiled program, and its collectives that the plan with its shardings does not predict."""
        predicted = plan.prediction
        if compiled is None:
            return Cost(predicted_s=predicted.step_time_s, predicted_peak_bytes=predicted.peak_bytes, compiled=None), ()
        module = parse_module(compiled.hlo_text)
        found = match_collectives(plan, module, compiled.hosts)
        rows = extras(found, self.hand.mesh, self.profile)
        over_s = max(0.0, sum(row.time_s for row in rows) - missing_time(found, plan))
        domain = gpus_per_slice(self.profile, self.hand.mesh.num_devices, self.num_hosts)
        replay, _ = replayed(module, self.profile.rates_name, domain)
        counts: Counter[str] = Counter()
        for one in found.compiled:
            counts[one.kind] += one.num_times
        unintended: Counter[str] = Counter()
        for row in rows:
            if not row.is_sum:
                unintended[row.kind] += row.count
        made = Compiled(
            step_time_s=None if replay is None else replay.step_time_s,
            exposed_s={} if replay is None else replay.exposed_s,
            peak_bytes=compiled.peak_bytes,
            sent_bytes=sum(one.num_bytes for one in found.compiled),
            counts=dict(counts),
            unintended_counts=dict(unintended),
            unintended_bytes=sum(row.num_bytes for row in rows if not row.is_sum),
        )
        cost = Cost(
            predicted_s=predicted.step_time_s + over_s, predicted_peak_bytes=predicted.peak_bytes, compiled=made
        )
        return cost, rows
