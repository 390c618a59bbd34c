"""Parse the text of an HLO module into computations and instructions.

In: the text that XLA prints, of any pass. Out: `Module`. Attributes stay text until they are read. Both notations of a
tuple's element are read: `get-tuple-element(%x), index=1`, and `%x#1` of newer versions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from autopar.errors import VerifyError
from autopar.xla_compiler.hlo_metadata import read_sources

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([\d,<=\s]*)\](?:\{([^}]*)\})?")
_MEMORY_SPACE = re.compile(r"S\((\d+)\)")
_OPERAND = re.compile(r"%?([\w.\-]+)((?:#\d+)*)$")
_BITS = re.compile(r"\d+")
_COMMENT = re.compile(r"/\*.*?\*/")
_PARTITIONS = re.compile(r"num_partitions=(\d+)")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CALLEES = re.compile(
    r"(?:calls|to_apply|body|condition|true_computation|false_computation|branch_computations|called_computations)="
    r"(?:%?([\w.\-]+)|\{([^}]*)\})"
)


@dataclass(frozen=True, slots=True)
class Shape:
    """An array's dtype, dims and layout, or a tuple of shapes.

    Args:
        dtype: HLO's name, e.g. `bf16`; `tuple`, or `token` and `opaque`, which have no bytes.
        minor_to_major: dims in the order of their layout, the contiguous one first.
        memory_space: 0 for device memory, 5 for pinned host memory.
    """

    dtype: str
    dims: tuple[int, ...] = ()
    minor_to_major: tuple[int, ...] = ()
    memory_space: int = 0
    elements: tuple[Shape, ...] = ()

    @property
    def leaves(self) -> tuple[Shape, ...]:
        """The arrays of a tuple, nested ones too."""
        if self.dtype != "tuple":
            return (self,)
        return tuple(leaf for element in self.elements for leaf in element.leaves)

    @property
    def num_elements(self) -> int:
        return sum(math.prod(leaf.dims) for leaf in self.leaves if leaf.dtype not in ("token", "opaque"))

    @property
    def num_bytes(self) -> float:
        return sum(math.prod(leaf.dims) * itemsize(leaf.dtype) for leaf in self.leaves)


@dataclass(frozen=True, slots=True)
class Operand:
    """A reference to an instruction of the same computation, or to an element of its tuple.

    Args:
        path: indices of the element, the outermost first: tuples may contain tuples.
    """

    name: str
    path: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction.

    Args:
        computation: name of the computation that it belongs to.
        operands: empty for a parameter or a constant.
        literal: text between the parentheses: a parameter's number, a constant's value.
        attributes: text behind the operands.
    """

    computation: str
    name: str
    opcode: str
    shape: Shape
    operands: tuple[Operand, ...]
    literal: str
    attributes: str
    is_root: bool = False

    def attribute(self, name: str) -> str:
        """An attribute's text; empty if it is absent."""
        start = 0
        while (found := self.attributes.find(f"{name}=", start)) >= 0:
            if found == 0 or self.attributes[found - 1] in ", {":
                return _balanced(self.attributes, found + len(name) + 1)
            start = found + 1
        return ""

    def numbers(self, name: str) -> tuple[int, ...]:
        """An attribute of the form `{0,1}`."""
        return tuple(int(number) for number in re.findall(r"-?\d+", self.attribute(name)))

    @property
    def callees(self) -> tuple[str, ...]:
        """Names of the computations that it calls."""
        found: list[str] = []
        for one, several in _CALLEES.findall(self.attributes.split(", metadata=")[0]):
            found += [one] if one else [name.strip().lstrip("%") for name in several.split(",")]
        return tuple(found)

    @property
    def custom_call_target(self) -> str:
        return self.attribute("custom_call_target").strip('"')

    @property
    def trip_count(self) -> int | None:
        """Trip count of a `while`; None where XLA does not know it."""
        found = _TRIP_COUNT.search(self.attributes)
        return int(found[1]) if found else None

    @property
    def op_name(self) -> str:
        """JAX's name stack and primitive; empty where XLA kept none."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else ""


@dataclass(frozen=True)
class Computation:
    """Instructions in the order of the text: the schedule, if the module is scheduled."""

    name: str
    instructions: tuple[Instruction, ...]

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        return {one.name: one for one in self.instructions}

    @cached_property
    def root(self) -> Instruction:
        return next((one for one in self.instructions if one.is_root), self.instructions[-1])

    @cached_property
    def parameters(self) -> tuple[Instruction, ...]:
        """Parameters by their numbers."""
        found = (one for one in self.instructions if one.opcode == "parameter")
        return tuple(sorted(found, key=lambda one: int(one.literal)))

    @cached_property
    def users(self) -> dict[str, tuple[Instruction, ...]]:
        """The instructions that read each instruction."""
        found: dict[str, list[Instruction]] = {}
        for one in self.instructions:
            for name in dict.fromkeys(operand.name for operand in one.operands):
                found.setdefault(name, []).append(one)
        return {name: tuple(users) for name, users in found.items()}

    def shape_of(self, operand: Operand) -> Shape:
        """The shape of an operand."""
        shape = self.by_name[operand.name].shape
        for index in operand.path:
            shape = shape.elements[index]
        return shape


@dataclass(frozen=True)
class Module:
    """An HLO module.

    Args:
        entry: name of the entry computation.
        num_partitions: number of devices that run it as one SPMD program.
        is_scheduled: whether the order of instructions is XLA's schedule.
        sources: two source lines for each stack frame (`read_sources`).
    """

    name: str
    computations: dict[str, Computation] = field(repr=False)
    entry: str
    num_partitions: int
    is_scheduled: bool
    sources: Mapping[int, tuple[str, str]] = field(default_factory=dict, repr=False)

    def called(self, one: Instruction) -> tuple[Computation, ...]:
        """The computations that an instruction calls."""
        return tuple(self.computations[name] for name in one.callees if name in self.computations)

    @property
    def main(self) -> Computation:
        return self.computations[self.entry]


def read_hlo_file(path: Path) -> str:
    """The text of an HLO file.

    Raises:
        VerifyError: the file cannot be read as text.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise VerifyError(f"cannot read HLO text from {str(path)[:200]!r}: {error}") from error


def itemsize(dtype: str) -> float:
    """Bytes of an element.

    >>> itemsize("bf16"), itemsize("f8e4m3fn"), itemsize("s4"), itemsize("pred"), itemsize("token")
    (2.0, 1.0, 0.5, 1.0, 0.0)
    """
    if dtype in ("token", "opaque", "tuple"):
        return 0.0
    digits = _BITS.search(dtype)
    return int(digits[0]) / 8 if digits else 1.0


def parse_module(text: str) -> Module:
    """Parse a module.

    Raises:
        VerifyError: the text has no entry computation, or an instruction cannot be read.
    """
    computations: dict[str, Computation] = {}
    name, entry, found = "", "", list[Instruction]()
    for number, line in enumerate(text.splitlines(), 1):
        if name:
            if line.startswith("}"):
                computations[name], name = Computation(name, tuple(found)), ""
            elif start := _INSTRUCTION.match(line):
                try:
                    found.append(_instruction(name, line, start))
                except (ValueError, IndexError) as error:
                    raise VerifyError(f"cannot read line {number} of the HLO text: {line.strip()[:200]!r}") from error
        elif header := _HEADER.match(line):
            name, found = header[2], []
            entry = name if header[1] else entry
    if not entry or entry not in computations:
        first = text.strip().split("\n", 1)[0][:80]
        raise VerifyError(
            f"no HLO module: the text has no complete ENTRY computation (it begins {first!r}); pass the text of"
            " `compiled.as_text()` or XLA's dump `*after_optimizations.txt`"
        )
    head = text[: text.find("\n")]
    partitions = _PARTITIONS.search(head)
    return Module(
        name=head.removeprefix("HloModule ").split(",")[0],
        computations=computations,
        entry=entry,
        num_partitions=int(partitions[1]) if partitions else 1,
        is_scheduled="is_scheduled=true" in head,
        sources=read_sources(text),
    )


def _instruction(computation: str, line: str, start: re.Match[str]) -> Instruction:
    shape, at = _shape(line, start.end())
    opening = line.index("(", at)
    opcode = line[at:opening].strip()
    closing = _closing(line, opening)
    inside = line[opening + 1 : closing]
    attributes = line[closing + 1 :].removeprefix(",").strip()
    is_leaf = opcode in ("parameter", "constant")
    operands = () if is_leaf else tuple(_operands(inside))
    return Instruction(computation, start[2], opcode, shape, operands, inside, attributes, bool(start[1]))


def _operands(text: str) -> Iterator[Operand]:
    for part in _split(_COMMENT.sub("", text) if "/*" in text else text):
        name = _OPERAND.search(part)
        if name is None:
            raise ValueError(part)
        yield Operand(name[1], tuple(map(int, name[2].split("#")[1:])))


def _shape(text: str, at: int) -> tuple[Shape, int]:
    """Parse a shape from a position; the shape, and the position behind it."""
    while text[at] == " " or text.startswith("/*", at):
        at = at + 1 if text[at] == " " else text.index("*/", at) + 2
    if text[at] == "(":
        elements: list[Shape] = []
        at += 1
        while text[at] != ")":
            element, at = _shape(text, at)
            elements.append(element)
            at += text[at] == ","
        return Shape("tuple", elements=tuple(elements)), at + 1
    found = _ARRAY.match(text, at)
    if found is None:
        raise ValueError(text[at:])
    dtype, dims, layout = found.groups()
    space = _MEMORY_SPACE.search(layout or "")
    order = (layout or "").split(":")[0]
    return (
        Shape(
            dtype,
            tuple(int(size.replace("<=", "")) for size in dims.split(",") if size.strip()),
            tuple(int(dim) for dim in order.split(",") if dim.strip()),
            int(space[1]) if space else 0,
        ),
        found.end(),
    )


def _closing(text: str, opening: int) -> int:
    """The position of the parenthesis that closes the one at a position; quoted ones do not count."""
    depth, at = 0, opening
    while at < len(text):
        character = text[at]
        if character == '"':
            at = _end_of_quote(text, at)
        elif character in "({[":
            depth += 1
        elif character in ")}]":
            depth -= 1
            if depth == 0:
                return at
        at += 1
    raise ValueError(text)


def _balanced(text: str, start: int) -> str:
    """The text from a position up to the next comma outside brackets and quotes."""
    depth, at = 0, start
    while at < len(text):
        character = text[at]
        if character == '"':
            at = _end_of_quote(text, at)
        elif character in "({[":
            depth += 1
        elif character in ")}]":
            if depth == 0:
                break
            depth -= 1
        elif character == "," and depth == 0:
            break
        at += 1
    return text[start:at].strip()


def _end_of_quote(text: str, at: int) -> int:
    end = at + 1
    while end < len(text) and text[end] != '"':
        end += 2 if text[end] == "\\" else 1
    return end


def _split(text: str) -> Iterator[str]:
    """Parts between commas outside brackets."""
    depth, start = 0, 0
    for at, character in enumerate(text):
        if character in "({[":
            depth += 1
        elif character in ")}]":
            depth -= 1
        elif character == "," and depth == 0:
            yield text[start:at].strip()
            start = at + 1
    if text[start:].strip():
        yield text[start:].strip()
