"""Replace attention that is written as softmax(QK^T)V by a fused kernel.

In: a `Trace`. Out: `Replaced`: the trace with the same inputs and outputs, and which attentions were replaced. The kernel's output and
the logarithm of its sums are kept for the backward pass; in a loop over layers they are stacked, and what the written form would have
kept is dropped with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.frontend.equations import Atom, Equation, Item, Nest, items_of
from autopar.frontend.trace import Trace
from autopar.frontend.trace_builder import TraceBuilder, piece_of
from autopar.jax_interop import compat as jax_compat
from autopar.transforms.attention.cones import Cone, find_cones
from autopar.transforms.attention.formula import Formula, formula_of
from autopar.transforms.attention.kernels import Call, UnsupportedError, bias_parts, call_of, part_of
from autopar.transforms.attention.sections import Sections
from autopar.transforms.attention.sources import Multiple


@dataclass(frozen=True)
class Replaced:
    """A trace with kernels.

    Args:
        formulas: the attentions that were replaced.
        reasons: why others were not, with their number.
    """

    trace: Trace
    formulas: tuple[Formula, ...]
    reasons: Mapping[str, int]


def with_kernels(trace: Trace, kernel: str) -> Replaced:
    """The trace with attention by a kernel where the kernel can compute it; the same trace if there is none."""
    sections = Sections(trace)
    sites, reasons = list[_Site](), Counter[str]()
    for cone in find_cones(sections):
        try:
            site = _site(sections, cone, kernel)
        except UnsupportedError as error:
            reasons[str(error)] += 1
            continue
        if site is not None:
            sites.append(site)
    made = _Rewriting(trace, sections, sites).run() if sites else trace
    return Replaced(made, tuple(site.formula for site in sites), reasons)


def _site(sections: Sections, cone: Cone, kernel: str) -> _Site | None:
    """The site of an attention; None if the cone computes something else.

    Raises:
        UnsupportedError: the kernel cannot compute it, or a value is not available where it would run.
    """
    formula = formula_of(sections, cone)
    if formula is None:
        return None
    try:
        return _Site.of(sections, formula, kernel)
    except _MaskElsewhereError:
        formula = formula_of(sections, cone, through_masks=False)
        return None if formula is None else _Site.of(sections, formula, kernel)


class _MaskElsewhereError(UnsupportedError):
    """A mask is not available where the kernel runs."""


@dataclass
class _Site:
    """One attention to replace.

    Args:
        forward: the position at which the kernel runs.
        backward: the position at which its backward kernel runs; None without a backward pass.
        inputs: the values of the call's inputs in the section of the forward pass, and in that of the backward pass.
        given: what a loop around the forward or backward pass must read too, by the position of the pass: the values of
            `inputs` as they are outside.
        results: the values of the kernel's results in the forward pass.
        stacks: their stacks, if another loop runs the backward pass.
        inside: the values of the kernel's results in that loop.
        is_across: whether the backward pass is in another section.
    """

    formula: Formula
    call: Call
    forward: int
    backward: int | None
    inputs: Mapping[int, tuple[int, ...]]
    d_out: int | None
    given: Mapping[int, set[int]]
    results: list[Atom] = field(default_factory=list)
    stacks: list[int] = field(default_factory=list)
    inside: list[Atom] = field(default_factory=list)
    is_across: bool = False

    @classmethod
    def of(cls, sections: Sections, formula: Formula, kernel: str) -> _Site:
        """The site of an attention.

        Raises:
            UnsupportedError: the kernel cannot compute it, or a value is not available where it would run.
        """
        last = [min(at) for role, at in formula.roles.outputs.items() if role != "out"]
        backward = min(last, default=None)
        forward = min(formula.roles.outputs["out"]) if "out" in formula.roles.outputs else backward
        assert forward is not None
        places = (forward,) if backward is None else (forward, backward)
        sources = {role: _available(sections, formula, role, places) for role in ("query", "key", "value")}
        if backward is not None:
            sources["d_out"] = _available(sections, formula, "d_out", (backward,))
        operands = [sources[role][0] for role in ("query", "key", "value")]
        parts = [part.origin for part in bias_parts(formula)]
        given = {place: {v for v in parts if _at(sections, v, place) is None} for place in places}
        if not all(_may_enter(sections, value, place) for place in places for value in given[place]):
            raise _MaskElsewhereError("its mask is not available where the kernel runs")
        inputs = {
            place: tuple(v if v in given[place] else _read_at(sections, v, place) for v in (*operands, *parts))
            for place in places
        }
        call = call_of(formula, sources, parts, kernel)
        d_out = None if backward is None else _read_at(sections, sources["d_out"][0], backward)
        across = backward is not None and sections.section_of(forward) != sections.section_of(backward)
        return cls(formula, call, forward, backward, inputs, d_out, given, is_across=across)


def _available(sections: Sections, formula: Formula, role: str, places: Sequence[int]) -> Multiple:
    """The operand of a role, or a value that it is a transpose or a multiple of, that can be read at some places.

    Raises:
        UnsupportedError: there is none.
    """
    for origin, factor in reversed(
        formula.roles.sources[formula.roles.operands[role]]
    ):  # the original needs the fewest transposes
        is_same = factor == 1 or role in ("query", "key")  # a kernel has one scale, that of the scores
        if is_same and all(_at(sections, origin, place) is not None for place in places):
            return origin, factor
    raise UnsupportedError("an operand is not available where the backward kernel runs")


def _at(sections: Sections, origin: int, place: int) -> int | None:
    """The value with an origin that can be read at a place; None if it is made later, or elsewhere."""
    found = sections.here(origin, sections.section_of(place))
    made = None if found is None else sections.trace.producers.get(found)
    return None if found is None or (made is not None and made >= place) else found


def _read_at(sections: Sections, origin: int, place: int) -> int:
    found = _at(sections, origin, place)
    assert found is not None
    return found


def _may_enter(sections: Sections, value: int, place: int) -> bool:
    """Whether a loop around a place may read a value that is made in front of it."""
    region = sections.loop(sections.section_of(place))
    if region is None:
        return False
    around, made = sections.section_of(region.enter[0]), sections.trace.producers.get(value)
    return around == 0 if made is None else sections.section_of(made) == around and made < region.enter[0]


class _Rewriting:
    """Writes the new trace; the one mutable object of this module."""

    def __init__(self, trace: Trace, sections: Sections, sites: Sequence[_Site]) -> None:
        self.trace, self.sections, self.builder = trace, sections, TraceBuilder(trace)
        self.position = {id(equation): n for n, equation in enumerate(trace.equations)}
        self.sites, self.forward = sites, {site.forward: site for site in sites}
        self.backward = {site.backward: site for site in sites if site.backward is not None}
        results = [value for site in sites for chain in site.formula.roles.results.values() for value in chain]
        self.replaced = {trace.producers[value] for value in results}
        self.new: dict[int, Atom] = {}  # by matmul's result, the kernel's
        self.inside: dict[tuple[int, int], int] = {}  # by place and value outside a loop, the value inside

    def run(self) -> Trace:
        """The new trace."""
        self._write(items_of(self.trace.equations, self.trace.regions))
        outputs = [self.new.get(atom, atom) if isinstance(atom, int) else atom for atom in self.trace.outputs]
        return self.builder.finish(outputs)

    def _write(self, items: Sequence[Item]) -> None:
        for item in items:
            if isinstance(item, Nest):
                self._nest(item)
                continue
            n = self.position[id(item)]
            if n in self.forward:
                self._forward(self.forward[n], item)
            if n in self.backward:
                self._backward(self.backward[n], item)
            if n not in self.replaced:
                self.builder.add(item.reading(self.new))

    def _nest(self, nest: Nest) -> None:
        """Write a region. A loop stacks what its kernels keep for a later loop, and that loop reads it."""
        enter = [piece.reading(self.new) for piece in nest.enter]
        first = self._first(nest)
        section = None if first is None else self.sections.section_of(first)
        for site in self.sites:
            for place in site.inputs:
                if self.sections.section_of(place) == section:
                    enter += self._giving(nest, site, place)
            if site.is_across and site.backward is not None and self.sections.section_of(site.backward) == section:
                enter += self._entering(nest, site)
        sections = self.builder.sections(nest.sections, self._write)
        leave = [piece.reading(self.new) for piece in nest.exit]
        for site in self.sites:
            if site.is_across and self.sections.section_of(site.forward) == section:
                leave += self._leaving(nest, site)
        self.builder.add(Nest(nest.kind, nest.source, enter, sections, leave))

    def _first(self, nest: Nest) -> int | None:
        """The first equation of a loop's body."""
        body = nest.sections[-1] if nest.kind == "scan" else []
        first = body[0] if body else None
        while isinstance(first, Nest):
            first = first.enter[0] if first.enter else None
        return None if first is None else self.position[id(first)]

    def _giving(self, nest: Nest, site: _Site, place: int) -> Iterator[Equation]:
        """Let a loop read what a mask or a bias consists of."""
        for value in sorted(site.given[place]):
            inside = self.builder.like(value, float(nest.source.params["length"]))
            self.inside[place, value] = inside
            yield piece_of(
                nest.enter[0],
                nest.source,
                "enter_const",
                self.new.get(value, value),
                inside,
                self.builder.repeats[value],
            )

    def _leaving(self, nest: Nest, site: _Site) -> Iterator[Equation]:
        """Stack the kernel's results."""
        length = int(nest.source.params["length"])
        for made in site.results:
            assert isinstance(made, int)
            repeat = self.builder.repeats[made]
            stack = self.builder.new(jax_compat.stacked(self.builder.avals[made], length), repeat / length)
            site.stacks.append(stack)
            yield piece_of(nest.exit[0], nest.source, "exit_stack", made, stack, repeat)

    def _entering(self, nest: Nest, site: _Site) -> Iterator[Equation]:
        """Read the stacks of the kernel's results."""
        for made, stack in zip(site.results, site.stacks, strict=True):
            assert isinstance(made, int)
            inside = self.builder.like(made)
            site.inside.append(inside)
            yield piece_of(nest.enter[0], nest.source, "enter_slice", stack, inside, self.builder.repeats[made])

    def _forward(self, site: _Site, like: Equation) -> None:
        call = site.call
        outs = list(site.formula.roles.outputs.get("out", ()))
        kept = call.kernel_results if site.is_across else call.kept
        outputs = [*kept, *(call.results[n] for n in outs)]
        part = part_of(call.inputs, [*call.before, *call.kernel], outputs)
        made = self.builder.inline(like, part, self._values(site, site.forward))
        site.results = made[: len(kept)]
        self._name(site, outs, made[len(kept) :])

    def _backward(self, site: _Site, like: Equation) -> None:
        call = site.call
        assert site.backward is not None and site.d_out is not None
        values = [*self._values(site, site.backward), *(site.inside if site.is_across else site.results)]
        kept = call.kernel_results if site.is_across else call.kept
        gradients = [n for role, at in site.formula.roles.outputs.items() if role != "out" for n in at]
        equations = [*(call.before if site.is_across else ()), *call.backward]
        part = part_of([*call.inputs, *kept, call.d_out], equations, [call.results[n] for n in gradients])
        d_out: Atom = self.new.get(site.d_out, site.d_out)
        self._name(site, gradients, self.builder.inline(like, part, [*values, d_out]))

    def _values(self, site: _Site, place: int) -> list[Atom]:
        found: list[Atom] = []
        for value in site.inputs[place]:
            inside = self.inside.get((place, value), value)
            found.append(self.new.get(inside, inside))
        return found

    def _name(self, site: _Site, matmuls: Sequence[int], made: Sequence[Atom]) -> None:
        for n, atom in zip(matmuls, made, strict=True):
            self.new[site.formula.roles.results[n][-1]] = atom
