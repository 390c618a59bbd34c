"""A step's state before it is there: its shapes, and which of the step's arguments it is.

In: what makes the state, or the state itself; a step, and its other arguments by name. Out: `NewState`, which the shapes
and the arrays of the state come from; all arguments of the step by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax

from autopar.errors import StepSignatureError
from autopar.frontend.call import Call, Results, opened
from autopar.frontend.libraries import building, is_object
from autopar.frontend.step import Step


@dataclass(frozen=True)
class NewState:
    """A state that a function makes.

    Args:
        call: of that function, open.
        function: `call.function`, jitted: to be traced once, for its shapes and for what is run.
        shapes: what it returns.
        value: the state, of shapes in place of arrays.
    """

    call: Call
    function: Callable[..., Any]
    results: Results
    shapes: Any
    value: Any

    def leaves(self, *trees: Any) -> list[Any]:
        """What is run, of `call.trees`. Flat, so that a state that holds freshly made functions (an optax
        transformation built inside the function) keeps the structure that was planned."""
        return jax.tree.leaves(self.function(*trees))

    def finish(self, arrays: Sequence[Any]) -> Any:
        """The state, of these leaves."""
        return self.call.finish(self.results, jax.tree.unflatten(jax.tree.structure(self.shapes), arrays))


@contextmanager
def new_state(create_state: Callable[..., Any], create_args: Sequence[Any]) -> Iterator[NewState]:
    """What a function makes; it is not run.

    Raises:
        StepSignatureError: where it is no function, such as the state itself.
    """
    if not callable(create_state):
        raise StepSignatureError(
            f"`init` takes the function that makes the state, and what that is called with, not the state: it got a"
            f" {type(create_state).__name__}. Write step.init(create_state, rng, batch=batch)"
        )
    with building(), opened(Step.of(create_state), create_args, {}) as call:
        function = jax.jit(call.function)
        shapes = jax.eval_shape(function, *call.trees)
        assert call.results is not None, "it has been traced"
        yield NewState(call, function, call.results, shapes, call.result_anew(call.results, shapes))


def abstract_of(create_state: Any, create_args: Sequence[Any]) -> Any:
    """A state of shapes in place of arrays, of the function that makes it; or the state, where it is given itself."""
    if not makes_state(create_state):
        return create_state
    with new_state(create_state, create_args) as new:
        return new.value


@contextmanager
def state_apart(state: Any) -> Iterator[tuple[Any, Callable[[Any], Any]]]:
    """A state's arrays as a tree, and what makes such a state of a tree like it; in place of objects, new ones."""
    with opened(Step.of(lambda state: state), (state,), {}) as call:
        yield call.trees[0], lambda tree: call.arguments_anew([tree])["state"]


def makes_state(create_state: Any) -> bool:
    """Whether it is a function that makes a state, not a state; a module can be called, too."""
    is_leaf = not is_object(create_state) and jax.tree_util.all_leaves([create_state])
    return callable(create_state) and is_leaf


def state_arguments(step: Step, state: Any, others: Mapping[str, Any], caller: str = "init") -> dict[str, Any]:
    """The arguments of a step, of which those that are not given are state.

    Args:
        state: the one that is missing; or of several a tuple in the step's order, or a dict by name.
        caller: the method that the user has called.

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
    several = (
        f". Where several arguments are state, as {', '.join(missing)} are here, let `create_state` return them as a tuple,"
        " in this order"
    )
    raise StepSignatureError(
        f"`{caller}` needs every argument of `{step.name}` but the state, by name. It takes {', '.join(names)};"
        f" given: {', '.join(others) or 'none'}. Call `.{caller}(create_state, rng,"
        f" {', '.join(f'{n}=…' for n in names[1:])})`{several if missing[1:] else ''}"
    )


def state_like(state: Any, others: Mapping[str, Any], arguments: Mapping[str, Any]) -> Any:
    """The inverse of `state_arguments`: the state, with its parts as they are among all arguments."""
    own = {name: value for name, value in arguments.items() if name not in others}
    if len(own) == 1:
        return next(iter(own.values()))
    if isinstance(state, Mapping):
        return {name: own[name] for name in state}
    return tuple(own.values())
