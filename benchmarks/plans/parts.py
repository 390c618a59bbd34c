"""Compare autopar's plans with sharding recipes by hand, on any number of the setting's GPUs.

**Did the hand plans get the same kernels and flags? Yes**: the tuned version of a recipe may have every combine threshold
that autopar chooses from, the loss's gradient by comparison (one-hot), column reductions in kernels of their own, and
reductions that start early, by the same rewriting of the same trace as autopar's plan. In cases that were tuned before 2026-11-29,
thresholds end at 30 MiB, and autopar's go up to 120; the gates below say how many these are. Rows of the earlier version, which
the tables below mark, compare with hand plans that had none of these.

Recipes: data parallel, ZeRO-1, FSDP, HSDP, tensor parallel, TP + SP (Megatron's sequence parallelism), FSDP x TP + SP, a
split vocabulary, context parallel with gathered keys, expert parallel, alone and with TP + SP or context parallel,
MaxText's default rules; each on every number of GPUs that divides. Two versions: as users write it, with the shardings of inputs and outputs, and with constraints on
activations where the recipe needs them; and tuned. Every recipe is priced by autopar's planner with everything pinned;
`case.py` says which are compiled. XLA compiles for absent H100s; hosts have 8 GPUs. The step time is that of the replay
(`autopar replay`) of the compiled program, an estimate by formulas that the planner does not use; XLA's own estimate is
beside it where it is known to be sound. Peaks are those of XLA's programs, and bytes are what one GPU sends per step.
Planning is timed in `held_out`, beside XLA's compile in one run, in CPU time.

**The split of a gain.** Five sets of programs, each with one thing more, and the fastest step of each:

1. users' programs on all GPUs;
2. users' programs on any number of GPUs;
3. the same with the experts' constraints on activations and gradients;
4. the same with other combine thresholds;
5. the same with autopar's kernels: one-hot, column reductions, early reductions. This is the best tuned expert.

`devices` is 1 over 2, `combiner` 3 over 4, `kernels` 4 over 5; `sharding` is 2 over 3 (shardings that experts add) times
5 over autopar's plan. Their product is the gain over the best user's program on all GPUs. Where no recipe runs on all
GPUs, `devices` is 1.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import autopar
from autopar.hardware import profile as hardware
from autopar.jax_interop.compilation import module_bytes
from autopar.runtime.jit import abstract_mesh, jit_plan, lower_for
from autopar.runtime.xla_options import compiler_options
from autopar.verification.compile_plan import hosts_needed
from benchmarks.plans.case import ByHand, Row
from benchmarks.plans.judge import Judge, new_compiler
from benchmarks.plans.models import MODELS
from benchmarks.plans.split import HAND, MEMORY_BYTES, best, variant_text
from benchmarks.zoo.training import Target

HARDWARE = "h100-sxm"
#: Autopar's memory in the setting of little memory, as a share of the best hand-written plan's peak.
SHARE_OF_MEMORY = 0.4


@dataclass(frozen=True, slots=True)
class Setting:
    """GPUs and a batch.

    Args:
        batch: batch of the whole job; None if each GPU gets its full share.
        tight: whether only autopar runs, with less memory than the best hand-written plan takes.
    """

    num_gpus: int
    batch: int | None = None
    tight: bool = False


SETTINGS = {
    "8 GPUs": Setting(8),
    "8 GPUs, batch of 8": Setting(8, 8),
    "16 GPUs, batch of 8": Setting(16, 8),
    "2 hosts": Setting(16),
    "8 hosts": Setting(64),
    "8 GPUs, 40 % of the memory": Setting(8, tight=True),
}


def measure(program: str, again: bool = False) -> list[Row]:
    """One row for each compiled program by hand, and one for autopar. A failed program has its error as a row; the others
    go on.

    Args:
        again: compile known programs too.
    """
    model, setting = program.split(": ", 1)
    with new_compiler() as compiler:
        return _Case(model, setting, Judge(compiler, hardware.load(HARDWARE), again)).rows()


def tuned_again(program: str, known: Sequence[Row], changed: Collection[str] = ()) -> list[Row]:
    """The known rows of a case, with the variants that its recipes lack and new tuned versions.

    Args:
        changed: kinds of recipe that are written otherwise now: their rows are made again.
    """
    model, setting = program.split(": ", 1)
    with new_compiler() as compiler:
        return _Case(model, setting, Judge(compiler, hardware.load(HARDWARE))).tuned_again(known, changed)


@dataclass(frozen=True, slots=True)
class _Case:
    model: str
    name: str
    judge: Judge

    @property
    def setting(self) -> Setting:
        return SETTINGS[self.name]

    @property
    def batch(self) -> int:
        return self.setting.batch or MODELS[self.model].per_gpu * self.setting.num_gpus

    def target(self) -> Target:
        return MODELS[self.model].training(self.batch).target

    def rows(self) -> list[Row]:
        """The rows, hand-written ones first, because autopar's memory may be a share of theirs."""
        by_hand = self.by_hand.rows()
        return [*by_hand, *self._own(by_hand)]

    def tuned_again(self, known: Sequence[Row], changed: Collection[str]) -> list[Row]:
        """The known rows, with what the recipes lack. Autopar's stays unless its memory is another now."""
        by_hand = self.by_hand.tuned_again(known, changed)
        own = [row for row in known if row["way"] == "autopar"]
        is_same = not self.setting.tight or _share(by_hand) == _share(known)
        return [*by_hand, *(own if is_same else self._own(by_hand))]

    @property
    def by_hand(self) -> ByHand:
        return ByHand(self.target, self.setting.num_gpus, HARDWARE, self.judge, self._row)

    def _own(self, by_hand: Sequence[Row]) -> list[Row]:
        """Autopar's row; none if its memory is a share of nothing."""
        budget = _share(by_hand) if self.setting.tight else None
        if self.setting.tight and budget is None:
            return []
        about = {"recipe": "autopar", "kind": "autopar", "way": "autopar"}
        return [self._row(about, functools.partial(self._planned, budget))]

    def _row(self, about: Row, make: Callable[[], Row]) -> Row:
        row = {"model": self.model, "setting": self.name, "gpus": self.setting.num_gpus, "batch": self.batch}
        row |= about | {"failed": ""}
        try:
            row |= make()
        except Exception as error:  # continue with the other programs
            row |= {"failed": f"{type(error).__name__}: {str(error)[:500]}"}
        _say(row)
        return row

    def _planned(self, budget: float | None) -> Row:
        """Autopar's plan. If XLA's program of it exceeds the memory, `verify` plans again with a smaller budget."""
        step, args = self.target()
        options: dict[str, Any] = {"num_devices": self.setting.num_gpus, "hardware": HARDWARE, "cache": False}
        options |= {} if budget is None else {"memory_budget_bytes": budget}
        parallel = autopar.parallelize(step, **options)
        plan, program = parallel.planned(*args)
        jitted = jit_plan(plan, program.of(plan).trace, abstract_mesh(plan.mesh))
        module = module_bytes(lower_for("cuda", jitted, args))
        hosts = hosts_needed(plan, self.judge.profile)
        made = self.judge.figures(module, plan.mesh, hosts, compiler_options(plan))
        attempts = 1
        if made["peak_bytes"] > (MEMORY_BYTES if budget is None else budget):
            verified = autopar.verify(step, *args, compiler=self.judge.compiler, **options)
            plan, attempts = verified.plan, len(verified.attempts)
            made = self.judge.of(verified.compiled, plan.mesh, hosts_needed(plan, self.judge.profile))
        return made | {
            "mesh": str(plan.mesh),
            "gpus_used": plan.mesh.num_devices,
            "words": plan.strategy,
            "predicted_s": plan.prediction.step_time_s,
            "predicted_bytes": plan.prediction.peak_bytes,
            "budget_bytes": budget,
            "merge_bytes": plan.combine_threshold_bytes,
            "attempts": attempts,
        }


def _share(rows: Sequence[Row]) -> float | None:
    """Autopar's memory in bytes in the setting of little memory; None if nothing by hand fits."""
    hand = best(rows, *HAND)
    return SHARE_OF_MEMORY * hand["peak_bytes"] if hand else None


def _say(row: Row) -> None:
    """Print progress."""
    about = f"{row['model']}: {row['setting']}: {row['recipe']} ({row['way']}: {variant_text(row)})"
    if row["failed"]:
        outcome = row["failed"][:200]
    else:
        step = "no time" if row["step_s"] is None else f"{1e3 * row['step_s']:.2f} ms"
        outcome = f"{step}, exposed {1e3 * (row['exposed_s'] or 0):.2f} ms, {row['peak_bytes'] / 1e9:.2f} GB, sends"
        outcome += f" {row['sent_bytes'] / 1e9:.2f} GB, {row['counts']}, {row['mesh']} {row['words']}"
    print(f"{time.strftime('%H:%M:%S')} {about}: {outcome}", flush=True)
