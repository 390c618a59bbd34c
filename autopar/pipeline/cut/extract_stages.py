"""Cut a step into the programs of its stages.

In: a trace with a loop over microbatches whose equations know their layers, and the layers of each stage. Out: one
`StageTrace` per stage: a trace of what the stage runs before, in and after the loop, planned like any other trace, and
the values that cross its borders. Cheap equations that need only data and small values are copied to each stage that
reads them.

In a stage's trace, the values that other stages send are the same in all iterations, and the values that it sends are
those of the last iteration. So the trace costs what the stage costs in the pipeline per iteration, and holds one
microbatch's values in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from autopar.frontend.equations import Atom, Equation, Item, Nest, equations_of, items_of
from autopar.frontend.trace import Trace
from autopar.frontend.trace_builder import LoopBuilder, TraceBuilder, flat_border, renumbered
from autopar.pipeline.cut.unroll_layers import Rows
from autopar.rules.table import traits_of

#: What crosses a border: an argument or a result of the step; a value that passes between stages once per step
#: (`outside`) or once per microbatch (`inside`); the buffer from which the latter is sent (`buffer`).
PortKind = Literal["argument", "result", "outside", "inside", "buffer"]


#: An argument or a result by its position, or some layers of it.
LeafKey = tuple[int, Rows | None]


@dataclass(frozen=True, slots=True)
class Port:
    """A value that crosses the border of a stage.

    Args:
        value: its number in the trace of the whole step; for an argument or a result, its position.
        rows: the layers, if the port is a part of a stacked argument or result; None for the whole.
    """

    kind: PortKind
    value: int
    rows: Rows | None = None

    @property
    def leaf(self) -> LeafKey:
        """The argument or result, with its layers."""
        return self.value, self.rows


@dataclass(frozen=True, slots=True)
class StageTrace:
    """The program of one stage.

    Args:
        inputs, outputs: ports of the trace's inputs and outputs.
        carried: pairs (input, output) of positions that hold the same state, or the same buffer.
    """

    trace: Trace
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    carried: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """The assignment of a step's layers and inputs to stages.

    Args:
        stage_of: stage of each layer.
        free: inputs of the step that every stage may have.
        homes: layer of each other input.
        carried: pairs (input, output) of positions that hold the same state.
    """

    stage_of: tuple[int, ...]
    free: frozenset[int]
    homes: dict[int, int]
    carried: tuple[tuple[int, int], ...]

    @property
    def num_stages(self) -> int:
        return max(self.stage_of) + 1


def stage_traces(trace: Trace, cut: Cut) -> tuple[StageTrace, ...]:
    """The programs of all stages, in order."""
    return _Cutting(trace, cut).run()


def stage_trace(trace: Trace, cut: Cut, stage: int) -> StageTrace:
    """The program of one stage, without building the others."""
    return _Cutting(trace, cut).one(stage)


@dataclass(slots=True)
class _Stage:
    """The contents of a stage, filled step by step."""

    before: list[Item] = field(default_factory=list)
    body: list[Item] = field(default_factory=list)
    after: list[Item] = field(default_factory=list)
    carries: list[tuple[Equation, Equation]] = field(default_factory=list)
    stacks: list[Equation] = field(default_factory=list)
    #: Values of other stages that it reads.
    outside: dict[int, None] = field(default_factory=dict)
    inside: dict[int, Equation] = field(default_factory=dict)  # value -> its first user
    #: Values that other stages read.
    sent_outside: dict[int, None] = field(default_factory=dict)
    sent_inside: dict[int, Equation] = field(default_factory=dict)  # value -> its producer


class _Cutting:
    """Builds the stages; the one mutable object of this module."""

    def __init__(self, trace: Trace, cut: Cut) -> None:
        self.trace, self.cut = trace, cut
        self.free = {*cut.free, *(value for value, _ in trace.constants)}
        self.stage: dict[int, int] = {}  # value -> stage, for values that a single stage makes
        self.stages = [_Stage() for _ in range(cut.num_stages)]
        for value in trace.inputs:
            if value not in self.free:
                self.stage[value] = cut.stage_of[cut.homes.get(value, 0)]
        items = items_of(trace.equations, trace.regions)
        at = next(i for i, item in enumerate(items) if isinstance(item, Nest) and item.source is trace.microbatches)
        loop = items[at]
        assert isinstance(loop, Nest)
        self.loop = loop
        self.shared_enters: list[Equation] = []
        self._add(items[:at], "before")
        self._add_loop()
        self._add(items[at + 1 :], "after")

    def run(self) -> tuple[StageTrace, ...]:
        self._find_imports()
        while True:
            made = tuple(self._finished(s, stage) for s, stage in enumerate(self.stages))
            if not self._drop_unread(made):
                return made

    def one(self, stage: int) -> StageTrace:
        """One stage by itself; it may send values that no stage reads."""
        self._find_imports()
        return self._finished(stage, self.stages[stage])

    def _drop_unread(self, made: Sequence[StageTrace]) -> bool:
        """Drop sends that no stage reads, since a receiver may have dropped the value as dead code. Returns whether any
        was dropped."""
        taken = {port for stage in made for port in stage.inputs}
        dropped = False
        for stage in self.stages:
            for kind, sent in (("outside", stage.sent_outside), ("inside", stage.sent_inside)):
                for value in [v for v in sent if Port(kind, v) not in taken]:  # type: ignore[arg-type]
                    del sent[value]
                    dropped = True
        return dropped

    # -- stages of items -----------------------------------------------------------------------

    def _add(self, items: Iterable[Item], where: Literal["before", "body", "after"]) -> None:
        for item in (part for whole in items for part in self._parts(whole)):
            if self._is_free(item):
                self.free.update(_made(item))
                runs: Sequence[_Stage] = self.stages
            else:
                s = self._stage_of(item)
                self.stage.update(dict.fromkeys(_made(item), s))
                runs = [self.stages[s]]
            for stage in runs:
                getattr(stage, where).append(item)

    def _parts(self, item: Item) -> Iterator[Item]:
        """Split a barrier into one per stage."""
        if isinstance(item, Equation) or item.kind != "barrier":
            yield item
            return
        pieces: dict[int, list[Equation]] = {}
        for piece in item.enter:
            pieces.setdefault(-1 if piece.layer is None else self._stage_of(piece), []).append(piece)
        for own in pieces.values():
            yield Nest(item.kind, item.source, own)

    def _add_loop(self) -> None:
        leaving = [piece for piece in self.loop.exit if piece.piece == "exit_carry"]
        for enter in self.loop.enter:
            if enter.piece == "enter_carry":
                leave = leaving.pop(0)
                s = self._stage_of(leave)
                self.stages[s].carries.append((enter, leave))
                self.stage.update(dict.fromkeys((*enter.results, *leave.results), s))
                continue
            self.shared_enters.append(enter)  # each stage that reads it gets a copy
            if all(value in self.free for value in enter.reads):
                self.free.update(enter.results)
        self._add(self.loop.sections[0], "body")
        for piece in self.loop.exit:
            if piece.stacks:
                s = self._stage_of(piece)
                self.stages[s].stacks.append(piece)
                self.stage.update(dict.fromkeys(piece.results, s))

    def _is_free(self, item: Item) -> bool:
        equations = list(equations_of(item))
        if any(equation.effects or traits_of(equation.primitive).contraction for equation in equations):
            return False
        made = set[int]().union(*(equation.results for equation in equations))
        return all(v in self.free or v in made for equation in equations for v in equation.reads)

    def _stage_of(self, item: Item) -> int:
        return self.cut.stage_of[next(equations_of(item)).layer or 0]

    # -- what crosses ------------------------------------------------------------------------

    def _find_imports(self) -> None:
        inside = {v for item in self.loop.sections[0] for v in _made(item)}
        enters = {piece.results[0]: piece for piece in self.shared_enters}
        for s, stage in enumerate(self.stages):
            entered: dict[int, None] = {}
            for item in stage.body:
                for equation in equations_of(item):
                    for value in equation.reads:
                        if value in enters:
                            entered[value] = None
                        if self.stage.get(value, s) != s and value in inside:
                            stage.inside.setdefault(value, equation)
            self._import_outside(s, [*stage.before, *stage.after, *(enter for enter, _ in stage.carries)])
            self._import_outside(s, [enters[value] for value in entered])
        for stage in self.stages:
            for value in stage.outside:
                if value not in self.trace.inputs:
                    self.stages[self.stage[value]].sent_outside[value] = None
            for value in stage.inside:
                producer = self.trace.equations[self.trace.producers[value]]
                self.stages[self.stage[value]].sent_inside[value] = producer

    def _import_outside(self, s: int, items: Iterable[Item]) -> None:
        for item in items:
            for equation in equations_of(item):
                for value in equation.reads:
                    if self.stage.get(value, s) != s:
                        self.stages[s].outside[value] = None

    # -- a stage's trace ---------------------------------------------------------------------

    def _finished(self, s: int, stage: _Stage) -> StageTrace:
        builder, loop = TraceBuilder(self.trace), LoopBuilder(self.loop.source)
        loop.given += self.shared_enters
        loop.carries += stage.carries
        loop.stacks += stage.stacks
        loop.body += stage.body
        taken = [(Port("argument", i), v) for i, v in enumerate(self.trace.inputs) if self._may_take(s, stage, v)]
        taken += [(Port("outside", v), v) for v in stage.outside if v not in self.trace.inputs]
        given = [(Port("result", i), atom) for i, atom in enumerate(self.trace.outputs) if self._gives(s, atom)]
        given += [(Port("outside", v), v) for v in stage.sent_outside]
        for value, reader in stage.inside.items():
            outer = builder.new(builder.avals[value])
            loop.give(reader, "enter_const", outer, value)
            taken.append((Port("inside", value), outer))
        for value, producer in stage.sent_inside.items():
            repeats = (1.0, builder.repeats[value], 1.0)
            buffer, within, last = (builder.new(builder.avals[value], repeat) for repeat in repeats)
            loop.carry(producer, buffer, within, value, last)
            taken.append((Port("buffer", value), buffer))
            given.append((Port("inside", value), last))
        builder.add(*stage.before, loop.nest(), *stage.after)
        live = builder.drop_dead(atom for _, atom in given)
        taken = [one for one in taken if one[1] in live]
        border = flat_border(
            [(value, _path(port, self.trace.input_paths)) for port, value in taken],
            [(atom, _path(port, self.trace.output_paths)) for port, atom in given],
        )
        made = builder.finish(name=f"stage {s} of {self.trace.name}", **border)
        inputs, outputs = tuple(port for port, _ in taken), tuple(port for port, _ in given)
        return StageTrace(renumbered(made), inputs, outputs, tuple(_carried(inputs, outputs, self.cut.carried)))

    def _may_take(self, s: int, stage: _Stage, value: int) -> bool:
        return value in self.cut.free or self.stage.get(value) == s or value in stage.outside

    def _gives(self, s: int, atom: Atom) -> bool:
        """Whether a stage returns a result of the step; one that all could return comes from the first."""
        return s == (self.stage.get(atom, 0) if isinstance(atom, int) else 0)


def _carried(
    inputs: Sequence[Port], outputs: Sequence[Port], whole: Iterable[tuple[int, int]]
) -> Iterator[tuple[int, int]]:
    result_of, at = dict(whole), {port: i for i, port in enumerate(outputs)}
    for i, port in enumerate(inputs):
        alias = None
        if port.kind == "argument" and port.value in result_of:
            alias = Port("result", result_of[port.value])
        elif port.kind == "buffer":
            alias = Port("inside", port.value)
        if alias in at:
            yield i, at[alias]


def _path(port: Port, paths: Sequence[str]) -> str:
    return paths[port.value] if port.kind in ("argument", "result") else f"{port.kind} {port.value}"


def _made(item: Item) -> Iterator[int]:
    return (v for equation in equations_of(item) for v in equation.results)
