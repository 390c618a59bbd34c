"""An engine planned for devices that need not be there: into how many replicas to cut them, and what each will do.

In: a decoder's configuration, a workload (`PaperInference`), devices. Out: `InferenceOnPaper`: for every number of
replicas the plans of all programs of one, or why it does not fit; and which number is best by the objective. The programs
planned are the engine's own, of abstract arrays; no weights are read.
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
from autopar.cost.hardware_profile import HardwareProfile
from autopar.errors import BudgetError, InferenceError, MeshError
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
#: Dtypes of weights and cache.
DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperInference:
    """What is to be served, and how.

    Args:
        batch: sequences that run at once in one replica: its slots.
        prompt, output: tokens of each sequence. max_length: of the longest; by default of these, in whole pages.
        dtype: of weights and cache; by default what the configuration says, else bfloat16.
        objective: "latency", the shortest time for each token; or "throughput", most tokens of all devices.
        ttft_s, tpot_s: bounds: what is slower is not chosen.

    Raises:
        InferenceError: what cannot be, by name.
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
                raise InferenceError(f"`{name}` is {getattr(self, name)!r}: give a whole number of at least 1")
        needed, most = self.prompt + self.output, self.config.max_positions
        if needed > most:
            raise InferenceError(
                f"a prompt of {self.prompt:,} tokens and {self.output:,} generated are {needed:,}, and the model was made"
                f" for {most:,} positions: shorten either"
            )
        if not self.max_length:
            object.__setattr__(self, "max_length", min(most, -(-needed // self.page_size) * self.page_size))
        if self.max_length > most:
            raise InferenceError(
                f"max_length is {self.max_length:,}, and the model was made for {most:,} positions: give at most so many"
            )
        if self.max_length < needed:
            raise InferenceError(
                f"max_length is {self.max_length:,}, and prompt and output have {needed:,} tokens: give at least so many"
            )
        if not self.dtype:
            known = self.config.dtype in DTYPES
            object.__setattr__(self, "dtype", self.config.dtype if known else "bfloat16")
        if self.dtype not in DTYPES:
            raise InferenceError(f"`dtype` is {self.dtype!r}: weights and cache can be {', '.join(DTYPES)}")
        if self.objective not in OBJECTIVES:
            raise InferenceError(f"`objective` is {self.objective!r}: there are {', '.join(OBJECTIVES)}")

    @property
    def served(self) -> Served:
        """What an engine would be opened with."""
        dtype, model = jnp.dtype(self.dtype), Decoder(self.config)
        shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
        params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), shapes)
        options = Options(num_slots=self.batch, max_length=self.max_length)
        return Served(model, params, options, self.page_size, dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """The devices cut into so many engines.

    Args:
        mesh: of one of them.
        layout, figures: None where one does not fit, and `refused` says why.
    """

    num: int
    mesh: MeshShape
    layout: Layout[PlanOnly] | None = field(default=None, repr=False)
    figures: ReplicaFigures | None = None
    refused: str = ""

    @property
    def tokens_per_s(self) -> float:
        """Of all replicas."""
        return 0.0 if self.figures is None else self.num * self.figures.tokens_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceOnPaper:
    """What there is to say.

    Args:
        options: all that was planned. chosen: one of them; `verdicts`: by number of replicas, why the others are not.
        room_bytes: what a plan may fill of a device.
        missed: which bound none keeps to; then the one that is nearest is chosen.
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
    """Plan every number of replicas, and choose.

    Args:
        options: of `autopar.plan`: num_devices, which are cut into replicas; or mesh, which is that of one replica alone;
            hardware, memory_budget_bytes, time_limit_s, cache.

    Raises:
        BudgetError: nothing fits. AutoparError: of planning.
    """
    profile = requested_profile(options.get("hardware"))
    given = options.get("memory_budget_bytes")
    budget = profile.usable_bytes if given is None else float(given)
    room = MemoryBudget(budget).plan_bytes
    meshes = _meshes(options.get("mesh"), options.get("num_devices"))
    more = {name: value for name, value in options.items() if name not in ("mesh", "num_devices")}
    more |= {"hardware": profile, "memory_budget_bytes": budget}
    served, report = case.served, progress or (lambda stage, fraction: None)
    found = []
    for done, (number, mesh) in enumerate(meshes):
        told = partial(_report, report, _replicas_in_words(number, mesh.num_devices), done, len(meshes))
        found.append(_planned(case, served, number, mesh, budget, more, told))
    report("done", 1.0)
    fitting = [one for one in found if one.figures is not None]
    if not fitting:
        raise BudgetError(_nothing_fits(served, found, room, profile))
    chosen, missed = choose(case, fitting)
    return InferenceOnPaper(
        case=case,
        profile=profile,
        num_devices=meshes[0][0] * meshes[0][1].num_devices,
        room_bytes=room,
        options=tuple(found),
        chosen=chosen,
        verdicts={one.num: verdict(case, one, chosen) for one in found if one is not chosen},
        missed=missed,
    )


def _meshes(mesh: Any, num_devices: int | None) -> list[tuple[int, MeshShape]]:
    """How many replicas, and the mesh of each."""
    if mesh is not None:
        return [(1, requested_meshes(mesh, num_devices)[0])]
    devices = jax.device_count() if num_devices is None else num_devices
    if devices < 1:
        raise MeshError(f"{devices} devices: give 1 or more")
    return [(n, MeshShape(("model",), (devices // n,))) for n in range(1, devices + 1) if devices % n == 0]


def _planned(
    case: PaperInference,
    served: Served,
    number: int,
    mesh: MeshShape,
    budget: float,
    options: Mapping[str, Any],
    progress: Progress,
) -> Replicas:
    least, room = _least_bytes(served), budget * mesh.num_devices
    if least > room:  # no need to plan, which takes a minute
        devices = "device has" if mesh.num_devices == 1 else "devices have"
        return Replicas(
            num=number,
            mesh=mesh,
            refused=f"weights and a cache for one sequence take {human_bytes(least)}, and {mesh.num_devices} {devices}"
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


def _least_bytes(served: Served) -> float:
    """Of weights, and of a cache for one sequence of full length, on all devices of a replica."""
    config = served.model.config
    page = page_bytes(config.num_layers, served.page_size, config.num_kv_heads, config.head_dim, served.dtype)
    weights = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(served.params))
    return weights + (served.pages_of_sequence + 1) * page


def _nothing_fits(served: Served, found: list[Replicas], room: float, profile: HardwareProfile) -> str:
    most = max(found, key=lambda one: one.mesh.num_devices)
    least = math.ceil(_least_bytes(served) / room)
    more = (
        f". Use at least {least} devices (by bytes alone), larger ones, a smaller dtype or a shorter max_length"
        if least > most.mesh.num_devices
        else ""  # it is said already
    )
    return (
        f"the model fits no {profile.name} here, not even one replica on {most.mesh.num_devices}: {most.refused}{more}"
    )


# -- the choice --------------------------------------------------------------------------------


def choose(case: PaperInference, fitting: Sequence[Replicas]) -> tuple[Replicas, str]:
    """The best of those that keep to the bounds; if none does, the nearest to them, and what is missed."""
    kept = [one for one in fitting if not _late(case, one)]
    if kept:
        return min(kept, key=lambda one: _rank(case, one)), ""
    nearest = min(fitting, key=lambda one: _excess(case, one))
    return nearest, f"no number of replicas keeps to the bounds; of the nearest, {_late(case, nearest)}"


def _rank(case: PaperInference, one: Replicas) -> tuple[float, float]:
    """The lower the better; of equals by the other objective."""
    assert one.figures is not None
    latency, throughput = one.figures.tpot_s, -one.tokens_per_s
    return (latency, throughput) if case.objective == "latency" else (throughput, latency)


def _seconds_and_bounds(case: PaperInference, one: Replicas) -> list[tuple[str, float, float]]:
    assert one.figures is not None
    loaded = one.figures.tpot_loaded_s if case.objective == "throughput" else one.figures.tpot_s
    return [("TTFT", one.figures.ttft_s, case.ttft_s), ("TPOT", loaded, case.tpot_s)]


def _late(case: PaperInference, one: Replicas) -> str:
    """Which bound is missed, in words."""
    missed = [
        f"{name} is {seconds:.3g} s, the bound {bound:.3g} s"
        for name, seconds, bound in _seconds_and_bounds(case, one)
        if seconds > bound
    ]
    return " and ".join(missed)


def _excess(case: PaperInference, one: Replicas) -> float:
    return max(seconds / bound for _, seconds, bound in _seconds_and_bounds(case, one))


def verdict(case: PaperInference, one: Replicas, chosen: Replicas) -> str:
    """Why it is not the one that is chosen."""
    if one.figures is None:
        return one.refused
    if late := _late(case, one):
        return late
    assert chosen.figures is not None
    if case.objective == "latency":
        return f"{one.figures.tpot_s / chosen.figures.tpot_s:.2f} x the TPOT"
    return f"{one.tokens_per_s / chosen.tokens_per_s:.2f} x the tokens/s"


def _report(report: Progress, words: str, done: int, num: int, _: str, fraction: float) -> None:
    report(words, (done + fraction) / num)


def _replicas_in_words(number: int, devices: int) -> str:
    """
    >>> _replicas_in_words(1, 8), _replicas_in_words(4, 2)
    ('plan 1 replica on 8 devices', 'plan 4 replicas on 2 devices each')
    """
    each = "" if number == 1 else " each"
    return f"plan {number} replica{'s' * (number > 1)} on {devices} device{'s' * (devices > 1)}{each}"
