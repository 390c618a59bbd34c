"""Lowered and compiled programs, by JAX's internals: compiled for devices that are absent, in a thread, from a folder.

In: lowered programs, jitted functions. Out: compiled ones; keys of what they depend on.
"""

from __future__ import annotations

import io
import math
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
