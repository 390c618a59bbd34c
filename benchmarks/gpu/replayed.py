"""The replay of measured steps, compared with the seconds of each of their kernels.

A measured step is stored with its compiled program (`benchmarks/gpu/programs.py`), and its kernels are aligned with the
program's instructions (`benchmarks/gpu/aligned.py`). `autopar.xla_replay` then prices the same instructions from the
device's rates. No GPU is needed. *Predicted* is the step time of the plan in `benchmarks/gpu/plans`. *Measured* is the mean of the profiled runs. An error is replayed over measured, less 1.
A layer's instructions differ only in their numbers: those count as one operation.

Some rates of `h100-sxm` are fitted to the first steps of GPT-2, BERT and LLaMA 1B (`cost_models/replay/h100-sxm.toml`
names them), so the errors of these three show how well the formulas fit. The other steps test them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autopar.hardware.profile import load as load_profile
from autopar.xla_compiler.hlo_text import Instruction, Shape, parse_module
from autopar.xla_replay import rates
from autopar.xla_replay.device_prices import DevicePrices
from autopar.xla_replay.program import replay_module
from autopar.xla_replay.replay import OperationTime
from benchmarks.gpu import programs
from benchmarks.gpu.aligned import Aligned, AlignmentError, align, is_memory
from benchmarks.gpu.prepared import FOLDER, saved
from benchmarks.proof_summary import table

Row = dict[str, Any]

#: Number of operations that are shown, those with the largest difference.
_SHOWN = 12
#: Rates of a card without a hardware profile.
_NEAREST = "h100-sxm"


def measure(name: str) -> list[Row]:
    """Rows of one stored program: the step, its kinds of kernels, and its largest differences."""
    return rows_of(programs.load(programs.path_of(name)))


def rows_of(program: programs.Program) -> list[Row]:
    """Rows of one program; of a program whose kernels do not align, the reason."""
    host = program.host
    about = {
        "step": f"{program.model} on {host['num_devices']} x {host['card']}",
        "date": host["date"],
        "driver": host["driver"].get("driver_version", ""),
        "jax": host["versions"]["jax"],
        "predicted_ms": _predicted_ms(program),
    }
    module = parse_module(program.hlo)
    device = rates.load(load_profile(host["profile"] or _NEAREST).rates_name)
    replay = replay_module(module, DevicePrices(device, device.domain_size))
    try:
        aligned = align(module, program.kernels)
    except AlignmentError as error:
        return [about | {"not aligned": str(error)}]
    priced = {one.name: one for one in replay.operations}
    # An operation without a price is free in the replay.
    pairs = [(one, priced.get(one.instruction.name)) for one in aligned]
    kinds: dict[str, list[_Pair]] = defaultdict(list)
    operations: dict[tuple[str, ...], list[_Pair]] = defaultdict(list)
    for one, price in pairs:
        kind = price.kind if price else one.instruction.opcode
        kinds[kind].append((one, price))
        operations[kind, _without_numbers(one.instruction.op_name), _text(one.instruction)].append((one, price))
    whole = _Sum.of(pairs)
    by_kind = sorted(((kind, _Sum.of(of)) for kind, of in kinds.items()), key=lambda row: -row[1].measured_s)
    differing = sorted(
        ((key, _Sum.of(of), of[0][0]) for key, of in operations.items()), key=lambda row: -abs(row[1].difference_s)
    )
    return [
        about | {"kernels": len(program.kernels)} | whole.in_ms(),
        *({"kind": kind, "count": found.count} | found.in_ms() for kind, found in by_kind),
        *(
            {"operation": op_name, "shape": shape, "kind": kind, "kernel": _kernel(first)} | found.of_each()
            for (kind, op_name, shape), found, first in differing[:_SHOWN]
        ),
    ]


#: A run of an instruction, and the time that the replay gives to all its runs.
_Pair = tuple[Aligned, OperationTime | None]


@dataclass(frozen=True, slots=True)
class _Sum:
    """Runs of instructions, measured and replayed."""

    count: int
    measured_s: float
    replayed_s: float
    flops: float
    num_bytes: float

    @classmethod
    def of(cls, pairs: Sequence[_Pair]) -> _Sum:
        prices = [price for _, price in pairs if price is not None]
        return cls(
            count=len(pairs),
            measured_s=sum(one.seconds for one, _ in pairs),
            replayed_s=sum(price.seconds / price.count for price in prices),
            flops=sum(price.flops / price.count for price in prices),
            num_bytes=sum(price.num_bytes / price.count for price in prices),
        )

    @property
    def difference_s(self) -> float:
        return self.replayed_s - self.measured_s

    def in_ms(self) -> Row:
        """The whole time."""
        return {
            "measured_ms": 1e3 * self.measured_s,
            "replayed_ms": 1e3 * self.replayed_s,
            "error": self.replayed_s / self.measured_s - 1 if self.measured_s else None,
        }

    def of_each(self) -> Row:
        """The mean of a run, and the difference of all."""
        return {
            "count": self.count,
            "measured_us": 1e6 * self.measured_s / self.count,
            "replayed_us": 1e6 * self.replayed_s / self.count,
            "difference_ms": 1e3 * self.difference_s,
            "TFLOP/s": 1e-12 * self.flops / self.measured_s if self.measured_s else None,
            "TB/s": 1e-12 * self.num_bytes / self.measured_s if self.measured_s else None,
        }


def _predicted_ms(program: programs.Program) -> float | None:
    """What the plan that is prepared for this step now predicts, which may be newer than the measurement."""
    version = ".".join(program.host["versions"]["jax"].split(".")[:2])
    try:
        plan, _, _ = saved(FOLDER, program.host["profile"], program.model, 1, version)
    except FileNotFoundError:
        return None
    return 1e3 * plan.prediction.step_time_s


def _kernel(one: Aligned) -> str:
    """The kernel that computes an instruction's result."""
    return next((name for name in one.kernels if not is_memory(name)), one.kernels[0])[:60]


def _without_numbers(op_name: str) -> str:
    """JAX's name stack without the jitted function, `N` in place of each number."""
    return re.sub(r"\d+", "N", re.sub(r"^jit\(\w+\)/", "", op_name))


def _text(one: Instruction) -> str:
    """The shape of a result, without workspaces: of several arrays the first, and how many more there are."""
    leaves = [leaf for leaf in one.shape.leaves if leaf.dtype != "s8"] or list(one.shape.leaves)
    more = f" and {len(leaves) - 1} more" if len(leaves) > 1 else ""
    return f"{_array(leaves[0])}{more}"


def _array(shape: Shape) -> str:
    return f"{shape.dtype}[{','.join(map(str, shape.dims))}]"


# -- the page ------------------------------------------------------------------------------------


def summary(rows: list[Row]) -> str:
    """A line for each step."""
    lines = [
        f"- {row['step']}: kernels {row['measured_ms']:.4g} ms, replayed {row['replayed_ms']:.4g} ms ({row['error']:+.1%})"
        if "measured_ms" in row
        else f"- {row['step']}: not aligned: {row['not aligned']}"
        for row in rows
        if "step" in row
    ]
    return "\n".join(["## Found", "", *lines])


def page_table(rows: list[Row]) -> str:
    """One table for each set of columns."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row), []).append(row)
    return "\n\n".join(
        table(columns, [[_cell(name, row[name]) for name in columns] for row in of]) for columns, of in groups.items()
    )


def _cell(column: str, value: Any) -> str:
    if value is None:
        return ""
    if column == "error":
        return f"{value:+.1%}"
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")
