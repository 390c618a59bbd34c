"""Access jaxprs and equations through JAX's internals, with one interface for JAX 0.10 to 0.12.

In: jaxprs, equations, avals. Out: accessors and builders for the front end and the runtime.
"""

from __future__ import annotations

import functools
import importlib
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax._src import core as _core
from jax._src import dispatch as _dispatch
from jax._src import source_info_util as _source_info
from jax._src.interpreters import mlir as _mlir
from jax._src.lax import lax as _lax
from jax._src.lax.slicing import _gather_fill
from jax.extend.core import Primitive

from autopar.jax_interop.absent_cudnn import without_cudnn
from autopar.system.source_paths import portable_path

Literal = _core.Literal

#: Primitives that only call another jaxpr, with the parameter that holds it.
INLINED = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_lin": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "core_closed_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",
    "custom_vmap_call": "call",
    "remat_opt": "fwd_jaxpr",  # `custom_vjp` with `optimize_remat`
}

#: Collectives that `vmap` with an `axis_name` leaves in a trace, with the equivalent reduction over positional dims.
_OVER_ROWS: dict[str, Callable[..., Any]] = {
    "psum": lambda value, axes: jax.lax.reduce_sum(value, axes),
    "psum_invariant": lambda value, axes: jax.lax.reduce_sum(value, axes),
    "pmax": lambda value, axes: jax.lax.reduce_max(value, axes),
    "pmin": lambda value, axes: jax.lax.reduce_min(value, axes),
}

#: Options of XLA's GPU compiler that run all-gathers of loops one iteration ahead.
PIPELINED_ALL_GATHERS: dict[str, int] = (
    {"xla_gpu_pipeline_all_gather": 2}
    if jax.__version_info__ >= (0, 11, 1)
    else {"xla_gpu_enable_pipelined_all_gather": True}
)
if (0, 11) <= jax.__version_info__ < (0, 12):  # whose XLA else ends the gather before the first kernel, for a copy
    PIPELINED_ALL_GATHERS["xla_gpu_copy_insertion_use_region_analysis"] = True

_LIBRARY_FOLDERS = tuple({sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"]})


def open_jaxpr(closed: Any) -> tuple[Any, Sequence[Any]]:
    """The (jaxpr, constants) of a trace or of a call parameter.

    Up to JAX 0.11 that is a `ClosedJaxpr` around a `Jaxpr`; from 0.12 it is a `Jaxpr` with `.consts`.
    """
    return getattr(closed, "jaxpr", closed), tuple(getattr(closed, "consts", ()))


def constant_vars(jaxpr: Any) -> Sequence[Any]:
    """The variables that the constants of `open_jaxpr` are bound to."""
    return jaxpr.constvars


def called(equation: Any, operands: Sequence[Any]) -> tuple[Any, Sequence[Any]] | None:
    """The jaxpr that an equation merely calls, and its operands; None if the equation is an operation of its own."""
    if equation.primitive.name == "custom_linear_solve":  # it lowers to its solver
        lengths, jaxprs = equation.params["const_lengths"], equation.params["jaxprs"]
        before = lengths.matvec + lengths.vecmat
        return jaxprs.solve, [*operands[before : before + lengths.solve], *operands[sum(lengths) :]]
    if equation.primitive.name == "gather":
        masked = _masked_gather(equation)
        return None if masked is None else (masked, operands)
    if equation.primitive.name in _OVER_ROWS:
        reduced = _over_rows(equation)
        return None if reduced is None else (reduced, operands)
    parameter = INLINED.get(equation.primitive.name)
    if parameter is None:
        return None
    for name in (parameter, "fun_jaxpr"):  # custom_vjp_call has had both names
        if name in equation.params:
            return equation.params[name], operands
    return None


def _over_rows(equation: Any) -> Any | None:
    """The reduction that replaces a collective over the positional dims of a `vmap`; None for other collectives."""
    axes, groups = equation.params["axes"], equation.params.get("axis_index_groups")
    if groups is not None or not all(isinstance(axis, int) for axis in axes):
        return None
    reduce = _OVER_ROWS[equation.primitive.name]
    closed = jax.make_jaxpr(lambda *values: [reduce(value, axes) for value in values])(
        *(shape_struct(atom.aval) for atom in equation.invars)
    )
    return _standing_at(closed, equation)


def _masked_gather(equation: Any) -> Any | None:
    """A gather with fill mode as its lowering, a gather and a mask; None for other gathers.

    The unreduced result of a split table can then be reduce-scattered before the mask; after it XLA would all-reduce it.
    """
    params, result = equation.params, equation.outvars[0].aval
    fills = params["mode"] == jax.lax.GatherScatterMode.FILL_OR_DROP
    if not fills or jax.numpy.issubdtype(result.dtype, jax.dtypes.extended):
        return None
    names = ("dimension_numbers", "slice_sizes", "unique_indices", "indices_are_sorted", "fill_value")
    masked = functools.partial(_gather_fill, **{name: params[name] for name in names}, output_shape=result.shape)
    closed = jax.make_jaxpr(masked)(*(shape_struct(atom.aval) for atom in equation.invars))
    return _standing_at(closed, equation)


def _standing_at(closed: Any, equation: Any) -> Any:
    """A jaxpr that replaces an equation, with all its equations at the source line of that equation."""
    place = equation.source_info.traceback
    parts = [part.replace(source_info=part.source_info.replace(traceback=place)) for part in closed.eqns]
    if isinstance(closed, _core.Jaxpr):  # from JAX 0.12 on
        return closed.replace(eqns=parts)
    return closed.replace(jaxpr=closed.jaxpr.replace(eqns=parts))


def is_traced() -> bool:
    """Whether JAX is currently tracing or transforming a function."""
    return not _core.trace_state_clean()


def scan_counts(equation: Any) -> tuple[int, int]:
    """The numbers of constants and of carries among the operands of a `scan`."""
    params = equation.params
    if "num_carry" in params:  # up to JAX 0.11
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = map(list, params["ft_in"].update(equation.invars).unpack())
    return len(consts), len(carry)


def barred_operands(equation: Any) -> tuple[bool, ...]:
    """Which operands of a `checkpoint` need a barrier that prevents common subexpression elimination."""
    given = equation.params["prevent_cse"]
    barred = given if isinstance(given, tuple) else (given,) * len(equation.invars)
    return tuple(b and equation.params["differentiated"] for b in barred)


def as_typed(value: Any, aval: Any) -> Any:
    """A value, perhaps a literal, converted to the dtype and weak type of an aval, as a loop's carry requires."""
    if isinstance(value, jax.Array) and (value.dtype, value.weak_type) == (aval.dtype, aval.weak_type):
        return value
    return _lax._convert_element_type(value, aval.dtype, weak_type=aval.weak_type)


def programs_in(equation: Any) -> Iterator[Any]:
    """Yield the jaxprs in an equation's parameters."""
    for parameter in equation.params.values():
        for item in parameter if isinstance(parameter, tuple | list) else (parameter,):
            jaxpr = open_jaxpr(item)[0]
            if hasattr(jaxpr, "eqns"):
                yield jaxpr


def as_function(closed: Any) -> Callable[..., Sequence[Any]]:
    """A function that evaluates a jaxpr."""
    jaxpr, constants = open_jaxpr(closed)
    return lambda *args: _core.eval_jaxpr(jaxpr, constants, *args)


def shape_struct(leaf: Any) -> jax.ShapeDtypeStruct:
    """The shape and dtype of an array or a Python scalar, without sharding. Python scalars stay weakly typed, and NumPy's
    64-bit types are narrowed silently where JAX has none, as `jax.jit` does."""
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jax.dtypes.result_type(leaf)
    dtype = jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True)
    weak = getattr(leaf, "weak_type", isinstance(leaf, bool | int | float | complex))
    return jax.ShapeDtypeStruct(jax.numpy.shape(leaf), dtype, weak_type=weak)


def itemsize(aval: Any) -> float:
    """Bytes per element; a typed PRNG key counts its raw words."""
    dtype = aval.dtype
    if jax.numpy.issubdtype(dtype, jax.dtypes.prng_key):
        return 4.0 * max(1, _prod(getattr(dtype._impl, "key_shape", (2,))))
    return float(getattr(dtype, "itemsize", 4))


def _prod(sizes: Sequence[int]) -> int:
    out = 1
    for size in sizes:
        out *= size
    return out


def stacked(aval: Any, length: int) -> Any:
    """The aval of `length` values stacked along a new first dim."""
    return _core.ShapedArray((length, *aval.shape), aval.dtype, weak_type=aval.weak_type)


def name_stack_of(equation: Any) -> Any:
    """The name stack of an equation; it can be added to another, and its text is e.g. `jvp(Model)/layer`."""
    return equation.source_info.name_stack


def user_source(equation: Any) -> str:
    """The innermost frame of the user's code as `models/gpt.py:12 (function)`, with the file's `portable_path`.

    Frames of installed libraries are skipped; if there are no others, it is the innermost of these.
    """
    frames = list(_source_info.user_frames(equation.source_info.traceback))
    own = [frame for frame in frames if not frame.file_name.startswith(_LIBRARY_FOLDERS)]
    if not frames:
        return ""
    frame = (own or frames)[0]
    return f"{portable_path(frame.file_name)}:{frame.start_line} ({frame.function_name})"


@contextmanager
def equation_context(traceback: Any, name_stack: Any, manager: Any) -> Iterator[None]:
    """Run the `with` block in the context of a traced equation, so that module names and source lines reach the compiled
    program."""
    stack = _source_info.current_name_stack() + name_stack
    with _source_info.user_context(traceback, name_stack=stack), manager:
        yield


def bind(equation: Any, operands: Sequence[Any], **changed: Any) -> Sequence[Any]:
    """Bind an equation's primitive to operands, with some parameters changed. Always returns a sequence of results."""
    parameters = equation.primitive.get_bind_params(equation.params | changed)
    if isinstance(parameters, tuple):  # up to 0.9 and for some primitives: (functions, parameters)
        functions, parameters = parameters
        operands = [*functions, *operands]
    results = equation.primitive.bind(*operands, **parameters)
    return results if equation.primitive.multiple_results else [results]


def primitive_of(name: str, function: Callable[..., jax.Array], *, result: Callable[..., Any]) -> Any:
    """Define a primitive that is one equation in a trace and lowers to a function.

    Args:
        function: lowering, from arrays and static parameters to one array.
        result: function from the avals of the arrays to that of the result.
    """

    def type_of(*avals: Any, **_: Any) -> Any:
        aval = result(*avals)
        return _core.ShapedArray(aval.shape, aval.dtype)

    primitive = Primitive(name)
    primitive.def_impl(functools.partial(_dispatch.apply_primitive, primitive))
    primitive.def_abstract_eval(type_of)
    _mlir.register_lowering(primitive, _mlir.lower_fun(function, multiple_results=False))
    return primitive


def needs_one_mesh(traced: Any) -> bool:
    """Whether JAX lowers a traced program only if all its shardings name one mesh, as with a host callback."""
    return bool(_dispatch.jaxpr_has_prim_requiring_devices(traced.jaxpr.jaxpr))


def triton_options(num_warps: int, num_stages: int) -> Any | None:
    """Pallas compiler parameters for Triton, which JAX 0.12 deprecates; None if JAX no longer has them."""
    try:
        triton = importlib.import_module("jax.experimental.pallas.triton")
    except ImportError:
        return None
    return triton.CompilerParams(num_warps=num_warps, num_stages=num_stages)


def drawn_bits(equation: Any) -> Any | None:
    """The jaxpr that draws the random bits of an equation from its key; None for an array of keys."""
    key, shape, width = equation.invars[0].aval, equation.params["shape"], equation.params["bit_width"]
    if key.shape:
        return None
    draw = key.dtype._impl.random_bits
    return jax.make_jaxpr(lambda one: draw(jax.random.key_data(one), width, shape))(shape_struct(key))


def scan_of(length: int) -> Any:
    """The equation of an empty `lax.scan` of `length` iterations."""
    counts = jax.ShapeDtypeStruct((length,), "int32")
    closed = jax.make_jaxpr(lambda xs: jax.lax.scan(lambda carry, x: (carry, x), (), xs))(counts)
    return open_jaxpr(closed)[0].eqns[0]


def scan_with_length(equation: Any, length: int) -> Any:
    """The equation of a `scan` with its trip count changed to `length`."""
    return equation.replace(params={**equation.params, "length": length})


def scalar_type(dtype: str) -> Any:
    """The type of a scalar."""
    return _core.ShapedArray((), np.dtype(dtype))


def staged(function: Callable[..., Any], avals: Sequence[Any]) -> Any:
    """The jaxpr of a function for arguments with these avals: `.invars`, `.eqns`, `.outvars`."""
    jaxpr, constants = open_jaxpr(jax.make_jaxpr(function)(*map(shape_struct, avals)))
    assert not constants
    return jaxpr


def placed_as(equation: Any, other: Any) -> Any:
    """An equation with the source line and the context of another."""
    return equation.replace(source_info=other.source_info, ctx=other.ctx)


def ordered_effects(equation: Any) -> bool:
    """Whether an equation has an ordered effect."""
    return any(
        "ordered" in str(effect).lower() and "unordered" not in str(effect).lower() for effect in equation.effects
    )


def trace(function: Callable[..., Any], args: Sequence[Any]) -> Any:
    """`jax.jit(function).trace(*args)`: the `Traced` object with `.jaxpr`, `.in_tree`, `.out_tree`. cuDNN attention is traced
    without cuDNN."""
    with without_cudnn():
        return jax.jit(function).trace(*args)


def raw_struct(aval: Any) -> jax.ShapeDtypeStruct:
    """The shape and dtype of an aval in XLA, where typed PRNG keys are their raw words."""
    struct = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
    if jax.numpy.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return jax.eval_shape(jax.random.key_data, struct)
    return struct


def retyped(value: Any, struct: jax.ShapeDtypeStruct) -> Any:
    """A value converted to the type of `struct`: raw words to a PRNG key, else by dtype and weak type.

    None becomes zeros, for types without elements.
    """
    if value is None:
        value = jax.numpy.zeros(raw_struct(struct).shape, raw_struct(struct).dtype)
    if jax.numpy.issubdtype(struct.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(value, impl=struct.dtype._impl)
    return _lax._convert_element_type(value, struct.dtype, weak_type=bool(struct.weak_type))


def meshes_named(jaxpr: Any) -> list[tuple[str, Any]]:
    """The place and mesh of every `with_sharding_constraint` and `shard_map` in a program."""
    found: list[tuple[str, Any]] = []
    for equation in jaxpr.eqns:
        sharding = equation.params.get("sharding") if equation.primitive.name == "sharding_constraint" else None
        if isinstance(sharding, jax.sharding.NamedSharding):
            found.append((f"`with_sharding_constraint` at {user_source(equation)}", sharding.mesh))
        elif equation.primitive.name == "shard_map":
            found.append((f"`shard_map` at {user_source(equation)}", equation.params["mesh"]))
            continue  # inside, the mesh has other axis types
        for inner in programs_in(equation):
            found += meshes_named(inner)
    return found


def placed_struct(leaf: Any) -> jax.ShapeDtypeStruct:
    """Like `shape_struct`, with the sharding if it is a `NamedSharding` over a non-empty mesh."""
    struct, sharding = shape_struct(leaf), getattr(leaf, "sharding", None)
    if not isinstance(sharding, jax.sharding.NamedSharding) or not sharding.mesh.axis_names:
        return struct
    return jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=sharding, weak_type=struct.weak_type)
