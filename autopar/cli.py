"""The command line: `autopar plan`, `explain`, `diff`, `verify`, `calibrate`.

In: arguments. Out: text, tables or JSON on standard output, progress and errors on standard error,
and an exit code: 0 done, 1 a verification that does not hold or a diagnosis with what nobody meant, 2 a mistake of the
user's, 130 interrupted. It parses and prints; every decision is the planner's.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.errors import AutoparError, PinError, PlanFileError, TargetError
from autopar.explain import explain_json, plain_text, render, render_summary
from autopar.plan import Plan
from autopar.saved_plans import load_plan
from autopar.target import load_target
from autopar.version import __version__

if TYPE_CHECKING:
    from jax.sharding import PartitionSpec
    from rich.console import Console

    from autopar.cost.hardware import HardwareProfile
    from autopar.mesh import MeshShape

_DESCRIPTION = "Plan how to split a JAX train step over many devices, and say why. No device of the target is needed."
_EXAMPLES = """\
examples:
  autopar plan train.py:make --mesh 2x4 --hardware h100-sxm -o gpt.plan.json
  autopar plan my_package.train:make --devices 8 --memory-budget 40GB -o gpt.plan.json
  autopar plan train.py:make --devices 8 --pin 'state/params/*/kernel=P(None, "model")'
  autopar plan small.py:make large.py:make --compare v100-sxm-16,a100-sxm-40,h100-sxm
  autopar explain gpt.plan.json
  autopar explain train.py:make --devices 8 --json
  autopar diff old.plan.json gpt.plan.json
  autopar explain --collectives --mesh 2x8 --hardware h100-sxm --plot all-reduce.png
  autopar calibrate -o mine.toml
  autopar verify train.py:make --mesh 8 --hardware h100-sxm
  autopar verify train.py:make --plan gpt.plan.json
  autopar verify train.py:make_sharded --as-is --hardware h100-sxm

TARGET is path/file.py:function or package.module:function. The function takes nothing and returns
(step, args): the train step and the tuple of its arguments, arrays or jax.ShapeDtypeStructs.
"""
_UNITS = {"": 1, "B": 1} | {f"{p}B": 1000**n for n, p in enumerate("KMGT", 1)}
_UNITS |= {f"{p}IB": 1024**n for n, p in enumerate("KMGT", 1)}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments without the program's name; by default those of the process.

    Returns:
        The exit code. `--help`, `--version` and arguments that argparse refuses raise `SystemExit`.
    """
    options = _parser().parse_args(argv)
    try:
        with _said_on_stderr():
            code = options.run(options)
        sys.stdout.flush()
    except AutoparError as error:
        print(f"autopar: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("autopar: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code or 0


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("autopar", description=_DESCRIPTION, epilog=_EXAMPLES, formatter_class=raw)
    parser.add_argument("--version", action="version", version=f"autopar {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    shared: dict[str, Any] = {"epilog": _EXAMPLES, "formatter_class": raw, "parents": [_planning_options()]}
    about = "plan a step, print a summary, and save the plan"
    plan = commands.add_parser("plan", help=about, description=about, **shared)
    about = "file.py:function or package.module:function; several with --compare"
    plan.add_argument("target", nargs="+", metavar="TARGET", help=about)
    plan.add_argument("-o", "--output", metavar="FILE", help="where the plan goes, e.g. gpt.plan.json")
    about = "instead of a plan: on which of these hardware profiles a step fits, on one device and on how many at the"
    about += " least, of at most --devices (default: 1024)"
    plan.add_argument("--compare", metavar="NAME,NAME...", help=about)
    plan.set_defaults(run=_run_plan)
    about = "say what a plan does and why: of a saved plan, or of a target planned for this"
    explain = commands.add_parser("explain", help=about, description=about, **shared)
    about = "a target as for `plan`, or a saved plan"
    explain.add_argument("target", metavar="TARGET|PLAN.json", nargs="?", help=about)
    about = "instead of a plan: what an all-reduce costs by each algorithm, over each axis of the mesh"
    explain.add_argument("--collectives", action="store_true", help=about)
    explain.add_argument("--plot", metavar="FILE.png", help="with --collectives: draw it too (needs `autopar[plot]`)")
    explain.set_defaults(run=_run_explain)
    about = "two saved plans beside each other: what is split otherwise, and what each device must fetch"
    diff = commands.add_parser("diff", help=about, description=about)
    diff.add_argument("before", metavar="A.json", help="a saved plan, or the folder of a checkpoint (CHECKPOINTS/100)")
    diff.add_argument("after", metavar="B.json", help="another")
    diff.add_argument("--json", action="store_true", help="print JSON for programs: all rows, plain numbers")
    diff.set_defaults(run=_run_diff)
    about = "measure the devices of this machine, and write a hardware profile that --hardware takes"
    calibrate = commands.add_parser("calibrate", help=about, description=about)
    where = "the profile, .toml; its samples go beside it as .json (default: calibrated/DEVICE-jaxVERSION.toml)"
    calibrate.add_argument("-o", "--output", metavar="FILE", help=where)
    calibrate.add_argument("--seconds", type=_seconds, default=150.0, metavar="S", help="how long (default: 150)")
    about = "profile for what cannot be measured here, e.g. the network (default: that of the devices)"
    calibrate.add_argument("--base", metavar="NAME", help=about)
    calibrate.set_defaults(run=_run_calibrate)
    about = "hold a plan against the program that XLA compiles from it, for GPUs that need not exist"
    verify = commands.add_parser("verify", help=about, description=about, **shared)
    verify.add_argument("target", metavar="TARGET", help="file.py:function or package.module:function")
    verify.add_argument("--plan", metavar="PLAN.json", help="verify this saved plan of the target; do not plan")
    verify.add_argument(
        "--hosts", type=_count, metavar="N", help="spread the GPUs over N hosts (default: as few as can be)"
    )
    about = "run the step too, and measure it; needs the GPUs themselves on this machine"
    verify.add_argument("--run", dest="run_step", action="store_true", help=about)
    about = "instead of a plan: a TARGET whose step is jitted with shardings given by hand; what it costs, which collectives"
    about += " nobody meant, and the few changes that help most"
    verify.add_argument("--as-is", action="store_true", help=about)
    about = "with --as-is: predict the changes, and do not compile them"
    verify.add_argument("--no-check", action="store_true", help=about)
    about = "save the verified plan, which is a tighter one where the first took too much memory"
    verify.add_argument("-o", "--output", metavar="FILE", help=about)
    verify.set_defaults(run=_run_verify)
    return parser


def _planning_options() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(add_help=False)
    group = options.add_argument_group("planning")
    where = group.add_mutually_exclusive_group()
    about = "plan every mesh of at most two axes, keep the best (default: as many as here)"
    where.add_argument("--devices", type=_count, metavar="N", help=about)
    where.add_argument("--mesh", metavar="MESH", help="plan this mesh alone: 8, 2x4 or data=2,model=4")
    group.add_argument("--hardware", metavar="NAME", help="hardware profile, e.g. h100-sxm (default: what is here)")
    about = "per device: 40GB, 512MiB or bytes (default: what the device has)"
    group.add_argument("--memory-budget", type=_size, metavar="SIZE", help=about)
    about = "do not compute forward values again in the backward pass, even where nothing fits otherwise"
    group.add_argument("--no-rematerialize", action="store_true", help=about)
    about = "fix a sharding; PATH may be a glob; may be repeated"
    group.add_argument("--pin", action="append", default=[], metavar="PATH=SPEC", help=about)
    about = 'split the batch over time into N parts, whose gradients are summed; "auto": as is fastest and fits'
    group.add_argument("--num-microbatches", type=_microbatches, metavar="N", help=about)
    about = "allow it of a step whose batch feeds back (batch normalisation): each part has its own statistics"
    group.add_argument("--per-microbatch-statistics", action="store_true", default=None, help=about)
    group.add_argument("--time-limit", type=_seconds, metavar="S", help="seconds for the solver, per problem")
    keep = group.add_mutually_exclusive_group()
    about = "folder in which plans are kept, so that none is made twice (default: the user's cache folder)"
    keep.add_argument("--cache", metavar="FOLDER", help=about)
    keep.add_argument("--no-cache", action="store_true", help="plan anew, and keep nothing")
    options.add_argument("--json", action="store_true", help="print JSON for programs: all rows, plain numbers")
    return options


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of devices: write 1 or more")
    return int(text)


def _microbatches(text: str) -> int | str:
    if text == "auto":
        return text
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of microbatches: write 1 or more, or auto")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no time: write seconds above 0")
    return seconds


def _size(text: str) -> float:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parse_size(text: str) -> float:
    """Bytes of `40GB` (SI), `512MiB` (binary) or a plain number of bytes.

    Raises:
        ValueError: where it is none of these, or not above zero.

    >>> parse_size("40GB"), parse_size("1.5 KiB"), parse_size("1e9")
    (40000000000.0, 1536.0, 1000000000.0)
    """
    match = re.fullmatch(r"\s*(\d+\.?\d*(?:[eE]\+?\d+)?|\.\d+)\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or float(match[1]) == 0:
        raise ValueError(f"{text!r} is no size: write e.g. 40GB (10^9 bytes), 40GiB (2^30 bytes) or a number of bytes")
    return float(match[1]) * unit


def parse_pin(text: str) -> tuple[str, PartitionSpec]:
    """Read `PATH=P(...)`; the spec is parsed, never run.

    Raises:
        PinError: where it cannot be read.

    >>> parse_pin("state/params/*/kernel=P(None, ('data', 'model'))")
    ('state/params/*/kernel', P(None, ('data', 'model')))
    """
    from jax.sharding import PartitionSpec

    path, _, spec = text.partition("=")
    try:
        call = ast.parse(spec.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or call.keywords or ast.unparse(call.func) not in ("P", "PartitionSpec"):
            raise ValueError
        entries = [ast.literal_eval(entry) for entry in call.args]
        if not path.strip() or not all(map(_is_entry, entries)):
            raise ValueError
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise PinError(
            f"cannot read the pin {text!r}: write PATH=P(...), one entry per dim, each None, an axis name or a tuple of"
            " names, e.g. --pin 'state/params/*/kernel=P(None, \"model\")'"
        ) from None
    return path.strip(), PartitionSpec(*entries)


def _is_entry(entry: Any) -> bool:
    names = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
    return all(isinstance(name, str) for name in names)


# The commands.


def _run_plan(options: argparse.Namespace) -> int | None:
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


def _run_compare(options: argparse.Namespace) -> int:
    useless = [name for name in ("mesh", "hardware", "memory_budget", "pin", "output") if getattr(options, name)]
    if useless:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in useless)
        raise TargetError(
            f"--compare {options.compare} plans for many meshes, each on the memory of its hardware, and saves none:"
            f" drop {flags}, or drop --compare"
        )
    from autopar.compare_hardware import MAX_DEVICES, compare, profiles_of
    from autopar.explain_comparison import comparison_json, render_comparison

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
    plan = _load_saved(options) if _is_plan_file(options.target) else _plan_target(options)
    if options.json:
        _print_json(plan)
    else:
        _show(lambda console: render(plan, console))


def _run_collectives(options: argparse.Namespace) -> None:
    from autopar.explain_collectives import check_can_plot, plot_all_reduce, price_all_reduce, render_all_reduce

    of_programs = ("target", "memory_budget", "no_rematerialize", "pin")
    of_programs = (*of_programs, "num_microbatches", "per_microbatch_statistics", "time_limit")
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
    from autopar.cost import hardware
    from autopar.mesh import parse_mesh

    if options.hardware and (options.devices or options.mesh):
        devices = []
    else:
        import jax

        devices = jax.devices()
    mesh = parse_mesh(options.mesh or str(options.devices or len(devices)))
    return mesh, hardware.load(options.hardware or hardware.detect(devices[0].device_kind, devices[0].platform))


def _run_diff(options: argparse.Namespace) -> None:
    from autopar.diff import diff
    from autopar.explain_diff import render_diff

    told = diff(*(load_plan(_plan_within(path)) for path in (options.before, options.after)))
    if options.json:
        print(json.dumps(told.to_json(), indent=2, allow_nan=False))
    else:
        _show(lambda console: render_diff(told, console))


def _plan_within(path: str) -> str:
    """A plan file; of a checkpoint's folder, the plan that its state was laid out by."""
    within = Path(path) / "plan" / "metadata"
    return str(within) if within.is_file() else path


def _run_calibrate(options: argparse.Namespace) -> None:
    from autopar.calibrate import calibrate
    from autopar.calibration import describe

    with _progress() as report:
        found, profile, samples = calibrate(options.output, seconds=options.seconds, base=options.base, progress=report)
    print(describe(found))
    print(f"\nSaved to {profile}, its samples to {samples}; use it as --hardware {profile}.")


def _run_verify(options: argparse.Namespace) -> int:
    _check_output(options)
    if options.as_is or options.no_check:
        return _run_diagnose(options)
    if options.plan is not None:
        _refuse_planning(options, options.plan, "or leave out --plan", allowed=("hardware",))
    from autopar.compiler import Compiler

    # It gets ready while the target is loaded; and is told nothing of the CPU, for it may use GPUs.
    with Compiler() as compiler:
        if options.plan is not None:
            more: dict[str, Any] = {"plan": load_plan(options.plan)}
            more |= {"hardware": options.hardware} if options.hardware else {}
            _use_cpu_only()
        else:
            more = _planning(options)
        step, args = load_target(options.target)
        from autopar.verification import render_verification
        from autopar.verify import verify

        more |= {"hosts": options.hosts, "run": options.run_step, "compiler": compiler}
        with _progress() as report:
            told = verify(step, *args, progress=report, **more)
    if options.output is not None:
        told.plan.save(options.output)
    if options.json:
        print(json.dumps(told.to_json(), indent=2, allow_nan=False))
        return 0 if told.holds else 1
    _show(lambda console: render_verification(told, console))
    if options.output is not None:
        print(f"\nThe plan is saved to {options.output}.")
    return 0 if told.holds else 1


def _run_diagnose(options: argparse.Namespace) -> int:
    """Exit code 1 where something was sent that nobody meant."""
    if not options.as_is:
        raise TargetError("--no-check is about the changes to a step sharded by hand: add --as-is, or drop it")
    no_use = ("plan", "run_step", "no_rematerialize", "pin", "num_microbatches", "per_microbatch_statistics")
    useless = [name for name in no_use if getattr(options, name)]
    if useless:
        flags = ", ".join(f"--{name.removesuffix('_step').replace('_', '-')}" for name in useless)
        raise TargetError(f"--as-is takes the shardings that the step has, and runs nothing: drop {flags}")
    from autopar.compiler import Compiler

    with Compiler() as compiler:
        if options.hardware:
            _use_cpu_only()
        step, args = load_target(options.target)
        from autopar.diagnose import diagnose
        from autopar.diagnosis import render_diagnosis

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


def _load_saved(options: argparse.Namespace) -> Plan:
    _refuse_planning(options, options.target, "or explain a TARGET")
    return load_plan(options.target)


def _refuse_planning(options: argparse.Namespace, saved: str, else_do: str, allowed: Sequence[str] = ()) -> None:
    """A saved plan takes no options of planning."""
    names = ("devices", "mesh", "hardware", "memory_budget", "no_rematerialize", "pin")
    names = (*names, "num_microbatches", "per_microbatch_statistics", "time_limit")
    given = [name for name in names if getattr(options, name) not in (None, [], False) and name not in allowed]
    if given:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise TargetError(f"{saved!r} is a saved plan, already decided: drop {flags}, {else_do}")


def _print_json(plan: Plan) -> None:
    print(json.dumps(explain_json(plan), indent=2, allow_nan=False))


def _show(draw: Callable[[Console], None]) -> None:
    """Tables in a terminal, as wide as it is; plain text of a fixed width where it is piped."""
    from rich.console import Console

    console = Console(highlight=False)
    if console.is_terminal:
        draw(console)
    else:
        print(plain_text(draw))


def _plan_target(options: argparse.Namespace) -> Plan:
    more = _planning(options)
    step, args = load_target(options.target)
    from autopar.plan_step import plan

    with _progress() as report:
        return plan(step, *args, progress=report, **more)


def _planning(options: argparse.Namespace) -> dict[str, Any]:
    """What the options say to the planner."""
    if options.hardware and (options.devices or options.mesh):
        _use_cpu_only()
    pins = dict(parse_pin(text) for text in options.pin)
    return _how_to_plan(options) | {
        "mesh": options.mesh,
        "num_devices": options.devices,
        "hardware": options.hardware,
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
