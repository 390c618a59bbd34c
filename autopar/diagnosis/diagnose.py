"""Say what a step that was sharded by hand costs, what nobody meant in it, and what few changes would help.

In: a jitted function with its shardings, and arrays or shapes. Out: `Diagnosis`. XLA's GPU compiler compiles the program
as it is, for GPUs that need not exist; what it sends is held against what those shardings need at the least, by a plan
that is pinned to them. What is over is extra. The changes are searched for by planning, and then compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax

from autopar.cost.hardware_profile import HardwareProfile, detect, load
from autopar.diagnosis.compiled_costs import CompiledCosts
from autopar.diagnosis.diagnosis import Change, Cost, Diagnosis
from autopar.diagnosis.hand_sharded import HandSharded, read_hand_sharded
from autopar.diagnosis.pinned_plans import PinnedPlans
from autopar.diagnosis.rows import Place, TensorChange, places, tensor_changes
from autopar.diagnosis.sharding_changes import LEAST_SHARE, Repin, groups_of, search
from autopar.diagnosis.unintended_collectives import Extra, origins_of
from autopar.errors import StepSignatureError
from autopar.ir.mesh import MeshShape
from autopar.plans.plan import Plan
from autopar.system.units import human_bytes
from autopar.transforms.program import Program, program_of
from autopar.xla_compiler.compiler import Compiler
from autopar.xla_compiler.gpu_target import target_text, topology_text

#: The part of the difference to autopar's plan that changes are looked for.
ENOUGH = 0.9


def diagnose(
    step: Callable[..., Any],
    *args: Any,
    mesh: str | MeshShape | jax.sharding.Mesh | None = None,
    num_devices: int | None = None,
    hardware: str | HardwareProfile | None = None,
    hosts: int | None = None,
    memory_budget_bytes: float | None = None,
    check: bool = True,
    share: float = ENOUGH,
    time_limit_s: float = 60.0,
    compiler: Compiler | None = None,
    progress: Callable[[str, float], None] | None = None,
) -> Diagnosis:
    """What a step sharded by hand costs, which collectives nobody meant, and the few changes that help most.

    Args:
        step: what `jax.jit(function, in_shardings=...)` returns; or a function whose arguments lie sharded. The mesh of
            its shardings may be an `AbstractMesh`, or of other devices than those to diagnose for.
        args: as it is called: arrays, or `jax.ShapeDtypeStruct`s.
        mesh, num_devices: what the shardings are expected to be over; another is refused.
        hardware: name of a profile, path of a profile file, or a profile; by default that of the visible devices.
        hosts: over how many hosts the devices are spread; by default as few as the profile needs.
        memory_budget_bytes: per device; by default what the profile says is usable.
        check: compile each change, and autopar's plan; without, these are predicted alone.
        share: of the difference to autopar's plan, what the changes are to recover.
        time_limit_s: seconds for the solver, per problem.
        compiler: one that was started earlier, and is ended by whoever started it.
        progress: called with a stage's name and the fraction done.

    Raises:
        StepSignatureError: the step is not sharded, or by autopar.
        MeshError: its shardings are over several meshes, or another than was asked for.
        VerifyError: XLA's GPU compiler is not installed, or refuses the program.
        AutoparError: as `autopar.plan` raises.
    """
    if not 0 < share <= 1:
        raise StepSignatureError(f"`share` is {share!r}: give a part of the difference, above 0 and at most 1")
    if callable(getattr(step, "planned", None)):
        raise StepSignatureError(
            f"`{getattr(step, '__qualname__', 'the step')}` runs by a plan of autopar's, so nothing in it was sharded by"
            " hand: hold it against XLA's program with `autopar.verify`"
        )
    with Compiler() if compiler is None else nullcontext(compiler) as compiler:
        hand = read_hand_sharded(step, args, mesh if mesh is not None else num_devices)
        profile = _profile(hardware, hand.mesh, hosts)
        target_text(profile)  # a profile without a GPU is refused before anything is planned
        donate = [hand.names[position] for position in hand.donated_arguments]
        program = program_of(hand.step, hand.args, carry=None, donate=donate)
        budget = profile.usable_bytes if memory_budget_bytes is None else float(memory_budget_bytes)
        plans = PinnedPlans(program, hand, profile, budget, time_limit_s)
        num_hosts = -(-hand.mesh.num_devices // profile.devices_per_host) if hosts is None else hosts
        compiling = CompiledCosts(hand, program, profile, num_hosts, compiler, check)
        return _Diagnosing(plans, compiling, progress or (lambda stage, fraction: None)).diagnosis(share)


def _profile(given: str | HardwareProfile | None, mesh: MeshShape, hosts: int | None) -> HardwareProfile:
    """The hardware, with as many devices a host as `hosts` leaves."""
    if given is None:
        device = jax.devices()[0]
        given = detect(device.device_kind, device.platform)
    profile = given if isinstance(given, HardwareProfile) else load(given)
    if hosts is None:
        return profile
    topology_text(mesh.num_devices, hosts)  # refused where they cannot be spread
    return replace(profile, devices_per_host=mesh.num_devices // hosts)


@dataclass(frozen=True, slots=True)
class _Diagnosing:
    """The steps of one diagnosis."""

    plans: PinnedPlans
    compiling: CompiledCosts
    report: Callable[[str, float], None]

    def diagnosis(self, share: float) -> Diagnosis:
        """All of it."""
        hand, profile, budget = self.plans.hand, self.plans.profile, self.plans.budget
        self.report("XLA compiles it as it is", 0.1)
        compiled = self.compiling.as_it_is()
        self.report("plan", 0.3)
        kept, fits = self.plans.that_may_not_fit(self.plans.own)
        best = self.plans.plan({}, rematerialize=True)
        as_is, rows = self.compiling.cost(kept, compiled)
        changes, changed = self._changes(as_is, kept, best, rows, share)
        best_cost, _ = self.compiling.cost(best, self.compiling.planned(best))
        self.report("done", 1.0)
        notes = [] if fits else [f"these shardings do not fit the memory budget of {human_bytes(budget)} a device"]
        return Diagnosis(
            program=self.plans.program.signature.name,
            mesh=hand.mesh,
            hardware=profile.name,
            topology=topology_text(hand.mesh.num_devices, self.compiling.num_hosts),
            budget_bytes=budget,
            as_is=as_is,
            kept=self.compiling.cost(kept, None)[0],
            best=best_cost,
            plan=best,
            extras=rows,
            changes=tuple(changes),
            changed=changed,
            notes=(*notes, *notes_on(hand, self.plans.program)),
            flags=compiled.flags,
        )

    def _changes(
        self, as_is: Cost, kept: Plan, best: Plan, rows: Sequence[Extra], share: float
    ) -> tuple[list[Change], Plan]:
        """The changes, and the plan with all of them.

        What XLA put in by itself goes once the values inside are constrained, so that comes first where it is much.
        Else the shardings alone are changed, and values constrained only if XLA then puts something in.
        """
        over_s = as_is.predicted_s - kept.prediction.step_time_s
        difference = as_is.predicted_s - best.prediction.step_time_s
        changes: list[Change] = []
        plan, pins, cost = kept, dict(self.plans.own), as_is
        constrained = over_s > max(0.0, LEAST_SHARE * difference)
        if constrained:
            changes.append(self._constraints(kept, rows, cost))
            cost = changes[-1].after
        repins = self._repins(kept, best, share * difference - (over_s if constrained else 0.0))
        for number, one in enumerate(repins):
            self.report("XLA compiles the changes", 0.7 + 0.3 * number / len(repins))
            was, pins = pins, pins | dict(one.to)
            plan = self.plans.plan(pins)
            compiled = self.compiling.planned(plan) if constrained else self.compiling.resharded(plan)
            after, rows = self.compiling.cost(plan, compiled)
            words = "split otherwise: " + ", ".join(f"`{group.name}`" for group in one.groups)
            tensors = tensor_changes(one.to, was, plan.inputs)
            changes.append(_change("shardings", words, cost, after, tensors=tensors))
            cost = after
        if not constrained and cost.predicted_s - plan.prediction.step_time_s > max(0.0, LEAST_SHARE * difference):
            changes.append(self._constraints(plan, rows, cost))
        return changes, plan

    def _repins(self, kept: Plan, best: Plan, to_recover_s: float) -> tuple[Repin, ...]:
        if to_recover_s <= 0 or kept.prediction.step_time_s <= best.prediction.step_time_s:
            return ()
        own = self.plans.own
        different = {n for n, sharding in own.items() if best.inputs[n].sharding != sharding}
        groups = [group for group in groups_of(kept.inputs) if different & set(group.members)]

        def trying(number: int) -> None:
            self.report(f"try changes: {number}", min(0.69, 0.4 + 0.01 * number))

        return search(own, groups, self.plans.price, kept.prediction.step_time_s, to_recover_s, kept.inputs, trying)

    def _constraints(self, plan: Plan, rows: Sequence[Extra], before: Cost) -> Change:
        after, _ = self.compiling.cost(plan, self.compiling.planned(plan))
        words = (
            f"keep these shardings, and constrain the {len(plan.constraints)} values inside that XLA was left to guess,"
            " as `autopar.parallelize(step, plan=told.changed)` does. Where it matters:"
        )
        return _change("constraints", words, before, after, places=places(plan, origins_of(rows)))


def _change(
    kind: Literal["constraints", "shardings"],
    words: str,
    before: Cost,
    after: Cost,
    *,
    tensors: tuple[TensorChange, ...] = (),
    places: tuple[Place, ...] = (),
) -> Change:
    known = before.xla_s is not None and after.xla_s is not None
    return Change(
        kind=kind,
        words=words,
        tensors=tensors,
        places=places,
        gain_s=before.predicted_s - after.predicted_s,
        xla_gain_s=before.xla_s - after.xla_s if known else None,  # type: ignore[operator]
        after=after,
    )


def notes_on(hand: HandSharded, program: Program) -> tuple[str, ...]:
    """What is odd about a program's own shardings."""
    notes = []
    carried = program.graph.carried
    for before, after in carried:
        comes, goes = hand.inputs[before], hand.outputs[after]
        if comes is not None and goes is not None and comes != goes:
            notes.append(
                f"`{hand.paths[before]}` comes in as {comes} and goes out as {goes}: every step has to reshard it"
            )
    unsaid = [path for path, said in zip(hand.paths, hand.inputs, strict=True) if said is None]
    if unsaid:
        notes.append(f"the program does not say how to split {len(unsaid)} of its inputs, e.g. `{unsaid[0]}`")
    if carried and not hand.donated:
        notes.append("nothing is donated, so the state is held twice: give `jax.jit` `donate_argnums`")
    return tuple(notes)
