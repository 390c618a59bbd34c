"""Describe a user's function by a text that is the same in every process, for cache keys.

In: a function. Out: a text of its code, constants, defaults, closure, and the globals of its own module that it uses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import CodeType, FunctionType, ModuleType
from typing import Any

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def function_text(function: Callable[..., Any]) -> str:
    """The text of a function and of the functions of its own module that it uses."""
    return _text(function, set())


def _text(value: Any, seen: set[int]) -> str:
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, tuple | list | frozenset | set):
        items = [_text(one, seen) for one in value]
        return f"({', '.join(sorted(items) if isinstance(value, frozenset | set) else items)})"
    if isinstance(value, dict):
        return f"{{{', '.join(sorted(f'{_text(key, seen)}: {_text(one, seen)}' for key, one in value.items()))}}}"
    if isinstance(value, CodeType):
        parts = (value.co_names, value.co_varnames, *value.co_consts)
        return f"{value.co_code.hex()} {_text(parts, seen)}"
    if isinstance(value, functools.partial):
        return f"partial {_text((value.func, value.args, value.keywords), seen)}"
    if isinstance(value, FunctionType) and id(value) not in seen:
        seen.add(id(value))
        return _function_text(value, seen)
    name = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    if isinstance(value, type | ModuleType) or id(value) in seen or not hasattr(value, "__dict__"):
        return name
    seen.add(id(value))  # a callable object, such as one that a decorator returns
    return f"{name} {_text(vars(value), seen)}"


def _function_text(function: FunctionType, seen: set[int]) -> str:
    closure = [cell.cell_contents for cell in function.__closure__ or ()]
    used = {name: function.__globals__[name] for name in _names(function.__code__) if name in function.__globals__}
    own = {
        name: one
        for name, one in used.items()
        if isinstance(one, (*_PLAIN, tuple)) or getattr(one, "__module__", None) == function.__module__
    }
    parts = (function.__code__, function.__defaults__, function.__kwdefaults__, closure, own)
    return f"{function.__module__}.{function.__qualname__} {_text(parts, seen)}"


def _names(code: CodeType) -> set[str]:
    inner = (_names(one) for one in code.co_consts if isinstance(one, CodeType))
    return set(code.co_names).union(*inner)
