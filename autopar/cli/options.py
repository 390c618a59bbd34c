"""Options that several commands have, and how values are written.

In: texts. Out: the options of planning, for `argparse`; sizes, shardings and hardware as the planner takes them.
"""

from __future__ import annotations

import argparse
import ast
from typing import TYPE_CHECKING, Any

from autopar.errors import PinError, TargetError
from autopar.pipeline.schedule.table import SCHEDULES
from autopar.system.units import parse_size

if TYPE_CHECKING:
    from jax.sharding import PartitionSpec

#: What follows the help of every command that plans.
EXAMPLES = """\
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


def add_planning_command(added: Any, name: str, about: str) -> argparse.ArgumentParser:
    """A command that has the options of planning, and the examples after its help."""
    return added.add_parser(
        name,
        help=about,
        description=about,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[_planning_options()],
    )


#: Options of planning that are about a program, on whatever mesh and hardware.
OF_PROGRAM = (
    "memory_budget",
    "no_rematerialize",
    "dims_as_written",
    "pin",
    "num_microbatches",
    "per_microbatch_statistics",
    "time_limit",
    "stages",
    "schedule",
)


def _planning_options() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(add_help=False)
    group = options.add_argument_group("planning")
    where = group.add_mutually_exclusive_group()
    about = "plan every mesh of at most two axes, keep the best (default: as many as here)"
    where.add_argument("--devices", type=device_counts, metavar="N", help=about)
    where.add_argument("--mesh", metavar="MESH", help="plan this mesh alone: 8, 2x4 or data=2,model=4")
    about = (
        "hardware profile, e.g. h100-sxm (default: what is here); for stages on several kinds, how many there are of"
    )
    about += " each: a100-sxm4-40gb=8,v100-sxm2-16gb=16"
    group.add_argument("--hardware", metavar="NAME", help=about)
    about = "per device: 40GB, 512MiB or bytes (default: what the device has)"
    group.add_argument("--memory-budget", type=size, metavar="SIZE", help=about)
    about = "do not compute forward values again in the backward pass, even where nothing fits otherwise"
    group.add_argument("--no-rematerialize", action="store_true", help=about)
    about = "never see a dim that the step cuts into equal parts as two: a plan that `autopar export` can write"
    group.add_argument("--dims-as-written", action="store_true", help=about)
    about = "fix a sharding; PATH may be a glob; may be repeated"
    group.add_argument("--pin", action="append", default=[], metavar="PATH=SPEC", help=about)
    about = 'split the batch over time into N parts, whose gradients are summed; "auto": as is fastest and fits'
    group.add_argument("--num-microbatches", type=microbatches, metavar="N", help=about)
    about = 'cut the step into N stages, each on devices of its own; "auto": as many as are fastest, which may be one'
    group.add_argument("--stages", type=microbatches, metavar="N", help=about)
    about = f"in which order stages run: {', '.join(SCHEDULES)} (default: the fastest that fits)"
    group.add_argument("--schedule", metavar="NAME", help=about)
    about = "allow it of a step whose batch feeds back (batch normalisation): each part has its own statistics"
    group.add_argument("--per-microbatch-statistics", action="store_true", default=None, help=about)
    group.add_argument("--time-limit", type=seconds, metavar="S", help="seconds for the solver, per problem")
    keep = group.add_mutually_exclusive_group()
    about = "folder in which plans are kept, so that none is made twice (default: the user's cache folder)"
    keep.add_argument("--cache", metavar="FOLDER", help=about)
    keep.add_argument("--no-cache", action="store_true", help="plan anew, and keep nothing")
    options.add_argument("--json", action="store_true", help="print JSON for programs: all rows, plain numbers")
    return options


def whole_number(text: str) -> int | None:
    """`1.4e9` as a whole number; None where it is none."""
    try:
        number = float(text)
    except ValueError:
        return None
    return int(number) if number.is_integer() else None


def count(text: str) -> int:
    number = whole_number(text)
    if not number or number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of these: write 1 or more")
    return number


def device_count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of devices: write 1 or more")
    return int(text)


def device_counts(text: str) -> int | tuple[int, ...]:
    """A number of devices; several, with commas between, for a comparison."""
    found = tuple(dict.fromkeys(device_count(part) for part in text.split(",")))
    return found[0] if len(found) == 1 and "," not in text else found


def microbatches(text: str) -> int | str:
    if text == "auto":
        return text
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of microbatches: write 1 or more, or auto")
    return int(text)


def seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no time: write seconds above 0")
    return found


def size(text: str) -> float:
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
