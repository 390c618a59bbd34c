"""Plan all programs of a served model with the same shardings of weights and KV cache.

In: a model and its static sizes, a memory budget. Out: `Layout`: the plan of each program, and the number of pages. The
program that runs most often, one decode step, is planned without constraints. Its plan fixes the shardings of weights and
cache, which are pinned in the plans of the others. The cache gets the memory that weights and temporaries leave.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, Literal, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from autopar.errors import BudgetError, InferenceError
from autopar.inference.kernels.paged_attention import REFERENCE
from autopar.inference.kv_cache.page_tables import most_held
from autopar.inference.model.decoder import Decoder
from autopar.inference.schedule.requests import Options, Shape
from autopar.inference.serve.page_rows import PageRows
from autopar.inference.step.apart import forward_of, sample_logits
from autopar.inference.step.host_inputs import Rows
from autopar.inference.step.sampling import num_words
from autopar.inference.step.step import copy_pages, copy_rows_of, resident_shapes, start_slot, step_of
from autopar.jax_interop.partition_spec import partition_spec
from autopar.planner.memory_budget import MemoryBudget
from autopar.plans.plan import Plan

#: The key of a program: the shape of an iteration; "copy" for the copies of pages; "start" for the counts and biases of a slot;
#: "forward" and "sample" for a decode step in two programs.
Key = Shape | Literal["copy", "start", "forward", "sample"]

#: The largest number of pages, as a multiple of what all slots need at full length. The surplus serves the prefix cache.
_MAX_POOL_FACTOR = 4
#: The share of the budget below which memory did not constrain a plan.
_UNCONSTRAINED = 0.8


class _HasPlan(Protocol):
    @property
    def plan(self) -> Plan: ...


@dataclass(frozen=True, slots=True)
class PlanOnly:
    """The plan of a program that is not compiled."""

    plan: Plan


Program = TypeVar("Program", bound=_HasPlan)

#: (function, argument shapes, names of carried arguments, pins) -> planned program.
MakeProgram = Callable[[Callable[..., Any], tuple[Any, ...], tuple[str, ...], Mapping[str, Any]], Program]


@dataclass(frozen=True, slots=True)
class Served:
    """A model, and the static sizes of its programs.

    Args:
        model: the decoder. params: the shapes and dtypes of its weights.
        options: the options of the scheduler.
        page_size: tokens per page.
        dtype: the dtype of keys and values in the cache.
        attention: a backend of `paged_attention`.
        page_rows: where the pages are rows of a pool that other models share; None if each layer has an array of its own.
    """

    model: Decoder
    params: Any
    options: Options
    page_size: int
    dtype: Any
    attention: str = REFERENCE
    page_rows: PageRows | None = None

    @property
    def pages_of_sequence(self) -> int:
        """The number of pages of the longest sequence."""
        return -(-self.options.max_length // self.page_size)

    @property
    def pages_held(self) -> int:
        """The number of pages that the longest sequence holds at most: those behind a window of all layers are given back."""
        window = self.model.config.window
        return most_held(self.options.max_length, self.page_size, window, self.options.num_ahead)

    @property
    def keys(self) -> tuple[Key, ...]:
        """The keys of all programs. The first is the primary one, whose plan fixes the shardings."""
        apart: tuple[Key, ...] = ("forward", "sample") if self.options.samples_apart else ()
        return (*self.options.shapes, "copy", "start", *apart)

    def rows(self, num: int, width: int, num_pages: int) -> tuple[NDArray[np.int32], Rows]:
        """Idle rows of the given sizes: a packed array, and views of it."""
        return Rows.views(num, width, self.pages_of_sequence, num_pages, self.options.num_slots)

    def resident(self, num_pages: int) -> Any:
        """The shapes and dtypes of the state that stays on the devices."""
        sizes = (self.model.config, self.options.num_slots, num_pages, self.page_size, self.dtype)
        return resident_shapes(*sizes, has_logits=self.options.samples_apart, has_rows=self.page_rows is not None)

    def program(self, key: Key, num_pages: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The function of a program, and the shapes of its arguments."""
        resident, slots = self.resident(num_pages), self.options.num_slots
        if key == "copy":
            copy = copy_pages if self.page_rows is None else copy_rows_of(self.page_rows.num_layers)
            return copy, (resident, jax.ShapeDtypeStruct((2, slots), jnp.int32))
        if key == "start":
            row = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), resident.state)
            return start_slot, (resident, jax.ShapeDtypeStruct((1,), jnp.int32), row)
        if isinstance(key, str):
            packed = self.rows(slots, 1, num_pages)[0]
            row = jax.ShapeDtypeStruct(packed.shape, packed.dtype)
            if key == "forward":
                return forward_of(self.model, self.attention), (self.params, resident, row)
            mask = self.all_allowed(Shape())
            return sample_logits, (resident, jax.ShapeDtypeStruct(mask.shape, mask.dtype), row)
        sizes = [(slots, key.width)] + ([(key.rows, key.length)] if key.rows else [])
        packed = [self.rows(num, width, num_pages)[0] for num, width in sizes]
        rows = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (self.all_allowed(key), *packed)]
        return step_of(self.model, key, self.attention), (self.params, resident, *rows)

    def all_allowed(self, shape: Shape) -> NDArray[np.int32]:
        """The mask of tokens for all rows of an iteration, and after each draft token, with all of them allowed."""
        words, slots = num_words(self.model.config.vocab_size), self.options.num_slots
        rows = (slots, shape.width) if shape.width > 1 else (slots + shape.rows,)
        return np.full((*rows, words), -1, np.int32)


@dataclass(frozen=True, slots=True)
class Layout(Generic[Program]):
    """The programs of a served model.

    Args:
        num_pages: the number of pages of the cache, without the scratch page.
        page_bytes: the bytes of one page on one device.
        programs: the programs by key, the primary one first.
    """

    num_pages: int
    page_bytes: float
    programs: Mapping[Key, Program]

    @property
    def peak_bytes(self) -> float:
        """The largest predicted peak memory of a program on one device."""
        return max(program.plan.prediction.peak_bytes for program in self.programs.values())

    @property
    def bytes_without_pages(self) -> float:
        """The peak memory without the pages, on one device: what another model on the same devices cannot use."""
        return self.peak_bytes - self.page_bytes * (self.num_pages + 1)


def plan_layout(
    served: Served,
    make: MakeProgram[Program],
    budget_bytes: float,
    num_pages: int | None = None,
    progress: Callable[[str, float], None] | None = None,
    shared: Layout[Any] | None = None,
) -> Layout[Program]:
    """Plan all programs.

    Args:
        make: the function that plans one program.
        budget_bytes: the memory budget of one device.
        num_pages: the number of pages; by default as many as fit, up to four times what all slots need.
        shared: the layout of another model whose pages this model uses.

    Raises:
        InferenceError: a cache for one sequence of full length does not fit.
        BudgetError: `num_pages` pages do not fit.
    """
    pinned = {} if shared is None else page_pins(served, shared)
    num_pages = num_pages if shared is None else shared.num_pages
    if served.page_rows is not None:
        pinned, num_pages = served.page_rows.pins, served.page_rows.scratch
    if num_pages is not None:
        return _plan_rest(served, make, num_pages, _plan_first(served, make, num_pages, pinned), progress)
    num_pages, planned = _fit_pages(served, make, budget_bytes)
    primary = next(iter(planned))
    while True:
        try:
            return _plan_rest(served, make, num_pages, planned, progress)
        except BudgetError:  # a program that did not take part in the fit needs more memory
            if num_pages == served.pages_held:
                raise
            num_pages = max(served.pages_held, num_pages * 9 // 10)
            replanned: dict[Key, Program] = {primary: _plan(served, make, primary, num_pages, None)}
            planned = replanned


def page_pins(served: Served, shared: Layout[Any]) -> dict[str, Any]:
    """The shardings of another model's pages, for as many layers as this model has.

    Raises:
        InferenceError: the pages of the two models differ in shape or dtype, or the other model has fewer layers.
    """
    theirs = {t.path: t for t in next(iter(shared.programs.values())).plan.inputs if _is_page(t.path)}
    pages = served.resident(shared.num_pages).pages
    for layer, page in enumerate(pages):
        other = theirs.get(f"resident/pages/{layer}/keys")
        mine = (tuple(page.keys.shape), str(page.keys.dtype))
        if other is None or (tuple(other.shape), other.dtype) != mine:
            has = f"{len(theirs) // 2} layers" if other is None else f"pages of {list(other.shape)}, {other.dtype}"
            raise InferenceError(
                f"the two models cannot share pages: in layer {layer} this one has pages of {list(mine[0])}, {mine[1]}, and"
                f" the other has {has}. Open the model with more layers first, with the same kv heads, head_dim, page_size"
                " and dtype, or give each model its own cache"
            )
    return {path: partition_spec(t.sharding) for path, t in theirs.items() if int(path.split("/")[2]) < len(pages)}


def _plan_rest(
    served: Served,
    make: MakeProgram[Program],
    num_pages: int,
    planned: Mapping[Key, Program],
    progress: Callable[[str, float], None] | None,
) -> Layout[Program]:
    """Plan the remaining programs, with the shardings of the first planned one."""
    programs, primary = dict(planned), next(iter(planned.values()))
    for number, key in enumerate(served.keys):
        if progress is not None:
            progress("plan programs", number / len(served.keys))
        if key not in programs:
            programs[key] = _plan(served, make, key, num_pages, primary)
    return Layout(num_pages, _page_bytes(primary.plan, num_pages), programs)


def _plan_first(
    served: Served, make: MakeProgram[Program], num_pages: int, pinned: Mapping[str, Any] = MappingProxyType({})
) -> dict[Key, Program]:
    """Plan the program that runs most often, and the one that needs the most memory. The primary one is first.

    The primary program is the one that runs most often. If the other does not fit with its shardings, it is the other.

    Raises:
        BudgetError: they do not fit in either order.
    """
    shapes = served.options.shapes
    largest = max(shapes, key=lambda shape: shape.rows * shape.length + shape.width)
    try:
        primary = _plan(served, make, shapes[0], num_pages, None, pinned)
        return {shapes[0]: primary, largest: _plan(served, make, largest, num_pages, primary)}
    except BudgetError:
        primary = _plan(served, make, largest, num_pages, None, pinned)
        return {largest: primary, shapes[0]: _plan(served, make, shapes[0], num_pages, primary)}


def _plan(
    served: Served,
    make: MakeProgram[Program],
    key: Key,
    num_pages: int,
    primary: Program | None,
    pinned: Mapping[str, Any] = MappingProxyType({}),
) -> Program:
    """Plan one program. Weights and cache are pinned to the shardings of `primary`; without it, to `pinned`."""
    function, arguments = served.program(key, num_pages)
    known = (
        dict(pinned)
        if primary is None
        else {t.path: partition_spec(t.sharding) for t in primary.plan.inputs if _is_fixed(t.path)}
    )
    has_params = isinstance(key, Shape) or key == "forward"
    pins = {path: spec for path, spec in known.items() if has_params or path.startswith("resident/")}
    return make(function, arguments, ("resident",), pins)


def _is_fixed(path: str) -> bool:
    return path.startswith(("params/", "resident/"))


def _is_page(path: str) -> bool:
    return path.startswith("resident/pages/")


def _page_bytes(plan: Plan, num_pages: int) -> float:
    total = sum(t.num_bytes for t in plan.inputs if _is_page(t.path))
    return total / (num_pages + 1)


def _fit_pages(served: Served, make: MakeProgram[Program], budget_bytes: float) -> tuple[int, dict[Key, Program]]:
    """Find the number of pages that fit, and return it with the programs planned for it, the primary one first."""
    least = served.pages_held
    all_slots = served.options.num_slots * least
    most = _MAX_POOL_FACTOR * all_slots
    num_pages = most
    while True:
        try:
            programs = _plan_first(served, make, num_pages)
        except BudgetError as error:
            if num_pages <= least:
                raise InferenceError(
                    f"a cache for one sequence of {served.options.max_length} tokens does not fit in memory with the model:"
                    f" {error} Or serve with a smaller max_length"
                ) from None
        else:
            peak = max(each.plan.prediction.peak_bytes for each in programs.values())
            # If memory is nearly full, a plan with fewer pages may have faster shardings.
            if num_pages < most or peak <= _UNCONSTRAINED * budget_bytes:
                break
        num_pages = all_slots if num_pages == most else max(least, num_pages // 2)
    key, program = next(iter(programs.items()))
    spare = MemoryBudget(budget_bytes).plan_bytes - peak
    found = min(num_pages + int(max(0.0, spare) // _page_bytes(program.plan, num_pages)), most)
    return found, programs if found == num_pages else {key: _plan(served, make, key, found, None)}
