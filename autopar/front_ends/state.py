"""Which arguments of a step a newly built state is.

In: a step, what the user's `create_state` returned, the other arguments by name. Out: all arguments by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autopar.errors import StepSignatureError
from autopar.front_ends.step import Step


def state_arguments(step: Step, state: Any, others: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a step, of which those that are not given are state.

    Args:
        state: the one that is missing; or of several a tuple in the step's order, or a dict by name.

    Raises:
        StepSignatureError: others names what is no argument, or it is not clear which the state is.
    """
    missing = [name for name in step.required if name not in others]
    unknown = [name for name in others if step.signature is not None and not step.takes(name)]
    if not unknown and len(missing) == 1:
        return {missing[0]: state, **others}
    if not unknown and missing and isinstance(state, Mapping) and {*state} == {*missing}:
        return {**state, **others}
    if not unknown and missing and isinstance(state, tuple | list) and len(state) == len(missing):
        return {**dict(zip(missing, state, strict=True)), **others}
    names = step.parameters
    raise StepSignatureError(
        f"`init` needs every argument of `{step.name}` but the state, by name. It takes {', '.join(names)};"
        f" given: {', '.join(others) or 'none'}. Call `.init(create_state, rng,"
        f" {', '.join(f'{n}=…' for n in names[1:])})`. Where several arguments are state, let `create_state` return them as"
        " a tuple, in this order"
    )
