"""What the command line takes: its commands, their options, and how values are written.

In: texts. Out: `parser_of(commands)`, an `argparse` parser; sizes, shardings and hardware as the planner takes them.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from autopar.cli.generate import add_generate_command
from autopar.cli.plan_inference import add_inference_options
from autopar.cli.plan_search import add_search_options, count
from autopar.errors import PinError, TargetError
from autopar.pipeline.schedule.table import SCHEDULES
from autopar.system.units import parse_size
from autopar.version import __version__

if TYPE_CHECKING:
    from jax.sharding import PartitionSpec

_DESCRIPTION = "Plan how to split a JAX train step over many devices, and say why. No device of the target is needed."
_EXAMPLES = """\
examples:
  autopar plan train.py:make --mesh 2x4 --hardware h100-sxm -o gpt.plan.json
  autopar plan my_package.train:make --devices 8 --memory-budget 40GB -o gpt.plan.json
  autopar plan train.py:make --devices 8 --pin 'state/params/*/kernel=P(None, "model")'
  autopar plan small.py:make large.py:make --compare v100-sxm-16,a100-sxm-40,h100-sxm
  autopar plan train.py:make --compare --hardware h100-sxm,h200,b200 --devices 4,8,16,64 --plot gpus.svg
  autopar plan --for search --corpus 1.4e9x100:int8 --devices 8 --hardware h200
  autopar plan --for inference Llama-3.1-8B --devices 8 --hardware h100-sxm --batch 64
  autopar explain gpt.plan.json
  autopar explain gpt.plan.json --html report.html
  autopar explain train.py:make --devices 8 --json
  autopar explain gpt.plan.json --why 'state/params/*/qkv/kernel' --of train.py:make
  autopar diff old.plan.json gpt.plan.json
  autopar diff gpt.plan.json train.py:make --check --memory 5%
  autopar export gpt.plan.json train.py:make -o sharded.py
  autopar explain --collectives --mesh 2x8 --hardware h100-sxm --plot all-reduce.png
  autopar calibrate -o mine.toml
  autopar verify train.py:make --mesh 8 --hardware h100-sxm
  autopar verify train.py:make --plan gpt.plan.json
  autopar verify train.py:make_sharded --as-is --hardware h100-sxm
  autopar generate Qwen3-0.6B --prompt 'Once upon a time' --max-tokens 100

TARGET is path/file.py:function or package.module:function. The function takes nothing and returns
(step, args): the train step and the tuple of its arguments, arrays or jax.ShapeDtypeStructs.
"""


def parser_of(commands: Mapping[str, Callable[[argparse.Namespace], Any]]) -> argparse.ArgumentParser:
    """The parser of the command line.

    Args:
        commands: by name, what runs each: it is `run` of what is parsed.
    """
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("autopar", description=_DESCRIPTION, epilog=_EXAMPLES, formatter_class=raw)
    parser.add_argument("--version", action="version", version=f"autopar {__version__}")
    added = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    shared: dict[str, Any] = {"epilog": _EXAMPLES, "formatter_class": raw, "parents": [_planning_options()]}
    about = "plan a step, print a summary, and save the plan"
    plan = added.add_parser("plan", help=about, description=about, **shared)
    about = "file.py:function or package.module:function; several with --compare"
    plan.add_argument("target", nargs="*", metavar="TARGET", help=about)
    plan.add_argument("-o", "--output", metavar="FILE", help="where the plan goes, e.g. gpt.plan.json")
    about = "instead of a plan: on which of these hardware profiles a step fits, on one device and on how many at the"
    about += " least, of at most --devices (default: 1024)"
    about += (
        "; without names: on each kind of --hardware NAME,NAME,... and each of --devices N,N,...: time, memory, price"
    )
    plan.add_argument("--compare", metavar="NAME,NAME...", nargs="?", const="", help=about)
    plan.add_argument(
        "--plot", metavar="FILE", help="with --compare over --devices: draw it too (needs `autopar[plot]`)"
    )
    add_search_options(plan, _size)
    add_inference_options(plan, count, _seconds)
    plan.set_defaults(run=commands["plan"])
    about = "say what a plan does and why: of a saved plan, or of a target planned for this"
    explain = added.add_parser("explain", help=about, description=about, **shared)
    about = "a target as for `plan`, or a saved plan"
    explain.add_argument("target", metavar="TARGET|PLAN.json", nargs="?", help=about)
    about = "instead of a plan: what an all-reduce costs by each algorithm, over each axis of the mesh"
    explain.add_argument("--collectives", action="store_true", help=about)
    explain.add_argument("--plot", metavar="FILE.png", help="with --collectives: draw it too (needs `autopar[plot]`)")
    about = "what the step would lose by the runner-up: of the array or the module at PATH, planned again with that; PATH may be a glob"
    explain.add_argument("--why", metavar="PATH", help=about)
    about = "with --why of a saved plan: the step that it is of"
    explain.add_argument("--of", metavar="TARGET", help=about)
    about = "of a plan of stages: explain the plan of stage N alone"
    explain.add_argument("--stage", type=int, metavar="N", help=about)
    about = "write a step for Perfetto, where the file ends in .json; of a plan of stages, else draw it as SVG"
    explain.add_argument("--timeline", metavar="FILE", help=about)
    about = "write it all as one page for a browser, which needs no network: time, memory, the model with its shards,"
    about += " decisions"
    explain.add_argument("--html", metavar="FILE", help=about)
    about = "with --html: what `autopar verify --json` wrote of this plan, to be shown beside the predictions"
    explain.add_argument("--verification", metavar="FILE", help=about)
    explain.set_defaults(run=commands["explain"])
    about = "two saved plans beside each other: what is split otherwise, and what each device must fetch"
    diff = added.add_parser("diff", help=about, description=about)
    diff.add_argument("before", metavar="A.json", help="a saved plan, or the folder of a checkpoint (CHECKPOINTS/100)")
    diff.add_argument("after", metavar="B.json|TARGET", help="another; with --check, the step as it is now")
    about = "for CI: plan TARGET as A.json was, and fail (exit code 1) where it sends a collective more, or takes more memory"
    diff.add_argument("--check", action="store_true", help=about)
    about = "with --check: how much more it may take, 5%% of what was planned or 200MB (default: 5%%)"
    diff.add_argument("--memory", type=_more_memory, metavar="MORE", help=about)
    about = "with --check: how much longer a step may take, 5%% or 2ms (default: not held)"
    diff.add_argument("--time", type=_more_time, metavar="MORE", help=about)
    about = "with --check: the hardware profile, where it is a file (default: by the name that is in A.json)"
    diff.add_argument("--hardware", metavar="NAME", help=about)
    diff.add_argument("--json", action="store_true", help="print JSON for programs: all rows, plain numbers")
    diff.set_defaults(run=commands["diff"])
    about = "write a plan as plain JAX: a Python file that shards the step and needs no autopar"
    export = added.add_parser("export", help=about, description=about)
    export.add_argument("plan", metavar="PLAN.json", help="a saved plan")
    export.add_argument("target", metavar="TARGET", help="what it was made for")
    export.add_argument("-o", "--output", metavar="FILE.py", help="where it goes (default: standard output)")
    export.set_defaults(run=commands["export"])
    about = "measure the devices of this machine, and write a hardware profile that --hardware takes"
    calibrate = added.add_parser("calibrate", help=about, description=about)
    where = "the profile, .toml; its samples go beside it as .json (default: calibrated/DEVICE-jaxVERSION.toml)"
    calibrate.add_argument("-o", "--output", metavar="FILE", help=where)
    calibrate.add_argument("--seconds", type=_seconds, default=150.0, metavar="S", help="how long (default: 150)")
    about = "profile for what cannot be measured here, e.g. the network (default: that of the devices)"
    calibrate.add_argument("--base", metavar="NAME", help=about)
    calibrate.set_defaults(run=commands["calibrate"])
    about = "hold a plan against the program that XLA compiles from it, for GPUs that need not exist"
    verify = added.add_parser("verify", help=about, description=about, **shared)
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
    about = "write the page of `autopar explain --html`, with predicted beside compiled"
    verify.add_argument("--html", metavar="FILE", help=about)
    about = "save the verified plan, which is a tighter one where the first took too much memory"
    verify.add_argument("-o", "--output", metavar="FILE", help=about)
    verify.set_defaults(run=commands["verify"])
    add_generate_command(added, commands["generate"], _size)
    return parser


def _planning_options() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(add_help=False)
    group = options.add_argument_group("planning")
    where = group.add_mutually_exclusive_group()
    about = "plan every mesh of at most two axes, keep the best (default: as many as here)"
    where.add_argument("--devices", type=_counts, metavar="N", help=about)
    where.add_argument("--mesh", metavar="MESH", help="plan this mesh alone: 8, 2x4 or data=2,model=4")
    about = (
        "hardware profile, e.g. h100-sxm (default: what is here); for stages on several kinds, how many there are of"
    )
    about += " each: a100-sxm4-40gb=8,v100-sxm2-16gb=16"
    group.add_argument("--hardware", metavar="NAME", help=about)
    about = "per device: 40GB, 512MiB or bytes (default: what the device has)"
    group.add_argument("--memory-budget", type=_size, metavar="SIZE", help=about)
    about = "do not compute forward values again in the backward pass, even where nothing fits otherwise"
    group.add_argument("--no-rematerialize", action="store_true", help=about)
    about = "never see a dim that the step cuts into equal parts as two: a plan that `autopar export` can write"
    group.add_argument("--dims-as-written", action="store_true", help=about)
    about = "fix a sharding; PATH may be a glob; may be repeated"
    group.add_argument("--pin", action="append", default=[], metavar="PATH=SPEC", help=about)
    about = 'split the batch over time into N parts, whose gradients are summed; "auto": as is fastest and fits'
    group.add_argument("--num-microbatches", type=_microbatches, metavar="N", help=about)
    about = 'cut the step into N stages, each on devices of its own; "auto": as many as are fastest, which may be one'
    group.add_argument("--stages", type=_microbatches, metavar="N", help=about)
    about = f"in which order stages run: {', '.join(SCHEDULES)} (default: the fastest that fits)"
    group.add_argument("--schedule", metavar="NAME", help=about)
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


def _counts(text: str) -> int | tuple[int, ...]:
    """A number of devices; several, with commas between, for a comparison."""
    found = tuple(dict.fromkeys(_count(part) for part in text.split(",")))
    return found[0] if len(found) == 1 and "," not in text else found


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


def _more_memory(text: str) -> tuple[float, float]:
    return _more(text, _size)


def _more_time(text: str) -> tuple[float, float]:
    return _more(text, _duration)


def _more(text: str, amount: Callable[[str], float]) -> tuple[float, float]:
    """How much more something may be: a fraction of it, or an amount."""
    percent = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*%\s*", text)
    if percent is not None:
        return float(percent[1]) / 100, 0.0
    return 0.0, 0.0 if text.strip() == "0" else amount(text)


def _duration(text: str) -> float:
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*(us|ms|s)\s*", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no time: write e.g. 5%, 2ms, 300us or 1.5s")
    return float(match[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[match[2]]


def _size(text: str) -> float:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parse_hardware(text: str | None) -> str | dict[str, int] | None:
    """A profile's name, or how many devices there are of each.

    >>> parse_hardware("a100-sxm4-40gb=8,v100-sxm2-16gb=16")
    {'a100-sxm4-40gb': 8, 'v100-sxm2-16gb': 16}
    """
    if text is None or "=" not in text:
        return text
    found: dict[str, int] = {}
    for part in text.split(","):
        name, _, number = part.partition("=")
        if not name or not number.isdecimal() or int(number) < 1:
            raise TargetError(f"--hardware {text!r}: {part!r} is no NAME=NUMBER of devices, such as h100-sxm=8")
        found[name] = int(number)
    return found


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
