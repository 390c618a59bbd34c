"""Compare autopar's plans with hand-written data parallelism, FSDP, Megatron's tensor parallelism, and grids of both.

For each model and setting: every recipe as most users write it (shardings of inputs and outputs) and as an expert does
(those of activations too), and autopar's own plan. XLA compiles each for absent H100s. Times are XLA's own estimates,
peaks are those of its programs, and bytes are what one GPU sends per step. Hosts have 8 GPUs.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import autopar
from autopar.hardware import profile as hardware
from autopar.jax_interop.compilation import module_bytes
from autopar.runtime.jit import abstract_mesh, jit_plan, lower_for
from autopar.runtime.xla_options import compiler_options
from autopar.verification.compile_plan import hosts_needed
from benchmarks.plans.judge import Judge, new_compiler
from benchmarks.plans.models import MODELS
from benchmarks.plans.recipes import Recipe, recipes
from benchmarks.zoo.training import Target

Row = dict[str, Any]

HARDWARE = "h100-sxm"
GPUS_PER_HOST = 8
#: Memory of a GPU; a program that needs more does not run.
MEMORY_BYTES = 80e9
#: If planning takes longer than this share of an earlier compile, compile again on the same busy machine.
DOUBTFUL = 0.75
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
    """One row for each recipe and way of writing it, and one for autopar. A failed program has its error as a row; the
    others go on.

    Args:
        again: compile known programs too.
    """
    model, setting = program.split(": ", 1)
    with new_compiler() as compiler:
        return _Case(model, setting, Judge(compiler, hardware.load(HARDWARE), again)).rows()


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

    @property
    def num_hosts(self) -> int:
        return -(-self.setting.num_gpus // GPUS_PER_HOST)

    def target(self) -> Target:
        return MODELS[self.model].training(self.batch).target

    def rows(self) -> list[Row]:
        """The rows, hand-written ones first, because autopar's memory may be a share of theirs."""
        by_hand = [
            self._row(recipe.name, way, functools.partial(self._by_hand, recipe, way))
            for recipe in recipes(self.setting.num_gpus, self.target()[1])
            for way in ("user", "expert")
        ]
        budget = None
        if self.setting.tight:
            best = min(filter(fits, by_hand), key=lambda row: row["step_s"], default=None)
            if best is None:
                return by_hand
            budget = SHARE_OF_MEMORY * best["peak_bytes"]
        return [*by_hand, self._row("autopar", "autopar", functools.partial(self._planned, budget))]

    def _row(self, recipe: str, way: str, make: Callable[[], Row]) -> Row:
        row = {"model": self.model, "setting": self.name, "gpus": self.setting.num_gpus, "batch": self.batch}
        row |= {"recipe": recipe, "way": way, "failed": ""}
        try:
            row |= make()
        except Exception as error:  # continue with the other programs
            row |= {"failed": f"{type(error).__name__}: {str(error)[:500]}"}
        _say(row)
        return row

    def _by_hand(self, recipe: Recipe, way: str) -> Row:
        step, args = self.target()
        jitted = recipe.by_user(step, args) if way == "user" else recipe.by_expert(step, args)
        module = module_bytes(lower_for("cuda", jitted, args))
        return self.judge.figures(module, recipe.mesh, self.num_hosts) | {"mesh": str(recipe.mesh), "words": ""}

    def _planned(self, budget: float | None) -> Row:
        """Autopar's plan. If XLA's program of it exceeds the memory, `verify` plans again with a smaller budget."""
        step, args = self.target()
        options: dict[str, Any] = {"num_devices": self.setting.num_gpus, "hardware": HARDWARE, "cache": False}
        options |= {} if budget is None else {"memory_budget_bytes": budget}
        start = time.perf_counter()
        parallel = autopar.parallelize(step, **options)
        plan, program = parallel.planned(*args)
        plan_s = time.perf_counter() - start
        jitted = jit_plan(plan, program.of(plan).trace, abstract_mesh(plan.mesh))
        module = module_bytes(lower_for("cuda", jitted, args))
        made = self.judge.figures(module, plan.mesh, hosts_needed(plan, self.judge.profile), compiler_options(plan))
        if not made["compiled_now"] and plan_s > DOUBTFUL * made["compile_s"]:
            with new_compiler(again=True) as compiler:
                judge = Judge(compiler, self.judge.profile, again=True)
                made = judge.figures(module, plan.mesh, hosts_needed(plan, self.judge.profile), compiler_options(plan))
        attempts = 1
        if made["peak_bytes"] > (MEMORY_BYTES if budget is None else budget):
            verified = autopar.verify(step, *args, hosts=self.num_hosts, compiler=self.judge.compiler, **options)
            plan, attempts = verified.plan, len(verified.attempts)
            made = self.judge.of(verified.compiled, plan.mesh)
        return made | {
            "mesh": str(plan.mesh),
            "words": plan.strategy,
            "predicted_s": plan.prediction.xla_step_time_s or plan.prediction.step_time_s,
            "predicted_bytes": plan.prediction.peak_bytes,
            "budget_bytes": budget,
            "merge_bytes": plan.combine_threshold_bytes,
            "plan_s": plan_s,
            "attempts": attempts,
        }


def fits(row: Row) -> bool:
    """Whether the program runs, and its time is known."""
    return not row["failed"] and row["step_s"] is not None and row["peak_bytes"] <= MEMORY_BYTES


def _say(row: Row) -> None:
    """Print progress."""
    about = f"{row['model']}: {row['setting']}: {row['recipe']} ({row['way']})"
    if row["failed"]:
        outcome = row["failed"][:200]
    else:
        step = "no estimate" if row["step_s"] is None else f"{1e3 * row['step_s']:.2f} ms"
        outcome = f"{step}, exposed {1e3 * row['exposed_s']:.2f} ms, {row['peak_bytes'] / 1e9:.2f} GB, sends"
        outcome += f" {row['sent_bytes'] / 1e9:.2f} GB, {row['counts']}, {row['mesh']} {row['words']}"
    print(f"{time.strftime('%H:%M:%S')} {about}: {outcome}", flush=True)
