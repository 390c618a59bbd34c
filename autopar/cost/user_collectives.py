"""Collectives that users register: their own ways to make a change of a sharding.

In: a name, the built-in collective that makes the same change, a cost formula, and the function that runs it. Out: entries
beside the table of `collectives`. They are state that is kept between calls, as registered rules are: a name is registered once
and planned with often.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from autopar.cost.collective_entry import Call, Collective
from autopar.cost.hardware_profile import LinkProfile
from autopar.errors import CollectiveError
from autopar.ir.sharding_changes import CHANGES, Change

#: Changes that a user's collective can make, with the dims that its function is given.
OPEN: Mapping[str, tuple[str, ...]] = MappingProxyType({"all-gather": ("dim",), "all-to-all": ("dim", "to")})

#: Names that mean something else in plans and reports.
_TAKEN = (*CHANGES, "ragged-all-to-all", "collective-broadcast", "compute")

_registered: dict[str, Collective] = {}


def register_collective(
    name: str,
    *,
    like: Change,
    time_s: Callable[[float, int, LinkProfile], float],
    run: Callable[..., Any],
) -> None:
    """Register a collective of your own: plans use it wherever it is cheaper than XLA's.

    Args:
        name: what reports and plan files call it.
        like: the built-in collective that makes the same change of a sharding: `all-gather`, or `all-to-all`.
        time_s: its seconds without a launch, which is added, from the bytes of its payload on one device (gathered, of an
            all-gather; before it, of an all-to-all), the number of devices, and the slowest link that it crosses.
        run: runs it under `jax.shard_map` on the part of one device, as `run(x, axes, dim=...)`: gathers along a dim, over mesh
            axes of which the first is major, as `lax.all_gather(x, axes, axis=dim, tiled=True)` does. Of an all-to-all
            `run(x, axes, dim=..., to=...)` does as `lax.all_to_all(x, axes, to, dim, tiled=True)`.

    It is used only where every split dim divides. A name that is registered again is replaced.

    Raises:
        CollectiveError: the name is that of a built-in kind or empty; `like` is none that a user's function can be; the function
            does not take the arguments; or the formula gives no seconds.
    """
    if not isinstance(name, str) or not name.strip() or not name.isprintable():
        raise CollectiveError(f"a collective is named by a text of visible characters, not by {name!r}")
    if name in _TAKEN:
        raise CollectiveError(
            f"the name {name!r} is taken: give your collective a name of its own, such as 'my-{name}'"
        )
    if not isinstance(like, str) or like not in OPEN:
        raise CollectiveError(f"the collective {name!r} cannot be like {like!r}: {_why_not(like)}")
    _check_function(name, like, run)
    formula = _Formula(name, time_s)
    for num_bytes in (1.0, 1e6):  # what is wrong whatever the payload shows at once
        formula.seconds_of(num_bytes, 2, LinkProfile(bytes_per_s=1e9, latency_s=1e-6))
    _registered[name] = Collective(name, like, formula, is_merged=False, run=run)


@dataclass(frozen=True, slots=True)
class _Formula:
    """A user's formula, whose results are checked."""

    name: str
    time_s: Callable[[float, int, LinkProfile], float]

    def __call__(self, call: Call) -> float:
        return self.seconds_of(call.num_bytes, call.num_devices, call.link) + call.profile.collective_launch_s

    def seconds_of(self, num_bytes: float, num_devices: int, link: LinkProfile) -> float:
        found = self.time_s(num_bytes, num_devices, link)
        try:
            seconds = float(found)
        except (TypeError, ValueError):
            seconds = math.nan
        if not 0.0 <= seconds < math.inf:
            raise CollectiveError(
                f"`time_s` of the collective {self.name!r} gives {found!r} for {num_bytes:g} bytes on {num_devices} devices:"
                " return seconds, zero or more, and finite"
            )
        return seconds


def _why_not(like: str) -> str:
    if like in ("all-reduce", "reduce-scatter"):
        why = (
            "the terms of a sum are taken by XLA's partitioner where they are made, where no function of yours can run"
        )
    elif like in CHANGES:
        why = "no function of one device's part and a dim can make that change"
    else:
        why = "that is no built-in collective"
    return f"{why}. Register one like {' or '.join(OPEN)}"


def _check_function(name: str, like: str, run: Callable[..., Any]) -> None:
    try:
        inspect.signature(run).bind(None, (), **dict.fromkeys(OPEN[like], 0))
    except (TypeError, ValueError) as error:
        arguments = ", ".join(f"{dim}=..." for dim in OPEN[like])
        raise CollectiveError(
            f"`run` of the collective {name!r} is called as `run(x, axes, {arguments})`, and cannot be: {error}"
        ) from None


def registered() -> Mapping[str, Collective]:
    """All that is registered, by name."""
    return _registered


def registered_for(change: str) -> tuple[Collective, ...]:
    """Those that make a change, in the order in which they were registered."""
    return tuple(one for one in _registered.values() if one.change == change)


def registered_functions() -> Iterator[tuple[str, str, Callable[..., Any], Callable[..., Any]]]:
    """What a plan depends on beside the program: names, what each is like, formulas and functions."""
    for name, one in sorted(_registered.items()):
        assert isinstance(one.seconds, _Formula) and one.run is not None
        yield name, one.change, one.seconds.time_s, one.run


def runner_of(name: str, like: str) -> Callable[..., Any]:
    """The function that runs a collective that a plan names.

    Raises:
        CollectiveError: none of that name is registered here, or one that makes another change.
    """
    one = _registered.get(name)
    how = f"autopar.extend.collectives.register_collective({name!r}, like={like!r}, time_s=..., run=...)"
    if one is None or one.run is None:
        raise CollectiveError(
            f"the plan runs the collective {name!r}, which is not registered in this process: call `{how}`, or import the"
            " module that does, before the plan is used; or plan anew"
        )
    if one.change != like:
        raise CollectiveError(
            f"the plan runs the collective {name!r} as one like {like}, and here it is registered like {one.change}:"
            f" call `{how}`, or plan anew"
        )
    return one.run
