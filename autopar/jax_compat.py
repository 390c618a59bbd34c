"""The only door to JAX's internals; every difference between JAX 0.10 and 0.12 lives here.

In: traced functions and their equations. Out: plain accessors that `trace` and `execute` use.
"""

from __future__ import annotations

import io
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax._src import compiler as _compiler
from jax._src import core as _core
from jax._src import source_info_util as _source_info
from jax._src.interpreters import mlir as _mlir
from jaxlib import xla_client as _xla_client
from jaxlib.mlir import ir as _ir

Literal = _core.Literal

#: Primitives that only call another jaxpr: parameter that holds it.
INLINED = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_lin": "call_jaxpr",
}

_LIBRARY_FOLDERS = tuple({sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"]})


def open_jaxpr(closed: Any) -> tuple[Any, Sequence[Any]]:
    """(jaxpr, constants) of what a trace or a call parameter holds.

    Up to 0.11 that is a `ClosedJaxpr` around a `Jaxpr`; from 0.12 a `Jaxpr` that carries `.consts`.
    """
    return getattr(closed, "jaxpr", closed), tuple(getattr(closed, "consts", ()))


def constant_vars(jaxpr: Any) -> Sequence[Any]:
    """Variables that the constants of `open_jaxpr` are bound to."""
    return jaxpr.constvars


def called_jaxpr(equation: Any) -> Any | None:
    """The jaxpr an equation merely calls, or None where it does something of its own."""
    parameter = INLINED.get(equation.primitive.name)
    if parameter is None:
        return None
    for name in (parameter, "fun_jaxpr"):  # custom_vjp_call has had both names
        if name in equation.params:
            return equation.params[name]
    return None


def shape_and_dtype(leaf: Any) -> tuple[tuple[int, ...], Any]:
    """Shape and dtype of an array, a `ShapeDtypeStruct` or a Python scalar."""
    return jax.numpy.shape(leaf), leaf.dtype if hasattr(leaf, "dtype") else jax.dtypes.result_type(leaf)


def shape_struct(leaf: Any) -> jax.ShapeDtypeStruct:
    """The same without the data, and without a place. Python scalars stay weakly typed."""
    weak = getattr(leaf, "weak_type", isinstance(leaf, bool | int | float | complex))
    return jax.ShapeDtypeStruct(*shape_and_dtype(leaf), weak_type=weak)


def itemsize(aval: Any) -> float:
    """Bytes per element; typed PRNG keys count their raw words."""
    dtype = aval.dtype
    if jax.numpy.issubdtype(dtype, jax.dtypes.prng_key):
        return 4.0 * max(1, _prod(getattr(dtype._impl, "key_shape", (2,))))
    return float(getattr(dtype, "itemsize", 4))


def _prod(sizes: Sequence[int]) -> int:
    out = 1
    for size in sizes:
        out *= size
    return out


def name_stack_of(equation: Any) -> Any:
    """The equation's name stack, an object that adds to another and reads as `jvp(Model)/layer`."""
    return equation.source_info.name_stack


def user_source(equation: Any) -> str:
    """`file.py:12 (function)` of the innermost frame in the user's own code.

    Frames of installed libraries are passed over; where all frames are libraries', the innermost.
    """
    frames = list(_source_info.user_frames(equation.source_info.traceback))
    own = [frame for frame in frames if not frame.file_name.startswith(_LIBRARY_FOLDERS)]
    if not frames:
        return ""
    frame = (own or frames)[0]
    return f"{frame.file_name}:{frame.start_line} ({frame.function_name})"


@contextmanager
def equation_context(traceback: Any, name_stack: Any, manager: Any) -> Iterator[None]:
    """Run what is inside as if it stood where the traced equation stood, so that module names and
    source lines reach the compiled program."""
    stack = _source_info.current_name_stack() + name_stack
    with _source_info.user_context(traceback, name_stack=stack), manager:
        yield


def bind(equation: Any, operands: Sequence[Any]) -> Sequence[Any]:
    """Run one equation's primitive on operands; always a sequence of results."""
    parameters = equation.primitive.get_bind_params(equation.params)
    if isinstance(parameters, tuple):  # up to 0.9 and for some primitives: (functions, parameters)
        functions, parameters = parameters
        operands = [*functions, *operands]
    results = equation.primitive.bind(*operands, **parameters)
    return results if equation.primitive.multiple_results else [results]


def staged(function: Callable[..., Any], avals: Sequence[Any]) -> Any:
    """The jaxpr of a function of arrays with these types: `.invars`, `.eqns`, `.outvars`."""
    jaxpr, constants = open_jaxpr(jax.make_jaxpr(function)(*map(shape_struct, avals)))
    assert not constants
    return jaxpr


def placed_as(equation: Any, other: Any) -> Any:
    """An equation with the source line and the context of another."""
    return equation.replace(source_info=other.source_info, ctx=other.ctx)


def ordered_effects(equation: Any) -> bool:
    """Whether an equation has an effect that must keep its order among others."""
    return any(
        "ordered" in str(effect).lower() and "unordered" not in str(effect).lower() for effect in equation.effects
    )


def trace(function: Callable[..., Any], args: Sequence[Any]) -> Any:
    """`jax.jit(function).trace(*args)`: the `Traced` object with `.jaxpr`, `.in_tree`, `.out_tree`."""
    return jax.jit(function).trace(*args)


def module_bytes(lowered: jax.stages.Lowered) -> bytes:
    """A lowered program as MLIR bytecode, with module names and source lines: another process of the
    same JAX compiles it by `compile_module`."""
    out = io.BytesIO()
    module: Any = lowered.compiler_ir("stablehlo")
    module.operation.write_bytecode(out)
    return out.getvalue()


def kept_inputs(lowered: jax.stages.Lowered) -> tuple[int, ...]:
    """Positions of the inputs, all arguments' leaves in order, that a lowered program still takes."""
    inner: Any = lowered._lowering
    return tuple(sorted(inner.compile_args["kept_var_idx"]))


def raw_struct(aval: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype as XLA sees them: typed PRNG keys are their words."""
    struct = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
    if jax.numpy.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return jax.eval_shape(jax.random.key_data, struct)
    return struct


def compile_module(module: bytes, devices: Sequence[Any]) -> Any:
    """Compile for devices, real or absent, with the options that `jax.jit` compiles with.

    Returns:
        XLA's executable: `.hlo_modules()`, `.get_compiled_memory_stats()`.
    """
    client = devices[0].client
    assignment = np.array(devices, dtype=object).reshape(1, -1)
    options = _compiler.get_compile_options(1, len(devices), assignment, backend=client)
    with _mlir.make_ir_context():
        parsed = _ir.Module.parse(module)
        return _compiler.backend_compile_and_load(client, parsed, _xla_client.DeviceList(tuple(devices)), options, [])
