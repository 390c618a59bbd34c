"""Compare autopar's predictions of a step with the GPU program that XLA compiles from its plan.

Real models are planned for 8 and 16 H100s, with the shardings that experts use and with autopar's own. XLA compiles
each plan for absent GPUs (`autopar.verify`). The compiled program's memory, collectives and XLA's own estimate of the
step time are compared with the predictions.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest import mock

import jax

import autopar
from autopar.ir.mesh import MeshShape, parse_mesh
from autopar.plans.plan import Plan
from autopar.verification.figures import CollectiveMatch
from autopar.verification.verification import Verification
from benchmarks.baselines import pinned
from benchmarks.baselines.megatron_only import data_whole_over
from benchmarks.compile_cache import CachingCompiler, default_folder
from benchmarks.frozen_choices import Frozen, Remembering
from benchmarks.machine import fingerprint
from benchmarks.models import MODELS
from benchmarks.proof_summary import OWN, off

HARDWARE = "h100-sxm"
#: Smaller collectives, in bytes on the wire, are not compared one by one.
MEGABYTE = 1e6
#: Sources that a row depends on, in addition to autopar, its data and this file.
SOURCES = ("models.py", "compile_cache.py", "baselines/pinned.py", "baselines/megatron_only.py")
GPUS_PER_HOST = 8
#: Hand-written plans ignore memory; the comparison reports whether they fit.
UNLIMITED_BYTES = 1e15

Recipe = Callable[[Sequence[Any], MeshShape], pinned.Pins]
RECIPES: dict[str, Recipe] = {
    "data_parallel": pinned.data_parallel,
    "fsdp": pinned.fsdp,
    "tensor_parallel": pinned.tensor_parallel,
}
#: Each recipe, and the meshes that it is planned for. The first two need only one axis.
MESHES = {
    "data_parallel": ("8", "16"),
    "fsdp": ("8", "16"),
    "tensor_parallel": ("1x8", "2x4", "4x2", "2x8"),
    OWN: ("1x8", "2x4", "4x2", "2x8"),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One model, planned in one way for one mesh."""

    model: str
    recipe: str
    mesh: str

    @property
    def name(self) -> str:
        return f"{self.model}/{self.recipe}@{self.mesh}"

    @property
    def file(self) -> str:
        """File name for the results of this case."""
        return f"{self.name.replace('/', '.')}.json"

    @property
    def shape(self) -> MeshShape:
        return parse_mesh(self.mesh)

    @property
    def num_gpus(self) -> int:
        return self.shape.num_devices

    @property
    def num_hosts(self) -> int:
        return -(-self.num_gpus // GPUS_PER_HOST)

    def target(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The step, and the shapes of its arguments for this number of GPUs."""
        model = MODELS[self.model]
        return model.target(model.batch_per_gpu * self.num_gpus)

    def plan(self, frozen: bool = False) -> Plan:
        """The plan, with its prediction; nothing is compiled.

        Args:
            frozen: reuse the saved choices, if there are any, and only price them again.
        """
        step, args = self.target()
        file = default_folder() / "choices" / self.file
        solver = Frozen.load(file) if frozen and file.exists() else Remembering()
        options: dict[str, Any] = {}
        if self.recipe != OWN:
            pins = RECIPES[self.recipe](args, self.shape)
            options = {"pin": pins, "memory_budget_bytes": UNLIMITED_BYTES}
        with self._restricted(args[1]):
            plan = autopar.plan(step, *args, mesh=self.shape, hardware=HARDWARE, solver=solver, **options)
        if isinstance(solver, Remembering):
            solver.save(file)
        return plan

    def _restricted(self, batch: Any) -> AbstractContextManager[None]:
        if self.recipe != "tensor_parallel":
            return nullcontext()
        shapes = [leaf.shape for leaf in jax.tree.leaves(batch)]
        given = [shape[1] for shape in shapes if len(shape) == 2]
        lengths = {*given, *(length - 1 for length in given), *MODELS[self.model].lengths}
        return data_whole_over("model", shapes[0][0], lengths)


@dataclass(frozen=True, slots=True)
class Proved:
    """A case compared with XLA's program.

    Args:
        plan_s: seconds to trace and plan.
        verify_s: seconds that `verify` adds to planning and XLA's compile: lowering, the rest of starting XLA's
            process, and reading its output. None if they were not timed at the compile.
        key: cache key of the compile.
        cached: whether the cache had it.
    """

    case: Case
    plan: Plan
    verification: Verification
    plan_s: float
    verify_s: float | None
    key: str
    cached: bool


def cases(models: Sequence[str] = tuple(MODELS), recipes: Sequence[str] = tuple(MESHES)) -> Iterator[Case]:
    """All cases, model by model, in the order of `MESHES`."""
    for model in models:
        for recipe in recipes:
            for mesh in MESHES[recipe]:
                yield Case(model, recipe, mesh)


def prove(case: Case, compiler: CachingCompiler | None = None, frozen: bool = False) -> Proved:
    """Plan a case, have XLA compile the plan, and compare; `frozen` as in `Case.plan`."""
    if compiler is None:
        with CachingCompiler(default_folder()) as compiler:
            return prove(case, compiler, frozen)
    step, args = case.target()
    start = time.perf_counter()
    plan = case.plan(frozen)
    plan_s = time.perf_counter() - start
    verified = autopar.verify(step, *args, plan=plan, hosts=case.num_hosts, hardware=HARDWARE, compiler=compiler)
    # A cached compile takes no time now; the time around XLA's own, then as now, counts.
    verify_s = None
    if compiler.last_around_s is not None:
        verify_s = verified.overhead_s + verified.compiled.compile_s - compiler.last_s + compiler.last_around_s
    return Proved(case, plan, verified, plan_s, verify_s, compiler.last_key, compiler.last_hit)


# -- rows for the runner ---------------------------------------------------------------------


def measure(program: str) -> list[dict[str, Any]]:
    """One row per plan of a model. A failed case has its error as a row; the others go on.

    A case proved with the same sources is not proved again, so an interrupted run resumes.
    """
    _sources()
    rows = []
    with CachingCompiler(default_folder()) as compiler:
        for case in cases([program]):
            row = _known_row(case)
            if row is None:
                try:
                    row = row_of(prove(case, compiler))
                    _keep_row(case, row)
                except Exception as error:
                    row = _about(case) | {"failed": f"{type(error).__name__}: {error}"}
            rows.append(row)
    return rows


def row_of(done: Proved) -> dict[str, Any]:
    """A case as JSON types: bytes per device, seconds, errors relative to the compiled program."""
    verified = done.verification
    memory = {figure.name: figure for figure in verified.memory}
    predicted = sum(match.predicted_bytes for match in verified.collectives)
    compiled = sum(match.compiled_bytes for match in verified.collectives)
    kinds = [(kind_off(match), match.name) for match in verified.collectives]
    replayed = None if verified.times.replay is None else verified.times.replay.step_time_s
    kind, name = max(kinds, key=lambda one: abs(one[0]), default=(0.0, ""))
    return _about(done.case) | {
        "words": done.plan.strategy,
        "holds": verified.holds,
        "off": list(verified.off),
        "peak_predicted": memory["peak"].predicted,
        "peak_compiled": memory["peak"].compiled,
        "peak_off": memory["peak"].off,
        "temp_predicted": memory["temporaries"].predicted,
        "temp_compiled": memory["temporaries"].compiled,
        "wire_predicted": predicted,
        "wire_compiled": compiled,
        "wire_off": off(predicted, compiled),
        "kind_off": kind,
        "kind_name": name if kind else "",
        "unpredicted_over_1mb": sum(one.num_bytes > MEGABYTE for one in verified.unpredicted),
        "step_predicted_s": verified.step_time.predicted,
        "step_xla_s": verified.step_time.compiled,
        "step_off": verified.step_time.off,
        "own_predicted_s": verified.times.predicted_s,
        "replayed_s": replayed,
        "replay_off": None if replayed is None else off(verified.times.predicted_s, replayed),
        "estimate_errors": list(verified.times.estimate_errors),
        "predicted_exposed_s": done.plan.prediction.xla_exposed_s,
        "exposed_s": verified.compiled.exposed_s,
        "plan_s": done.plan_s,
        "verify_s": done.verify_s,
        "compile_s": verified.compiled.compile_s,
        "key": done.key,
    }


def kind_off(match: CollectiveMatch) -> float:
    """Relative error of one kind of collective over one set of axes, relative to the larger of both; 0 below a
    megabyte."""
    larger = max(match.predicted_bytes, match.compiled_bytes)
    return 0.0 if larger < MEGABYTE else (match.predicted_bytes - match.compiled_bytes) / larger


def _known_row(case: Case) -> dict[str, Any] | None:
    file = _row_file(case)
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


def _keep_row(case: Case, row: dict[str, Any]) -> None:
    file = _row_file(case)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(row) + "\n", encoding="utf-8")


def _row_file(case: Case) -> Path:
    return default_folder() / "rows" / _sources() / case.file


@functools.cache
def _sources() -> str:
    """Fingerprint of the sources at the first call, so that later edits do not count as measured."""
    here = Path(__file__).parent
    return fingerprint(Path(__file__), *(here / name for name in SOURCES))


def _about(case: Case) -> dict[str, Any]:
    return {
        "case": case.name,
        "model": case.model,
        "recipe": case.recipe,
        "mesh": case.mesh,
        "gpus": case.num_gpus,
        "fitted": MODELS[case.model].fitted,
        "failed": "",
    }


# -- filling the cache -----------------------------------------------------------------------

INDEX_COLUMNS = (
    "case",
    "key",
    "peak_predicted",
    "peak_compiled",
    "temp_predicted",
    "temp_compiled",
    "step_s_predicted",
    "step_s_xla",
    "wire_predicted",
    "wire_compiled",
    "compile_s",
    "plan_s",
    "verify_s",
)


def index_row(done: Proved) -> tuple[Any, ...]:
    """A case as a row of the index: bytes per device, seconds."""
    verified = done.verification
    memory = {figure.name: figure for figure in verified.memory}
    return (
        done.case.name,
        done.key,
        memory["peak"].predicted,
        memory["peak"].compiled,
        memory["temporaries"].predicted,
        memory["temporaries"].compiled,
        verified.step_time.predicted,
        verified.step_time.compiled,
        sum(match.predicted_bytes for match in verified.collectives),
        sum(match.compiled_bytes for match in verified.collectives),
        verified.compiled.compile_s,
        done.plan_s,
        done.verify_s,
    )


def main() -> None:
    """Prove cases one after the other, and maintain an index of them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.proof", description=main.__doc__)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--recipes", nargs="*", default=list(MESHES), choices=list(MESHES))
    parser.add_argument("--meshes", nargs="*", help="only these")
    parser.add_argument("--index", type=Path, default=default_folder() / "index.tsv")
    parser.add_argument("--dump", type=Path, help="compile again, and keep XLA's buffer assignment in this folder")
    parser.add_argument("--frozen", action="store_true", help="price the saved choices again instead of planning")
    options = parser.parse_args()
    _sources()
    with _dumping(options.dump), CachingCompiler(default_folder(), again=options.dump is not None) as compiler:
        failed = _prove_all(options, compiler)
    sys.exit(1 if failed else 0)


def _prove_all(options: argparse.Namespace, compiler: CachingCompiler) -> int:
    """Prove all selected cases; returns how many failed."""
    failed = 0
    for case in cases(options.models, options.recipes):
        if options.meshes and case.mesh not in options.meshes:
            continue
        begun = time.perf_counter()
        try:
            done = prove(case, compiler, options.frozen)
        except Exception as error:  # continue with the other cases
            failed += 1
            print(f"{_now()} {case.name} FAILED {type(error).__name__}: {error}", flush=True)
            continue
        _put(options.index, index_row(done))
        if not options.frozen and options.dump is None:
            _keep_row(case, row_of(done))
        verified = done.verification
        print(
            f"{_now()} {case.name} {'cached' if done.cached else 'compiled'} {done.key}"
            f" in {time.perf_counter() - begun:.0f} s; {done.plan.strategy};"
            f" off: {', '.join(verified.off) or 'nothing'}",
            flush=True,
        )
    return failed


def _put(index: Path, row: tuple[Any, ...]) -> None:
    """Add a case to the index; it replaces an older one of the same name."""
    index.parent.mkdir(parents=True, exist_ok=True)
    lines = index.read_text(encoding="utf-8").splitlines()[1:] if index.exists() else []
    kept = [line for line in lines if line.split("\t")[0] != row[0]]
    index.write_text("\n".join(["\t".join(INDEX_COLUMNS), *kept, "\t".join(map(str, row))]) + "\n", encoding="utf-8")


@contextmanager
def _dumping(folder: Path | None) -> Iterator[None]:
    """A context in which XLA dumps to a folder; afterwards all but the buffer assignment is deleted."""
    if folder is None:
        yield
        return
    dump = f"--xla_dump_to={folder} --xla_dump_hlo_as_text --xla_dump_hlo_module_re=.*"
    with mock.patch.dict(os.environ, {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {dump}"}):
        yield
    kept = ("after_optimizations", "buffer-assignment", "memory-usage-report")
    for file in folder.glob("*"):
        if file.is_file() and not any(name in file.name for name in kept):
            file.unlink()


def _now() -> str:
    return datetime.now(UTC).strftime("%H:%M:%S")


if __name__ == "__main__":
    main()
