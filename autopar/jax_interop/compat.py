"""The only door to JAX's internals; every difference between JAX 0.10 and 0.12 lives here.

In: traced functions and their equations. Out: plain accessors that `trace` and `execute` use.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import io
import math
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax._src import cache_key as _cache_key
from jax._src import compilation_cache as _compilation_cache
from jax._src import compiler as _compiler
from jax._src import config as _config
from jax._src import core as _core
from jax._src import dispatch as _dispatch
from jax._src import distributed as _distributed
from jax._src import source_info_util as _source_info
from jax._src import xla_bridge as _xla_bridge
from jax._src.interpreters import mlir as _mlir
from jax._src.lax import lax as _lax
from jax._src.lax.slicing import _gather_fill
from jax._src.lib.mlir.dialects import hlo as _hlo
from jax._src.random import prng as _prng
from jax._src.random import threefry2x32 as _threefry
from jax.extend.core import Primitive
from jaxlib import xla_client as _xla_client
from jaxlib.mlir import ir as _ir

from autopar.system.source_paths import portable_path

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
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "core_closed_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",
}

#: Collectives that a `vmap` with an `axis_name` leaves behind, and what each is over dims that are there.
_OVER_ROWS: dict[str, Callable[..., Any]] = {
    "psum": lambda value, axes: jax.lax.reduce_sum(value, axes),
    "psum_invariant": lambda value, axes: jax.lax.reduce_sum(value, axes),
    "pmax": lambda value, axes: jax.lax.reduce_max(value, axes),
    "pmin": lambda value, axes: jax.lax.reduce_min(value, axes),
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


def called(equation: Any, operands: Sequence[Any]) -> tuple[Any, Sequence[Any]] | None:
    """The jaxpr that an equation merely calls, and on what; None where it does something of its own."""
    if equation.primitive.name == "custom_linear_solve":  # lowered, it is nothing but its solver
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
    """A collective over the rows of a `vmap` alone, which names their dims by number: a reduction, and lowered as one."""
    axes, groups = equation.params["axes"], equation.params.get("axis_index_groups")
    if groups is not None or not all(isinstance(axis, int) for axis in axes):
        return None
    reduce = _OVER_ROWS[equation.primitive.name]
    closed = jax.make_jaxpr(lambda *values: [reduce(value, axes) for value in values])(
        *(shape_struct(atom.aval) for atom in equation.invars)
    )
    return _standing_at(closed, equation)


def _masked_gather(equation: Any) -> Any | None:
    """A gather that fills in for what is out of bounds as it is lowered: a gather, then a mask. Between the two what
    a split table leaves unreduced may be scattered; behind the mask XLA sums it whole."""
    params, result = equation.params, equation.outvars[0].aval
    fills = params["mode"] == jax.lax.GatherScatterMode.FILL_OR_DROP
    if not fills or jax.numpy.issubdtype(result.dtype, jax.dtypes.extended):
        return None
    names = ("dimension_numbers", "slice_sizes", "unique_indices", "indices_are_sorted", "fill_value")
    masked = functools.partial(_gather_fill, **{name: params[name] for name in names}, output_shape=result.shape)
    closed = jax.make_jaxpr(masked)(*(shape_struct(atom.aval) for atom in equation.invars))
    return _standing_at(closed, equation)


def _standing_at(closed: Any, equation: Any) -> Any:
    """A jaxpr that an equation is replaced by, each part of it at the equation's line."""
    place = equation.source_info.traceback
    parts = [part.replace(source_info=part.source_info.replace(traceback=place)) for part in closed.eqns]
    if isinstance(closed, _core.Jaxpr):  # from JAX 0.12 on, a jaxpr holds its constants
        return closed.replace(eqns=parts)
    return closed.replace(jaxpr=closed.jaxpr.replace(eqns=parts))


def is_traced() -> bool:
    """Whether JAX is tracing or transforming a function right here."""
    return not _core.trace_state_clean()


def scan_counts(equation: Any) -> tuple[int, int]:
    """Of a `scan`, how many operands are constants, and how many its carry."""
    params = equation.params
    if "num_carry" in params:  # up to JAX 0.11
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = map(list, params["ft_in"].update(equation.invars).unpack())
    return len(consts), len(carry)


def barred_operands(equation: Any) -> tuple[bool, ...]:
    """Of a `checkpoint`, the operands that the compiler must not know for what was computed before."""
    given = equation.params["prevent_cse"]
    barred = given if isinstance(given, tuple) else (given,) * len(equation.invars)
    return tuple(b and equation.params["differentiated"] for b in barred)


def as_typed(value: Any, aval: Any) -> Any:
    """A value, perhaps a literal, with the dtype of an aval, weak or not: a loop's carry keeps its type."""
    if isinstance(value, jax.Array) and (value.dtype, value.weak_type) == (aval.dtype, aval.weak_type):
        return value
    return _lax._convert_element_type(value, aval.dtype, weak_type=aval.weak_type)


def programs_in(equation: Any) -> Iterator[Any]:
    """The jaxprs that an equation holds."""
    for parameter in equation.params.values():
        for item in parameter if isinstance(parameter, tuple | list) else (parameter,):
            jaxpr = open_jaxpr(item)[0]
            if hasattr(jaxpr, "eqns"):
                yield jaxpr


def as_function(closed: Any) -> Callable[..., Sequence[Any]]:
    """A jaxpr as the function that it was traced from."""
    jaxpr, constants = open_jaxpr(closed)
    return lambda *args: _core.eval_jaxpr(jaxpr, constants, *args)


def shape_struct(leaf: Any) -> jax.ShapeDtypeStruct:
    """An array or a Python scalar without the data, and without a place. Python scalars stay weakly typed."""
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jax.dtypes.result_type(leaf)
    weak = getattr(leaf, "weak_type", isinstance(leaf, bool | int | float | complex))
    return jax.ShapeDtypeStruct(jax.numpy.shape(leaf), dtype, weak_type=weak)


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


def stacked(aval: Any, length: int) -> Any:
    """The type of so many values of a type, along a new first dim."""
    return _core.ShapedArray((length, *aval.shape), aval.dtype, weak_type=aval.weak_type)


def name_stack_of(equation: Any) -> Any:
    """The equation's name stack, an object that adds to another and reads as `jvp(Model)/layer`."""
    return equation.source_info.name_stack


def user_source(equation: Any) -> str:
    """`models/gpt.py:12 (function)` of the innermost frame in the user's own code, the file as `portable_path` names it.

    Frames of installed libraries are passed over; where all frames are libraries', the innermost.
    """
    frames = list(_source_info.user_frames(equation.source_info.traceback))
    own = [frame for frame in frames if not frame.file_name.startswith(_LIBRARY_FOLDERS)]
    if not frames:
        return ""
    frame = (own or frames)[0]
    return f"{portable_path(frame.file_name)}:{frame.start_line} ({frame.function_name})"


@contextmanager
def equation_context(traceback: Any, name_stack: Any, manager: Any) -> Iterator[None]:
    """Run what is inside as if it stood where the traced equation stood, so that module names and
    source lines reach the compiled program."""
    stack = _source_info.current_name_stack() + name_stack
    with _source_info.user_context(traceback, name_stack=stack), manager:
        yield


def bind(equation: Any, operands: Sequence[Any], **changed: Any) -> Sequence[Any]:
    """Run one equation's primitive on operands, some of its parameters changed; always a sequence of results."""
    parameters = equation.primitive.get_bind_params(equation.params | changed)
    if isinstance(parameters, tuple):  # up to 0.9 and for some primitives: (functions, parameters)
        functions, parameters = parameters
        operands = [*functions, *operands]
    results = equation.primitive.bind(*operands, **parameters)
    return results if equation.primitive.multiple_results else [results]


def primitive_of(name: str, function: Callable[..., jax.Array], *, result: Callable[..., Any]) -> Any:
    """A primitive that stands as one equation in a trace, and is what a function makes of it when it is lowered.

    Args:
        function: of arrays and static parameters, to one array. result: types of the arrays -> that of the result.
    """

    def type_of(*avals: Any, **_: Any) -> Any:
        aval = result(*avals)
        return _core.ShapedArray(aval.shape, aval.dtype)

    primitive = Primitive(name)
    primitive.def_impl(functools.partial(_dispatch.apply_primitive, primitive))
    primitive.def_abstract_eval(type_of)
    _mlir.register_lowering(primitive, _mlir.lower_fun(function, multiple_results=False))
    return primitive


def triton_options(num_warps: int, num_stages: int) -> Any | None:
    """What has Pallas compile a kernel for a GPU by Triton, which JAX 0.12 calls deprecated; None where it is gone."""
    try:
        triton = importlib.import_module("jax.experimental.pallas.triton")
    except ImportError:
        return None
    return triton.CompilerParams(num_warps=num_warps, num_stages=num_stages)


def drawn_bits(equation: Any) -> Any | None:
    """How the random bits of one key are drawn, as a closed jaxpr of the key: for each place of the result, from its
    position. None where it is not from one key."""
    key, shape, width = equation.invars[0].aval, equation.params["shape"], equation.params["bit_width"]
    if key.shape:
        return None
    draw = key.dtype._impl.random_bits
    return jax.make_jaxpr(lambda one: draw(jax.random.key_data(one), width, shape))(shape_struct(key))


def scan_of(length: int) -> Any:
    """The equation of a `lax.scan` of so many trips that does nothing."""
    counts = jax.ShapeDtypeStruct((length,), "int32")
    closed = jax.make_jaxpr(lambda xs: jax.lax.scan(lambda carry, x: (carry, x), (), xs))(counts)
    return open_jaxpr(closed)[0].eqns[0]


def scan_with_length(equation: Any, length: int) -> Any:
    """The equation of a `scan`, of so many trips."""
    return equation.replace(params={**equation.params, "length": length})


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


def compile_module(module: bytes, devices: Sequence[Any], more: Mapping[str, Any] | None = None) -> Any:
    """Compile for devices, real or absent, with the options that `jax.jit` compiles with, and more of XLA's.

    Returns:
        XLA's executable: `.hlo_modules()`, `.get_compiled_memory_stats()`.
    """
    client = devices[0].client
    assignment = np.array(devices, dtype=object).reshape(1, -1)
    own: Any = dict(more) if more else None
    options = _compiler.get_compile_options(1, len(devices), assignment, own, backend=client)
    with _mlir.make_ir_context():
        parsed = _ir.Module.parse(module)
        return _compiler.backend_compile_and_load(client, parsed, _xla_client.DeviceList(tuple(devices)), options, [])


#: What has at most so many elements is a key, or a few: not the random bits of an array.
_FEW = 64


def _hashed(*words: Any) -> Sequence[Any]:
    """Threefry, its rounds written out. Of keys, what it is computed from lies in memory, behind barriers: no constant is
    part of the code, so that all keys are one kernel's."""
    of_keys = math.prod(np.broadcast_shapes(*map(np.shape, words))) <= _FEW
    words = jax.lax.optimization_barrier(words) if of_keys else words
    hashed = _threefry._threefry2x32_lowering(*words, use_rolled_loops=False)
    return jax.lax.optimization_barrier(hashed) if of_keys else hashed


def _bits_in_memory(ctx: Any, keys: Any, **about: Any) -> Any:
    """Random bits, behind a barrier: what is made of them is compiled as if another program had drawn them."""
    (bits,) = _prng.random_bits_lowering(ctx, keys, **about)
    return _hlo.OptimizationBarrierOp([bits]).results


_RULES: Any = (
    (_threefry.threefry2x32_p, _mlir.lower_fun(_hashed, multiple_results=True)),
    (_prng.random_bits_p, _bits_in_memory),
)
_DRAWN_APART = _mlir.LoweringParameters(override_lowering_rules=_RULES)


def compiled_to_draw(jitted: Any, args: Sequence[Any]) -> jax.stages.Compiled:
    """A program that draws many random arrays, compiled for CPUs in a third of the time, to the same bits.

    For CPUs JAX writes every draw as a loop of its own, whose code XLA shares with no other loop, and LLVM unrolls each of
    them. Written out, the bits of all arrays of one shape are one kernel.
    """
    return jitted.trace(*args).lower(_private_parameters=_DRAWN_APART).compile()


def retyped(value: Any, struct: jax.ShapeDtypeStruct) -> Any:
    """A value as another was typed: the words of a PRNG key as the key, weakly typed or not. None is made of zeros,
    for what has no elements."""
    if value is None:
        value = jax.numpy.zeros(raw_struct(struct).shape, raw_struct(struct).dtype)
    if jax.numpy.issubdtype(struct.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(value, impl=struct.dtype._impl)
    return _lax._convert_element_type(value, struct.dtype, weak_type=bool(struct.weak_type))


@contextmanager
def compiled_programs_in(folder: str) -> Iterator[None]:
    """While entered, this thread's compiles look in a folder for what they would make, and keep there what they made.

    JAX's own setting, `jax_compilation_cache_dir`, stays as it is outside. JAX opens one folder for a process at its
    first compile, and goes on with it: so it is made to forget it, before and after.
    """
    with _config.compilation_cache_dir(folder):
        _compilation_cache.reset_cache()
        try:
            yield
        finally:
            _compilation_cache.reset_cache()


def compiling(lowered: jax.stages.Lowered) -> Callable[[], jax.stages.Compiled]:
    """Starts to compile in a thread, under this thread's settings of JAX's cache of compiled programs.

    Returns:
        What waits for the program. An interrupt ends the wait, not the compiler.
    """
    folder, is_kept = _config.compilation_cache_dir.value, _config.enable_compilation_cache.value

    def compiled() -> jax.stages.Compiled:
        with _config.compilation_cache_dir(folder), _config.enable_compilation_cache(is_kept):
            return lowered.compile()

    threads = ThreadPoolExecutor(1)
    found = threads.submit(compiled)
    threads.shutdown(wait=False)
    return found.result


@contextmanager
def compiled_anew() -> Iterator[None]:
    """While entered, this thread's compiles take nothing from JAX's cache of compiled programs, and keep nothing there.

    What was taken from it, or was put into it, runs, but on CPUs is no longer serialized whole: loaded again, it lacks its
    functions, and says so only when it runs.
    """
    with _config.enable_compilation_cache(False):
        _compilation_cache.reset_cache()
        try:
            yield
        finally:
            _compilation_cache.reset_cache()


def is_compiled_program(data: bytes) -> bool:
    """Whether a file of JAX's compilation cache is whole, as far as its packing tells."""
    try:
        return len(_compilation_cache.decompress_executable(data)) > 0
    except Exception:  # of zlib or zstandard, whichever JAX has found
        return False


def compiler_key(devices: Sequence[Any]) -> str:
    """What JAX's compilation cache knows programs for these devices by, besides the program: versions, the compiler's
    flags and options, which devices, and of a CPU its instructions. It is the key of a program that does nothing."""
    backend = devices[0].client
    nothing: Any = jax.jit(lambda: ()).lower().compiler_ir()
    assignment = np.array([[device.id for device in devices]])
    options = _compiler.get_compile_options(1, len(devices), device_assignment=assignment, backend=backend)
    return _cache_key.get(nothing, np.array(devices), options, backend)


def tracing_key() -> str:
    """JAX's settings, those of this thread first: what a trace and its lowering depend on besides the function."""
    context = [each for each in _config.trace_context() if not isinstance(each, _core.AxisEnv)]
    return repr((context, sorted(jax.config.values.items())))


def coordination_client() -> tuple[Any, int, int]:
    """The client of the service that `jax.distributed.initialize` started (None before that), this process's index, and
    the number of processes. No device is touched."""
    state = _distributed.global_state
    return state.client, state.process_id, state.num_processes


def coordinator_address() -> str:
    """Where the coordination service answers, as given to `jax.distributed.initialize`; "" before that."""
    return _distributed.global_state.coordinator_address or ""


def process_count_said() -> int:
    """How many processes `jax.distributed.initialize` was told of; 1 before that. No device is touched."""
    return _distributed.global_state.num_processes or 1


def backends_are_initialized() -> bool:
    """Whether JAX has looked at its devices."""
    return _xla_bridge.backends_are_initialized()


def cross_host_address() -> str:
    """Where this process listens for arrays of others; "" where it does not."""
    return _xla_bridge.CROSS_HOST_TRANSFER_SOCKET_ADDRESS.value


def copying_to(sharding: jax.sharding.NamedSharding) -> Callable[[Any], Any]:
    """What `jax.device_put(array, sharding)` comes to in the end where the array lies so on other devices, as many: copies
    from device to device, in a tenth of the time that it takes to find that out."""
    devices = sharding._internal_device_list
    copy, as_is = _xla_client.batched_copy_array_to_devices_with_sharding, _xla_client.ArrayCopySemantics.REUSE_INPUT
    return lambda array: copy([array], [devices], [sharding], [as_is])[0]


def leave_without_waiting() -> None:
    """Let this process end at once: JAX would first wait for the others to end too, which hang or are gone."""
    state = _distributed.global_state
    held = (state.client, state.service, state.preemption_sync_manager)
    state.client = state.service = state.preemption_sync_manager = None
    # Others may still read from the service, and its own client ends the process where it is gone: both stay to the end.
    # So do the devices' clients, which would wait until every transfer between processes has come to its end.
    clients = {device.client for device in jax.local_devices()} if backends_are_initialized() else set()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object((held, clients)))


@dataclass(frozen=True, slots=True)
class JitCall:
    """What a jitted function was told of its arguments and results, leaf by leaf.

    Args:
        in_shardings, out_shardings: None where nothing was said.
        donated: positions of arguments' leaves.
    """

    in_shardings: tuple[Any, ...]
    out_shardings: tuple[Any, ...]
    out_shapes: tuple[tuple[int, ...], ...]
    donated: tuple[int, ...]


def jit_call(jitted: Any, args: Sequence[Any]) -> tuple[JitCall, Any]:
    """What `jax.jit` was told, and the jaxpr of the function."""
    traced = jitted.trace(*args)
    params = traced._params
    consts = len(params["in_shardings"]) - len(jax.tree.leaves(tuple(args)))  # closed-over values come first

    def said(shardings: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(one if isinstance(one, jax.sharding.Sharding) else None for one in shardings)

    call = JitCall(
        in_shardings=said(params["in_shardings"])[consts:],
        out_shardings=said(params["out_shardings"]),
        out_shapes=tuple(tuple(leaf.shape) for leaf in jax.tree.leaves(traced.out_info)),
        donated=tuple(n for n, is_donated in enumerate(params["donated_invars"][consts:]) if is_donated),
    )
    return call, open_jaxpr(traced.jaxpr)[0]


def meshes_named(jaxpr: Any) -> list[tuple[str, Any]]:
    """Every mesh that a program itself names, in a `with_sharding_constraint` or a `shard_map`, and where."""
    found: list[tuple[str, Any]] = []
    for equation in jaxpr.eqns:
        sharding = equation.params.get("sharding") if equation.primitive.name == "sharding_constraint" else None
        if isinstance(sharding, jax.sharding.NamedSharding):
            found.append((f"`with_sharding_constraint` at {user_source(equation)}", sharding.mesh))
        elif equation.primitive.name == "shard_map":
            found.append((f"`shard_map` at {user_source(equation)}", equation.params["mesh"]))
            continue  # inside, the mesh's axes are of another type
        for inner in programs_in(equation):
            found += meshes_named(inner)
    return found


def placed_struct(leaf: Any) -> jax.ShapeDtypeStruct:
    """`shape_struct`, with the sharding where it is one over a mesh."""
    struct, sharding = shape_struct(leaf), getattr(leaf, "sharding", None)
    if not isinstance(sharding, jax.sharding.NamedSharding) or not sharding.mesh.axis_names:
        return struct
    return jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=sharding, weak_type=struct.weak_type)
