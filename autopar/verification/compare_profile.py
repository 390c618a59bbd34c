"""Compare a plan's timeline with a JAX profile of a run: predicted, replayed and measured time by module and collective.

In: a plan, a profile, optionally the HLO of the program that ran. Out: `ProfileComparison`. All times are of one step on
one device; measured ones are means over devices and steps.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from autopar.errors import HardwareError, PlanMismatchError, ProfileFileError, VerifyError
from autopar.pipeline.plan import PipelinePlan
from autopar.plans.plan import Plan
from autopar.plans.step_trace import StepTrace
from autopar.verification.profile_comparison import MeasuredOperation, ProfileComparison, Row, Times
from autopar.verification.profile_rows import IDLE, Place, Places, Spent, predicted
from autopar.verification.verify import verify
from autopar.xla_compiler.hlo_text import read_hlo_file
from autopar.xla_profile.profile import OperationRuns, Profile, operations
from autopar.xla_profile.read import read_profile, with_partitions
from autopar.xla_replay.replay import Replay
from autopar.xla_replay.run import replay


def compare_profile(
    plan: Plan | PipelinePlan,
    path: str | os.PathLike[str],
    *,
    hlo: str | os.PathLike[str] | None = None,
    step: tuple[Callable[..., Any], tuple[Any, ...]] | None = None,
    hardware: str | None = None,
    program: str | None = None,
) -> ProfileComparison:
    """Compare a plan with the profile of a run of its step.

    Args:
        path: folder that `jax.profiler.trace` wrote, or an `.xplane.pb` file.
        hlo: file with the optimized HLO of the program that ran, where the profile does not hold it.
        step: the step and its arguments, which are compiled for the plan's GPUs where neither has the HLO.
        hardware: name or path of the replay's rates; by default those of the plan's hardware.
        program: name of the HLO module; by default the one with the most device time.

    Raises:
        ProfileFileError: no profile, no complete step in it, or a profile of another program.
        PlanMismatchError: a pipeline plan, or a plan without a timeline.
        VerifyError: `hlo` cannot be read, or is no HLO.
        HardwareError: there are no rates for the `hardware` given.
    """
    if isinstance(plan, PipelinePlan):
        raise PlanMismatchError(
            "the plan has pipeline stages, each with a program of its own; compare-profile takes a plan of one program"
        )
    if plan.trace is None:
        raise PlanMismatchError(
            f"the plan of `{plan.program.name}` has no timeline: its file is of an older version; plan again"
        )
    text = None if hlo is None else read_hlo_file(Path(hlo))
    profile = read_profile(path, program=program, hlo_text=text)
    if not profile.hlo_text and step is not None:
        compiled = verify(step[0], *step[1], plan=plan).compiled
        profile = read_profile(path, program=program, hlo_text=compiled.hlo_text)
    profile = replace(profile, hlo_text=with_partitions(profile.hlo_text, plan.mesh.num_devices))
    places = Places(plan, plan.trace, profile.hlo_text)
    measured = operations(profile)
    _check_program(plan, places, measured, profile, path)
    replayed, notes = _replayed(profile, hardware, plan.hardware)
    comparison = _comparison(plan, plan.trace, profile, places, measured, replayed, notes)
    _check_modules(plan, plan.trace, places, path)
    return comparison


def _check_program(
    plan: Plan, places: Places, measured: Iterable[OperationRuns], profile: Profile, path: str | os.PathLike[str]
) -> None:
    """Refuse an HLO that is not the program of the profile, and a program for another number of devices."""
    if places.module is None:
        return
    names = [one.operation for one in measured if not one.operation.startswith("(")]
    missing = [name for name in names if name not in places.known]
    if 2 * len(missing) > len(names):
        raise ProfileFileError(
            f"the HLO module {places.module.name!r} has {len(names) - len(missing)} of the {len(names)} operations of"
            f" {profile.program!r} in the profile {os.fspath(path)!r}, and not {', '.join(missing[:3])}: it is of another"
            " program; pass the HLO of the run itself, or none"
        )
    ran, planned = places.module.num_partitions, plan.mesh.num_devices
    if ran != planned:
        raise ProfileFileError(
            f"the profile {os.fspath(path)!r} is of another program: {profile.program!r} ran on {ran} device"
            f"{'s' if ran > 1 else ''}, the plan is for {planned}{_others(profile)}"
        )


def _check_modules(plan: Plan, trace: StepTrace, places: Places, path: str | os.PathLike[str]) -> None:
    """Refuse a profile that has modules, but none of the plan's."""
    planned = sorted({path for _, path in trace.places if path})
    if planned and places.missing and not places.found:
        raise ProfileFileError(
            f"the profile {os.fspath(path)!r} is of another program: its modules ({_some(places.missing)}) are none of"
            f" those of the plan of `{plan.program.name}` ({_some(planned)}); pass the profile of a run by this plan"
        )


def _some(names: Iterable[str]) -> str:
    found = sorted(names)
    return ", ".join(found[:3]) + (", ..." if len(found) > 3 else "")


def _others(profile: Profile) -> str:
    names = [name for name, _ in profile.other_programs]
    return f"; select one with --program: the profile also has {', '.join(names[:5])}" if names else ""


def _replayed(profile: Profile, hardware: str | None, planned_for: str) -> tuple[Replay | None, tuple[str, ...]]:
    """The replay of the program that ran; None, and why, where there is none."""
    if profile.platform != "gpu" and hardware is None:
        return None, ("no replay: the profile is of CPU devices, and the replay has rates of GPUs only",)
    if not profile.hlo_text:
        return None, ("no replay: the program's HLO is not known",)
    try:
        return replay(profile.hlo_text, hardware=hardware or planned_for), ()
    except HardwareError as error:
        if hardware is not None:
            raise
        return None, (f"no replay: {error}",)
    except VerifyError as error:
        return None, (f"no replay: {error}",)


def _comparison(
    plan: Plan,
    trace: StepTrace,
    profile: Profile,
    places: Places,
    measured: tuple[OperationRuns, ...],
    replayed: Replay | None,
    notes: tuple[str, ...],
) -> ProfileComparison:
    columns = (
        predicted(plan, trace, with_axes=places.module is not None),
        None if replayed is None else _of_replay(replayed, places),
        _of_profile(profile, measured, places),
    )
    sources = _sources(measured, places)
    rows = [_row(place, columns, sources) for place in dict.fromkeys(place for one in columns if one for place in one)]
    seconds = {} if replayed is None else {one.name: one for one in replayed.operations}
    table = tuple(
        MeasuredOperation(
            name=one.operation,
            kind=one.kind,
            phase=places.of(one.operation, one.kind)[0],
            path=places.path(one.operation),
            source=places.source(one.operation),
            runs_per_step=one.runs_per_step,
            median_s=one.median_s,
            seconds=one.seconds,
            exposed_s=one.exposed_s,
            replayed_s=seconds[one.operation].seconds if one.operation in seconds else None,
        )
        for one in measured
    )
    return ProfileComparison(
        program=plan.program.name,
        mesh=plan.mesh.describe(),
        hardware=plan.hardware,
        profile=profile.files[0],
        module=profile.program,
        device_kind=profile.device_kind or profile.platform,
        num_devices=len(profile.devices),
        num_steps=profile.num_steps,
        step_time=Times(plan.prediction.step_time_s, replayed and replayed.step_time_s, profile.step_time_s),
        period_s=profile.period_s,
        rows=tuple(sorted(rows, key=lambda row: -row.largest_s)),
        operations=table,
        notes=(*profile.notes, *notes, *(replayed.notes if replayed else ())),
    )


def _row(
    place: Place,
    columns: tuple[Mapping[Place, Spent], Mapping[Place, Spent] | None, Mapping[Place, Spent]],
    sources: Mapping[Place, str],
) -> Row:
    before, between, after = (None if one is None else one.get(place, Spent()) for one in columns)
    assert before is not None
    assert after is not None
    phase, path, kind = place
    return Row(
        phase=phase,
        path=path,
        kind=kind,
        source=sources.get(place, ""),
        exposed=Times(before.exposed_s, between and between.exposed_s, after.exposed_s),
        total=Times(before.seconds, between and between.seconds, after.seconds),
    )


def _of_profile(profile: Profile, measured: Iterable[OperationRuns], places: Places) -> dict[Place, Spent]:
    found: dict[Place, Spent] = defaultdict(Spent)
    for one in measured:
        found[places.of(one.operation, one.kind)].add(one.exposed_s, one.seconds)
    idle = max(0.0, profile.step_time_s - sum(one.exposed_s for one in found.values()))
    found[IDLE].add(idle, idle)
    return found


def _of_replay(replayed: Replay, places: Places) -> dict[Place, Spent]:
    found: dict[Place, Spent] = defaultdict(Spent)
    for one in replayed.operations:
        kind = one.kind if one.is_transfer else ""
        found[places.of(one.name, kind)].add(one.exposed_s if kind else one.seconds, one.seconds)
    idle = max(0.0, replayed.step_time_s - sum(one.exposed_s for one in found.values()))
    found[IDLE].add(idle, idle)
    return found


def _sources(measured: Iterable[OperationRuns], places: Places) -> dict[Place, str]:
    """For each place, the source line with the most measured time."""
    seconds: dict[Place, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for one in measured:
        if line := places.source(one.operation):
            seconds[places.of(one.operation, one.kind)][line] += one.exposed_s
    return {place: max(lines, key=lambda line: lines[line]) for place, lines in seconds.items()}
