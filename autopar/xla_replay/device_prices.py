"""Price every instruction of a compiled program by a device's rates.

In: a module, `ReplayRates`, how the devices are wired. Out: a `KernelPrice` or a `TransferPrice` per instruction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from autopar.xla_compiler.hlo_collectives import KINDS
from autopar.xla_compiler.hlo_text import Computation, Instruction, Module
from autopar.xla_replay.fused_work import (
    FusedWork,
    fills_registers,
    fused_work,
    has_scattered_rows,
    moves_contiguous_dim,
)
from autopar.xla_replay.gemm_time import gemm_s, peak_flops_per_s
from autopar.xla_replay.kernel_time import (
    KernelWork,
    attention_s,
    cached_bytes,
    convolution_s,
    custom_call_s,
    fusion_s,
)
from autopar.xla_replay.library_calls import Attention, Convolution, Gemm, LibraryCall, dot_gemm, library_call
from autopar.xla_replay.price import KernelPrice, TransferPrice
from autopar.xla_replay.rates import ReplayRates
from autopar.xla_replay.transfer_prices import TransferPrices, host_bytes, sends

_HOST_SPACE = 5
#: Kernels up to this many launches long are bound by latency.
_SHORT = 2.0
_LIBRARY = ("custom-call", "convolution", "sort", "fft", "cholesky", "triangular-solve")


@dataclass
class DevicePrices:
    """The prices of one device kind in one topology.

    Args:
        devices_per_domain: devices that NVLink connects.
        custom_kernels: target of a custom call, or a part of its `op_name` -> the work of one run.
    """

    rates: ReplayRates
    devices_per_domain: int
    custom_kernels: Mapping[str, LibraryCall] = field(default_factory=dict)
    transfers: TransferPrices = field(init=False)
    _known: dict[tuple[str, str], KernelPrice | TransferPrice] = field(default_factory=dict)
    _touched: dict[str, Mapping[str, tuple[float, float]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.transfers = TransferPrices(self.rates, self.devices_per_domain)

    def of(self, module: Module, computation: Computation, one: Instruction) -> KernelPrice | TransferPrice:
        """The price of one run of an instruction."""
        key = (computation.name, one.name)
        if key not in self._known:
            price = self._price(module, computation, one)
            if isinstance(price, KernelPrice) and price.seconds > 0:
                price = replace(price, seconds=price.seconds + self.rates.kernels.gap_s)
            self._known[key] = price
        return self._known[key]

    def host_round_trip(self) -> KernelPrice:
        """The price of a decision that the host takes: it copies a predicate, and launches what follows."""
        return KernelPrice("host", 2 * self.rates.host.launch_s)

    def _price(self, module: Module, computation: Computation, one: Instruction) -> KernelPrice | TransferPrice:
        opcode = one.opcode.removesuffix("-start")
        if opcode in KINDS:
            return self.transfers.collective(module, computation, one, opcode)
        if opcode == "fusion":
            inner = module.called(one)[0]
            if (sent := sends(module, inner)) is not None:
                return self.transfers.collective(module, *sent, sent[1].opcode)
            host = host_bytes(computation, one)
            return self.transfers.host_copy(host) if host else self._fusion(module, computation, one, inner)
        if opcode == "copy":
            host = host_bytes(computation, one)
            return self.transfers.host_copy(host) if host else self._copy(computation, one)
        if opcode in _LIBRARY:
            given = (kernel for name, kernel in self.custom_kernels.items() if _is_named(one, name))
            return self._library(computation, one, next(given, None) or library_call(computation, one))
        if opcode == "dot":
            gemm = dot_gemm(computation, one)
            moved = sum(computation.shape_of(operand).num_bytes for operand in one.operands) + one.shape.num_bytes
            return self._kernel("gemm", self._gemm(gemm), gemm.flops, moved, gemm.unit_dtype or gemm.lhs_dtype)
        if opcode in ("send", "recv"):
            return self.transfers.peer(one)
        return self._elementwise(module, computation, one)

    # -- kernels -----------------------------------------------------------------------------

    def _fusion(self, module: Module, computation: Computation, one: Instruction, inner: Computation) -> KernelPrice:
        work = fused_work(module, inner)
        notes: tuple[str, ...] = ()
        gemms = [dot_gemm(*dot) for dot in work.dots]
        fused = self._fused_s(work, self._cached(computation, one, work), self._tile_efficiency(one, inner, work))
        seconds, flops, dtype = sum(map(self._gemm, gemms)), sum(gemm.flops for gemm in gemms), "f32"
        for within, heavy in work.heavy:
            price = self._library(within, heavy, library_call(within, heavy))
            seconds, flops, notes = seconds + price.seconds, flops + price.flops, (*notes, *price.notes)
        if gemms:
            dtype = gemms[0].unit_dtype or gemms[0].lhs_dtype
        kind = "gemm" if gemms else _fusion_kind(work)
        return self._kernel(kind, max(seconds, fused), flops, work.num_bytes, dtype, notes)

    def _tile_efficiency(self, one: Instruction, inner: Computation, work: FusedWork) -> float:
        """The share of the memory rate that the tile of a Triton kernel allows."""
        if work.is_transpose or work.is_column_reduction or work.dots:
            return 1.0
        kernels = self.rates.kernels
        scattered = kernels.scattered_rows_efficiency if has_scattered_rows(one) else 1.0
        return scattered * (kernels.full_registers_efficiency if fills_registers(one, inner) else 1.0)

    def _fused_s(self, work: FusedWork, cached: float = 0.0, tile_efficiency: float = 1.0) -> float:
        largest = max(work.read_bytes, default=0.0)
        return fusion_s(
            self.rates,
            KernelWork(
                bytes_read=sum(work.read_bytes),
                bytes_written=work.written_bytes,
                operations=work.operations,
                num_elements=work.num_elements,
                num_reads=sum(2 * size > largest for size in work.read_bytes),
                cached_bytes=cached,
                transpose=work.is_transpose and not work.dots,  # a tile of an operand is loaded either way
                column_reduction=work.is_column_reduction,
                gather=work.is_gather,
                tile_efficiency=tile_efficiency,
                scatter_updates=work.scattered,
            ),
        )

    def _copy(self, computation: Computation, one: Instruction) -> KernelPrice:
        moved = one.shape.num_bytes
        work = KernelWork(
            moved, moved, num_elements=one.shape.num_elements, transpose=moves_contiguous_dim(computation, one)
        )
        return self._kernel("copy", fusion_s(self.rates, work), 0.0, 2 * moved, "f32")

    def _elementwise(self, module: Module, computation: Computation, one: Instruction) -> KernelPrice:
        """An instruction outside a fusion, as the fusion of itself."""
        alone = Computation(one.name, (*_parameters(computation, one), one))
        work = fused_work(module, alone)
        return self._kernel(_fusion_kind(work), self._fused_s(work), 0.0, work.num_bytes, "f32")

    def _gemm(self, gemm: Gemm) -> float:
        return gemm_s(
            self.rates,
            batch=gemm.batch,
            m=gemm.m,
            n=gemm.n,
            k=gemm.k,
            lhs_dtype=gemm.lhs_dtype,
            rhs_dtype=gemm.rhs_dtype,
            out_dtype=gemm.out_dtype,
            unit_dtype=gemm.unit_dtype,
            aligned_bytes=gemm.aligned_bytes,
        )

    def _library(self, computation: Computation, one: Instruction, call: LibraryCall) -> KernelPrice:
        if isinstance(call, Gemm):
            moved = sum(computation.shape_of(operand).num_bytes for operand in one.operands[:2])
            moved += one.shape.leaves[0].num_bytes
            return self._kernel("gemm", self._gemm(call), call.flops, moved, call.lhs_dtype)
        if isinstance(call, Convolution):
            seconds = convolution_s(
                self.rates,
                output_positions=call.positions,
                input_features=call.input_features,
                output_features=call.output_features,
                window_elements=call.window_elements,
                dtype=call.dtype,
                out_dtype=call.out_dtype,
                groups=call.groups,
                direction=call.direction,
                input_bytes=call.read_bytes,
            )
            return self._kernel("convolution", seconds, call.flops, call.num_bytes, call.dtype)
        if isinstance(call, Attention):
            seconds = attention_s(
                self.rates,
                flops=call.flops,
                num_bytes=call.num_bytes,
                head_dim=call.head_dim,
                sequence=call.keys,
                dtype=call.dtype,
                backward=call.is_backward,
                masked=call.fraction < 1.0,
            )
            return self._kernel("attention", seconds, call.flops, call.num_bytes, call.dtype)
        flops, moved, notes = call.flops, call.num_bytes, tuple[str, ...]()
        if flops is None:
            notes = (
                f"custom call {call.target!r}: its FLOPs are unknown, so only its bytes are counted; pass"
                f" custom_kernels={{{call.target!r}: LibraryKernel(flops=...)}}",
            )
        seconds = custom_call_s(self.rates, flops=flops or 0.0, num_bytes=moved, dtype=call.dtype)
        seconds += max(0.0, call.num_steps - 1) * self.rates.kernels.launch_s
        return self._kernel("custom-call", seconds, flops or 0.0, moved, call.dtype, notes, is_known=flops is not None)

    def _kernel(
        self,
        kind: str,
        seconds: float,
        flops: float,
        num_bytes: float,
        dtype: str,
        notes: tuple[str, ...] = (),
        *,
        is_known: bool = True,
    ) -> KernelPrice:
        device, launch = self.rates.device, self.rates.kernels.launch_s
        if not is_known:
            bound = "unknown"
        elif seconds < _SHORT * launch:
            bound = "latency"
        else:
            compute = flops / peak_flops_per_s(self.rates, dtype) if flops else 0.0
            memory = num_bytes / (device.hbm_bytes_per_s * device.hbm_efficiency)
            # A kernel far from both limits computes outside the matrix units.
            bound = "FLOPs" if compute > memory or seconds > 2 * max(compute, memory) + launch else "memory"
        return KernelPrice(kind, seconds, bound, flops, num_bytes, notes)

    def _cached(self, computation: Computation, one: Instruction, work: FusedWork) -> float:
        """Bytes of the operands that the L2 cache still holds from the kernels before."""
        if computation.name not in self._touched:
            self._touched[computation.name] = _touched_bytes(computation)
        touched, total = self._touched[computation.name], 0.0
        here = touched.get(one.name, (0.0, 0.0))[0]
        for operand, read in zip(one.operands, work.read_bytes, strict=False):
            produced = touched.get(_producer(computation, operand.name))
            size = computation.shape_of(operand).num_bytes
            if produced is not None and size:
                total += min(read, cached_bytes(self.rates, size, here - produced[1] + size))
        return total


def _is_named(one: Instruction, name: str) -> bool:
    return one.opcode == "custom-call" and (name == one.custom_call_target or name in one.op_name)


def _fusion_kind(work: FusedWork) -> str:
    if work.scattered:
        return "scatter"
    if work.is_gather:
        return "gather"
    return "transpose" if work.is_transpose else "column reduction" if work.is_column_reduction else "fusion"


def _parameters(computation: Computation, one: Instruction) -> tuple[Instruction, ...]:
    """The operands of an instruction as parameters, for a computation of itself alone."""
    found: dict[str, Instruction] = {}
    for operand in one.operands:
        source = computation.by_name[operand.name]
        number = str(len(found))
        found.setdefault(
            operand.name, Instruction(one.name, operand.name, "parameter", source.shape, (), number, source.attributes)
        )
    return tuple(found.values())


def _touched_bytes(computation: Computation) -> dict[str, tuple[float, float]]:
    """For each instruction of a schedule, the bytes that kernels had moved before it and after it."""
    total, found = 0.0, dict[str, tuple[float, float]]()
    for one in computation.instructions:
        before = total
        if one.opcode not in ("parameter", "constant", "tuple", "get-tuple-element", "bitcast"):
            total += one.shape.num_bytes + sum(computation.shape_of(operand).num_bytes for operand in one.operands)
            found[one.name] = (before, total)
    return found


def _producer(computation: Computation, name: str) -> str:
    """The instruction that wrote a buffer."""
    one = computation.by_name[name]
    while one.opcode in ("bitcast", "get-tuple-element") and one.operands:
        one = computation.by_name[one.operands[0].name]
    return one.name
