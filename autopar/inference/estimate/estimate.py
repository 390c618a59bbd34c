"""Plan the serving of a model on devices that may be absent, and choose the number of replicas.

In: a decoder's configuration, a workload (`PaperInference`), the number of devices. Out: `InferenceOnPaper`: for every
number of replicas, the plans of a replica's programs and their figures, or why it does not fit; and the best number by the
objective. The programs are those of the engine, traced with abstract arrays; no weights are read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from autopar.api.planned_function import plan_of
from autopar.errors import BudgetError, InferenceError, MeshError
from autopar.hardware.profile import HardwareProfile
from autopar.inference.estimate.figures import ReplicaFigures, figures_of
from autopar.inference.kv_cache.device_pages import page_bytes
from autopar.inference.model.config import DecoderConfig
from autopar.inference.model.decoder import Decoder
from autopar.inference.schedule.requests import Options
from autopar.inference.serve.layout import Layout, PlanOnly, Served, plan_layout
from autopar.ir.mesh import MeshShape
from autopar.planner.memory_budget import MemoryBudget
from autopar.planner.request import Progress, requested_meshes, requested_profile
from autopar.system.units import human_bytes

Objective = Literal["latency", "throughput"]
OBJECTIVES: tuple[Objective, ...] = ("latency", "throughput")
#: The supported dtypes of weights and cache.
DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperInference:
    """A model, a serving workload, and an objective.

    Args:
        batch: the slots of a replica, which are the sequences that run at once.
        prompt, output: the tokens of each prompt, and the tokens generated for it.
        max_length: the tokens of the longest sequence; by default `prompt + output`, in whole pages.
        dtype: the dtype of weights and cache; by default the configuration's, else bfloat16.
        page_size: tokens per page of the KV cache.
        objective: "latency" minimizes TPOT; "throughput" maximizes the tokens per second of all devices.
        ttft_s, tpot_s: upper bounds of TTFT and TPOT.

    Raises:
        InferenceError: a field is invalid; the message names it.
    """

    config: DecoderConfig
    batch: int = 16
    prompt: int = 1000
    output: int = 1000
    max_length: int = 0
    dtype: str = ""
    page_size: int = 16
    objective: Objective = "latency"
    ttft_s: float = math.inf
    tpot_s: float = math.inf

    def __post_init__(self) -> None:
        for name in ("batch", "prompt", "output", "page_size"):
            if getattr(self, name) < 1:
                raise InferenceError(f"`{name}` is {getattr(self, name)!r}: give an integer of at least 1")
        needed, most = self.prompt + self.output, self.config.max_positions
        if needed > most:
            raise InferenceError(
                f"a prompt of {self.prompt:,} tokens and an output of {self.output:,} are {needed:,} tokens, but the model"
                f" has {most:,} positions: shorten either"
            )
        if not self.max_length:
            object.__setattr__(self, "max_length", min(most, -(-needed // self.page_size) * self.page_size))
        if self.max_length > most:
            raise InferenceError(
                f"max_length is {self.max_length:,}, but the model has {most:,} positions: give at most that many"
            )
        if self.max_length < needed:
            raise InferenceError(
                f"max_length is {self.max_length:,}, but prompt and output have {needed:,} tokens: give at least that many"
            )
        if not self.dtype:
            known = self.config.dtype in DTYPES
            object.__setattr__(self, "dtype", self.config.dtype if known else "bfloat16")
        if self.dtype not in DTYPES:
            raise InferenceError(f"`dtype` is {self.dtype!r}: give one of {', '.join(DTYPES)}")
        if self.objective not in OBJECTIVES:
            raise InferenceError(f"`objective` is {self.objective!r}: give one of {', '.join(OBJECTIVES)}")

    @property
    def served(self) -> Served:
        """The model and the static sizes of its engine."""
        dtype, model = jnp.dtype(self.dtype), Decoder(self.config.for_length(self.max_length))
        shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
        params = jax.tree.map(
            lambda leaf: leaf if jnp.issubdtype(leaf.dtype, jnp.integer) else jax.ShapeDtypeStruct(leaf.shape, dtype),
            shapes,
        )
        options = Options(num_slots=self.batch, max_length=self.max_length)
        return Served(model, params, options, self.page_size, dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """The devices divided into a number of replicas, each with an engine of its own.

    Args:
        mesh: the mesh of one replica.
        layout, figures: the plans and the predicted figures of one replica; None if it does not fit.
        refused: the reason if a replica does not fit.
    """

    num: int
    mesh: MeshShape
    layout: Layout[PlanOnly] | None = field(default=None, repr=False)
    figures: ReplicaFigures | None = None
    refused: str = ""

    @property
    def tokens_per_s(self) -> float:
        """The tokens per second of all replicas."""
        return 0.0 if self.figures is None else self.num * self.figures.tokens_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceOnPaper:
    """The predicted figures of serving a model, for every number of replicas.

    Args:
        profile: the hardware. num_devices: the number of devices.
        room_bytes: the memory of one device that a plan may use.
        options: the candidates, one for each number of replicas.
        chosen: the best candidate.
        verdicts: why each other candidate is not chosen, by its number of replicas.
        missed: the bounds that the chosen candidate misses, if no candidate meets all bounds; else "".
    """

    case: PaperInference
    profile: HardwareProfile
    num_devices: int
    room_bytes: float
    options: tuple[Replicas, ...]
    chosen: Replicas
    verdicts: Mapping[int, str]
    missed: str = ""


def inference_on_paper(case: PaperInference, *, progress: Progress | None = None, **options: Any) -> InferenceOnPaper:
    """Plan every number of replicas, and choose the best one.

    Args:
        options: options of `autopar.plan`: num_devices, to be divided into replicas, or mesh, for a single replica;
            hardware, memory_budget_bytes, time_limit_s, cache.

    Raises:
        BudgetError: no number of replicas fits. AutoparError: planning fails.
    """
    profile = requested_profile(options.get("hardware"))
    budget = options.get("memory_budget_bytes")
    budget = profile.usable_bytes if budget is None else float(budget)
    room = MemoryBudget(budget).plan_bytes
    meshes = _meshes(options.get("mesh"), options.get("num_devices"))
    planning = {name: value for name, value in options.items() if name not in ("mesh", "num_devices")}
    planning |= {"hardware": profile, "memory_budget_bytes": budget}
    served, report = case.served, progress or (lambda stage, fraction: None)
    candidates = []
    for done, (number, mesh) in enumerate(meshes):
        stage = partial(_report, report, _replicas_text(number, mesh.num_devices), done, len(meshes))
        candidates.append(_plan_replicas(case, served, number, mesh, budget, planning, stage))
    report("done", 1.0)
    fitting = [one for one in candidates if one.figures is not None]
    if not fitting:
        raise BudgetError(_nothing_fits(served, candidates, room, profile))
    chosen, missed = choose(case, fitting)
    return InferenceOnPaper(
        case=case,
        profile=profile,
        num_devices=meshes[0][0] * meshes[0][1].num_devices,
        room_bytes=room,
        options=tuple(candidates),
        chosen=chosen,
        verdicts={one.num: verdict(case, one, chosen) for one in candidates if one is not chosen},
        missed=missed,
    )


def _meshes(mesh: Any, num_devices: int | None) -> list[tuple[int, MeshShape]]:
    """The candidate numbers of replicas, each with the mesh of one replica."""
    if mesh is not None:
        return [(1, requested_meshes(mesh, num_devices)[0])]
    devices = jax.device_count() if num_devices is None else num_devices
    if devices < 1:
        raise MeshError(f"the number of devices is {devices}: give 1 or more")
    return [(n, MeshShape(("model",), (devices // n,))) for n in range(1, devices + 1) if devices % n == 0]


def _plan_replicas(
    case: PaperInference,
    served: Served,
    number: int,
    mesh: MeshShape,
    budget: float,
    options: Mapping[str, Any],
    progress: Progress,
) -> Replicas:
    least, room = _min_bytes(served), budget * mesh.num_devices
    if least > room:  # planning takes a minute, so check this first
        devices = "device has" if mesh.num_devices == 1 else "devices have"
        return Replicas(
            num=number,
            mesh=mesh,
            refused=f"weights and a cache for one sequence take {human_bytes(least)}, but {mesh.num_devices} {devices}"
            f" {human_bytes(room)}",
        )

    def make(function: Any, arguments: Any, carry: Any, pins: Mapping[str, Any]) -> PlanOnly:
        return PlanOnly(plan_of(function, arguments, {**options, "mesh": mesh, "pin": pins}, carry))

    try:
        layout = plan_layout(served, make, budget, progress=progress)
    except (BudgetError, InferenceError) as error:
        return Replicas(num=number, mesh=mesh, refused=str(error))
    figures = figures_of(served, layout, case.prompt, case.output, options["hardware"])
    return Replicas(num=number, mesh=mesh, layout=layout, figures=figures)


def _min_bytes(served: Served) -> float:
    """The bytes of the weights and of a cache for one sequence of full length, over all devices of a replica."""
    config = served.model.config
    page = page_bytes(config.num_layers, served.page_size, config.num_kv_heads, config.head_dim, served.dtype)
    weights = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(served.params))
    return weights + (served.pages_held + 1) * page


def _nothing_fits(served: Served, candidates: list[Replicas], room: float, profile: HardwareProfile) -> str:
    most = max(candidates, key=lambda one: one.mesh.num_devices)
    least = math.ceil(_min_bytes(served) / room)
    way_out = (
        f". Use at least {least} devices (by bytes alone), larger ones, a smaller dtype or a shorter max_length"
        if least > most.mesh.num_devices
        else ""  # `refused` has it
    )
    return (
        f"the model does not fit on {profile.name}, not even as one replica on {most.mesh.num_devices}:"
        f" {most.refused}{way_out}"
    )


# -- the choice --------------------------------------------------------------------------------


def choose(case: PaperInference, fitting: Sequence[Replicas]) -> tuple[Replicas, str]:
    """Choose the best candidate that meets the bounds. If none does, choose the nearest, and describe the missed bounds."""
    valid = [one for one in fitting if not _missed_bounds(case, one)]
    if valid:
        return min(valid, key=lambda one: _rank(case, one)), ""
    nearest = min(fitting, key=lambda one: _excess(case, one))
    return nearest, f"no number of replicas meets the bounds; of the nearest, {_missed_bounds(case, nearest)}"


def _rank(case: PaperInference, one: Replicas) -> tuple[float, float]:
    """The sort key, lower is better: the objective, then the other objective."""
    assert one.figures is not None
    latency, throughput = one.figures.tpot_s, -one.tokens_per_s
    return (latency, throughput) if case.objective == "latency" else (throughput, latency)


def _seconds_and_bounds(case: PaperInference, one: Replicas) -> list[tuple[str, float, float]]:
    assert one.figures is not None
    loaded = one.figures.tpot_loaded_s if case.objective == "throughput" else one.figures.tpot_s
    return [("TTFT", one.figures.ttft_s, case.ttft_s), ("TPOT", loaded, case.tpot_s)]


def _missed_bounds(case: PaperInference, one: Replicas) -> str:
    """A description of the bounds that a candidate misses; "" if it meets all."""
    missed = [
        f"{name} is {seconds:.3g} s, the bound {bound:.3g} s"
        for name, seconds, bound in _seconds_and_bounds(case, one)
        if seconds > bound
    ]
    return " and ".join(missed)


def _excess(case: PaperInference, one: Replicas) -> float:
    return max(seconds / bound for _, seconds, bound in _seconds_and_bounds(case, one))


def verdict(case: PaperInference, one: Replicas, chosen: Replicas) -> str:
    """Say why a candidate is not the chosen one."""
    if one.figures is None:
        return one.refused
    if missed := _missed_bounds(case, one):
        return missed
    assert chosen.figures is not None
    if case.objective == "latency":
        return f"{one.figures.tpot_s / chosen.figures.tpot_s:.2f} x the TPOT"
    return f"{one.tokens_per_s / chosen.tokens_per_s:.2f} x the tokens/s"


def _report(report: Progress, stage: str, done: int, num: int, _: str, fraction: float) -> None:
    report(stage, (done + fraction) / num)


def _replicas_text(number: int, devices: int) -> str:
    """
    >>> _replicas_text(1, 8), _replicas_text(4, 2)
    ('plan 1 replica on 8 devices', 'plan 4 replicas on 2 devices each')
    """
    each = "" if number == 1 else " each"
    return f"plan {number} replica{'s' * (number > 1)} on {devices} device{'s' * (devices > 1)}{each}"
