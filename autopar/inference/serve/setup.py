"""Open a model for serving: check its sizes, plan and compile its programs, read its weights.

In: a configuration, the shapes of the weights, devices. Out: `OpenedModel`, for an `Engine` to run.
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
from autopar.inference.serve.kv_pool import KVPool
from autopar.inference.serve.layout import Key, Layout, Served, page_pins, plan_layout
from autopar.inference.serve.page_rows import PageRows
from autopar.inference.serve.program_cache import DamagedError, ProgramCache
from autopar.jax_interop import compilation
from autopar.jax_interop.partition_spec import partition_spec
from autopar.planner.cache import plans as plan_cache
from autopar.planner.request import requested_meshes, requested_profile

#: The source of draft tokens: `N_GRAM`, the folder of a small model, or a `Proposer`.
Propose = str | os.PathLike[str] | Proposer | None
N_GRAM = "n-gram"
_NUM_PROPOSALS = 4


class OpenedModel(NamedTuple):
    """A model that is ready to run: its compiled programs and its weights.

    Args:
        cache: the cache that the programs were loaded from; None if they were compiled.
    """

    served: Served
    layout: Layout[Compiled]
    params: Any
    cache: ProgramCache | None


def open_model(
    served: Served,
    attention: str | None,
    load: Load,
    place: Mapping[str, Any],
    num_pages: int | None = None,
    progress: Progress | None = None,
    reserved_bytes: float = 0.0,
    shared: Layout[Compiled] | None = None,
    *,
    ignore_cache: bool = False,
    pool: KVPool | None = None,
) -> OpenedModel:
    """Load a model's programs from the cache, or plan, compile and cache them; and read its weights.

    Args:
        attention: an attention backend; None selects the fastest one.
        load: the function that reads the weights.
        place, num_pages, progress, reserved_bytes, shared: as for `planned_for`.
        ignore_cache: whether to compile even if the cache has the programs.
        pool: the pool that the pages are in, if `served` has rows.
    """
    options = {**_planning(place, reserved_bytes), "num_pages": num_pages, "attention": attention}
    options["shared"] = None if shared is None else (shared.num_pages, page_pins(served, shared))
    options["rows"] = None if served.page_rows is None else (served.page_rows.shape, str(served.page_rows.spec))
    cache = ProgramCache.of(plan_cache.folder_of(options.pop("cache", None)), served, options)
    found = None if ignore_cache else cache.read()
    if found is not None:
        try:
            served = replace(served, attention=found[0])
            return OpenedModel(served, *_compile_and_load(served, found[1], load, progress, pool), cache)
        except DamagedError as error:
            cache.warn_damaged(error)
    if attention is None:
        attention = select_attention(served, place.get("mesh")).name
    served = replace(served, attention=attention)
    layout = planned_for(served, place, num_pages, progress, reserved_bytes, shared)
    with contextlib.nullcontext() if cache.path is None else compilation.without_compilation_cache():
        programs, params = _compile_and_load(served, layout, load, progress, pool)
    cache.write(attention, programs)
    return OpenedModel(served, programs, params, None)


def _compile_and_load(
    served: Served, layout: Layout[Any], load: Load, progress: Progress | None, pool: KVPool | None
) -> tuple[Layout[Compiled], Any]:
    """Compile the programs while a background thread reads the weights.

    Args:
        layout: planned or cached programs.
    """
    programs: dict[Key, Compiled] = {}
    primary = layout.programs[served.keys[0]]
    leaves, structure = jax.tree.flatten(served.params)
    shardings = jax.tree.unflatten(structure, shardings_of(primary.plan, primary.mesh)[: len(leaves)])
    num_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    with BackgroundLoad(load, shardings, num_bytes) as weights:
        for number, (key, program) in enumerate(layout.programs.items()):
            if progress is not None:
                progress("compile programs", number / len(layout.programs))
            if isinstance(program, Planned) and pool is not None and served.page_rows is not None:
                programs[key] = pool.compiled(program, served.page_rows)
            else:
                programs[key] = program.compiled()
            weights.check()
        return replace(layout, programs=programs), weights.result(progress)


def planned_for(
    served: Served,
    place: Mapping[str, Any],
    num_pages: int | None = None,
    progress: Progress | None = None,
    reserved_bytes: float = 0.0,
    shared: Layout[Compiled] | None = None,
) -> Layout[Planned]:
    """Plan all programs for the visible devices.

    Args:
        place: mesh, hardware, memory_budget_bytes and cache, as for `autopar.plan`; by default a 1D mesh of all devices.
        num_pages, progress, shared: as for `plan_layout`.
        reserved_bytes: memory of each device that something else uses.
    """
    planning = _planning(place, reserved_bytes)

    def make(function: Any, arguments: Any, carry: Any, pins: Mapping[str, Any]) -> Planned:
        return Planned.of(function, arguments, {**planning, "pin": pins}, carry)

    return plan_layout(served, make, planning["memory_budget_bytes"], num_pages, progress, shared)


def _planning(place: Mapping[str, Any], reserved_bytes: float = 0.0) -> dict[str, Any]:
    """The options of `autopar.plan`, with defaults filled in and reserved memory subtracted from the budget."""
    mesh = place.get("mesh") or f"model={requested_meshes(None, None)[0].num_devices}"
    profile, budget = requested_profile(place.get("hardware")), place.get("memory_budget_bytes")
    budget = profile.usable_bytes if budget is None else float(budget)
    return {**place, "mesh": mesh, "hardware": profile, "memory_budget_bytes": budget - reserved_bytes}


# -- speculative decoding ------------------------------------------------------------------------


class ProposerSetup(NamedTuple):
    """A source of draft tokens.

    Args:
        proposer: None if speculative decoding is off.
        seconds: the time of one call for all slots.
        held_bytes: the memory that it uses on each device.
    """

    proposer: Proposer | None
    seconds: float = 0.0
    held_bytes: int = 0


def make_proposer(propose: Propose, served: Served, place: Mapping[str, Any]) -> ProposerSetup:
    """Make the source of draft tokens that a user has requested.

    Raises:
        InferenceError: `propose` is none of the valid values, or a model with another vocabulary.
    """
    if propose is None or not isinstance(propose, str | os.PathLike):
        return ProposerSetup(propose)
    if propose == N_GRAM:
        return ProposerSetup(NGram())
    if not Path(propose).is_dir():
        raise InferenceError(
            f"propose is {os.fspath(propose)!r}: give {N_GRAM!r}, the folder of a small model, or a Proposer"
        )
    checkpoint, options = Checkpoint.open(propose), served.options
    planned: list[Planned] = []

    def prepare(function: Any, arguments: Any) -> Planned:
        inputs = planned[0].plan.inputs if planned else ()
        pins = {t.path: partition_spec(t.sharding) for t in inputs if t.path.startswith(("params/", "cache/"))}
        planned.append(Planned.of(function, arguments, {**_planning(place), "pin": pins}, ("cache",)))
        return planned[-1]

    draft = DraftModel(
        checkpoint.model,
        checkpoint.load(),
        options.num_slots,
        options.max_length,
        options.num_proposals,
        vocab_size=served.model.config.vocab_size,
        prepare=prepare,
    )
    return ProposerSetup(draft, draft.warm_up(), draft.held_bytes)


def make_policy(seconds: Mapping[Shape, float], draft_s: float) -> SpeculationPolicy | None:
    """Make the policy of speculative decoding; None if no program verifies draft tokens.

    Args:
        seconds: the measured time of each program.
        draft_s: the measured time of drafting.
    """
    verified = next((time for shape, time in seconds.items() if shape.width > 1), None)
    if verified is None:
        return None
    plain = min(time / shape.steps for shape, time in seconds.items() if shape.width == 1 and not shape.rows)
    return SpeculationPolicy((verified + draft_s) / plain)


def options_for(config: DecoderConfig, options: Options | None) -> Options:
    """Check the options against the model's limits, or return the defaults for the model.

    Raises:
        InferenceError: `max_length` exceeds the model's number of positions.
    """
    if options is None:
        default = Options()
        return replace(default, max_length=min(default.max_length, config.max_positions))
    if options.max_length > config.max_positions:
        raise InferenceError(
            f"max_length is {options.max_length}, but the model has {config.max_positions} positions: give at most that many"
        )
    return options


def stop_tokens_of(folder: str | os.PathLike[str]) -> frozenset[int]:
    """Read the end-of-sequence tokens from `generation_config.json`, or else from `config.json`.

    Raises:
        ModelError: a file is not JSON, or its `eos_token_id` is not a token or a list of tokens.
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
    rows: PageRows | None = None,
) -> Served:
    """Make the model's static sizes from the user's options.

    Args:
        params: the shapes and dtypes of its weights. Keys and values have the dtype of the norms, which are never
            quantized.
        options: the scheduler's options; by default those for the model.
        page_size: tokens per page.
        rows: of a pool. propose: the source of draft tokens. If it is given, four tokens are drafted unless the options set another number.
    """
    options = options_for(config, options)
    if propose is not None and not options.num_proposals:
        options = replace(options, num_proposals=_NUM_PROPOSALS)
    dtype = params["params"]["norm"]["weight"].dtype
    backend_named(attention)  # raises if there is none
    return Served(Decoder(config.for_length(options.max_length)), params, options, page_size, dtype, attention, rows)


def select_attention(served: Served, mesh: Any) -> BackendChoice:
    """Select the fastest attention backend for a decode step, on one device's share of the heads."""
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
        scores=config.scores(0),
    )
    return choose_backend(problem, device=device)
