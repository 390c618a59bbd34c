"""Define the options that several commands share, and parse their values.

In: option texts. Out: groups of options for `argparse`; sizes, shardings and hardware in the planner's types.
"""

from __future__ import annotations

import argparse
import ast
from typing import TYPE_CHECKING, Any

from autopar.errors import PinError, TargetError
from autopar.hardware.profile import known_names
from autopar.pipeline.schedule.asynchronous import ASYNCHRONOUS
from autopar.pipeline.schedule.table import SCHEDULES
from autopar.system.units import parse_size

if TYPE_CHECKING:
    from jax.sharding import PartitionSpec

#: The help of every command with a TARGET ends with this text.
TARGET_IS = """\
TARGET is path/file.py:function or package.module:function. The function takes nothing and returns
(step, args): the train step and the tuple of its arguments, arrays or jax.ShapeDtypeStructs.
"""

#: Planning options of a program, which do not depend on the mesh and the hardware.
OF_PROGRAM = (
    "memory_budget",
    "no_rematerialize",
    "dims_as_written",
    "attention",
    "pin",
    "num_microbatches",
    "per_microbatch_statistics",
    "time_limit",
    "everything",
    "stages",
    "schedule",
    "consistency",
    "max_delay",
)


def add_command(added: Any, name: str, about: str, examples: str = "") -> argparse.ArgumentParser:
    """Add a command whose help ends with examples.

    Args:
        examples: command lines without `autopar`, one per line.
    """
    lines = "".join(f"  autopar {line}\n" for line in examples.strip().splitlines())
    epilog = (f"examples:\n{lines}" if lines else "") + (f"\n{TARGET_IS}" if "TARGET" in about else "")
    raw = argparse.RawDescriptionHelpFormatter
    return added.add_parser(name, help=about, description=about, epilog=epilog or None, formatter_class=raw)


def add_mesh_options(command: argparse.ArgumentParser, *, of_stages: bool = False) -> None:
    """Add the options for the number of devices, the mesh and the hardware.

    Args:
        of_stages: whether the command also plans stages, each of which has the mesh on a part of the devices.
    """
    group = command.add_argument_group("devices")
    where = group if of_stages else group.add_mutually_exclusive_group()
    about = "plan every mesh of at most two axes over N devices, or fewer where as fast, and keep the best (default: as many as are visible)"
    where.add_argument("--devices", type=device_count, metavar="N", help=about)
    about = "plan this mesh alone: 8, 2x4 or data=2,model=4" + (
        "; with --stages, the mesh of each stage" if of_stages else ""
    )
    where.add_argument("--mesh", metavar="MESH", help=about)
    about = "use all devices, even if fewer are as fast"
    group.add_argument("--all-devices", action="store_true", help=about)
    about = f"hardware profile: {', '.join(known_names())}, or the path of a .toml file (default: the visible devices);"
    about += " for pipeline stages on several kinds, the number of each: a100-sxm-40=8,v100-sxm-16=16"
    group.add_argument("--hardware", metavar="NAME", help=about)


def add_solver_options(command: argparse.ArgumentParser, *, keeps_plans: bool = True) -> None:
    """Add the options for the memory budget, the solver's time limit, and the plan cache.

    Args:
        keeps_plans: whether the command uses the plan cache.
    """
    group = command.add_argument_group("solver")
    about = "memory per device: 40GB, 512MiB or bytes (default: all that the device has)"
    group.add_argument("--memory-budget", type=size, metavar="SIZE", help=about)
    group.add_argument("--time-limit", type=seconds, metavar="S", help="seconds for the solver, per problem")
    if keeps_plans:
        keep = group.add_mutually_exclusive_group()
        keep.add_argument("--cache", metavar="FOLDER", help="plan cache (default: in the user's cache folder)")
        keep.add_argument("--no-cache", action="store_true", help="neither read nor write the plan cache")
    add_json(command)


def add_program_options(command: argparse.ArgumentParser, *, any_mesh: bool = False, chooses: bool = False) -> None:
    """Add the options for rematerialization, gradient accumulation, pins and pipeline stages.

    Args:
        any_mesh: whether the command plans several meshes; then pins and pipeline options are left out.
        chooses: whether it may choose an asynchronous pipeline.
    """
    group = command.add_argument_group("program")
    about = "no rematerialization (activation checkpointing), even where no plan fits without it"
    group.add_argument("--no-rematerialize", action="store_true", help=about)
    about = "never split one dim into two, so that `autopar export` can write the plan"
    group.add_argument("--dims-as-written", action="store_true", help=about)
    about = "auto: let a fused kernel replace softmax(QK^T)V where that is predicted to be faster (default: as written)"
    group.add_argument("--attention", choices=("as_written", "auto"), help=about)
    about = 'gradient accumulation over N microbatches; "auto": the fastest number that fits'
    group.add_argument("--num-microbatches", type=microbatches, metavar="N", help=about)
    about = "allow microbatches where the batch feeds back (batch normalization): each has its own statistics"
    group.add_argument("--per-microbatch-statistics", action="store_true", default=None, help=about)
    if any_mesh:
        return
    add_pin(group)
    about = "auto: choose devices, mesh, sharding, rematerialization, microbatches, stages and schedule; other options fix a part"
    group.add_argument("--everything", choices=("auto",), help=about)
    about = 'pipeline parallelism: N stages, each on its own devices; "auto": the fastest number, which may be one'
    group.add_argument("--stages", type=microbatches, metavar="N", help=about)
    about = f"pipeline schedule: {', '.join(SCHEDULES)}, or FILE.py:NAME of your own (default: the fastest that fits)"
    group.add_argument("--schedule", metavar="NAME", help=about)
    about = f"asynchronous pipeline, whose batches do not wait for updates: {', '.join(ASYNCHRONOUS)}"
    group.add_argument(
        "--consistency", metavar="NAME", help=about + ("; auto: the fastest within --max-delay" if chooses else "")
    )
    if chooses:
        about = "with --consistency auto: the most updates that a gradient may be late"
        group.add_argument("--max-delay", type=count, metavar="N", help=about)


def add_pin(group: Any) -> None:
    about = "fix the sharding of an argument; PATH may be a glob; may be repeated"
    group.add_argument("--pin", action="append", default=[], metavar="PATH=SPEC", help=about)


def add_json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="print JSON: all rows, plain numbers")


def whole_number(text: str) -> int | None:
    """Parse a whole number such as `1.4e9`; None where the text is not one."""
    try:
        number = float(text)
    except ValueError:
        return None
    return int(number) if number.is_integer() else None


def count(text: str) -> int:
    number = whole_number(text)
    if not number or number < 1:
        raise argparse.ArgumentTypeError(f"invalid count {text!r}: write a whole number, 1 or more")
    return number


def device_count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        several = "; `autopar compare` takes several, comma-separated" if "," in text else ""
        raise argparse.ArgumentTypeError(f"invalid device count {text!r}: write a whole number, 1 or more{several}")
    return int(text)


def device_counts(text: str) -> tuple[int, ...]:
    """Parse comma-separated device counts, or `..64` for the powers of two up to 64."""
    if text.startswith(".."):
        most = device_count(text[2:])
        return tuple(2**k for k in range(most.bit_length()))
    return tuple(dict.fromkeys(device_count(part) for part in text.split(",")))


def microbatches(text: str) -> int | str:
    if text == "auto":
        return text
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(
            f"invalid number of microbatches or stages {text!r}: write a whole number, 1 or more, or auto"
        )
    return int(text)


def seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise argparse.ArgumentTypeError(f"invalid time {text!r}: write seconds, above 0")
    return found


def size(text: str) -> float:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parse_hardware(text: str | None) -> str | dict[str, int] | None:
    """Parse the name of a hardware profile, or the number of devices of each profile.

    >>> parse_hardware("a100-sxm-40=8,v100-sxm-16=16")
    {'a100-sxm-40': 8, 'v100-sxm-16': 16}
    """
    if text is None or "=" not in text:
        return text
    found: dict[str, int] = {}
    for part in text.split(","):
        name, _, number = part.partition("=")
        if not name or not number.isdecimal() or int(number) < 1:
            raise TargetError(f"--hardware {text!r}: {part!r} is not NAME=NUMBER, such as h100-sxm=8")
        found[name] = int(number)
    return found


def parse_pin(text: str) -> tuple[str, PartitionSpec]:
    """Parse `PATH=P(...)` without evaluating it.

    Raises:
        PinError: the text cannot be parsed.

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
