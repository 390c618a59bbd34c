"""Check predictions on twelve models that the planner was not developed with.

The models are drawn from the first eight hex digits of the commit that last changed rules, cost, simulation or planner:
nobody chooses them, and nobody knows them while the planner is changed. They are decoders, encoder-decoders, image models
and mixtures of experts of real widths with few layers, from libraries that nobody here wrote: bf16 compute, f32
parameters, AdamW; for 8 H100s, for 16 on 2 hosts and for 64 on 8 hosts. A model that somebody looked into is listed in
`held_out/tuned.toml`; it is shown apart and counts no more.

`autopar.plan` plans each step once; XLA compiles the plan for absent H100s. The step time is compared with the replay of
the compiled program, memory and bytes sent with the program itself. Planning, which includes tracing, and the compile are
in one run; their times are CPU times, over all processes of planning and over the compiler's process.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import autopar
from autopar.hardware import profile as hardware
from autopar.plans.plan import Plan
from autopar.transforms.program import Program
from autopar.verification.compile_plan import compare_with_compiled, compile_plan, hosts_needed
from autopar.verification.verification import Verification
from benchmarks.compile_cache import CachingCompiler, default_folder
from benchmarks.held_out.build import training
from benchmarks.held_out.draw import Drawn, model
from benchmarks.held_out.seed import seed

Row = dict[str, Any]

HARDWARE = "h100-sxm"
#: Of the names of programs: `model NUMBER` of the newest seed, and `tuned SEED/NUMBER`.
MODEL, TUNED = "model ", "tuned "
#: Collectives of one kind over the same mesh axes that differ by less send the same bytes: XLA pads what it combines, and
#: losses, norms and counters send a few bytes.
SAME_BYTES, SAME_SHARE = 1024, 1e-4
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def measure(program: str) -> list[Row]:
    """One row. If the model is not planned or not compiled, the row says why."""
    drawn = drawn_of(program)
    row: Row = {
        "seed": drawn.seed,
        "number": drawn.number,
        "family": drawn.family,
        "sizes": str(drawn.sizes),
        "gpus": drawn.num_gpus,
        "hosts": drawn.num_hosts,
        "failed": "",
    }
    try:
        row |= _planned_and_compiled(drawn)
    except Exception as error:  # failures are published, too
        row["failed"] = f"{type(error).__name__}: {str(error)[:1000]}"
    return [row]


def drawn_of(program: str) -> Drawn:
    """The model that a program's name means."""
    if program.startswith(TUNED):
        its_seed, number = program.removeprefix(TUNED).split("/")
        return model(its_seed, int(number))
    return model(seed(), int(program.removeprefix(MODEL)))


def _planned_and_compiled(drawn: Drawn) -> Row:
    step, args = training(drawn.sizes).target
    options: dict[str, Any] = {"num_devices": drawn.num_gpus, "hardware": HARDWARE, "cache": False}
    start, began = time.perf_counter(), _cpu_s()
    plan, program = autopar.parallelize(step, **options).planned(*args)
    row = {"plan_s": time.perf_counter() - start, "plan_cpu_s": _cpu_s() - began} | _of_plan(plan)
    try:
        with TimingCompiler(default_folder(), again=True) as compiler:
            verified = _compiled(plan, program, compiler)
    except Exception as error:  # the plan's figures are published
        return row | {"failed": f"not compiled: {type(error).__name__}: {str(error)[:1000]}"}
    return row | {"compile_cpu_s": compiler.cpu_s} | _of_program(verified)


def _of_plan(plan: Plan) -> Row:
    return {
        "mesh": str(plan.mesh),
        "words": plan.strategy,
        "status": plan.outcome.status,
        "gap": plan.outcome.gap,
        "step_predicted_s": plan.prediction.step_time_s,
        "peak_predicted": plan.prediction.peak_bytes,
    }


def _compiled(plan: Plan, program: Program, compiler: CachingCompiler) -> Verification:
    """The plan compared with XLA's program of it; unlike `verify`, without a second plan if it exceeds the budget."""
    profile, own = hardware.load(HARDWARE), program.of(plan)
    num_hosts = hosts_needed(plan, profile)
    budget = profile.usable_bytes if plan.memory_budget_bytes is None else plan.memory_budget_bytes
    compiled = compile_plan(plan, own, profile, num_hosts, compiler, lambda stage, fraction: None)
    return compare_with_compiled(
        plan, own, compiled, profile, num_hosts, budget_bytes=budget, attempts=(), overhead_s=0
    )


def _of_program(verified: Verification) -> Row:
    matches, replay = verified.collectives, verified.times.replay
    same = [
        abs(one.predicted_bytes - one.compiled_bytes) <= max(SAME_BYTES, SAME_SHARE * one.compiled_bytes)
        for one in matches
    ]
    return {
        "step_replayed_s": None if replay is None else replay.step_time_s,
        "no_replay": verified.times.no_replay,
        "peak_compiled": verified.compiled.peak_bytes,
        "budget_bytes": verified.budget_bytes,
        "sent_predicted": sum(one.predicted_bytes for one in matches),
        "sent_compiled": sum(one.compiled_bytes for one in matches),
        "sent_exact": all(same),
        "compile_s": verified.compiled.compile_s,
    }


class TimingCompiler(CachingCompiler):
    """A compiler that measures its CPU time.

    `cpu_s` is that of the last compile, over all threads of the worker process.
    """

    cpu_s = 0.0

    def _done(self, job: str) -> str:
        process = Path(f"/proc/{self._child.pid}/stat")
        _wait_until_idle(process)
        before = _worker_cpu_s(process)
        log = super()._done(job)
        self.cpu_s = _worker_cpu_s(process) - before
        return log


def _wait_until_idle(process: Path, readings: int = 5) -> None:
    """Wait until a worker has imported JAX and waits for a job, which is not part of the job's CPU time."""
    asleep = 0
    while asleep < readings:
        state = _fields(process)[0]
        asleep = asleep + 1 if state == "S" else 0
        if state == "Z":
            return  # its job reports the failure
        time.sleep(0.05)


def _worker_cpu_s(process: Path) -> float:
    """User and system time of a process."""
    return sum(map(int, _fields(process)[11:13])) / _TICKS_PER_S


def _fields(process: Path) -> list[str]:
    """The fields of `/proc/PID/stat` from the state on; the name before them may have spaces."""
    return process.read_text(encoding="utf-8").rpartition(")")[2].split()


def _cpu_s() -> float:
    """CPU time of this process and of its ended child processes."""
    return sum(os.times()[:4])
