"""Count the bytes and the operations of a kernel from its fused computation.

In: a computation of an HLO fusion. Out: `FusedWork`. Work is counted by demand, from the roots backwards: an operand
behind a slice or a gather is read only where the slice needs it, and an update in place writes only the update.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from autopar.xla_compiler.hlo_text import Computation, Instruction, Module, Operand, Shape

#: Opcodes that only rename, describe or index data: the kernel computes nothing for them.
FREE = frozenset(
    [
        "parameter",
        "constant",
        "bitcast",
        "reshape",
        "tuple",
        "get-tuple-element",
        "broadcast",
        "iota",
        "slice",
        "dynamic-slice",
        "gather",
        "pad",
        "concatenate",
        "transpose",
        "copy",
        "reverse",
        "dynamic-update-slice",
        "partition-id",
        "replica-id",
        "after-all",
        "opt-barrier",
        "domain",
    ]
)
#: The least that an access to memory moves.
_SECTOR_BYTES = 32
#: The least that a GPU compares and swaps.
_WORD_BYTES = 4
_PARTIAL = frozenset(("slice", "dynamic-slice", "gather"))
#: Registers of a thread that values of a Triton kernel's tile may take before few threads run: half of all.
_MOST_REGISTERS = 128
_WHOLE = frozenset(("dot", "convolution", "sort", "reduce-window", "select-and-scatter", "scan"))


@dataclass(frozen=True, slots=True)
class FusedWork:
    """The work of one kernel on one device.

    Args:
        read_bytes: bytes of each parameter that the kernel reads.
        written_bytes: bytes that it writes.
        operations: (opcode, dtype) -> number of elements computed.
        num_elements: elements that run in parallel: those that the largest root writes, or those of the operand of a
            reduction or a matmul.
        is_transpose: whether it moves a dim to or from the contiguous position.
        is_column_reduction: whether it reduces a dim that is not the contiguous one.
        is_gather: whether it reads rows by index.
        scattered: memory accesses that it updates by index: a sector of contiguous elements, or a single element.
        dots: the matmuls in it.
        heavy: its other instructions that a formula of their own prices, e.g. a sort.
    """

    read_bytes: tuple[float, ...]
    written_bytes: float
    operations: Mapping[tuple[str, str], float]
    num_elements: float
    is_transpose: bool = False
    is_column_reduction: bool = False
    is_gather: bool = False
    scattered: float = 0.0
    dots: tuple[tuple[Computation, Instruction], ...] = ()
    heavy: tuple[tuple[Computation, Instruction], ...] = ()

    @property
    def num_bytes(self) -> float:
        return sum(self.read_bytes) + self.written_bytes


def fused_work(module: Module, computation: Computation) -> FusedWork:
    """Count the work of a fusion's computation, nested fusions included."""
    counter = _Counter(module)
    demanded = {one.name: float(one.shape.num_elements) for one in _roots(computation)}
    reads = counter.count(computation, demanded)
    return FusedWork(
        read_bytes=tuple(reads),
        written_bytes=sum(_written(computation, one) for one in _roots(computation)),
        operations=dict(counter.operations),
        num_elements=max((counter.parallel, *(_written_elements(computation, one) for one in _roots(computation)))),
        is_transpose=counter.is_transpose,
        is_column_reduction=counter.is_column_reduction,
        is_gather=counter.is_gather,
        scattered=counter.scattered,
        dots=tuple(counter.dots),
        heavy=tuple(counter.heavy),
    )


class _Counter:
    def __init__(self, module: Module) -> None:
        self.module = module
        self.operations: dict[tuple[str, str], float] = defaultdict(float)
        self.parallel = 0.0
        self.is_transpose = self.is_column_reduction = self.is_gather = False
        self.scattered = 0.0
        self.dots: list[tuple[Computation, Instruction]] = []
        self.heavy: list[tuple[Computation, Instruction]] = []

    def count(self, computation: Computation, demanded: Mapping[str, float]) -> list[float]:
        """Add a computation's work; bytes read of each of its parameters.

        Args:
            demanded: elements demanded of the instructions whose results leave the computation.
        """
        demand: dict[str, float] = defaultdict(float, demanded)
        in_place = {name for one in _roots(computation) for name in _updated(computation, one)}
        rotations = {name for one in computation.instructions for name in _shifts_of_rotation(computation, one)}
        for one in reversed(computation.instructions):
            elements = min(demand[one.name], float(one.shape.num_elements))
            if elements <= 0:
                continue  # nothing needs it
            if one.opcode != "tuple" and one.name not in rotations:
                self._note(computation, one, elements)
            for index, operand in enumerate(one.operands):
                wanted = self._wanted(computation, one, index, elements, in_place)
                demand[operand.name] += wanted
        return [
            min(demand[parameter.name], float(parameter.shape.num_elements)) * _itemsize(parameter.shape)
            for parameter in computation.parameters
        ]

    def _wanted(
        self, computation: Computation, one: Instruction, index: int, elements: float, in_place: set[str]
    ) -> float:
        """Elements that an instruction needs of an operand, to compute some elements of its result."""
        operand = computation.shape_of(one.operands[index])
        size, whole = float(operand.num_elements), float(one.shape.num_elements)
        part = elements / whole if whole else 0.0
        if one.opcode == "fusion":
            inner = self.module.called(one)[0]
            nested = _Counter(self.module)
            roots = _roots(inner)
            itemsize = _itemsize(inner.parameters[index].shape) or 1.0
            return nested.count(inner, {r.name: part * r.shape.num_elements for r in roots})[index] / itemsize
        if one.opcode == "tuple":
            return 0.0  # its elements are roots, or read one by one
        if one.opcode in ("dynamic-update-slice", "scatter"):
            if index == 0:
                updated = float(computation.shape_of(one.operands[1 if one.opcode != "scatter" else -1]).num_elements)
                return 0.0 if one.name in in_place else max(0.0, elements - updated)
            return min(size, elements) if one.opcode == "dynamic-update-slice" else size
        if one.opcode in _PARTIAL:
            return min(size, elements) if index == 0 else size
        if one.opcode in ("concatenate", "pad"):
            return size * min(1.0, part)
        if one.opcode == "reduce":
            return size * min(1.0, part) if size > whole else min(size, elements)
        if one.opcode in _WHOLE:
            return size
        return min(size, elements)

    def _note(self, computation: Computation, one: Instruction, elements: float) -> None:
        """Record an instruction's operations and what makes its kernel slow."""
        if one.opcode == "fusion":
            inner = self.module.called(one)[0]
            whole = float(one.shape.num_elements) or 1.0
            self.count(inner, {r.name: elements / whole * r.shape.num_elements for r in _roots(inner)})
        elif one.opcode == "dot":
            self.dots.append((computation, one))
            sizes = (float(computation.shape_of(operand).num_elements) for operand in one.operands)
            self.parallel = max(self.parallel, *sizes)  # blocks share the contracted dim where the result is small
        elif one.opcode in ("sort", "convolution", "fft", "custom-call"):
            self.heavy.append((computation, one))
        elif one.opcode in ("reduce-window", "select-and-scatter"):
            self._note_window(computation, one, elements)
        elif one.opcode == "reduce":
            self._note_reduction(computation, one, elements)
        elif one.opcode == "scatter":
            updates = computation.shape_of(one.operands[-1])
            self.scattered += _accesses(one, updates)
            self.parallel = max(self.parallel, float(updates.num_elements))
        elif one.opcode == "gather":
            self.is_gather = True
        elif one.opcode in ("transpose", "copy"):
            self.is_transpose |= moves_contiguous_dim(computation, one)
        elif one.opcode not in FREE:
            self.operations[one.opcode, _dtype(one.shape)] += elements

    def _note_reduction(self, computation: Computation, one: Instruction, elements: float) -> None:
        operand = computation.shape_of(one.operands[0])
        reduced = operand.num_elements * elements / max(1.0, float(one.shape.num_elements))
        self._note_body(one, reduced)
        self.parallel = max(self.parallel, reduced)
        contiguous = next((dim for dim in operand.minor_to_major if operand.dims[dim] > 1), None)
        self.is_column_reduction |= contiguous is not None and contiguous not in one.numbers("dimensions")

    def _note_window(self, computation: Computation, one: Instruction, elements: float) -> None:
        size = re.search(r"size=([\dx]+)", one.attributes)
        window = math.prod(int(length) for length in size[1].split("x")) if size else 1
        if one.opcode == "select-and-scatter":
            source = computation.shape_of(one.operands[-2]).num_elements
        else:  # one run of the body makes an element of each result
            source = elements / len(one.shape.leaves)
        self._note_body(one, window * float(source))

    def _note_body(self, one: Instruction, times: float) -> None:
        """Add the operations of the computation that an instruction applies to pairs of elements."""
        for body in self.module.called(one):
            for step in body.instructions:
                if step.opcode not in FREE:
                    self.operations[step.opcode, _dtype(step.shape)] += times


def _accesses(scatter: Instruction, updates: Shape) -> float:
    """Memory accesses of a scatter.

    Threads of one warp that update contiguous elements access their sector once, unless elements are smaller than a word:
    each word is then compared and swapped by itself.
    """
    if _itemsize(updates) < _WORD_BYTES:
        return updates.num_bytes / _WORD_BYTES
    window, contiguous = scatter.numbers("update_window_dims"), 1
    for dim in itertools.takewhile(window.__contains__, updates.minor_to_major):
        contiguous *= updates.dims[dim]
    sectors = math.ceil(contiguous * _itemsize(updates) / _SECTOR_BYTES)
    return updates.num_elements / contiguous * min(contiguous, sectors) if contiguous else 0.0


def _shifts_of_rotation(computation: Computation, one: Instruction) -> tuple[str, ...]:
    """The two shifts of a rotation `x << n | x >> 32 - n`, which a GPU computes as one instruction: the `or`."""
    if one.opcode != "or":
        return ()
    shifts = [computation.by_name[operand.name] for operand in one.operands]
    if sorted(shift.opcode for shift in shifts) != ["shift-left", "shift-right-logical"]:
        return ()
    same = len({shift.operands[0] for shift in shifts}) == 1
    return tuple(shift.name for shift in shifts) if same else ()


def has_scattered_rows(one: Instruction) -> bool:
    """Whether a tile of a Triton kernel takes one row from each of several places.

    XLA chooses such tiles under a causal mask, which all heads and examples share, and where the number of adjacent rows
    is odd.
    """
    sizes, dims = _tile(one), one.shape.leaves[0].dims
    whole = len(dims)  # the first of the dims that a row has as a whole; a reduced dim is not in the result
    while whole and len(sizes) == len(dims) and sizes[whole - 1] >= dims[whole - 1]:
        whole -= 1
    if len(sizes) != len(dims) or (whole and sizes[whole - 1] > 1):
        return False  # no tile, or it takes adjacent rows at each place
    return any(size > 1 for size in sizes[: max(0, whole - 1)])


def fills_registers(one: Instruction, inner: Computation) -> bool:
    """Whether what a Triton kernel's tile holds while it reduces rows takes half of the registers or more, so that few
    threads run."""
    threads = re.search(r'"num_warps":"(\d+)"', one.attributes)
    if threads is None:
        return False
    per_thread = math.prod(_tile(one)) / (32 * int(threads[1]))
    reductions = [each.name for each in inner.instructions if each.opcode == "reduce"]
    return any(per_thread * _num_held(one, inner, name) >= _MOST_REGISTERS for name in reductions)


def _num_held(one: Instruction, inner: Computation, reduction: str) -> int:
    """The number of values of the result's size that are read before a reduction and after it."""
    after, held = {reduction}, set[str]()
    for each in inner.instructions:
        names = [operand.name for operand in each.operands]
        if after.intersection(names):
            after.add(each.name)
            held.update(names)
    whole = [inner.by_name[name] for name in held - after if name in inner.by_name]
    size = one.shape.leaves[0].num_elements
    return sum(
        each.shape.num_elements == size and each.shape.leaves[0].dtype != "pred" and each.opcode != "broadcast"
        for each in whole
    )


def _tile(one: Instruction) -> list[int]:
    """The sizes of the result's tile; none unless it is a Triton kernel."""
    tile = re.search(r'"output_tiles":\[\{"sizes":\[([^\]]*)\]', one.attributes)
    sizes = [int(size) for size in re.findall(r"\d+", tile[1])] if tile is not None else [0]
    return [2 ** (size - 1).bit_length() for size in sizes]


def moves_contiguous_dim(computation: Computation, one: Instruction) -> bool:
    """Whether a transpose or a copy changes which dim is contiguous in memory."""
    operand = computation.shape_of(one.operands[0])
    if not operand.minor_to_major or not one.shape.minor_to_major:
        return False
    permutation = one.numbers("dimensions") or tuple(range(len(one.shape.dims)))
    after = [permutation[dim] for dim in one.shape.minor_to_major if one.shape.dims[dim] > 1]
    before = [dim for dim in operand.minor_to_major if operand.dims[dim] > 1]
    return bool(before) and before[0] != after[0]


def _roots(computation: Computation) -> tuple[Instruction, ...]:
    """The instructions whose results leave the computation."""
    root = computation.root
    if root.opcode != "tuple":
        return (root,)
    return tuple(dict.fromkeys(computation.by_name[operand.name] for operand in root.operands))


def _behind(computation: Computation, one: Instruction) -> Instruction:
    """The instruction whose data this one passes on unchanged."""
    while one.opcode in ("bitcast", "reshape") and one.operands:
        one = computation.by_name[one.operands[0].name]
    return one


def _updated(computation: Computation, root: Instruction) -> Iterator[str]:
    """Updates in place that end in a root: the buffer that they update is the result's."""
    source = _behind(computation, root)
    if source.opcode in ("dynamic-update-slice", "scatter"):
        yield source.name


def _written(computation: Computation, root: Instruction) -> float:
    """Bytes that a root writes; those of an update in place are the update's, read and written for a scatter."""
    source = _behind(computation, root)
    if source.opcode == "dynamic-update-slice":
        return computation.shape_of(source.operands[1]).num_bytes
    if source.opcode == "scatter":
        count = (len(source.operands) - 1) // 2
        updates: Iterable[Operand] = source.operands[-count:] if count else ()
        return 2.0 * sum(computation.shape_of(update).num_bytes for update in updates)
    return 0.0 if source.opcode == "parameter" and source is not root else root.shape.num_bytes


def _written_elements(computation: Computation, root: Instruction) -> float:
    """Elements that a root computes: of an update in place, the update's; a scatter's are counted where it is."""
    source = _behind(computation, root)
    if source.opcode == "dynamic-update-slice":
        return float(computation.shape_of(source.operands[1]).num_elements)
    return 0.0 if source.opcode == "scatter" else float(root.shape.num_elements)


def _dtype(shape: Shape) -> str:
    return shape.leaves[0].dtype


def _itemsize(shape: Shape) -> float:
    elements = shape.num_elements
    return shape.num_bytes / elements if elements else 0.0
