"""Diagnose a hand-sharded step: its cost, its unintended collectives, and the few changes that recover most time.

In: a jitted function with its shardings, and arrays or shapes. Out: `Diagnosis`. XLA's GPU compiler compiles the
program as is, for present or absent GPUs. A plan that is pinned to the user's shardings says which collectives these
need. Every other compiled collective is extra. A search over plans finds the changes, which are then compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax

from autopar.diagnosis.compiled_costs import CompiledCosts
from autopar.diagnosis.diagnosis import Change, Cost, Diagnosis
from autopar.diagnosis.hand_sharded import HandSharded, read_hand_sharded
from autopar.diagnosis.pinned_plans import PinnedPlans
from autopar.diagnosis.rows import Place, TensorChange, places, tensor_changes
from autopar.diagnosis.sharding_changes import LEAST_SHARE, Repin, groups_of, search
from autopar.diagnosis.unintended_collectives import Extra, origins_of
from autopar.errors import StepSignatureError
from autopar.hardware.profile import HardwareProfile, detect, load
from autopar.ir.mesh import MeshShape
from autopar.ir.sharding import TensorSharding
from autopar.plans.plan import Plan
from autopar.system.units import human_bytes
from autopar.transforms.program import Program, program_of
from autopar.xla_compiler.compiler import Compiler
from autopar.xla_compiler.gpu_target import gpus_per_host, target_text, topology_text

#: Default fraction of the time difference to autopar's plan that the changes should recover.
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
    """Diagnose a hand-sharded step: its cost, its unintended collectives, and the few changes that recover most time.

    Args:
        step: the result of `jax.jit(function, in_shardings=...)`, or a function with sharded arguments. The mesh of the
            shardings may be an `AbstractMesh`, or consist of other devices than the target.
        args: positional arguments: arrays or `jax.ShapeDtypeStruct`s.
        mesh, num_devices: expected mesh of the shardings, or its size.
        hardware: name of a profile, path of a profile file, or a profile; by default that of the visible devices.
        hosts: number of hosts; by default the fewest that hold the devices.
        memory_budget_bytes: memory budget per device; by default the profile's usable memory.
        check: whether to compile each change and autopar's plan; otherwise they are only predicted.
        share: fraction of the time difference to autopar's plan that the changes should recover.
        time_limit_s: time limit of the solver in seconds, per problem.
        compiler: a running compiler, which stays open; by default one is started and closed here.
        progress: callback with a stage's name and the fraction done.

    Raises:
        StepSignatureError: the step has no shardings, or autopar made them.
        MeshError: the shardings are over several meshes, or not over the expected one.
        VerifyError: XLA's GPU compiler is not installed, or fails to compile the program.
        AutoparError: as `autopar.plan` raises.
    """
    if not 0 < share <= 1:
        raise StepSignatureError(f"`share` is {share!r}: give a fraction of the difference, above 0 and at most 1")
    if callable(getattr(step, "planned", None)):
        raise StepSignatureError(
            f"`{getattr(step, '__qualname__', 'the step')}` runs by a plan of autopar's, so nothing in it is sharded by"
            " hand: compare it with XLA's program by `autopar.verify`"
        )
    with Compiler() if compiler is None else nullcontext(compiler) as compiler:
        hand = read_hand_sharded(step, args, mesh if mesh is not None else num_devices)
        profile = _profile(hardware, hand.mesh, hosts)
        target_text(profile)  # raise for a profile without a GPU before planning
        donate = [hand.names[position] for position in hand.donated_arguments]
        program = program_of(hand.step, hand.args, carry=None, donate=donate)
        budget = profile.usable_bytes if memory_budget_bytes is None else float(memory_budget_bytes)
        plans = PinnedPlans(program, hand, profile, budget, time_limit_s)
        num_hosts = -(-hand.mesh.num_devices // profile.devices_per_host) if hosts is None else hosts
        compiling = CompiledCosts(hand, program, profile, num_hosts, compiler, check)
        return _Diagnosing(plans, compiling, progress or (lambda stage, fraction: None)).diagnosis(share)


def _profile(given: str | HardwareProfile | None, mesh: MeshShape, hosts: int | None) -> HardwareProfile:
    """The hardware profile with the devices per host that `hosts` gives."""
    if given is None:
        device = jax.devices()[0]
        given = detect(device.device_kind, device.platform)
    profile = given if isinstance(given, HardwareProfile) else load(given)
    if hosts is None:
        return profile
    return replace(profile, devices_per_host=gpus_per_host(mesh.num_devices, hosts))


@dataclass(frozen=True, slots=True)
class _Diagnosing:
    """Runs one diagnosis."""

    plans: PinnedPlans
    compiling: CompiledCosts
    report: Callable[[str, float], None]

    def diagnosis(self, share: float) -> Diagnosis:
        """Compile and plan the step, search for changes, and compile them."""
        hand, profile, budget = self.plans.hand, self.plans.profile, self.plans.budget
        self.report("XLA compiles the step as is", 0.1)
        compiled = self.compiling.as_is()
        self.report("plan", 0.3)
        kept, fits = self.plans.plan_or_unlimited(self.plans.own)
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
            topology=topology_text(self.compiling.profile, hand.mesh.num_devices, self.compiling.num_hosts),
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

        Constraints on intermediate values remove the collectives that XLA's partitioner inserted. They come first where
        those cost much. Otherwise input shardings change first, and constraints follow if XLA then inserts collectives.
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
        groups: list[str] = []
        to: dict[int, TensorSharding] = {}
        for number, one in enumerate(repins):
            self.report("XLA compiles the changes", 0.7 + 0.3 * number / len(repins))
            groups += [f"`{group.name}`" for group in one.groups]
            to |= dict(one.to)
            tried = self.plans.plan(pins | to)
            compiled = self.compiling.planned(tried) if constrained else self.compiling.resharded(tried)
            after, extras = self.compiling.cost(tried, compiled)
            if not _gains(cost, after):  # only together with the next
                continue
            tensors = tensor_changes(to, pins, tried.inputs)
            text = "change the sharding of " + ", ".join(groups)
            changes.append(_change("shardings", text, cost, after, tensors=tensors))
            plan, pins, cost, rows, groups, to = tried, pins | to, after, extras, [], {}
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
        text = (
            f"keep these shardings, and constrain {len(plan.constraints)} intermediate values whose shardings XLA inferred,"
            " as `autopar.parallelize(step, plan=diagnosis.changed)` does. Where it matters:"
        )
        return _change("constraints", text, before, after, places=places(plan, origins_of(rows)))


def _gains(before: Cost, after: Cost) -> bool:
    """Whether a change makes the predicted step faster, and the replayed one no slower."""
    if before.replayed_s is not None and after.replayed_s is not None and after.replayed_s > before.replayed_s:
        return False
    return after.predicted_s < before.predicted_s


def _change(
    kind: Literal["constraints", "shardings"],
    description: str,
    before: Cost,
    after: Cost,
    *,
    tensors: tuple[TensorChange, ...] = (),
    places: tuple[Place, ...] = (),
) -> Change:
    known = before.replayed_s is not None and after.replayed_s is not None
    return Change(
        kind=kind,
        description=description,
        tensors=tensors,
        places=places,
        gain_s=before.predicted_s - after.predicted_s,
        replayed_gain_s=before.replayed_s - after.replayed_s if known else None,  # type: ignore[operator]
        after=after,
    )


def notes_on(hand: HandSharded, program: Program) -> tuple[str, ...]:
    """Notes on suspicious shardings and donations of the program."""
    notes = []
    carried = program.graph.carried
    for before, after in carried:
        comes, goes = hand.inputs[before], hand.outputs[after]
        if comes is not None and goes is not None and comes != goes:
            notes.append(
                f"`{hand.paths[before]}` has sharding {comes} as an input and {goes} as an output: every step reshards it"
            )
    undefined = [path for path, sharding in zip(hand.paths, hand.inputs, strict=True) if sharding is None]
    if undefined:
        notes.append(f"the program gives no sharding for {len(undefined)} of its inputs, e.g. `{undefined[0]}`")
    if carried and not hand.donated:
        notes.append("nothing is donated, so the state is in memory twice: give `jax.jit` `donate_argnums`")
    return tuple(notes)
