"""List all consistency policies by name, and build one.

In: a policy's name with its numbers, as "ssp(3)" or "every(4, ssp(3))", or a custom `Policy`.
Out: a `Policy`.
"""

from __future__ import annotations

import ast
import difflib
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from autopar.errors import StoreError
from autopar.versions.consistency.clocks import Clocks
from autopar.versions.consistency.policy import Decision, Part, Pending, Policy, of_all


def bsp() -> Policy:
    """Bulk synchronous parallel: a clock's updates are summed in the order of the workers and applied as one; a worker at
    clock c reads after all of clock c - 1 (Valiant 1990)."""
    return Policy("bsp", 0, decide=_by_clock(of_all))


def ssp(s: int) -> Policy:
    """Stale synchronous parallel: no worker is more than `s` clocks ahead of the slowest; updates are applied when they
    arrive (Ho et al. 2013). `ssp(0)` is BSP."""
    _at_least("ssp", "s", s, 0)
    return replace(bsp(), name="ssp(0)") if s == 0 else Policy(f"ssp({s})", s)


def asynchronous() -> Policy:
    """No worker ever waits (DistBelief's Downpour SGD, Dean et al. 2012)."""
    return Policy("async", math.inf)


def every(n: int, policy: str | Policy = "async") -> Policy:
    """A worker pulls and pushes once in `n` iterations; its updates of these are added up (Downpour's `n_fetch` and
    `n_push`; with `"bsp"` and differences of weights as updates, local SGD)."""
    _at_least("every", "n", n, 1)
    base = find(policy)
    return replace(base, name=f"every({n}, {base.name})", period=n * base.period)


def discard(max_age: int, policy: str | Policy = "async") -> Policy:
    """An update is discarded if more than `max_age` updates were applied since its worker read the weights."""
    _at_least("discard", "max_age", max_age, 0)
    base = find(policy)

    def decide(clocks: Clocks, pending: Sequence[Pending]) -> Decision:
        old = tuple(update for update in pending if update.age(clocks) > max_age)
        rest = base.decide(clocks, [update for update in pending if update not in old])
        return Decision(rest.groups, (*old, *rest.discarded))

    return replace(base, name=f"discard({max_age}, {base.name})", decide=decide)


def backup(b: int) -> Policy:
    """BSP with `b` backup workers: of N + b workers the first N updates of each clock are applied, the others discarded;
    a late worker goes on with the newest clock (Chen et al. 2016, Revisiting distributed synchronous SGD)."""
    _at_least("backup", "b", b, 0)

    def complete(clocks: Clocks) -> float:
        fastest = sorted(clocks.members, reverse=True)
        return fastest[min(clocks.num_workers - b, len(fastest)) - 1] if fastest else math.inf

    def unmet(num_workers: int) -> str | None:
        return f"needs more than {b} workers, not {num_workers}" if num_workers <= b else None

    return Policy(f"backup({b})", 0, complete, _by_clock(complete), catches_up=True, unmet=unmet)


def partial(n: int, seed: int = 0) -> Policy:
    """BSP in which `n` workers, drawn for each clock from `seed`, take part (McMahan et al. 2017, federated averaging)."""
    _at_least("partial", "n", n, 1)
    _at_least("partial", "seed", seed, 0)

    def turn(worker: int, clock: int, num_workers: int) -> int:
        clock += 1
        while worker not in random.Random(f"{seed} {clock}").sample(range(num_workers), n):
            clock += 1
        return clock

    def unmet(num_workers: int) -> str | None:
        return f"needs at least {n} workers, not {num_workers}" if num_workers < n else None

    name = f"partial({n}, {seed})" if seed else f"partial({n})"
    return Policy(name, 0, decide=_by_clock(of_all), turn=turn, unmet=unmet)


def largest(budget_bytes: int, hold: int = 1, policy: str | Policy = "bsp") -> Policy:
    """A worker sends at most `budget_bytes` in a clock, the keys with the largest updates first, and holds the others back
    for at most `hold` clocks; what has waited so long is sent in any case (the priorities of Bosen, Wei et al. 2015)."""
    _at_least("largest", "budget_bytes", budget_bytes, 0)
    _at_least("largest", "hold", hold, 0)
    base = find(policy)

    def send(parts: Sequence[Part]) -> Sequence[Part]:
        due = [part for part in parts if part.held >= hold]
        left = budget_bytes - sum(part.num_bytes for part in due)
        for part in sorted((part for part in parts if part.held < hold), key=lambda part: -part.magnitude):
            if part.num_bytes <= left:
                due.append(part)
                left -= part.num_bytes
        return sorted(due, key=lambda part: -part.magnitude)

    return replace(base, name=f"largest({budget_bytes}, {hold}, {base.name})", send=send, hold=hold)


#: Every policy by name; `find` calls the entry with the numbers in the brackets.
POLICIES: Mapping[str, Callable[..., Policy]] = MappingProxyType(
    {
        "bsp": bsp,
        "ssp": ssp,
        "async": asynchronous,
        "every": every,
        "discard": discard,
        "backup": backup,
        "partial": partial,
        "largest": largest,
    }
)

#: Longer names than any that makes sense.
_MOST_LETTERS = 200


def find(policy: str | Policy) -> Policy:
    """The policy of this name. A `Policy` is returned unchanged.

    Raises:
        StoreError: there is no such policy, or its numbers are not ones that it is defined for.

    >>> find("ssp(3)").floor(10)
    7
    >>> find("every(4, ssp(3))").period
    4
    """
    if isinstance(policy, Policy):
        return policy
    if not isinstance(policy, str) or len(policy) > _MOST_LETTERS:
        shown = repr(policy)[:60]
        raise StoreError(f'`consistency` is {shown}: give the name of a policy, as "bsp" or "ssp(3)", or a `Policy`')
    try:
        parsed = ast.parse(policy.strip().replace("async", "async_"), mode="eval")  # `async` is a keyword of Python
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise _unreadable(policy) from None
    return _built(parsed.body, policy)


def check_suits(policy: Policy, num_workers: int) -> None:
    """Refuse a policy that is not defined for this number of workers.

    Raises:
        StoreError: it is not.
    """
    reason = policy.unmet(num_workers)
    if reason:
        raise StoreError(f"the policy {policy.name!r} {reason}: change its number or `workers=`")


def _by_clock(complete: Callable[[Clocks], float]) -> Callable[[Clocks, Sequence[Pending]], Decision]:
    """Apply the updates of a clock together, in the order of the workers, once the clock is complete; discard later ones."""

    def decide(clocks: Clocks, pending: Sequence[Pending]) -> Decision:
        done = complete(clocks)
        groups: dict[int, list[Pending]] = {}
        for update in sorted(pending, key=lambda update: (update.clock, update.worker)):
            if clocks.applied <= update.clock < done:
                groups.setdefault(update.clock, []).append(update)
        late = tuple(update for update in pending if update.clock < clocks.applied)
        return Decision(tuple(map(tuple, groups.values())), late)

    return decide


def _built(node: ast.expr, policy: str) -> Policy:
    """The policy that an expression names: `name`, or `name(number or policy, ...)`."""
    arguments: list[Any] = []
    name = node
    if isinstance(node, ast.Call):
        if node.keywords:
            raise _unreadable(policy)
        name = node.func
        for argument in node.args:
            try:
                arguments.append(ast.literal_eval(argument))
            except ValueError:
                arguments.append(_built(argument, policy))
    if not isinstance(name, ast.Name):
        raise _unreadable(policy)
    word = name.id.replace("async_", "async")
    if word not in POLICIES:
        close = difflib.get_close_matches(word.lower(), POLICIES, n=2, cutoff=0.5)
        meant = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
        raise StoreError(f"there is no policy {word!r}.{meant} The policies are {', '.join(map(repr, POLICIES))}")
    try:
        return POLICIES[word](*arguments)
    except TypeError:
        names = ", ".join(_parameters(POLICIES[word]))
        takes = f"takes ({names})" if names else "takes no numbers"
        raise StoreError(f"the policy {policy!r} gives {word!r} {len(arguments)} numbers, but it {takes}") from None


def _parameters(entry: Callable[..., Policy]) -> tuple[str, ...]:
    code = entry.__code__  # pyright: ignore[reportFunctionMemberAccess]
    return code.co_varnames[: code.co_argcount]


def _unreadable(policy: str) -> StoreError:
    return StoreError(
        f'the policy {policy!r} cannot be read: give a name and its numbers, as "bsp", "ssp(3)" or "every(4, ssp(3))"'
    )


def _at_least(policy: str, name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise StoreError(f"the policy {policy!r} needs a whole number `{name}` of at least {least}; got {value!r}")
