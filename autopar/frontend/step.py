"""Wrap a user's function with the names of its arguments and which of them are static.

In: a function, `static_argnames`, and a call's arguments.
Out: `Arguments` in a canonical order.
"""

from __future__ import annotations

import functools
import inspect
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autopar.errors import StepSignatureError


@dataclass(frozen=True, slots=True)
class Arguments:
    """A call's arguments by name, positional ones first.

    Args:
        num_positional: the number of positional arguments.
    """

    names: tuple[str, ...]
    values: tuple[Any, ...]
    num_positional: int


@dataclass(frozen=True)
class Step:
    """A function to plan.

    Args:
        static_argnames: arguments that are static, not arrays, such as `train` or a configuration.
        kwargs: default keyword arguments of its calls.
    """

    function: Callable[..., Any]
    static_argnames: tuple[str, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        step: Callable[..., Any],
        static_argnames: str | Iterable[str] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> Step:
        """Wrap a function as a step. A step is returned with additional static arguments.

        Raises:
            StepSignatureError: it is not a function, or does not take a static argument.
        """
        if callable(getattr(step, "plan", None)):  # made by `parallelize`
            step = getattr(step, "called", None) or getattr(step, "__wrapped__", step)
        known = step if isinstance(step, Step) else cls(step)
        if not callable(known.function):
            raise StepSignatureError(
                f"a step is a function, and {reprlib.repr(step)} is a {type(step).__name__}, which cannot be called:"
                " give the function itself first, its arguments after it, and options by name, such as"
                ' `autopar.plan(train_step, state, batch, mesh="2x4")`'
            )
        given = (static_argnames,) if isinstance(static_argnames, str) else tuple(static_argnames or ())
        static = tuple(dict.fromkeys((*known.static_argnames, *given)))
        out = cls(known.function, static, {**known.kwargs, **(kwargs or {})})
        out._check_static()
        return out

    @property
    def __name__(self) -> str:  # functions have one
        return self.name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function itself."""
        return self.function(*args, **{**self.kwargs, **kwargs})

    @property
    def name(self) -> str:
        """Its name in reports."""
        return getattr(self.function, "__qualname__", None) or type(self.function).__name__

    @functools.cached_property
    def signature(self) -> inspect.Signature | None:
        """Its signature; None if Python does not know it."""
        try:
            return inspect.signature(self.function)
        except (TypeError, ValueError):
            return None

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of its arguments, as shown to the user."""
        if self.signature is None:
            return ()
        return tuple(name for name, p in self.signature.parameters.items() if p.kind not in _VARIADIC)

    @property
    def required(self) -> tuple[str, ...]:
        """The names of the arguments without a default."""
        if self.signature is None:
            return ()
        return tuple(n for n in self.parameters if self.signature.parameters[n].default is inspect.Parameter.empty)

    def takes(self, name: str) -> bool:
        """Whether it takes an argument of this name, or any."""
        variadic = self.signature is None or any(p.kind is p.VAR_KEYWORD for p in self.signature.parameters.values())
        return variadic or name in self.parameters

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
        """A call's arguments by name. Missing arguments keep the function's defaults.

        Raises:
            StepSignatureError: the function does not accept the call.
        """
        args, kwargs = tuple(args), {**self.kwargs, **kwargs}
        if self.signature is not None:
            try:
                bound = self.signature.bind(*args, **kwargs)
            except TypeError as error:
                takes = ", ".join(map(str, self.signature.parameters.values()))
                raise StepSignatureError(f"`{self.name}` takes ({takes}), but was called otherwise: {error}") from None
            args, kwargs = bound.args, bound.kwargs
        names = (*self._positional(len(args)), *kwargs)
        return Arguments(names, (*args, *kwargs.values()), len(args))

    def by_name(self, arguments: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments from named ones, as some may be positional-only."""
        parameters = self.signature.parameters if self.signature is not None else {}
        first = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_ONLY and n in arguments]
        return tuple(arguments[n] for n in first), {n: v for n, v in arguments.items() if n not in first}

    def _positional(self, count: int) -> list[str]:
        """The names of the first positional arguments; `arg3` for unnamed ones."""
        parameters = self.signature.parameters.values() if self.signature is not None else ()
        names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        return [names[i] if i < len(names) else f"arg{i}" for i in range(count)]

    def _check_static(self) -> None:
        unknown = [name for name in self.static_argnames if not self.takes(name)]
        if unknown:
            raise StepSignatureError(
                f"`static_argnames` names {unknown[0]!r}, but `{self.name}` takes {', '.join(self.parameters)}"
            )


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
