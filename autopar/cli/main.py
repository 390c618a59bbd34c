"""The command line: `autopar plan`, `explain`, `diff`, `export`, `verify`, `calibrate`, `generate`.

In: arguments. Out: text, tables or JSON on standard output, progress and errors on standard error,
and an exit code: 0 done, 1 a verification or a check that does not hold or a diagnosis with what nobody meant, 2 a mistake
of the user's, 130 interrupted. It parses and prints; every decision is the planner's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.cli.generate import run_generate
from autopar.cli.options import parse_hardware, parse_pin, parser_of
from autopar.cli.plan_inference import run_inference
from autopar.cli.plan_search import check_target, search_asked
from autopar.cli.target import load_target
from autopar.errors import AutoparError, BudgetError, PlanFileError, TargetError
from autopar.pipeline.plan import AnyPlan, PipelinePlan
from autopar.pipeline.plan_files import load_plan
from autopar.plans.plan import Plan
from autopar.report.explain import explain, explain_json, render, render_summary
from autopar.system.text_tables import new_console, plain_text
from autopar.system.units import without_controls

if TYPE_CHECKING:
    from rich.console import Console

    from autopar.cost.hardware_profile import HardwareProfile
    from autopar.ir.mesh import MeshShape


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments without the program's name; by default those of the process.

    Returns:
        The exit code. `--help`, `--version` and arguments that argparse refuses raise `SystemExit`.
    """
    options = parser_of(_COMMANDS).parse_args(argv)
    try:
        with _said_on_stderr():
            _check_devices(options)
            code = options.run(options)
        sys.stdout.flush()
    except AutoparError as error:
        print(without_controls("\n".join([f"autopar: {error}", *error.__notes__])), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("autopar: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code or 0


def _check_devices(options: argparse.Namespace) -> None:
    """Refuse several numbers of devices, but for a comparison of these."""
    devices = getattr(options, "devices", None)
    if isinstance(devices, tuple) and getattr(options, "compare", None) != "":
        numbers = ",".join(map(str, devices))
        raise TargetError(
            f"--devices {numbers} are several numbers of devices: give one, or compare them by `autopar plan TARGET --compare"
            " --hardware NAME,... --devices N,...`"
        )


# The commands.


def _run_plan(options: argparse.Namespace) -> int | None:
    check_target(options)
    if options.plan_for == "search":
        return _run_search(options)
    if options.plan_for == "inference":
        _check_output(options)
        return run_inference(options, _planning(options), _progress, _show)
    if options.compare == "":
        return _run_grid(options)
    if options.plot is not None:
        raise TargetError("--plot draws a comparison: add --compare --hardware NAME,... --devices N,..., or drop it")
    if options.compare is not None:
        return _run_compare(options)
    if len(options.target) > 1:
        named = ", ".join(options.target)
        raise TargetError(
            f"{named}: `autopar plan` plans one target; give one, or compare them with --compare NAME,..."
        )
    (options.target,) = options.target
    _check_output(options)
    plan = _plan_target(options)
    if options.output is not None:
        plan.save(options.output)
    if options.json:
        _print_json(plan)
        return None
    _show(lambda console: render_summary(plan, console))
    if options.output is None:
        print("\nThe plan was not saved: add -o FILE.")
    else:
        print(f"\nSaved to {options.output}; `autopar explain {options.output}` says why.")
    return None


def _run_search(options: argparse.Namespace) -> None:
    _check_output(options)
    case, more = search_asked(options), _planning(options)
    from autopar.vector_search.estimate.estimate import search_on_paper
    from autopar.vector_search.estimate.sizes import PARTS, PaperSearch
    from autopar.vector_search.estimate.tables import on_paper_json, render_on_paper

    with _progress() as report:
        told = search_on_paper(PaperSearch(**case), indexes=options.index or tuple(PARTS), progress=report, **more)
    if options.output is not None:
        if told.asked.plan is None:
            raise BudgetError(told.asked.refused)
        told.asked.plan.save(options.output)
    if options.json:
        print(json.dumps(on_paper_json(told), indent=2, allow_nan=False))
        return
    _show(lambda console: render_on_paper(told, console))
    if options.output is not None:
        print(f"\nThe plan of {told.case.batch:,} queries is saved to {options.output}; `autopar explain` says why.")


def _run_compare(options: argparse.Namespace) -> int:
    useless = [
        name
        for name in ("mesh", "hardware", "memory_budget", "pin", "output", "stages", "schedule")
        if getattr(options, name)
    ]
    if useless:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in useless)
        raise TargetError(
            f"--compare {options.compare} plans for many meshes, each on the memory of its hardware, and saves none:"
            f" drop {flags}, or drop --compare"
        )
    from autopar.comparison.by_hardware import MAX_DEVICES, compare, profiles_of
    from autopar.comparison.by_hardware_text import comparison_json, render_comparison

    profiles = profiles_of(options.compare.split(","))
    _use_cpu_only()
    more = _how_to_plan(options)
    if more.get("num_microbatches") == "auto":
        del more["num_microbatches"]  # as few as fit
    targets = {target: partial(load_target, target) for target in options.target}
    with _progress() as report:
        told = compare(targets, profiles, max_devices=options.devices or MAX_DEVICES, progress=report, **more)
    if options.json:
        print(json.dumps(comparison_json(told), indent=2, allow_nan=False))
    else:
        _show(lambda console: render_comparison(told, console))
    for one in told.compared:
        if one.error:
            print(f"autopar: {one.target}: {one.error}", file=sys.stderr)
    if told.interrupted:
        print("autopar: interrupted; above is what was found until then", file=sys.stderr)
        return 130
    return 2 if told.failed else 0


def _run_grid(options: argparse.Namespace) -> int:
    """Kinds by numbers of devices."""
    names = ("mesh", "memory_budget", "pin", "output", "stages", "schedule")
    useless = [f"--{name.replace('_', '-')}" for name in names if getattr(options, name)]
    if useless or not options.hardware or not options.devices or "=" in options.hardware:
        why = (
            f"drop {', '.join(useless)}"
            if useless
            else "give --hardware NAME,NAME,... and --devices N,N,..., or --compare NAME,..."
        )
        raise TargetError(f"--compare plans each kind of device and each number of them, and saves no plan: {why}")
    from autopar.comparison.by_hardware import profiles_of
    from autopar.comparison.by_hardware_and_count import compare_grid
    from autopar.comparison.grid_text import grid_json, plot_grid, render_grid
    from autopar.report.all_reduce_table import check_can_plot

    if options.plot is not None:
        check_can_plot(options.plot)
    profiles = profiles_of(options.hardware.split(","))
    _use_cpu_only()
    more = _how_to_plan(options)
    if more.get("num_microbatches") == "auto":
        del more["num_microbatches"]  # as few as fit
    targets = {target: partial(load_target, target) for target in options.target}
    devices = options.devices if isinstance(options.devices, tuple) else (options.devices,)
    with _progress() as report:
        told = compare_grid(targets, profiles, devices, progress=report, **more)
    if options.json:
        print(json.dumps(grid_json(told), indent=2, allow_nan=False))
    else:
        _show(lambda console: render_grid(told, console))
    if options.plot is not None:
        plot_grid(told, options.plot)
        print(f"Drawn into {options.plot}.", file=sys.stderr if options.json else sys.stdout)
    for one in told.grids:
        if one.error:
            print(f"autopar: {one.target}: {one.error}", file=sys.stderr)
    if told.interrupted:
        print("autopar: interrupted; above is what was found until then", file=sys.stderr)
        return 130
    return 2 if told.failed else 0


def _check_output(options: argparse.Namespace) -> None:
    """Refuse what cannot be written to now, rather than when all is done."""
    if options.output is not None:
        folder = Path(options.output).resolve().parent
        if Path(options.output).is_dir() or not os.access(folder, os.W_OK):
            raise PlanFileError(f"cannot write {options.output!r}: give -o a file in a folder that can be written to")


def _run_explain(options: argparse.Namespace) -> None:
    if options.collectives:
        _run_collectives(options)
        return
    if options.target is None or options.plot is not None:
        missing = "a TARGET or a saved plan" if options.target is None else "--collectives with --plot"
        raise TargetError(f"`autopar explain` needs {missing}; `autopar explain --collectives` prices all-reduces")
    if options.why is not None or options.of is not None:
        _run_why(options)
        return
    _check_html(options)
    plan = _load_saved(options) if _is_plan_file(options.target) else _plan_target(options)
    if options.timeline is not None:
        explain(plan).draw(options.timeline)
        print(f"drawn to {options.timeline}", file=sys.stderr)
    if options.stage is not None:
        plan = _stage(_staged(plan), options.stage)
    if options.html is not None:
        _write_html(plan, options.html, options.verification)
    if options.json:
        _print_json(plan)
    elif options.html is None:
        _show(lambda console: render(plan, console))


def _run_why(options: argparse.Namespace) -> None:
    """Plan again with a runner-up, and say what that costs."""
    saved = _is_plan_file(options.target)
    if options.why is None or saved != (options.of is not None):
        raise TargetError("--why PATH is of a TARGET, or of a saved plan with --of TARGET, which it was made for")
    if options.stages not in (None, 1) or options.timeline is not None or options.stage is not None:
        raise TargetError("--why is of a step that is one program: drop --stages, --stage and --timeline")
    if saved:
        from autopar.comparison.plan_check import options_of

        plan = _load_saved(options)
        if isinstance(plan, PipelinePlan):
            raise TargetError("--why is of a plan of one program, and this one is of stages")
        _use_cpu_only()
        more = options_of(plan)
    else:
        more = {
            name: value for name, value in _planning(options).items() if name not in ("cache", "stages", "schedule")
        }
    step, args = load_target(options.of or options.target)
    from autopar.comparison.why import why

    told = why(options.why, step, *args, **more)
    print(json.dumps(told.to_json(), indent=2, allow_nan=False) if options.json else told)


def _check_html(options: argparse.Namespace) -> None:
    """Refuse what cannot be written to now, rather than when all is done."""
    if options.html is not None:
        from autopar.report.html.document import check_can_write

        check_can_write(options.html)
    elif getattr(options, "verification", None) is not None:
        raise TargetError(f"--verification {options.verification!r} is shown in a page: add --html FILE")


def _write_html(plan: AnyPlan, path: str, verification: Any = None) -> None:
    from autopar.report.html.document import write_report

    write_report(plan, path, verification=verification)
    print(f"The page is written to {path}.", file=sys.stderr)


def _staged(plan: AnyPlan) -> PipelinePlan:
    if isinstance(plan, PipelinePlan):
        return plan
    raise TargetError(
        f"the plan of `{plan.program.name}` is of one program, on mesh {plan.mesh.describe()}: --stage is of plans of"
        " stages, which `autopar plan --stages` makes"
    )


def _stage(plan: PipelinePlan, number: int) -> Plan:
    if 0 <= number < len(plan.stages):
        return plan.stages[number].plan
    raise TargetError(f"there is no stage {number}: the plan has stages 0 to {len(plan.stages) - 1}")


def _run_collectives(options: argparse.Namespace) -> None:
    from autopar.report.all_reduce_table import check_can_plot, plot_all_reduce, price_all_reduce, render_all_reduce

    of_programs = ("target", "memory_budget", "no_rematerialize", "dims_as_written", "pin")
    of_programs = (*of_programs, "num_microbatches", "per_microbatch_statistics", "time_limit", "stages", "schedule")
    of_programs = (*of_programs, "html", "timeline")
    useless = [name for name in of_programs if getattr(options, name)]
    if useless:
        flags = ", ".join("TARGET" if name == "target" else f"--{name.replace('_', '-')}" for name in useless)
        raise TargetError(f"--collectives is about a mesh and a hardware, not about a program: drop {flags}")
    if options.plot is not None:
        check_can_plot(options.plot)
    mesh, profile = _mesh_and_hardware(options)
    if options.plot is not None:
        plot_all_reduce(mesh, profile, options.plot)
    if options.json:
        axes = [asdict(axis) for axis in price_all_reduce(mesh, profile)]
        print(json.dumps({"mesh": mesh.describe(), "hardware": profile.name, "axes": axes}, indent=2))
    else:
        _show(lambda console: render_all_reduce(mesh, profile, console))
    if options.plot is not None:
        print(f"Drawn into {options.plot}.", file=sys.stderr if options.json else sys.stdout)


def _mesh_and_hardware(options: argparse.Namespace) -> tuple[MeshShape, HardwareProfile]:
    """What was asked for; what was not, as it is here."""
    from autopar.cost import hardware_profile as hardware
    from autopar.ir.mesh import parse_mesh

    if options.hardware and (options.devices or options.mesh):
        devices = []
    else:
        import jax

        devices = jax.devices()
    mesh = parse_mesh(options.mesh or str(options.devices or len(devices)))
    return mesh, hardware.load(options.hardware or hardware.detect(devices[0].device_kind, devices[0].platform))


def _run_diff(options: argparse.Namespace) -> int | None:
    if options.check:
        return _run_check(options)
    useless = [f"--{name}" for name in ("memory", "time", "hardware") if getattr(options, name) is not None]
    if useless:
        raise TargetError(f"{', '.join(useless)}: for new code held against a plan: add --check, or drop it")
    from autopar.report.diff import diff
    from autopar.report.diff_text import render_diff

    told = diff(*(load_plan(_plan_within(path)) for path in (options.before, options.after)))
    if options.json:
        print(json.dumps(told.to_json(), indent=2, allow_nan=False))
    else:
        _show(lambda console: render_diff(told, console))
    return None


def _run_check(options: argparse.Namespace) -> int:
    """Exit code 1 where new code is not as planned."""
    saved = load_plan(_plan_within(options.before))
    if _is_plan_file(options.after):
        raise TargetError(
            f"--check holds code against a plan, and {options.after!r} is a plan: give a TARGET, or drop --check"
        )
    _use_cpu_only()
    step, args = load_target(options.after)
    from autopar.comparison.plan_check import Allowed, check_plan

    more: dict[str, Any] = {} if options.memory is None else {"memory": Allowed(*options.memory)}
    more |= {} if options.time is None else {"time": Allowed(*options.time)}
    more |= {"hardware": options.hardware} if options.hardware else {}
    with _progress() as report:
        told = check_plan(saved, step, *args, progress=report, **more)
    print(json.dumps(told.to_json(), indent=2, allow_nan=False) if options.json else told)
    return 0 if told.holds else 1


def _plan_within(path: str) -> str:
    """A plan file; of a checkpoint's folder, the plan that its state was laid out by."""
    within = Path(path) / "plan" / "metadata"
    return str(within) if within.is_file() else path


def _run_export(options: argparse.Namespace) -> None:
    _check_output(options)
    plan = load_plan(options.plan)
    _use_cpu_only()
    step, args = load_target(options.target)
    from autopar.code_export.export import export
    from autopar.plans.json_codec import write_text

    text = export(plan, step, *args)
    if options.output is None:
        print(text, end="")
        return
    write_text(text, options.output)
    print(f"Saved to {options.output}; it needs JAX alone.")


def _run_calibrate(options: argparse.Namespace) -> None:
    from autopar.calibration.calibrate import calibrate
    from autopar.calibration.calibration import describe

    with _progress() as report:
        found, profile, samples = calibrate(options.output, seconds=options.seconds, base=options.base, progress=report)
    print(describe(found))
    print(f"\nSaved to {profile}, its samples to {samples}; use it as --hardware {profile}.")


def _run_verify(options: argparse.Namespace) -> int:
    _check_output(options)
    _check_html(options)
    if options.as_is or options.no_check:
        return _run_diagnose(options)
    if options.plan is not None:
        _refuse_planning(options, options.plan, "or leave out --plan", allowed=("hardware",))
    from autopar.xla_compiler.compiler import Compiler

    # It gets ready while the target is loaded; and is told nothing of the CPU, for it may use GPUs.
    with Compiler() as compiler:
        if options.plan is not None:
            more: dict[str, Any] = {"plan": load_plan(options.plan)}
            more |= {"hardware": options.hardware} if options.hardware else {}
            _use_cpu_only()
        else:
            more = _planning(options)
        step, args = load_target(options.target)
        from autopar.verification.verification import render_verification
        from autopar.verification.verify import verify
        from autopar.verification.verify_stages import StagesVerification, render_stages_verification

        more |= {"hosts": options.hosts, "run": options.run_step, "compiler": compiler}
        with _progress() as report:
            told = verify(step, *args, progress=report, **more)
    if options.output is not None:
        told.plan.save(options.output)
    if options.html is not None:
        _write_html(told.plan, options.html, told)
    if options.json:
        print(json.dumps(told.to_json(), indent=2, allow_nan=False))
        return 0 if told.holds else 1
    if isinstance(told, StagesVerification):
        _show(lambda console: render_stages_verification(told, console))
    else:
        _show(lambda console: render_verification(told, console))
    if options.output is not None:
        print(f"\nThe plan is saved to {options.output}.")
    return 0 if told.holds else 1


def _run_diagnose(options: argparse.Namespace) -> int:
    """Exit code 1 where something was sent that nobody meant."""
    if not options.as_is:
        raise TargetError("--no-check is about the changes to a step sharded by hand: add --as-is, or drop it")
    no_use = (
        "plan",
        "html",
        "run_step",
        "no_rematerialize",
        "dims_as_written",
        "pin",
        "num_microbatches",
        "per_microbatch_statistics",
    )
    useless = [name for name in no_use if getattr(options, name)]
    if useless:
        flags = ", ".join(f"--{name.removesuffix('_step').replace('_', '-')}" for name in useless)
        raise TargetError(f"--as-is takes the shardings that the step has, and runs nothing: drop {flags}")
    from autopar.xla_compiler.compiler import Compiler

    with Compiler() as compiler:
        if options.hardware:
            _use_cpu_only()
        step, args = load_target(options.target)
        from autopar.diagnosis.diagnose import diagnose
        from autopar.diagnosis.diagnosis import render_diagnosis

        more: dict[str, Any] = {} if options.time_limit is None else {"time_limit_s": options.time_limit}
        more |= {"mesh": options.mesh, "num_devices": options.devices, "hardware": options.hardware}
        more |= {"memory_budget_bytes": options.memory_budget, "hosts": options.hosts, "check": not options.no_check}
        with _progress() as report:
            told = diagnose(step, *args, compiler=compiler, progress=report, **more)
    if options.output is not None:
        told.changed.save(options.output)
    if options.json:
        print(json.dumps(told.to_json(), indent=2, allow_nan=False))
    else:
        _show(lambda console: render_diagnosis(told, console))
        if options.output is not None:
            print(f"\nThe plan with all changes is saved to {options.output}.")
    return 1 if told.unmeant else 0


def _is_plan_file(target: str) -> bool:
    return target.endswith(".json") or (Path(target).is_file() and not target.endswith(".py"))


def _load_saved(options: argparse.Namespace) -> AnyPlan:
    _refuse_planning(options, options.target, "or explain a TARGET")
    return load_plan(options.target)


def _refuse_planning(options: argparse.Namespace, saved: str, else_do: str, allowed: Sequence[str] = ()) -> None:
    """A saved plan takes no options of planning."""
    names = ("devices", "mesh", "hardware", "memory_budget", "no_rematerialize", "dims_as_written", "pin")
    names = (*names, "num_microbatches", "per_microbatch_statistics", "time_limit", "stages", "schedule")
    given = [name for name in names if getattr(options, name) not in (None, [], False) and name not in allowed]
    if given:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise TargetError(f"{saved!r} is a saved plan, already decided: drop {flags}, {else_do}")


def _print_json(plan: AnyPlan) -> None:
    print(json.dumps(explain_json(plan), indent=2, allow_nan=False))


def _show(draw: Callable[[Console], None]) -> None:
    """Tables in a terminal, as wide as it is; plain text of a fixed width where it is piped."""
    console = new_console(highlight=False)
    if console.is_terminal:
        draw(console)
    else:
        print(plain_text(draw))


def _plan_target(options: argparse.Namespace) -> AnyPlan:
    more = _planning(options)
    step, args = load_target(options.target)
    from autopar.api.make_plan import plan

    with _progress() as report:
        return plan(step, *args, progress=report, **more)


def _planning(options: argparse.Namespace) -> dict[str, Any]:
    """What the options say to the planner."""
    if options.hardware and (options.devices or options.mesh or "=" in options.hardware):
        _use_cpu_only()
    pins = dict(parse_pin(text) for text in options.pin)
    return _how_to_plan(options) | {
        "mesh": options.mesh,
        "num_devices": options.devices,
        "hardware": parse_hardware(options.hardware),
        "memory_budget_bytes": options.memory_budget,
        "pin": pins or None,
        "cache": options.cache or not options.no_cache,
    }


def _how_to_plan(options: argparse.Namespace) -> dict[str, Any]:
    """The options that hold on any mesh and hardware."""
    more: dict[str, Any] = {} if options.time_limit is None else {"time_limit_s": options.time_limit}
    if options.num_microbatches is not None:
        more["num_microbatches"] = options.num_microbatches
    if options.per_microbatch_statistics:
        more["per_microbatch_statistics"] = True
    for name in ("stages", "schedule"):
        if getattr(options, name) is not None:
            more[name] = getattr(options, name)
    if options.dims_as_written:
        more["dims_as_written"] = True
    return more | ({"rematerialize": False} if options.no_rematerialize else {})


def _use_cpu_only() -> None:
    """Keep JAX off the accelerators: everything about the target machine has been said.

    Where something was left to be read off this machine (its devices, their kind), JAX may look.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if "jax" in sys.modules:  # it has read the environment already
        jax = sys.modules["jax"]
        if not jax.config.jax_platforms:
            jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])


@contextlib.contextmanager
def _said_on_stderr() -> Iterator[None]:
    """What the package has to say beside its result, such as that a plan was kept from an earlier start."""
    handler, logger = logging.StreamHandler(sys.stderr), logging.getLogger("autopar")
    handler.setFormatter(logging.Formatter("autopar: %(message)s"))
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False  # or Python says a warning twice
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str, float], None] | None]:
    """A bar on standard error while planning, gone afterwards; nothing where it is piped."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("start", total=1.0)
        yield lambda stage, fraction: bar.update(task, description=stage, completed=fraction)


_COMMANDS: dict[str, Callable[[argparse.Namespace], int | None]] = {
    "plan": _run_plan,
    "explain": _run_explain,
    "diff": _run_diff,
    "export": _run_export,
    "calibrate": _run_calibrate,
    "verify": _run_verify,
    "generate": lambda options: run_generate(options, _progress),
}
