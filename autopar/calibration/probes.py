"""Define the microbenchmarks of a calibration: small programs over shapes, dtypes, sizes and mesh axes.

In: devices, `Sizes`, a rough profile. Out: `Point`s, each with a program to build and the counts (FLOPs, bytes, hops)
of one repetition. Every program runs on all devices at once, each with its own data, as a sharded step does, because
virtual CPU devices share cores and GPUs share a host.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from autopar.hardware.profile import HardwareProfile

#: The profile's name of a dtype -> the timed dtype.
DTYPES = {name: name for name in ("bfloat16", "float16", "float32", "float64", "int8")} | {"float8": "float8_e4m3fn"}

_MOST_UNROLLED = 32
_MOST_ITERATIONS = 1024
#: Random numbers drawn for one input: a prime, so that rows of a matrix differ.
_DRAWN = 1_000_003


@dataclass(frozen=True, slots=True)
class Sizes:
    """Benchmark sizes per device. Their order mixes large and small, so that a short time budget does not drop one end.

    Args:
        products: (m, k, n) of matmuls.
        elements: sizes of float32 arrays for memory bandwidth; the arrays of all devices together exceed every cache.
        cached_elements: sizes of float32 arrays that fit in a cache.
        launches: numbers of small kernels in one program.
        payload_bytes: payloads of collectives.
        copy_bytes: sizes of copies between host and device.
        convolutions: (batch, side, channels, kernel) on square NHWC images with equal in and out channels.
        attention: (batch, tokens, heads, head dim).
        dtypes: dtypes of matmuls, by the profile's names.
        last_dtypes: dtypes whose matmuls come after those of all other dtypes, so that a short time budget drops them.
    """

    products: tuple[tuple[int, int, int], ...]
    elements: tuple[int, ...]
    cached_elements: tuple[int, ...]
    launches: tuple[int, ...]
    payload_bytes: tuple[int, ...]
    copy_bytes: tuple[int, ...]
    convolutions: tuple[tuple[int, int, int, int], ...]
    attention: tuple[tuple[int, int, int, int], ...]
    dtypes: tuple[str, ...] = tuple(DTYPES)
    last_dtypes: tuple[str, ...] = ()


CPU_SIZES = Sizes(
    products=(
        *((n, n, n) for n in (128, 256, 384, 512)),
        *((16, 512, 1024), (64, 512, 512), (512, 64, 512), (1024, 256, 256)),
        *((192, 192, 192), (32, 768, 768), (256, 1024, 128), (256, 128, 512)),
    ),
    elements=tuple(1 << e for e in (18, 21, 20, 19)),
    cached_elements=tuple(1 << e for e in (12, 14)),
    launches=(8, 16, 32, 64, 128, 256),
    payload_bytes=tuple(1 << e for e in (12, 22, 18, 20, 15)),
    copy_bytes=tuple(1 << e for e in (12, 16, 18, 20, 22, 24)),
    convolutions=((4, 28, 64, 3), (4, 14, 128, 3), (4, 28, 64, 1), (1, 56, 32, 3), (4, 14, 128, 1), (8, 7, 256, 3)),
    attention=((1, 256, 4, 64), (1, 512, 4, 64), (4, 128, 4, 64), (1, 1024, 1, 64), (2, 256, 8, 32)),
)
GPU_SIZES = Sizes(
    products=(
        *((n, n, n) for n in (1024, 4096, 2048, 8192, 512)),
        *((64, 4096, 4096), (512, 4096, 4096), (4096, 512, 4096), (8192, 1024, 8192), (2048, 8192, 2048)),
    ),
    elements=tuple(1 << e for e in (24, 27, 26, 25)),
    cached_elements=tuple(1 << e for e in (14, 18, 20)),
    launches=(8, 16, 32, 64, 128, 256),
    payload_bytes=tuple(1 << e for e in (14, 28, 22, 25, 18, 20, 27)),
    copy_bytes=tuple(1 << e for e in (12, 16, 20, 22, 24, 26, 28)),
    convolutions=(
        *((64, 56, 64, 3), (64, 28, 256, 3), (64, 56, 256, 1), (64, 14, 512, 3), (256, 7, 512, 3), (16, 64, 128, 3)),
        *((64, 28, 512, 1), (256, 56, 64, 1), (16, 128, 128, 3), (64, 14, 1024, 1), (64, 112, 64, 3), (8, 32, 384, 3)),
    ),
    attention=(
        *((8, 1024, 16, 64), (4, 2048, 16, 128), (1, 8192, 16, 128), (64, 512, 12, 64), (1, 16384, 8, 128)),
        *((16, 1024, 12, 64), (2, 4096, 32, 128), (128, 197, 12, 64)),
    ),
    dtypes=("bfloat16", "float32", "float8"),
    last_dtypes=("float16", "int8", "float64"),
)


@dataclass(frozen=True, slots=True)
class Point:
    """One benchmark.

    Args:
        group, name, counts: as in `Sample`.
        guess_s: rough seconds of one repetition.
        most: the most repetitions; unless the program has a loop, each one lengthens it.
        make: repetitions -> a call that blocks until its results are ready.
        with_dispatch: whether the timing includes the program's dispatch.
    """

    group: str
    name: str
    counts: dict[str, float]
    guess_s: float
    most: int
    make: Callable[[int], Callable[[], object]]
    with_dispatch: bool = False


# -- programs ------------------------------------------------------------------------------------


def program(devices: Sequence[Any], local: Callable[..., Any], inputs: Sequence[np.ndarray]) -> Callable[[], object]:
    """Compile `local` to run on every device with the same inputs; the returned call blocks."""
    return _program(_mesh(devices, 1), local, inputs)


def _program(mesh: Mesh, local: Callable[..., Any], inputs: Sequence[np.ndarray]) -> Callable[[], object]:
    """Compile `local` to run on every device of a mesh with the same inputs."""
    split = PartitionSpec(mesh.axis_names)
    sharding = NamedSharding(mesh, split)
    n = mesh.devices.size
    # Each device creates its own shard, so that no host array holds all of them.
    arrays = [jax.make_array_from_callback((n, *x.shape), sharding, lambda _, x=x: x[None]) for x in inputs]

    def run(*blocks: Any) -> Any:
        return local(*(block[0] for block in blocks))[None]

    mapped = jax.shard_map(run, mesh=mesh, in_specs=split, out_specs=split, check_vma=False)
    compiled = jax.jit(mapped).lower(*arrays).compile()
    return lambda: jax.block_until_ready(compiled(*arrays))


def noise(shape: tuple[int, ...], dtype: Any, scale: float = 1.0) -> np.ndarray:
    """Normally distributed numbers with this standard deviation; of int8, all numbers alike.

    Zeros, ones and identities would not do: a GPU multiplies them faster than real data, because they take less power.
    A block of numbers is repeated, since drawing all of them would take longer than the benchmark.
    """
    generator = np.random.default_rng(0)
    if jnp.dtype(dtype) == jnp.int8:
        return np.resize(generator.integers(-128, 128, _DRAWN, np.int8), shape)
    return np.resize((scale * generator.standard_normal(_DRAWN, np.float32)).astype(dtype), shape)


def _mesh(devices: Sequence[Any], inner: int) -> Mesh:
    """The devices as a mesh `outer` x `inner`."""
    grid = np.array(devices, dtype=object).reshape(-1, inner)
    return Mesh(grid, ("outer", "inner"), axis_types=(AxisType.Auto,) * 2)


def empty_program(devices: Sequence[Any]) -> Callable[[], object]:
    return program(devices, lambda x: x + 1, [np.zeros(8, np.float32)])


# -- one iterator of points for each sweep -------------------------------------------------------


def launch_points(devices: Sequence[Any], sizes: Sizes) -> Iterator[Point]:
    """Chains of 16 x 16 matmuls, which take no compute time and which XLA does not fuse."""
    for count in sizes.launches:

        def make(repetitions: int, count: int = count) -> Callable[[], object]:
            return program(devices, partial(_products, count), [np.eye(16, dtype=np.float32)] * 3)

        counts = {"program": 1.0, "kernels": float(count)}
        yield Point("kernel launch", f"{count} kernels", counts, 1.0, 1, make, with_dispatch=True)


def _products(count: int, x: Any, right: Any, back: Any) -> Any:
    """A chain x @ right @ back @ right …; every matmul has the same FLOPs and bytes."""
    for number in range(count):
        weights = back if number % 2 else right
        wide = jnp.int32 if x.dtype == jnp.int8 else None
        x = lax.dot(x, weights, preferred_element_type=wide).astype(x.dtype)
    return x


def matmul_points(devices: Sequence[Any], sizes: Sizes, base: HardwareProfile) -> Iterator[Point]:
    """Matmuls, all dtypes of a shape before the next shape, so that a short time budget drops shapes and not dtypes."""
    for names in (sizes.dtypes, sizes.last_dtypes):
        for (m, k, n), name in itertools.product(sizes.products, names):
            dtype = jnp.dtype(DTYPES[name])
            flops, traffic = 2.0 * m * k * n, float(dtype.itemsize * (m * k + k * n + m * n))
            guess = flops / base.matrix_rate(name) + traffic / base.hbm_bytes_per_s + base.kernel_launch_s

            def make(repetitions: int, m: int = m, k: int = k, n: int = n, dtype: Any = dtype) -> Callable[[], object]:
                # Scaled so that values neither grow nor shrink along the chain.
                inputs = [noise((m, k), dtype), noise((k, n), dtype, k**-0.5), noise((n, k), dtype, n**-0.5)]
                with jax.enable_x64(dtype == jnp.float64):
                    return program(devices, partial(_products, repetitions), inputs)

            counts = {"launch": 1.0, "flops": flops, "bytes": traffic}
            yield Point(f"matmul {name}", f"{m}x{k}x{n}", counts, guess, _MOST_UNROLLED, make)


def wide_matmul_points(devices: Sequence[Any], sizes: Sizes, base: HardwareProfile) -> Iterator[Point]:
    """bfloat16 matmuls with float32 results, as for many weight gradients."""
    for m, k, n in sizes.products if "bfloat16" in sizes.dtypes else ():
        flops, traffic = 2.0 * m * k * n, 2.0 * (m * k + k * n) + 4.0 * m * n
        guess = flops / base.matrix_rate("bfloat16") + traffic / base.hbm_bytes_per_s + base.kernel_launch_s

        def make(repetitions: int, m: int = m, k: int = k, n: int = n) -> Callable[[], object]:
            inputs = [noise((m, k), jnp.bfloat16), noise((k, n), jnp.bfloat16, k**-0.5)]
            return program(devices, partial(_wide_products, repetitions), inputs)

        counts = {"launch": 1.0, "flops": flops, "bytes": traffic}
        yield Point("matmul bfloat16 to float32", f"{m}x{k}x{n}", counts, guess, _MOST_UNROLLED, make)


def _wide_products(count: int, x: Any, weights: Any) -> Any:
    """A chain of matmuls: the last row of each result is cast to bfloat16 and written into the next left operand in
    place.

    Without the optimization barrier XLA would compute only that row, with a bfloat16 result.
    """
    for _ in range(count):
        result = lax.optimization_barrier(lax.dot(x, weights, preferred_element_type=jnp.float32))
        x = lax.dynamic_update_slice(x, result[-1:, : x.shape[1]].astype(x.dtype), (0, 0))
    return x


#: name -> (operation (x, y) -> next y, FLOPs per element, floats moved per element, whether y is small).
#: FLOPs count as in the sharding rules: 10 for a transcendental function.
_STREAMS: dict[str, tuple[Callable[[Any, Any], Any], float, float, bool]] = {
    "multiply-add": (lambda x, y: 0.5 * y + x, 2.0, 3.0, False),
    "tanh": (lambda x, y: _tanhs(1, x, y), 12.0, 3.0, False),
    "8 tanhs": (lambda x, y: _tanhs(8, x, y), 96.0, 3.0, False),
    "sum": (lambda x, y: jnp.sum(jnp.maximum(x, y), keepdims=True) * 1e-9, 2.0, 1.0, True),
}


def _tanhs(count: int, x: Any, y: Any) -> Any:
    """A sum of tanhs, for the vector FLOP/s.

    Compute-bound elementwise operations of a model are transcendental functions; multiply-adds run several times faster
    per counted FLOP. A nested chain would not do: XLA's CPU compiler computes its inner functions several times.
    """
    for number in range(count):
        x = x + jnp.tanh(y * (0.25 + number))
    return x


def memory_points(devices: Sequence[Any], sizes: Sizes, base: HardwareProfile) -> Iterator[Point]:
    """Elementwise operations and sums, repeated in a loop: XLA would fuse a chain into one kernel."""
    for elements in (*sizes.elements, *sizes.cached_elements):
        group = "memory" if elements in sizes.elements else "cache"
        for name, (operation, flops, floats, small) in _STREAMS.items():
            work, traffic = flops * elements, 4 * floats * elements
            guess = work / base.vector_flops_per_s + traffic / base.hbm_bytes_per_s + base.kernel_launch_s

            def make(
                repetitions: int, operation: Any = operation, elements: int = elements, small: bool = small
            ) -> Callable[[], object]:
                inputs = [noise((elements,), np.float32), noise((1 if small else elements,), np.float32)]
                return program(devices, partial(_loop, operation, repetitions), inputs)

            counts = {"launch": 1.0, "flops": work, "bytes": traffic}
            yield Point(group, f"{name} of {elements}", counts, guess, _MOST_ITERATIONS, make)


_ROW = 1024
#: name -> (operation on rows of `_ROW` floats, FLOPs per element, floats moved per element).
_REDUCTIONS: dict[str, tuple[Callable[[Any], Any], float, float]] = {
    "softmax": (lambda y: jax.nn.softmax(y), 14.0, 2.0),
    "normalization": (lambda y: jax.nn.standardize(y), 7.0, 2.0),
    "sum of columns": (lambda y: y + jnp.sum(y, 0) * 1e-9, 3.0, 3.0),
}


def reduction_points(devices: Sequence[Any], sizes: Sizes, base: HardwareProfile) -> Iterator[Point]:
    """Row and column reductions with the elementwise operations that XLA fuses into them."""
    for elements in sizes.elements:
        rows = max(1, elements // _ROW)
        for name, (operation, flops, floats) in _REDUCTIONS.items():
            traffic = 4 * floats * rows * _ROW
            guess = traffic / base.hbm_bytes_per_s + base.kernel_launch_s

            def make(repetitions: int, operation: Any = operation, rows: int = rows) -> Callable[[], object]:
                def looped(y: Any) -> Any:
                    return _loop(lambda _, carry: operation(carry), repetitions, None, y)

                return program(devices, looped, [noise((rows, _ROW), np.float32)])

            counts = {"launch": 1.0, "flops": flops * rows * _ROW, "bytes": traffic}
            yield Point("reduction", f"{name} of {rows}x{_ROW}", counts, guess, _MOST_ITERATIONS, make)


def _loop(operation: Callable[[Any, Any], Any], iterations: int, x: Any, y: Any) -> Any:
    return lax.fori_loop(0, iterations, lambda _, carry: operation(x, carry), y)


#: kind -> the collective of x over axis `inner` of size n.
_COLLECTIVES: dict[str, Callable[[Any, int], Any]] = {
    "all-reduce": lambda x, n: lax.psum(x, "inner"),
    "all-gather": lambda x, n: lax.all_gather(x, "inner", tiled=True),
    "reduce-scatter": lambda x, n: lax.psum_scatter(x, "inner", tiled=True),
    "all-to-all": lambda x, n: lax.all_to_all(x, "inner", 0, 0, tiled=True),
    "collective-permute": lambda x, n: lax.ppermute(x, "inner", [(i, (i + 1) % n) for i in range(n)]),
}


def collective_points(devices: Sequence[Any], sizes: Sizes, base: HardwareProfile) -> Iterator[Point]:
    """Every collective for every payload and axis size, in all groups of the axis at once, as in a sharded step."""
    for wanted in sizes.payload_bytes:
        for n in _axis_sizes(len(devices)):
            for kind in _COLLECTIVES:
                elements = max(1, wanted // 4 // n) * n  # some kinds need a multiple of n
                payload = 4.0 * elements
                hops, moved = ring(kind, n, payload)
                guess = moved / base.host_link.bytes_per_s + hops * base.host_link.latency_s

                def make(
                    repetitions: int, n: int = n, kind: str = kind, elements: int = elements
                ) -> Callable[[], object]:
                    inputs = [np.zeros(elements // n if kind == "all-gather" else elements, np.float32)]
                    return _program(_mesh(devices, n), partial(_communicate, kind, n, repetitions), inputs)

                counts = {"launch": 1.0, "hops": hops, "bytes": moved}
                guess += base.collective_launch_s
                yield Point(kind, f"{payload:.0f} bytes over {n}", counts, guess, _MOST_UNROLLED, make)


def ring(kind: str, n: int, payload: float) -> tuple[float, float]:
    """(hops, bytes sent by one device) of a ring algorithm, as in `cost.collectives`."""
    if kind == "collective-permute":
        return 1.0, payload
    rounds = 2 if kind == "all-reduce" else 1
    return rounds * (n - 1.0), rounds * (n - 1) / n * payload


def _communicate(kind: str, n: int, repetitions: int, x: Any) -> Any:
    """Collectives in a chain: each depends on the previous one by one element, which is written in place.

    With the whole result as an operand, XLA would simplify an all-reduce of a replicated value.
    """
    for _ in range(repetitions):
        result = _COLLECTIVES[kind](x, n)
        x = lax.dynamic_update_slice(x, result[-1:], (0,))
    return x


def _axis_sizes(num_devices: int) -> list[int]:
    """At most three possible axis sizes: the smallest, one in the middle, all devices."""
    sizes = [n for n in range(2, num_devices + 1) if num_devices % n == 0]
    return sizes if len(sizes) < 3 else [sizes[0], sizes[len(sizes) // 2], sizes[-1]]


def copy_points(devices: Sequence[Any], sizes: Sizes) -> Iterator[Point]:
    """Copies between host memory, pageable and pinned, and one device."""
    for size in sizes.copy_bytes:
        for group, prepare in _COPIES.items():

            def make(repetitions: int, size: int = size, prepare: Any = prepare) -> Callable[[], object]:
                copy = prepare(_unaligned(size // 4), devices[0])
                return lambda: [copy() for _ in range(repetitions)]

            counts = {"launch": 1.0, "bytes": float(size)}
            yield Point(group, f"{size} bytes", counts, 1e-4 + size / 1e9, 64, make, with_dispatch=True)


def _to_device(array: np.ndarray, device: Any) -> Callable[[], object]:
    return lambda: jax.block_until_ready(jax.device_put(array, device))


def _to_host(array: np.ndarray, device: Any) -> Callable[[], object]:
    """Copies to the host. JAX caches an array's host copy, so each run copies a new array in the same buffer."""
    copy_in_place = jax.jit(lambda x: x, donate_argnums=0)
    current = [jax.device_put(array, device)]

    def copy() -> object:
        current[0] = jax.block_until_ready(copy_in_place(current[0]))
        return np.asarray(current[0])

    return copy


def _to_pinned(array: np.ndarray, device: Any) -> Callable[[], object]:
    there = jax.block_until_ready(jax.device_put(array, device))
    return lambda: jax.block_until_ready(jax.device_put(there, SingleDeviceSharding(device, memory_kind="pinned_host")))


def _from_pinned(array: np.ndarray, device: Any) -> Callable[[], object]:
    pinned = jax.block_until_ready(jax.device_put(array, SingleDeviceSharding(device, memory_kind="pinned_host")))
    return lambda: jax.block_until_ready(jax.device_put(pinned, SingleDeviceSharding(device)))


#: group -> a function (host array, device) -> a blocking copy.
_COPIES: dict[str, Callable[[np.ndarray, Any], Callable[[], object]]] = {
    "host-to-device": _to_device,
    "device-to-host": _to_host,
    "device-to-pinned-host": _to_pinned,
    "pinned-host-to-device": _from_pinned,
}


def _unaligned(elements: int) -> np.ndarray:
    """An array off every 64-byte boundary: a CPU device aliases an aligned array, whatever `may_alias` says."""
    room = np.ones(elements + 32, np.float32)
    return room[(-room.ctypes.data % 64) // 4 + 1 :][:elements]
