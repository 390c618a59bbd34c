"""What it takes to serve a model: its sizes checked, its programs planned, its weights read.

In: a configuration, shapes of weights, devices. Out: `Opened`, for an `Engine` to run.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from autopar.api.planned_function import Compiled, Planned, shardings_of
from autopar.errors import InferenceError, ModelError
from autopar.inference.kernels.paged_attention import REFERENCE, backend_named
from autopar.inference.kernels.select_backend import BackendChoice, Problem, choose_backend
from autopar.inference.model.async_load import BackgroundLoad, Load, Progress
from autopar.inference.model.checkpoint import Checkpoint
from autopar.inference.model.config import DecoderConfig
from autopar.inference.model.decoder import Decoder
from autopar.inference.schedule.requests import Options, Shape
from autopar.inference.schedule.speculation_policy import NGram, Proposer, SpeculationPolicy
from autopar.inference.serve.draft_model import DraftModel
from autopar.inference.serve.layout import Key, Layout, Served, laid_out, pins_of_pages
from autopar.inference.serve.program_cache import DamagedError, KeptPrograms
from autopar.jax_interop import compilation
from autopar.jax_interop.partition_spec import partition_spec
from autopar.planner.cache import plans as plan_cache
from autopar.planner.request import requested_meshes, requested_profile

#: Who guesses tokens: `N_GRAM`, the folder of a small model, or whoever does.
Propose = str | os.PathLike[str] | Proposer | None
N_GRAM = "n-gram"
_NUM_PROPOSALS = 4


class Opened(NamedTuple):
    """What is served, by which programs, with which weights; and where the programs come from, if an earlier start has kept
    them."""

    served: Served
    layout: Layout[Compiled]
    params: Any
    kept: KeptPrograms | None


def opened(
    served: Served,
    attention: str | None,
    load: Load,
    place: Mapping[str, Any],
    num_pages: int | None = None,
    progress: Progress | None = None,
    others_bytes: float = 0.0,
    beside: Layout[Compiled] | None = None,
    *,
    anew: bool = False,
) -> Opened:
    """Everything on the devices: from what an earlier start has kept, or made, and kept.

    Args:
        attention: a backend; None takes the fastest here. load: reads the weights.
        place, num_pages, progress, others_bytes, beside: as of `planned_for`.
        anew: take nothing from an earlier start.
    """
    asked = {**_planning(place, others_bytes), "num_pages": num_pages, "attention": attention}
    asked["beside"] = None if beside is None else (beside.num_pages, pins_of_pages(served, beside))
    kept = KeptPrograms.of(plan_cache.folder_of(asked.pop("cache", None)), served, asked)
    found = None if anew else kept.read()
    if found is not None:
        try:
            served = replace(served, attention=found[0])
            return Opened(served, *_with_weights(served, found[1], load, progress), kept)
        except DamagedError as error:
            kept.say_damaged(error)
    if attention is None:
        attention = attention_for(served, place.get("mesh")).name
    served = replace(served, attention=attention)
    layout = planned_for(served, place, num_pages, progress, others_bytes, beside)
    with contextlib.nullcontext() if kept.path is None else compilation.compiled_anew():
        programs, params = _with_weights(served, layout, load, progress)
    kept.write(attention, programs)
    return Opened(served, programs, params, None)


def _with_weights(
    served: Served, layout: Layout[Any], load: Load, progress: Progress | None
) -> tuple[Layout[Compiled], Any]:
    """Programs compiled, and weights read meanwhile.

    Args:
        layout: of programs planned, or compiled before.
    """
    programs: dict[Key, Compiled] = {}
    home = layout.programs[served.keys[0]]
    leaves, structure = jax.tree.flatten(served.params)
    shardings = jax.tree.unflatten(structure, shardings_of(home.plan, home.mesh)[: len(leaves)])
    num_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    with BackgroundLoad(load, shardings, num_bytes) as weights:
        for number, (key, program) in enumerate(layout.programs.items()):
            if progress is not None:
                progress("compile programs", number / len(layout.programs))
            programs[key] = program.compiled()
            weights.check()
        return replace(layout, programs=programs), weights.result(progress)


def planned_for(
    served: Served,
    place: Mapping[str, Any],
    num_pages: int | None = None,
    progress: Progress | None = None,
    others_bytes: float = 0.0,
    beside: Layout[Compiled] | None = None,
) -> Layout[Planned]:
    """All programs, planned for devices that are there.

    Args:
        place: mesh, hardware, memory_budget_bytes and cache, as of `autopar.plan`; by default all devices in a row.
        num_pages, progress, beside: as of `laid_out`. others_bytes: of each device, that something else holds.
    """
    planning = _planning(place, others_bytes)

    def make(function: Any, arguments: Any, carry: Any, pins: Mapping[str, Any]) -> Planned:
        return Planned.of(function, arguments, {**planning, "pin": pins}, carry)

    return laid_out(served, make, planning["memory_budget_bytes"], num_pages, progress, beside)


def _planning(place: Mapping[str, Any], others_bytes: float = 0.0) -> dict[str, Any]:
    """The options of `autopar.plan`, with what is not said filled in, and what others hold taken from the budget."""
    mesh = place.get("mesh") or f"model={requested_meshes(None, None)[0].num_devices}"
    profile, asked = requested_profile(place.get("hardware")), place.get("memory_budget_bytes")
    budget = profile.usable_bytes if asked is None else float(asked)
    return {**place, "mesh": mesh, "hardware": profile, "memory_budget_bytes": budget - others_bytes}


# -- proposals -----------------------------------------------------------------------------------


class Proposing(NamedTuple):
    """Who proposes, the seconds that it takes for all slots at once, and what it holds of each device's memory."""

    proposer: Proposer | None
    seconds: float = 0.0
    held_bytes: int = 0


def proposer_of(propose: Propose, served: Served, place: Mapping[str, Any]) -> Proposing:
    """Who proposes.

    Raises:
        InferenceError: it is none of what can be given, or a model with another vocabulary.
    """
    if propose is None or not isinstance(propose, str | os.PathLike):
        return Proposing(propose)
    if propose == N_GRAM:
        return Proposing(NGram())
    if not Path(propose).is_dir():
        raise InferenceError(
            f"propose is {os.fspath(propose)!r}: give {N_GRAM!r}, the folder of a small model, or a Proposer"
        )
    checkpoint, options = Checkpoint.open(propose), served.options
    home: list[Planned] = []

    def prepare(function: Any, arguments: Any) -> Planned:
        known = home[0].plan.inputs if home else ()
        pins = {t.path: partition_spec(t.sharding) for t in known if t.path.startswith(("params/", "cache/"))}
        home.append(Planned.of(function, arguments, {**_planning(place), "pin": pins}, ("cache",)))
        return home[-1]

    draft = DraftModel(
        checkpoint.model,
        checkpoint.load(),
        options.num_slots,
        options.max_length,
        options.num_proposals,
        vocab_size=served.model.config.vocab_size,
        prepare=prepare,
    )
    return Proposing(draft, draft.warm_up(), draft.held_bytes)


def policy_of(seconds: Mapping[Shape, float], guess_s: float) -> SpeculationPolicy | None:
    """When to propose, by the seconds of each program and those of a guess; None where nothing is proposed."""
    verified = next((time for shape, time in seconds.items() if shape.width > 1), None)
    if verified is None:
        return None
    plain = min(time / shape.steps for shape, time in seconds.items() if shape.width == 1 and not shape.rows)
    return SpeculationPolicy((verified + guess_s) / plain)


def options_for(config: DecoderConfig, options: Options | None) -> Options:
    """Checked against what the model was made for.

    Raises:
        InferenceError: sequences may be longer than it has positions.
    """
    if options is None:
        default = Options()
        return replace(default, max_length=min(default.max_length, config.max_positions))
    if options.max_length > config.max_positions:
        raise InferenceError(
            f"max_length is {options.max_length}, and the model was made for {config.max_positions} positions: give at"
            " most so many"
        )
    return options


def stop_tokens_of(folder: str | os.PathLike[str]) -> frozenset[int]:
    """The tokens that end a text by `generation_config.json`, or by `config.json`.

    Raises:
        ModelError: one of the files is no JSON, or names something else than tokens.
    """
    for name in ("generation_config.json", "config.json"):
        path = Path(folder) / name
        if not path.is_file():
            continue
        try:
            found = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
            if found is not None:
                return frozenset(map(int, found if isinstance(found, list) else [found]))
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise ModelError(f"{path} cannot be read ({error}). Copy it again from where it came from") from None
    return frozenset()


def served_of(
    config: DecoderConfig,
    params: Any,
    options: Options | None,
    page_size: int,
    propose: Propose = None,
    attention: str = REFERENCE,
) -> Served:
    """A model in the sizes that it is served in.

    Args:
        params: its weights, as shapes; keys and values are kept in the dtype of the embedding.
        propose: where it is given, four tokens are proposed, unless the options say how many.
        attention: a backend.
    """
    options = options_for(config, options)
    if propose is not None and not options.num_proposals:
        options = replace(options, num_proposals=_NUM_PROPOSALS)
    dtype = params["params"]["embed"]["weight"].dtype
    backend_named(attention)  # refuses what is none
    return Served(Decoder(config), params, options, page_size, dtype, attention)


def attention_for(served: Served, mesh: Any) -> BackendChoice:
    """The backend that is fastest here for a token of each slot, with the heads that a device gets if they are split."""
    (shape,), config, options = (
        requested_meshes(mesh or f"model={jax.device_count()}", None),
        served.model.config,
        served.options,
    )
    parts = shape.num_devices if config.num_kv_heads % shape.num_devices == 0 else 1
    device = mesh.devices.flat[0] if isinstance(mesh, Mesh) else jax.devices()[0]
    problem = Problem(
        rows=options.num_slots,
        tokens=1,
        heads=config.num_heads // parts,
        kv_heads=config.num_kv_heads // parts,
        head_dim=config.head_dim,
        page_size=served.page_size,
        pages_per_sequence=served.pages_of_sequence,
        dtype=served.dtype,
    )
    return choose_backend(problem, device=device)
