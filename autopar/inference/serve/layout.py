"""How a model that is served lies on its devices: the plans of all its programs, tied to one another.

In: what is served, devices, memory. Out: `Layout`: for each program its plan, and how many pages the cache has. The
program that runs most, a token for each slot, is planned freely, and says where weights and cache lie; the others are
planned around these. The cache gets what weights and intermediates leave.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, Literal, Protocol, TypeVar

import jax
import jax.numpy as jnp

from autopar.errors import BudgetError, InferenceError
from autopar.inference.kernels.paged_attention import REFERENCE
from autopar.inference.model.decoder import Decoder
from autopar.inference.schedule.requests import Options, Shape
from autopar.inference.step.host_inputs import Rows
from autopar.inference.step.step import copy_pages, resident_shapes, step_of
from autopar.jax_interop.partition_spec import partition_spec
from autopar.planner.memory_budget import MemoryBudget
from autopar.plans.plan import Plan

#: One program: an iteration of a shape, or the copying of pages.
Key = Shape | Literal["copy"]

#: Of the pages that all slots need at their longest, so many times as many are kept at most: prefixes live in the rest.
_MOST_POOLS = 4
#: Of the budget, what a plan may fill that was not in want of memory.
_AMPLE = 0.8


class _HasPlan(Protocol):
    @property
    def plan(self) -> Plan: ...


@dataclass(frozen=True, slots=True)
class PlanAlone:
    """Of a program that is not run."""

    plan: Plan


Made = TypeVar("Made", bound=_HasPlan)

#: A function, the shapes of its arguments, the names of those that come back, and pins: to its plan, and what runs it.
Make = Callable[[Callable[..., Any], tuple[Any, ...], tuple[str, ...], Mapping[str, Any]], Made]


@dataclass(frozen=True, slots=True)
class Served:
    """A model, and the static sizes that it is served in.

    Args:
        params: its weights, as shapes. options: of the scheduler.
        page_size: tokens of a page. dtype: of keys and values in the cache. attention: a backend of `paged_attention`.
    """

    model: Decoder
    params: Any
    options: Options
    page_size: int
    dtype: Any
    attention: str = REFERENCE

    @property
    def pages_of_sequence(self) -> int:
        """Of the longest."""
        return -(-self.options.max_length // self.page_size)

    @property
    def keys(self) -> tuple[Key, ...]:
        """All programs, the one that says how things lie first."""
        return (*self.options.shapes, "copy")

    def rows(self, num: int, width: int, num_pages: int) -> Rows:
        """Empty ones, as the programs take them."""
        return Rows.empty(num, width, self.pages_of_sequence, num_pages, self.options.num_slots)

    def resident(self, num_pages: int) -> Any:
        """Shapes of what stays on the devices."""
        return resident_shapes(self.model.config, self.options.num_slots, num_pages, self.page_size, self.dtype)

    def program(self, key: Key, num_pages: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """A function, and the shapes of its arguments."""
        resident, slots = self.resident(num_pages), self.options.num_slots
        if key == "copy":
            return copy_pages, (resident, jax.ShapeDtypeStruct((2, slots), jnp.int32))
        sizes = [(slots, key.width)] + ([(key.rows, key.length)] if key.rows else [])
        packed = [self.rows(num, width, num_pages).packed() for num, width in sizes]
        rows = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in packed]
        return step_of(self.model, key, self.attention), (self.params, resident, *rows)


@dataclass(frozen=True, slots=True)
class Layout(Generic[Made]):
    """All programs.

    Args:
        num_pages: of the cache, besides that for waste.
        page_bytes: of one, on one device.
    """

    num_pages: int
    page_bytes: float
    programs: Mapping[Key, Made]

    @property
    def peak_bytes(self) -> float:
        """Predicted, of the program that needs most on one device."""
        return max(program.plan.prediction.peak_bytes for program in self.programs.values())


def laid_out(
    served: Served,
    make: Make[Made],
    budget_bytes: float,
    num_pages: int | None = None,
    progress: Callable[[str, float], None] | None = None,
    beside: Layout[Any] | None = None,
) -> Layout[Made]:
    """Plan all programs.

    Args:
        make: plans one. budget_bytes: of one device.
        num_pages: by default as many as the memory has room for, up to four times what all slots need.
        beside: the programs of another model, whose pages these are to be too.

    Raises:
        InferenceError: not even one sequence of full length fits. BudgetError: `num_pages` do not.
    """
    pinned = {} if beside is None else pins_of_pages(served, beside)
    num_pages = num_pages if beside is None else beside.num_pages
    if num_pages is not None:
        return _laid_out(served, make, num_pages, _home(served, make, num_pages, pinned), progress)
    num_pages, known = _pages_that_fit(served, make, budget_bytes)
    home = next(iter(known))
    while True:
        try:
            return _laid_out(served, make, num_pages, known, progress)
        except BudgetError:  # a program that was not asked when pages were counted needs more
            if num_pages == served.pages_of_sequence:
                raise
            num_pages = max(served.pages_of_sequence, num_pages * 9 // 10)
            again: dict[Key, Made] = {home: _made(served, make, home, num_pages, None)}
            known = again


def pins_of_pages(served: Served, beside: Layout[Any]) -> dict[str, Any]:
    """As the other model's lie: of as many of its layers as this one has.

    Raises:
        InferenceError: pages of the two are not of one shape.
    """
    theirs = {t.path: t for t in next(iter(beside.programs.values())).plan.inputs if _is_page(t.path)}
    pages = served.resident(beside.num_pages).pages
    for layer, page in enumerate(pages):
        other = theirs.get(f"resident/pages/{layer}/keys")
        mine = (tuple(page.keys.shape), str(page.keys.dtype))
        if other is None or (tuple(other.shape), other.dtype) != mine:
            has = f"{len(theirs) // 2} layers" if other is None else f"pages of {list(other.shape)}, {other.dtype}"
            raise InferenceError(
                f"the two models cannot share pages: in layer {layer} this one's are {list(mine[0])}, {mine[1]}, and the"
                f" other has {has}. Serve first that which has more layers, with the same kv heads, head_dim, page_size"
                " and dtype, or give each a cache of its own"
            )
    return {path: partition_spec(t.sharding) for path, t in theirs.items() if int(path.split("/")[2]) < len(pages)}


def _laid_out(
    served: Served,
    make: Make[Made],
    num_pages: int,
    known: Mapping[Key, Made],
    progress: Callable[[str, float], None] | None,
) -> Layout[Made]:
    """All programs, around the first of those that are planned already."""
    programs, home = dict(known), next(iter(known.values()))
    for number, key in enumerate(served.keys):
        if progress is not None:
            progress("plan programs", number / len(served.keys))
        if key not in programs:
            programs[key] = _made(served, make, key, num_pages, home)
    return Layout(num_pages, _page_bytes(home.plan, num_pages), programs)


def _home(
    served: Served, make: Make[Made], num_pages: int, pinned: Mapping[str, Any] = MappingProxyType({})
) -> dict[Key, Made]:
    """Two programs: those that run most, and need most memory. The one that says how things lie comes first.

    That is the one which runs most; where the other has no room beside what lies as is best for this, the other.

    Raises:
        BudgetError: neither way there is room.
    """
    shapes = served.options.shapes
    largest = max(shapes, key=lambda shape: shape.rows * shape.length + shape.width)
    try:
        home = _made(served, make, shapes[0], num_pages, None, pinned)
        return {shapes[0]: home, largest: _made(served, make, largest, num_pages, home)}
    except BudgetError:
        home = _made(served, make, largest, num_pages, None, pinned)
        return {largest: home, shapes[0]: _made(served, make, shapes[0], num_pages, home)}


def _made(
    served: Served,
    make: Make[Made],
    key: Key,
    num_pages: int,
    home: Made | None,
    pinned: Mapping[str, Any] = MappingProxyType({}),
) -> Made:
    """Planned; around the weights and the cache of `home`, if there is one, else around what is pinned."""
    function, arguments = served.program(key, num_pages)
    known = (
        dict(pinned)
        if home is None
        else {t.path: partition_spec(t.sharding) for t in home.plan.inputs if _is_tied(t.path)}
    )
    pins = {path: spec for path, spec in known.items() if key != "copy" or path.startswith("resident/")}
    return make(function, arguments, ("resident",), pins)


def _is_tied(path: str) -> bool:
    return path.startswith(("params/", "resident/"))


def _is_page(path: str) -> bool:
    return path.startswith("resident/pages/")


def _page_bytes(plan: Plan, num_pages: int) -> float:
    held = sum(t.num_bytes for t in plan.inputs if _is_page(t.path))
    return held / (num_pages + 1)


def _pages_that_fit(served: Served, make: Make[Made], budget_bytes: float) -> tuple[int, dict[Key, Made]]:
    """How many pages there is room for, beside what the program that says how things lie makes of the rest; and what
    was planned with so many, that program first."""
    least = served.pages_of_sequence
    wanted = served.options.num_slots * least
    most = _MOST_POOLS * wanted
    num_pages = most
    while True:
        try:
            programs = _home(served, make, num_pages)
        except BudgetError as error:
            if num_pages <= least:
                raise InferenceError(
                    f"a cache for one sequence of {served.options.max_length} tokens does not fit beside the model:"
                    f" {error} Or serve with a smaller max_length"
                ) from None
        else:
            peak = max(each.plan.prediction.peak_bytes for each in programs.values())
            # What is nearly full might have been laid out otherwise with fewer pages, and faster.
            if num_pages < most or peak <= _AMPLE * budget_bytes:
                break
        num_pages = wanted if num_pages == most else max(least, num_pages // 2)
    home, program = next(iter(programs.items()))
    spare = MemoryBudget(budget_bytes).plan_bytes - peak
    found = min(num_pages + int(max(0.0, spare) // _page_bytes(program.plan, num_pages)), most)
    return found, programs if found == num_pages else {home: _made(served, make, home, found, None)}
