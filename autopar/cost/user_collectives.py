"""Register user-defined collectives that change a sharding.

In: a name, the built-in collective that makes the same change, a cost formula, and the function that runs it. Out:
entries in addition to the table of `collectives`. The registry is global, like that of rules: a name is registered once
and used by many plans.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from autopar.cost.collective_entry import Call, Collective
from autopar.errors import CollectiveError
from autopar.hardware.profile import LinkProfile
from autopar.ir.sharding_changes import CHANGES, Change

#: Changes that a user's collective can make, with the dim arguments of its function.
OPEN: Mapping[str, tuple[str, ...]] = MappingProxyType({"all-gather": ("dim",), "all-to-all": ("dim", "to")})

#: Names with another meaning in plans and reports.
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
        name: name in reports and plan files.
        like: built-in collective that makes the same change of sharding: `all-gather` or `all-to-all`.
        time_s: cost formula, in seconds without the launch, which is added. Its arguments are the payload bytes on one
            device (the gathered buffer of an all-gather, the local buffer of an all-to-all), the number of devices,
            and the slowest link that it crosses.
        run: implementation on one device's part, called under `jax.shard_map`. For an all-gather `run(x, axes, dim=...)`
            does what `lax.all_gather(x, axes, axis=dim, tiled=True)` does; the first mesh axis is the major one. For an
            all-to-all `run(x, axes, dim=..., to=...)` does what `lax.all_to_all(x, axes, to, dim, tiled=True)` does.

    It is used only where every split dim divides evenly. Registering a name again replaces its entry.

    Raises:
        CollectiveError: the name is empty or that of a built-in kind; `like` is not `all-gather` or `all-to-all`; the
            function does not accept the arguments; or the formula does not return seconds.
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
    for num_bytes in (1.0, 1e6):  # a formula that always fails is reported here
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
            "XLA's SPMD partitioner inserts reductions at the operation that produces the terms, where a function of"
            " yours cannot run"
        )
    elif like in CHANGES:
        why = "a function of one device's part and a dim cannot make that change"
    else:
        why = "that is no built-in collective"
    return f"{why}. Register one like {' or '.join(OPEN)}"


def _check_function(name: str, like: str, run: Callable[..., Any]) -> None:
    try:
        inspect.signature(run).bind(None, (), **dict.fromkeys(OPEN[like], 0))
    except (TypeError, ValueError) as error:
        arguments = ", ".join(f"{dim}=..." for dim in OPEN[like])
        raise CollectiveError(
            f"`run` of the collective {name!r} must accept the call `run(x, axes, {arguments})`: {error}"
        ) from None


def registered() -> Mapping[str, Collective]:
    """All registered collectives, by name."""
    return _registered


def registered_for(change: str) -> tuple[Collective, ...]:
    """The registered collectives that make a change, in order of registration."""
    return tuple(one for one in _registered.values() if one.change == change)


def registered_functions() -> Iterator[tuple[str, str, Callable[..., Any], Callable[..., Any]]]:
    """Yield name, `like`, formula and function of each registered collective: plans depend on them."""
    for name, one in sorted(_registered.items()):
        assert isinstance(one.seconds, _Formula) and one.run is not None
        yield name, one.change, one.seconds.time_s, one.run


def runner_of(name: str, like: str) -> Callable[..., Any]:
    """The function that runs a collective that a plan names.

    Raises:
        CollectiveError: no collective of that name is registered, or it makes another change.
    """
    one = _registered.get(name)
    how = f"autopar.extend.collectives.register_collective({name!r}, like={like!r}, time_s=..., run=...)"
    if one is None or one.run is None:
        raise CollectiveError(
            f"the plan runs the collective {name!r}, which is not registered in this process: call `{how}`, or import the"
            " module that does, before the plan is used; or plan again"
        )
    if one.change != like:
        raise CollectiveError(
            f"the plan runs the collective {name!r} as one like {like}, and here it is registered like {one.change}:"
            f" call `{how}`, or plan again"
        )
    return one.run
