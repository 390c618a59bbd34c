"""Equation parameters as plain Python, so that nothing after this module meets a JAX object.

In: a primitive's name and its parameters as JAX has them. Out: a dict of ints, floats, strings,
bools, None, tuples and dicts of these. Without importing JAX: values are told by how they look.
"""

from __future__ import annotations

import enum
import numbers
from collections.abc import Mapping
from typing import Any

#: Parameters that carry programs or compiler requests and never shape a result; a jaxpr or a
#: sharding would be left out by its type anyway, but these may hold tuples of None and the like.
_IGNORED = frozenset({"compiler_options_kvs", "ctx_mesh", "in_layouts", "out_layouts", "in_shardings", "out_shardings"})


class _Left(enum.Enum):
    OUT = enum.auto()


def plain_params(primitive_name: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of one equation without JAX objects.

    Numbers become Python's own, dtypes and enums and primitives their names, lists tuples, named
    tuples dicts. Jaxprs, callables, shardings, meshes and arrays are left out, and so is a tuple
    that holds one.

    Args:
        primitive_name: used in the message if a parameter's name is not a string.
        params: as in `eqn.params`.

    >>> plain_params("iota", {"dimension": 0, "shape": [2, 3], "computation": len})
    {'dimension': 0, 'shape': (2, 3)}
    """
    assert all(isinstance(name, str) for name in params), f"parameters of {primitive_name} need names"
    plain = {name: _plain(value) for name, value in params.items() if name not in _IGNORED}
    if primitive_name == "pallas_call":
        plain["name"] = _kernel_name(params)
    return {name: value for name, value in plain.items() if value is not _Left.OUT}


def _kernel_name(params: Mapping[str, Any]) -> str | None:
    """Of a Pallas kernel: what it was called, else the name of its function."""
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
    if _is_array_like(value):  # an array of JAX's, which has an `aval`, may be on a device or traced: leave it
        return _Left.OUT if value.shape != () or hasattr(value, "aval") else _plain(value.item())
    return _name(value)


def _plain_mapping(value: Mapping[Any, Any]) -> dict[str, Any]:
    """Fields that are plain; a `PRNGImpl` keeps its key shape and name, and loses its functions."""
    fields = {str(key): _plain(field) for key, field in value.items()}
    return {key: field for key, field in fields.items() if field is not _Left.OUT}


def _plain_sequence(value: tuple[Any, ...] | list[Any]) -> Any:
    items = tuple(map(_plain, value))
    return _Left.OUT if any(item is _Left.OUT for item in items) else items


def _is_array_like(value: Any) -> bool:
    """NumPy scalars that are no Python number (np.bool_, bfloat16), and arrays; not their abstract values, of which a
    callback's results are told, and whose `item` is no method."""
    return not isinstance(value, type) and hasattr(value, "dtype") and callable(getattr(value, "item", None))


def _name(value: Any) -> Any:
    """The name of a dtype (`float32`, `key<fry>`), scalar type or primitive; all else is left out."""
    if isinstance(value, type):
        return value.__name__ if hasattr(value, "dtype") else _Left.OUT
    name = getattr(value, "name", None)
    if isinstance(name, str) and (hasattr(value, "itemsize") or hasattr(value, "bind")):
        return name
    fields = getattr(type(value), "__dataclass_fields__", None)
    if fields and all(_plain(getattr(value, field)) is not _Left.OUT for field in fields):
        return _plain_mapping({field: getattr(value, field) for field in fields})
    return _Left.OUT
