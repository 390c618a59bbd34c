"""Describe a step's state before it exists: its shapes, and which of the step's arguments it is.

In: the function that makes the state, or the state; a step, and its other arguments by name.
Out: `NewState`, from which the state's shapes and arrays come; all arguments of the step by name.
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
        call: an open call of that function.
        function: `call.function`, jitted, so that it is traced once for its shapes and for the run.
        shapes: the shapes of its result.
        value: the state with shapes instead of arrays.
    """

    call: Call
    function: Callable[..., Any]
    results: Results
    shapes: Any
    value: Any

    def leaves(self, *trees: Any) -> list[Any]:
        """The leaves of the state, computed from `call.trees`. They are flat, because a state with newly made
        functions (an optax transformation built inside the function) must keep the planned structure."""
        return jax.tree.leaves(self.function(*trees))

    def finish(self, arrays: Sequence[Any]) -> Any:
        """The state with these leaves."""
        return self.call.finish(self.results, jax.tree.unflatten(jax.tree.structure(self.shapes), arrays))


@contextmanager
def new_state(create_state: Callable[..., Any], create_args: Sequence[Any]) -> Iterator[NewState]:
    """The state that a function makes, without running it.

    Raises:
        StepSignatureError: it is not a function, for example the state itself.
    """
    if not callable(create_state):
        raise StepSignatureError(
            f"`init` takes the function that creates the state, and its arguments, not the state itself: it got a"
            f" {type(create_state).__name__}. Write step.init(create_state, rng, batch=batch)"
        )
    with building(), opened(Step.of(create_state), create_args, {}) as call:
        function = jax.jit(call.function)
        shapes = jax.eval_shape(function, *call.trees)
        assert call.results is not None, "it has been traced"
        yield NewState(call, function, call.results, shapes, call.result_without_mutation(call.results, shapes))


def abstract_of(create_state: Any, create_args: Sequence[Any]) -> Any:
    """A state with shapes instead of arrays, from the function that makes it or from the state itself."""
    if not makes_state(create_state):
        return create_state
    with new_state(create_state, create_args) as new:
        return new.value


@contextmanager
def state_apart(state: Any) -> Iterator[tuple[Any, Callable[[Any], Any]]]:
    """A state's arrays as a tree, and the inverse; objects are replaced by new ones."""
    with opened(Step.of(lambda state: state), (state,), {}) as call:
        yield call.trees[0], lambda tree: call.rebuilt_arguments([tree])["state"]


def makes_state(create_state: Any) -> bool:
    """Whether it is a function that makes a state. States may be callable too, as modules are."""
    is_leaf = not is_object(create_state) and jax.tree_util.all_leaves([create_state])
    return callable(create_state) and is_leaf


def state_arguments(step: Step, state: Any, others: Mapping[str, Any], caller: str = "init") -> dict[str, Any]:
    """All arguments of a step; those that are not given by name are the state.

    Args:
        state: the missing argument; for several a tuple in the step's order, or a dict by name.
        caller: the name of the method that the user called.

    Raises:
        StepSignatureError: a name is not an argument, or the state is ambiguous.
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
    """The inverse of `state_arguments`: the state in the form in which it was given."""
    own = {name: value for name, value in arguments.items() if name not in others}
    if len(own) == 1:
        return next(iter(own.values()))
    if isinstance(state, Mapping):
        return {name: own[name] for name in state}
    return tuple(own.values())
