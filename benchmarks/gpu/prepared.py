"""Prepare plans and XLA's estimates ahead of time, because a GPU host has no solver.

In: a JAX version and a card. Out: files in `plans/`, one per version, card, model and number of GPUs, and the plan and
the estimate read back from them. `python -m benchmarks.gpu prepare` makes those of the JAX version that runs it: a plan
belongs to one traced program, and the trace differs between versions.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import autopar
from autopar.errors import AutoparError
from autopar.frontend.trace import Trace
from autopar.hardware.profile import load
from autopar.jax_interop.compilation import module_bytes
from autopar.plans.plan import Plan
from autopar.runtime import jit as execute
from autopar.runtime.xla_options import compiler_options
from autopar.xla_compiler.compiler import Compiler
from benchmarks.gpu.models import MODELS, ON_SEVERAL, OPTIONS
from benchmarks.gpu.pieces import selected
from benchmarks.zoo.training import Training

FOLDER = Path(__file__).parent / "plans"
#: Numbers of GPUs of a host that the models of `ON_SEVERAL` are planned for, in addition to one.
SEVERAL = (2, 4, 8)
#: Limit for all files that `prepare` writes, over all versions and cards.
MOST_BYTES = 30_000_000


def jax_version() -> str:
    """The major and minor version of this JAX, such as `0.12`."""
    return ".".join(jax.__version__.split(".")[:2])


def prepare(
    folder: Path,
    cards: Sequence[str],
    scale: str,
    several: Sequence[int],
    *,
    estimate: bool,
    report: Callable[[str], None],
    only: str = "",
    again: bool = False,
) -> None:
    """Plan every model for every card and number of GPUs; existing files are kept unless `again` is set.

    Args:
        estimate: whether XLA compiles each step for its estimate. This needs the CUDA plugin and half a minute per
            model.
        only: as for `selected`; other models are skipped.
    """
    wanted = [(num, card, name) for num in (1, *several) for card in cards for name in selected(only, MODELS)]
    for num, card, name in wanted:  # plans for one GPU first
        if num > 1 and name not in ON_SEVERAL:
            continue
        path = _path(folder, card, name, num)
        kept = _read(path) if path.exists() and not again else None
        lacks_estimate = estimate and num == 1 and (kept is None or kept["xla"] is None)
        if kept is not None and not lacks_estimate:
            continue
        report(f"{card}: {name} on {num}")
        path.parent.mkdir(parents=True, exist_ok=True)
        training = MODELS[name][scale](num)
        plan = _planned(training, card, num, OPTIONS.get(name, {})) if kept is None else Plan.from_json(kept["plan"])
        _write(path, {"plan": plan.to_json(), "xla": _estimate(training, plan, card) if lacks_estimate else None})


def _planned(training: Training, card: str, num: int, options: Mapping[str, Any]) -> Plan:
    step, args = training.target
    plan = autopar.plan(step, *args, num_devices=num, all_devices=True, hardware=card, cache=False, **options)
    assert isinstance(plan, Plan)
    return plan


def _estimate(training: Training, plan: Plan, card: str) -> dict[str, Any]:
    """XLA's own estimate of the planned step's time."""
    step, args = training.target
    _, program = autopar.parallelize(step, plan=plan, cache=False).planned(*args)
    if program.as_traced.graph.loops:
        return {"error": "XLA's estimate leaves out what is inside a loop"}
    profile = load(card)
    try:
        with Compiler() as compiler:
            module = module_bytes(_with_a_copy(plan, program.trace))
            found = compiler.compile(module, profile, 1, 1, options=compiler_options(plan))
    except AutoparError as error:
        return {"error": str(error)}
    return {"step_s": found.step_time_s}


def _with_a_copy(plan: Plan, trace: Trace) -> jax.stages.Lowered:
    """The planned step, with a copy of its smallest argument to the host's memory.

    XLA's scheduler gives no estimate for a program without an asynchronous operation, such as a program for one device.
    The copy is asynchronous and ends long before the step. It changes the schedule, so this program's memory is not
    that of the step.
    """
    jitted = execute.jit_plan(plan, trace, execute.abstract_mesh(plan.mesh))

    def both(*args: Any) -> tuple[Any, Any]:
        leaves = [
            leaf for leaf in jax.tree.leaves(args) if leaf.size and not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
        ]
        return jitted(*args), jax.device_put(min(leaves, key=lambda leaf: leaf.size), jax.memory.Space.Host)

    return execute.lower_for(
        "cuda", jax.jit(both, donate_argnums=tuple(execute.donated_arguments(plan, trace))), trace.arguments
    )


def saved(
    folder: Path, profile: str | None, name: str, num: int, version: str | None = None
) -> tuple[Plan, dict[str, Any] | None, str]:
    """The plan, XLA's estimate, and the card of both: the card of `profile`, or the first one with a plan.

    Args:
        version: that of JAX, such as `0.12`; by default this one's.

    Raises:
        FileNotFoundError: there is no plan for this version of JAX.
    """
    version = version or jax_version()
    of_version = folder / f"jax-{version}"
    cards = sorted(one.name for one in of_version.iterdir()) if of_version.is_dir() else []
    for card in [profile] if profile in cards else cards:
        path = of_version / card / f"{name}-{num}.json.gz"
        if path.exists():
            found = _read(path)
            return Plan.from_json(found["plan"]), found["xla"], card
    raise FileNotFoundError(
        f"no plan of {name} on {num} under JAX {version} in {folder}: run `python -m benchmarks.gpu prepare` under it"
    )


def num_bytes(folder: Path) -> int:
    """Bytes of all plan files."""
    return sum(path.stat().st_size for path in folder.rglob("*.json.gz"))


def _path(folder: Path, card: str, name: str, num: int) -> Path:
    return folder / f"jax-{jax_version()}" / card / f"{name}-{num}.json.gz"


def _read(path: Path) -> dict[str, Any]:
    return json.loads(gzip.decompress(path.read_bytes()))


def _write(path: Path, data: dict[str, Any]) -> None:
    text = json.dumps(data, separators=(",", ":"))
    part = path.with_suffix(".part")
    part.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    part.replace(path)
