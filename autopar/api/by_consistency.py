"""Choose what runs a step with `consistency`: data-parallel workers around versioned weights, or an asynchronous pipeline.

In: a step, a consistency policy and options. Out: a step with `stream(state, batches)`, an iterator of losses, and `drain()`, which
finishes what is in flight and returns the state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from autopar.api.workers.step import WorkersStep
from autopar.errors import OptionError


def step_by_consistency(step: Callable[..., Any], consistency: Any, plan: Any, options: Mapping[str, Any]) -> Any:
    """The step under a consistency policy.

    Args:
        consistency: the name of a policy, or the policy.
        plan: the option `plan` of `parallelize`.
        options: its other options.

    Raises:
        OptionError: they do not go together.
    """
    if options.get("stages") not in (None, 1):
        raise OptionError(
            f"`consistency` is {consistency!r} with `stages`={options['stages']!r}: pipelines are synchronous. Leave"
            " `consistency` out; or leave `stages` out, for data-parallel workers"
        )
    return WorkersStep(step, consistency, plan, options)
