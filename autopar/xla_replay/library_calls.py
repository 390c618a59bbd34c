"""Read the sizes of matmuls, convolutions, attention and other library kernels from HLO.

In: an instruction. Out: `Gemm`, `Convolution`, `Attention` or `LibraryKernel`; None where the HLO does not say what the
kernel computes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from autopar.xla_compiler.hlo_text import Computation, Instruction, Shape, itemsize

#: Which of the three convolutions of a train step.
Direction = Literal["forward", "input_gradient", "filter_gradient"]


@dataclass(frozen=True, slots=True)
class Gemm:
    """`batch` products of an m x k by a k x n matrix.

    Args:
        lhs_dtype, rhs_dtype, out_dtype: HLO's names of what is in memory.
        unit_dtype: dtype that the tensor cores multiply; empty for that of the operands.
        aligned_bytes: for the left operand, the right one and the result, the largest power of two, up to 16, that
            divides the bytes of a row in memory.
    """

    batch: int
    m: int
    n: int
    k: int
    lhs_dtype: str
    rhs_dtype: str
    out_dtype: str
    unit_dtype: str = ""
    aligned_bytes: tuple[int, int, int] = (16, 16, 16)

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * self.m * self.n * self.k


@dataclass(frozen=True, slots=True)
class Convolution:
    """A convolution, or one of its gradients.

    Args:
        direction: which of the three convolutions of a train step.
        positions: batch x spatial positions of the forward convolution's output.
        input_features, output_features: features of the forward convolution, of all groups.
        window_elements: product of the window's sizes.
        dtype, out_dtype: dtypes of the operands and of the result.
        num_bytes: bytes of operands and result; `read_bytes` of its first operand alone.
    """

    direction: Direction
    positions: int
    input_features: int
    output_features: int
    window_elements: int
    groups: int
    dtype: str
    out_dtype: str
    num_bytes: float
    read_bytes: float

    @property
    def flops(self) -> float:
        features = self.input_features // self.groups * self.output_features
        return 2.0 * self.positions * features * self.window_elements


@dataclass(frozen=True, slots=True)
class Attention:
    """A fused attention kernel, forward or backward.

    Args:
        batch: batch times heads of the queries.
        head_dim: width of a query head; `value_dim` of a value head.
        fraction: fraction of the scores that the mask leaves, e.g. 0.5 of a causal one.
        num_bytes: bytes of operands and results.
    """

    batch: int
    queries: int
    keys: int
    head_dim: int
    value_dim: int
    dtype: str
    fraction: float
    is_backward: bool
    num_bytes: float

    @property
    def flops(self) -> float:
        """Matmul FLOPs: two matmuls forward; five backward, of which the kernel computes one again."""
        scores = 2.0 * self.batch * self.queries * self.keys * self.fraction
        if self.is_backward:
            return scores * (3 * self.head_dim + 2 * self.value_dim)
        return scores * (self.head_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class LibraryKernel:
    """Another kernel of a library.

    Args:
        target: target of the custom call, or the opcode.
        flops: FLOPs; None where the HLO does not say.
        num_bytes: bytes moved, all passes over the data together.
        num_steps: number of dependent steps, each at least one kernel.
        dtype: dtype of the operands, which decides the peak rate.
    """

    target: str = ""
    flops: float | None = None
    num_bytes: float = 0.0
    num_steps: float = 1.0
    dtype: str = "bf16"


LibraryCall = Gemm | Convolution | Attention | LibraryKernel


def dot_gemm(computation: Computation, dot: Instruction) -> Gemm:
    """The matmul of a `dot`."""
    lhs, rhs = (computation.shape_of(operand) for operand in dot.operands[:2])
    batch = math.prod(lhs.dims[dim] for dim in dot.numbers("lhs_batch_dims"))
    k = math.prod(lhs.dims[dim] for dim in dot.numbers("lhs_contracting_dims"))
    # An algorithm such as `dot_bf16_bf16_f32` rounds float32 operands before it multiplies them.
    unit = re.fullmatch(r"dot_(bf16|f16|f32|f64)_(?:bf16|f16|f32|f64)(?:_f32|_f64)?", dot.attribute("algorithm"))
    return _gemm(lhs, rhs, dot.shape, batch, k, unit[1] if unit else "")


def library_call(computation: Computation, call: Instruction) -> LibraryCall:
    """What a `custom-call`, or an instruction that XLA runs by a library, computes."""
    target = call.custom_call_target if call.opcode == "custom-call" else call.opcode
    operands = tuple(computation.shape_of(operand) for operand in call.operands)
    for pattern, read in _READERS.items():
        if re.search(pattern, target):
            found = read(call, operands)
            if found is not None:
                return found
    estimate = _cost_estimate(call)
    moved = sum(shape.num_bytes for shape in operands) + _result_bytes(call)
    flops, num_bytes = estimate if estimate else (None, moved)
    return LibraryKernel(target, flops, num_bytes, 1.0, _dtype(call, operands))


def convolution(call: Instruction, operands: tuple[Shape, ...]) -> Convolution | None:
    """A convolution, of cuDNN or of HLO."""
    labels = re.fullmatch(r"(\w+)_(\w+)->(\w+)", call.attribute("dim_labels"))
    result = call.shape.leaves[0]
    if labels is None or len(operands) < 2:
        return None
    direction: Direction = "forward"
    kernel, out = operands[1], result
    if "BackwardInput" in call.custom_call_target:
        direction, out = "input_gradient", operands[0]
    elif "BackwardFilter" in call.custom_call_target:
        direction, kernel, out = "filter_gradient", result, operands[1]
    features = kernel.dims[labels[2].index("o")]
    groups = int(call.attribute("feature_group_count") or 1) * int(call.attribute("batch_group_count") or 1)
    channels = kernel.dims[labels[2].index("i")]
    return Convolution(
        direction=direction,
        positions=out.num_elements // max(1, features),
        input_features=channels * groups,
        output_features=features,
        window_elements=kernel.num_elements // max(1, channels * features),
        groups=groups,
        dtype=operands[0].dtype,
        out_dtype=result.dtype,
        num_bytes=sum(shape.num_bytes for shape in operands) + _result_bytes(call),
        read_bytes=operands[0].num_bytes,
    )


def _cublas(call: Instruction, operands: tuple[Shape, ...]) -> Gemm | None:
    dims = dict(re.findall(r'"((?:lhs|rhs)_(?:contracting|batch)_dimensions)":\[([^\]]*)\]', call.attributes))
    if len(operands) < 2 or "lhs_contracting_dimensions" not in dims:
        return None
    lhs, rhs = operands[:2]
    numbers = {name: [int(n) for n in re.findall(r"\d+", text)] for name, text in dims.items()}
    batch = math.prod(lhs.dims[dim] for dim in numbers.get("lhs_batch_dimensions", ()))
    k = math.prod(lhs.dims[dim] for dim in numbers["lhs_contracting_dimensions"])
    return _gemm(lhs, rhs, call.shape.leaves[0], batch, k)


def _attention(call: Instruction, operands: tuple[Shape, ...]) -> Attention | None:
    scores = re.search(r'"intermediate_tensor_shape":\{[^}]*?"dimensions":\[([^\]]*)\]', call.attributes)
    sizes = [int(n) for n in re.findall(r"\d+", scores[1])] if scores else []
    if len(sizes) != 4 or len(operands) < 3:
        return None
    batch, heads, queries, keys = sizes
    head_dim = operands[0].num_elements // max(1, batch * heads * queries)
    # Values have as many heads as keys; their width is that of the result or of the queries.
    is_backward = "Backward" in call.custom_call_target
    value_dim = head_dim if is_backward else call.shape.leaves[0].num_elements // max(1, batch * heads * queries)
    return Attention(
        batch=batch * heads,
        queries=queries,
        keys=keys,
        head_dim=head_dim,
        value_dim=value_dim,
        dtype=operands[0].dtype,
        fraction=_unmasked(call, queries, keys),
        is_backward=is_backward,
        num_bytes=sum(shape.num_bytes for shape in operands) + _result_bytes(call),
    )


def _unmasked(call: Instruction, queries: int, keys: int) -> float:
    """The fraction of scores that a causal mask or a sliding window leaves."""
    if '"mask_type":"CAUSAL"' not in call.attributes and '"mask_type":"PADDING_CAUSAL"' not in call.attributes:
        return 1.0
    window = re.search(r'"sliding_window_length":"?(\d+)', call.attributes)
    width = min(int(window[1]), keys) if window and int(window[1]) > 0 else keys
    # Query i attends to the keys max(0, i - width + 1) to i.
    rising = min(queries, width)
    left = rising * (rising + 1) / 2 + (queries - rising) * width
    return left / max(1, queries * keys)


def _solver(flops: Callable[[int, int], float], steps: Callable[[int], float]) -> Callable[..., LibraryKernel | None]:
    """A dense factorization, of a batch of m x n matrices: FLOPs by formula, in dependent panels."""

    def read(call: Instruction, operands: tuple[Shape, ...]) -> LibraryKernel | None:
        if not operands or len(operands[0].dims) < 2:
            return None
        *batch, m, n = operands[0].dims
        moved = sum(shape.num_bytes for shape in operands) + _result_bytes(call)
        total = math.prod(batch) * flops(m, n)
        return LibraryKernel(
            call.custom_call_target or call.opcode, total, moved, steps(min(m, n)), _dtype(call, operands)
        )

    return read


def _passes(count: float) -> Callable[..., LibraryKernel]:
    """A kernel that reads and writes its data several times."""

    def read(call: Instruction, operands: tuple[Shape, ...]) -> LibraryKernel:
        moved = sum(shape.num_bytes for shape in operands) + _result_bytes(call)
        return LibraryKernel(call.custom_call_target or call.opcode, 0.0, count * moved, count, _dtype(call, operands))

    return read


def _sort(call: Instruction, operands: tuple[Shape, ...]) -> LibraryKernel:
    """A radix sort reads and writes keys and values once per 8 bits of the key."""
    keys = operands[0] if operands else call.shape.leaves[0]
    digits = max(1.0, keys.num_bytes / max(1, keys.num_elements))
    moved = 2 * sum(shape.num_bytes for shape in call.shape.leaves)
    return LibraryKernel("sort", 0.0, digits * moved, digits, keys.dtype)


def _fft(call: Instruction, operands: tuple[Shape, ...]) -> LibraryKernel:
    lengths = call.numbers("fft_length")
    points, elements = max(2, math.prod(lengths)), max(shape.num_elements for shape in (*operands, *call.shape.leaves))
    moved = sum(shape.num_bytes for shape in operands) + _result_bytes(call)
    return LibraryKernel("fft", 5.0 * elements * math.log2(points), len(lengths) * moved, len(lengths), "f32")


def _cost_estimate(call: Instruction) -> tuple[float, float] | None:
    """FLOPs and bytes that a Pallas kernel declares."""
    found = {name: float(number) for name, number in _ESTIMATE.findall(call.attributes)}
    return (found["flops"], found["bytes_accessed"]) if {"flops", "bytes_accessed"} <= found.keys() else None


def _gemm(lhs: Shape, rhs: Shape, result: Shape, batch: int, k: int, unit_dtype: str = "") -> Gemm:
    m, n = (shape.num_elements // max(1, batch * k) for shape in (lhs, rhs))
    aligned = (_aligned_bytes(lhs), _aligned_bytes(rhs), _aligned_bytes(result))
    return Gemm(batch, m, n, k, lhs.dtype, rhs.dtype, result.dtype, unit_dtype, aligned)


def _aligned_bytes(shape: Shape) -> int:
    """The largest power of two, up to 16, that divides the bytes of a row; 16 for a single row."""
    rows = [dim for dim in shape.minor_to_major if shape.dims[dim] > 1]
    if len(rows) < 2:
        return 16
    return math.gcd(16, max(1, int(shape.dims[rows[0]] * itemsize(shape.dtype))))


def _result_bytes(call: Instruction) -> float:
    """Bytes of a call's results; cuDNN and cuBLAS return their scratch memory as `u8`, which is no result."""
    return sum(leaf.num_bytes for leaf in call.shape.leaves if leaf.dtype != "u8")


def _dtype(call: Instruction, operands: tuple[Shape, ...]) -> str:
    return operands[0].dtype if operands else call.shape.leaves[0].dtype


_ESTIMATE = re.compile(r'"?(flops|bytes_accessed)"?\s*[:=]\s*"?([\d.e+]+)')

#: Pattern of a custom call's target, or an opcode -> its reader. FLOPs of factorizations: Golub and Van Loan, Matrix
#: Computations, 4th edition; panels of 64 columns.
_READERS: dict[str, Callable[[Instruction, tuple[Shape, ...]], LibraryCall | None]] = {
    r"^__cublas": _cublas,
    r"^__cudnn\$conv|^convolution$": convolution,
    r"^__cudnn\$fmha": _attention,
    r"^sort$": _sort,
    r"^fft$": _fft,
    r"TopK": _passes(2),
    r"potrf|^cholesky$": _solver(lambda m, n: m * n * n / 3, lambda n: n / 64),
    r"getrf": _solver(lambda m, n: n * n * (m - n / 3), lambda n: n / 64),
    r"geqrf|orgqr|ormqr": _solver(lambda m, n: 2 * n * n * (m - n / 3), lambda n: n / 64),
    r"syevd|syevj|hegvd": _solver(lambda m, n: 9.0 * n**3, lambda n: n / 8),
    r"gesvd": _solver(lambda m, n: 4.0 * m * n * n + 22.0 * n**3, lambda n: n / 8),
    r"^triangular-solve$|trsm": _solver(lambda m, n: float(m * m * n), lambda n: n / 64),
}
