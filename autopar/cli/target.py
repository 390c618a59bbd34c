"""Load a command line's TARGET: import `path/file.py:function` or `package.module:function`, and call the function.

In: the TARGET as text. Out: the step and its arguments, or a `TargetError` with the problem and its source line.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from autopar.errors import TargetError
from autopar.frontend.step import Step

T = TypeVar("T")


def load_target(target: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Import a target's module, call its function, and return its step and arguments.

    A step made by `parallelize` is unwrapped, because the command line's options replace its own. The returned step contains
    the keyword arguments and the names of static arguments. What the target's code prints goes to stderr, so that the
    command's own output can be read by a program.

    Raises:
        TargetError: the target cannot be loaded; with the problem and its source line, where there is one.
    """
    place, name = _split(target, "target", "function")
    with contextlib.redirect_stdout(sys.stderr):
        return _loaded(target, place, name)


def load_object(text: str, what: str, kind: type[T]) -> T:
    """Import an object of a module.

    Args:
        text: `path/file.py:NAME` or `package.module:NAME`.
        what: the option's value, as text for errors.
        kind: its type.

    Raises:
        TargetError: the module cannot be imported, or has no such object.
    """
    place, name = _split(text, what, "NAME")
    with contextlib.redirect_stdout(sys.stderr):
        module = _load_file(Path(place)) if place.endswith(".py") else _import_module(place)
    found = getattr(module, name, None)
    if isinstance(found, kind):
        return found
    known = [n for n, item in vars(module).items() if isinstance(item, kind)]
    raise TargetError(f"{place} has no {kind.__name__} {name!r}; it has {', '.join(known) or 'none'}")


def _split(text: str, what: str, name: str) -> tuple[str, str]:
    place, _, found = text.rpartition(":")
    if not place or not found.isidentifier():
        raise TargetError(f"cannot read the {what} {text!r}: write path/file.py:{name} or package.module:{name}")
    return place, found


def _loaded(target: str, place: str, name: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    module = _load_file(Path(place)) if place.endswith(".py") else _import_module(place)
    make = getattr(module, name, None)
    if not callable(make):
        known = [
            n for n, item in vars(module).items() if inspect.isfunction(item) and item.__module__ == module.__name__
        ]
        raise TargetError(f"{place} has no function {name!r}; it has {', '.join(known) or 'none'}")
    _refuse_parameters(make, target)
    with _as_target_error(f"`{name}` failed", _file_of(module)):
        made = make()
    return _checked(made, f"`{name}` ({_line_of(make)})")


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise TargetError(f"there is no file {str(path)!r} (in {Path.cwd()})")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # so that the file can import modules of its folder, as with `python file.py`
    name = f"autopar_target_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module
    with _as_target_error(f"{str(path)!r} cannot be imported", str(path)):
        spec.loader.exec_module(module)
    return module


def _import_module(name: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    with _as_target_error(f"module {name!r} cannot be imported", ""):
        return importlib.import_module(name)


@contextlib.contextmanager
def _as_target_error(what: str, file: str) -> Iterator[None]:
    """Turn any exception of the target's code into a `TargetError` with the source line."""
    try:
        yield
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if file and os.path.realpath(frame.filename) == os.path.realpath(file)]
        if isinstance(error, SyntaxError) and error.filename:
            place = f" at {error.filename}:{error.lineno}"
        else:
            place = f" at {own[-1].filename}:{own[-1].lineno} ({own[-1].line})" if own else ""
        raise TargetError(f"{what}{place}: {type(error).__name__}: {error}") from error


def _file_of(module: ModuleType) -> str:
    return getattr(module, "__file__", None) or ""


def _line_of(function: Callable[..., Any]) -> str:
    try:
        function = inspect.unwrap(function)
        return f"{inspect.getsourcefile(function)}:{inspect.getsourcelines(function)[1]}"
    except (TypeError, OSError):
        return "an unknown file"


def _refuse_parameters(make: Callable[..., Any], target: str) -> None:
    try:
        signature = inspect.signature(make)
    except (TypeError, ValueError):  # built-in functions may have no signature
        return
    try:
        signature.bind()
    except TypeError as error:
        raise TargetError(
            f"the target {target!r} ({_line_of(make)}) must take nothing and return (step, args), but calling it"
            f" without arguments fails: {error}. Add a function that returns the step and its arguments, which may be"
            " shapes (`jax.eval_shape`), and name that function."
        ) from None


def _checked(made: Any, where: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    want = (
        "it must return (step, args) or (step, args, kwargs): a function, the tuple of its arguments, keyword arguments"
    )
    if type(made) not in (tuple, list) or len(made) not in (2, 3):
        size = f" of {len(made)}" if isinstance(made, tuple | list) else ""
        raise TargetError(f"{where} returned a {type(made).__name__}{size}; {want}")
    step, args, kwargs = made if len(made) == 3 else (*made, {})
    if not callable(step):
        raise TargetError(f"{where} returned a {type(step).__name__} as its step, which cannot be called; {want}")
    if type(args) not in (tuple, list):
        raise TargetError(f"{where} returned its args as a {type(args).__name__}; {want}, e.g. (step, (state, batch))")
    if not isinstance(kwargs, dict):
        raise TargetError(f"{where} returned its kwargs as a {type(kwargs).__name__}; {want}")
    called = Step.of(step, kwargs=kwargs)
    return (called if called.kwargs or called.static_argnames else called.function), tuple(args)
