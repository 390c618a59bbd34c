"""Compile programs through JAX's internals: for absent devices, in a thread, with a cache folder.

In: lowered programs, jitted functions. Out: compiled programs; keys of the settings that they depend on.
"""

from __future__ import annotations

import io
import math
import re
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
from jax._src.interpreters import mlir as _mlir
from jax._src.lib.mlir.dialects import hlo as _hlo
from jax._src.random import prng as _prng
from jax._src.random import threefry2x32 as _threefry
from jaxlib import xla_client as _xla_client
from jaxlib.mlir import ir as _ir

from autopar.jax_interop.compat import open_jaxpr


def module_bytes(lowered: jax.stages.Lowered) -> bytes:
    """A lowered program as MLIR bytecode with module names and source lines.

    Another process with the same JAX version compiles it with `compile_module`.
    """
    out = io.BytesIO()
    module: Any = lowered.compiler_ir("stablehlo")
    module.operation.write_bytecode(out)
    return out.getvalue()


def with_matmuls_apart(module: bytes, name: str) -> bytes:
    """The program with a barrier before the operands of the matmuls of a name, so that nothing before is fused into them.

    Args:
        module: as `module_bytes` returns it.
        name: in JAX's name stack, as XLA's `op_name` has it; names that differ in numbers only are equal.
    """
    wanted, found = _without_numbers(name), list[Any]()

    def visit(operation: Any) -> Any:
        one = operation.operation
        if one.name == "stablehlo.dot_general":
            location = re.match(r'loc\("((?:[^"\\]|\\.)*)"', str(one.location))
            if location and _without_numbers(location[1]) == wanted:
                found.append(one)
        return _ir.WalkResult.ADVANCE

    with _mlir.make_ir_context():
        parsed = _ir.Module.parse(module)
        parsed.operation.walk(visit)
        for one in found:
            with _ir.InsertionPoint(one), one.location:
                apart = _hlo.OptimizationBarrierOp(list(one.operands))
            for number, result in enumerate(apart.results):
                one.operands[number] = result
        out = io.BytesIO()
        parsed.operation.write_bytecode(out)
    return out.getvalue()


def _without_numbers(name: str) -> str:
    return re.sub(r"\d+", "0", name)


def kept_inputs(lowered: jax.stages.Lowered) -> tuple[int, ...]:
    """Positions of the inputs (leaves of all arguments, in order) that a lowered program uses."""
    inner: Any = lowered._lowering
    return tuple(sorted(inner.compile_args["kept_var_idx"]))


def lowered_for(lowered: jax.stages.Lowered) -> tuple[tuple[str, ...], int]:
    """The platforms that a program is lowered for, and the number of devices that run it."""
    inner: Any = lowered._lowering
    return tuple(inner._platforms), int(inner.compile_args["num_devices"])


def compiled_platforms(compiled: jax.stages.Compiled) -> set[str]:
    """The platforms of the devices that a compiled program runs on; empty where its executable does not say."""
    executable: Any = compiled.runtime_executable()
    devices = getattr(executable, "local_devices", list)
    return {device.platform for device in devices()}


def compile_module(module: bytes, devices: Sequence[Any], more: Mapping[str, Any] | None = None) -> Any:
    """Compile for real or absent devices with the options of `jax.jit`.

    Args:
        more: further XLA compiler options.

    Returns:
        XLA's executable, with `.hlo_modules()` and `.get_compiled_memory_stats()`.
    """
    client = devices[0].client
    assignment = np.array(devices, dtype=object).reshape(1, -1)
    own: Any = dict(more) if more else None
    options = _compiler.get_compile_options(1, len(devices), assignment, own, backend=client)
    with _mlir.make_ir_context():
        parsed = _ir.Module.parse(module)
        return _compiler.backend_compile_and_load(client, parsed, _xla_client.DeviceList(tuple(devices)), options, [])


#: Largest number of elements of a few PRNG keys; random bits of an array have more.
_FEW = 64


def _hashed(*words: Any) -> Sequence[Any]:
    """Threefry with unrolled rounds.

    For keys, barriers keep the operands in memory, so that no constant is part of the code and one kernel serves all
    keys.
    """
    of_keys = math.prod(np.broadcast_shapes(*map(np.shape, words))) <= _FEW
    words = jax.lax.optimization_barrier(words) if of_keys else words
    hashed = _threefry._threefry2x32_lowering(*words, use_rolled_loops=False)
    return jax.lax.optimization_barrier(hashed) if of_keys else hashed


def _bits_in_memory(ctx: Any, keys: Any, **about: Any) -> Any:
    """Random bits behind a barrier, so that their users compile to the same code for every array."""
    (bits,) = _prng.random_bits_lowering(ctx, keys, **about)
    return _hlo.OptimizationBarrierOp([bits]).results


_RULES: Any = (
    (_threefry.threefry2x32_p, _mlir.lower_fun(_hashed, multiple_results=True)),
    (_prng.random_bits_p, _bits_in_memory),
)


_DRAWN_APART = _mlir.LoweringParameters(override_lowering_rules=_RULES)


def compiled_to_draw(jitted: Any, args: Sequence[Any]) -> jax.stages.Compiled:
    """Compile a program that draws many random arrays for CPUs in a third of the time, with the same random bits.

    On CPUs JAX lowers every draw to its own loop. XLA shares no code between loops, and LLVM unrolls each. With unrolled
    rounds, one kernel draws the bits of all arrays of one shape.
    """
    return jitted.trace(*args).lower(_private_parameters=_DRAWN_APART).compile()


@contextmanager
def compiled_programs_in(folder: str) -> Iterator[None]:
    """Use a folder as JAX's compilation cache for this thread, inside the `with` block.

    JAX's setting `jax_compilation_cache_dir` is unchanged outside. JAX opens one folder per process at its first compile
    and keeps it, so the cache is reset before and after.
    """
    with _config.compilation_cache_dir(folder):
        _compilation_cache.reset_cache()
        try:
            yield
        finally:
            _compilation_cache.reset_cache()


def compiling(lowered: jax.stages.Lowered) -> Callable[[], jax.stages.Compiled]:
    """Start to compile in a thread, with this thread's settings of JAX's compilation cache.

    Returns:
        A function that waits for the program. An interrupt ends the wait, not the compilation.
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
def without_compilation_cache() -> Iterator[None]:
    """Compile without JAX's compilation cache in this thread, inside the `with` block.

    On CPUs a program that was read from or written to the cache serializes incompletely: loaded again, it lacks
    functions and fails only when it runs.
    """
    with _config.enable_compilation_cache(False):
        _compilation_cache.reset_cache()
        try:
            yield
        finally:
            _compilation_cache.reset_cache()


def is_compiled_program(data: bytes) -> bool:
    """Whether a file of JAX's compilation cache can be decompressed, and so is not truncated."""
    try:
        return len(_compilation_cache.decompress_executable(data)) > 0
    except Exception:  # from zlib or zstandard, depending on what JAX found
        return False


def compiler_key(devices: Sequence[Any]) -> str:
    """The part of a JAX compilation cache key that does not depend on the program.

    It covers versions, compiler flags and options, the devices, and a CPU's instruction set. It is computed as the key
    of an empty program.
    """
    backend = devices[0].client
    nothing: Any = jax.jit(lambda: ()).lower().compiler_ir()
    assignment = np.array([[device.id for device in devices]])
    options = _compiler.get_compile_options(1, len(devices), device_assignment=assignment, backend=backend)
    return _cache_key.get(nothing, np.array(devices), options, backend)


def tracing_key() -> str:
    """JAX's settings, of this thread and of the process, that tracing and lowering depend on."""
    context = [each for each in _config.trace_context() if not isinstance(each, _core.AxisEnv)]
    return repr((context, sorted(jax.config.values.items())))


@dataclass(frozen=True, slots=True)
class JitCall:
    """The options of a `jax.jit` function for its arguments and results, per leaf.

    Args:
        in_shardings, out_shardings: given shardings; None for unspecified ones.
        out_shapes: shapes of the results.
        donated: positions of donated leaves of the arguments.
    """

    in_shardings: tuple[Any, ...]
    out_shardings: tuple[Any, ...]
    out_shapes: tuple[tuple[int, ...], ...]
    donated: tuple[int, ...]


def jit_call(jitted: Any, args: Sequence[Any]) -> tuple[JitCall, Any]:
    """The options of a `jax.jit` function, and its jaxpr."""
    traced = jitted.trace(*args)
    params = traced._params
    consts = len(params["in_shardings"]) - len(jax.tree.leaves(tuple(args)))  # closed-over values come first

    def given(shardings: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(one if isinstance(one, jax.sharding.Sharding) else None for one in shardings)

    call = JitCall(
        in_shardings=given(params["in_shardings"])[consts:],
        out_shardings=given(params["out_shardings"]),
        out_shapes=tuple(tuple(leaf.shape) for leaf in jax.tree.leaves(traced.out_info)),
        donated=tuple(n for n, is_donated in enumerate(params["donated_invars"][consts:]) if is_donated),
    )
    return call, open_jaxpr(traced.jaxpr)[0]
