"""Hold back what a worker pushes, as its policy says: for the iterations of a period, or by the size of the updates.

In: a policy, the updates of iterations. Out: what is sent, and `Held`. A store does it for its workers; those of a served store do it
in their own processes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import jax.numpy as jnp

from autopar.versions.consistency.policy import Part, Policy
from autopar.versions.host_memory.memory_kinds import on_device
from autopar.versions.server_update import Pushed, Update


@dataclass(frozen=True, slots=True)
class Held:
    """What a worker has pushed and not sent.

    Args:
        num_clocks: for each key, for how many clocks it has been held back.
    """

    update: Update = field(default_factory=dict)
    num_clocks: Mapping[str, int] = field(default_factory=dict)


def after_iteration(
    policy: Policy, held: Held, count: int, update: Update, at_once: Collection[str] = ()
) -> tuple[Update | None, Held]:
    """What is sent after an iteration, in the policy's order, and what is held back; None in the midst of a period.

    Args:
        count: the number of iterations that the worker has finished.
        update: what it pushed in the last one.
        at_once: keys that are never held back.
    """
    update = added(held.update, update)
    if count % policy.period:
        return None, replace(held, update=update)
    if policy.send is None:
        return update, Held()
    parts = [
        Part(key, pushed.num_bytes, _magnitude(pushed), held.num_clocks.get(key, 0))
        for key, pushed in update.items()
        if key not in at_once
    ]
    sent = {key: pushed for key, pushed in update.items() if key in at_once}
    sent |= {part.key: update[part.key] for part in policy.send(parts)}
    rest = {key: pushed for key, pushed in update.items() if key not in sent}
    return sent, Held(rest, {key: held.num_clocks.get(key, 0) + 1 for key in rest})


def added(first: Update, second: Update) -> Update:
    """The sum of two updates of a worker."""
    if not first:
        return second
    both = {key: first[key].plus(second[key]) for key in second if key in first}
    return {**first, **second, **both}


def _magnitude(pushed: Pushed) -> float:
    """The mean absolute value; waits for the device."""
    arrays = [values for _, values in pushed.rows] + [factors.product() for factors in pushed.factors]
    arrays += [] if pushed.whole is None else [pushed.whole]
    size = sum(array.size for array in arrays)
    return sum(float(jnp.abs(on_device(array)).sum()) for array in arrays) / size if size else 0.0
