"""Convert the parameters of a JAX equation to plain Python values, so that later passes see no JAX objects.

In: a primitive's name and its parameters as JAX has them. Out: a dict of ints, floats, strings, bools, None, tuples and
dicts of these. This module does not import JAX: it recognises values by their attributes.
"""

from __future__ import annotations

import enum
import numbers
from collections.abc import Mapping
from typing import Any

#: Parameters that hold programs or compiler options and never affect a result's shape. Jaxprs and shardings are left out
#: by their type; these may also be plain values, such as tuples of None.
_IGNORED = frozenset({"compiler_options_kvs", "ctx_mesh", "in_layouts", "out_layouts", "in_shardings", "out_shardings"})


class _Left(enum.Enum):
    OUT = enum.auto()


def plain_params(primitive_name: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of one equation without JAX objects.

    Numbers become Python numbers; dtypes, enums and primitives become their names; lists become tuples; named tuples
    become dicts. Jaxprs, callables, shardings, meshes and arrays are left out, and so are tuples that contain one.

    Args:
        primitive_name: name for the message if a parameter's name is not a string.
        params: parameters as in `eqn.params`.

    >>> plain_params("iota", {"dimension": 0, "shape": [2, 3], "computation": len})
    {'dimension': 0, 'shape': (2, 3)}
    """
    assert all(isinstance(name, str) for name in params), f"parameters of {primitive_name} need names"
    plain = {name: _plain(value) for name, value in params.items() if name not in _IGNORED}
    if primitive_name == "pallas_call":
        plain["name"] = _kernel_name(params)
    return {name: value for name, value in plain.items() if value is not _Left.OUT}


def _kernel_name(params: Mapping[str, Any]) -> str | None:
    """The name of a Pallas kernel, or else the name of its function."""
    described = params.get("name_and_src_info")  # up to JAX 0.11
    debug = getattr(params.get("jaxpr"), "debug_info", None)
    names = (params.get("name"), getattr(described, "name", None), getattr(debug, "func_name", None))
    return next((name for name in names if isinstance(name, str) and name), None)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, enum.Enum):  # before int: GatherScatterMode could be an IntEnum
        return value.name
    if isinstance(value, numbers.Integral):  # np.int64 too, and JAX's typed ints
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, Mapping):
        return _plain_mapping(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple
        return _plain_mapping(dict(zip(value._fields, value, strict=True)))  # type: ignore[attr-defined]
    if isinstance(value, (tuple, list)):
        return _plain_sequence(value)
    if _is_array_like(value):  # leave JAX's own arrays, which have an `aval`: they may be on a device or traced
        return _Left.OUT if value.shape != () or hasattr(value, "aval") else _plain(value.item())
    return _name(value)


def _plain_mapping(value: Mapping[Any, Any]) -> dict[str, Any]:
    """The plain fields of a mapping; a `PRNGImpl` keeps its key shape and name, but not its functions."""
    fields = {str(key): _plain(field) for key, field in value.items()}
    return {key: field for key, field in fields.items() if field is not _Left.OUT}


def _plain_sequence(value: tuple[Any, ...] | list[Any]) -> Any:
    items = tuple(map(_plain, value))
    return _Left.OUT if any(item is _Left.OUT for item in items) else items


def _is_array_like(value: Any) -> bool:
    """Whether a value is an array or a NumPy scalar that is no Python number (np.bool_, bfloat16).

    Abstract values, such as a callback's result types, are not: their `item` is no method.
    """
    return not isinstance(value, type) and hasattr(value, "dtype") and callable(getattr(value, "item", None))


def _name(value: Any) -> Any:
    """The name of a dtype (`float32`, `key<fry>`), scalar type or primitive; other objects are left out."""
    if isinstance(value, type):
        return value.__name__ if hasattr(value, "dtype") else _Left.OUT
    name = getattr(value, "name", None)
    if isinstance(name, str) and (hasattr(value, "itemsize") or hasattr(value, "bind")):
        return name
    fields = getattr(type(value), "__dataclass_fields__", None)
    if fields and all(_plain(getattr(value, field)) is not _Left.OUT for field in fields):
        return _plain_mapping({field: getattr(value, field) for field in fields})
    return _Left.OUT
