"""Cut a step into the part that each data-parallel worker runs on its share of the batch, and the update that a server runs.

    whole:  data of the whole batch -> what examples read of it, such as a number of tokens; rarely needed
    worker: state, a share          -> the worker's terms of the sums over the batch: gradients, loss
    update: state, the terms added  -> new state, results

In: a `Program`. Out: `WorkerCut`: three programs, each planned and run like any other. The cut is that of gradient accumulation
(`classify`): what runs once per microbatch there runs on each worker here, and what runs after the loop is the update. So with all
workers the numbers are those of gradient accumulation over as many microbatches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from autopar.errors import MicrobatchError
from autopar.frontend.equations import Atom, Item, equations_of, items_of
from autopar.frontend.trace import Trace
from autopar.frontend.trace_builder import TraceBuilder, flat_border, renumbered
from autopar.ir.graph import Graph
from autopar.transforms.microbatch.batch_dims import Places
from autopar.transforms.microbatch.classify import Split, classify
from autopar.transforms.microbatch.rewrite import check_divides, laid_for_parts, write_microbatch
from autopar.transforms.microbatch.slices import Cut
from autopar.transforms.microbatch.worker_border import WorkerBorder
from autopar.transforms.program import Program, program_of_trace

#: Where an input of a part comes from: the state, another argument of the step, the program of the whole batch, the worker's
#: number, or what the workers pushed.
Source = Literal["state", "argument", "whole", "number", "term"]


@dataclass(frozen=True, slots=True)
class Input:
    """One input of a part.

    Args:
        index: for state and arguments, the position of the step's input; else that of the output of `whole`, or of the term.
        cut: how the value is cut into shares; None if it is taken whole.
        shape: of the whole value.
    """

    source: Source
    index: int = 0
    cut: Cut | None = None
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Term:
    """What each worker hands to the update for one value.

    Args:
        kind: how the terms of several workers are combined: a reduction (`slices.COMBINE`), `rows` for one value per example, or
            `same` for what all workers have of one batch.
        dtype, shape: of the combined value.
        cut: of `rows`.
        where: the operation that makes it, for messages.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    cut: Cut | None
    where: str


@dataclass(frozen=True, slots=True)
class Part:
    """One of the programs, and where its inputs come from."""

    program: Program
    inputs: tuple[Input, ...]


@dataclass(frozen=True, slots=True)
class WorkerCut:
    """A step cut for data-parallel workers.

    Args:
        whole: None if nothing is computed from the whole batch.
        worker: its outputs are the terms.
        update: its outputs are those of the step.
        batch_size: the number of examples of all workers.
    """

    whole: Part | None
    worker: Part
    update: Part
    terms: tuple[Term, ...]
    batch_size: int
    num_workers: int


def cut_for_workers(
    program: Program, num_workers: int, *, own_statistics: bool = False, wide: bool = False
) -> WorkerCut:
    """Cut a step.

    Args:
        own_statistics: whether each worker may have batch statistics of its own; as in `classify`.
        wide: whether narrow sums leave the worker in float32.

    Raises:
        MicrobatchError: the number of workers does not divide the batch, or the batch cannot be split.
    """
    form = program.as_written
    trace, graph = form.trace, form.graph
    check_divides(graph, num_workers, "shares of workers")
    trace, graph = laid_for_parts(trace, graph)
    places = Places(graph)
    split = classify(trace, graph, places, own_statistics=own_statistics)
    border = WorkerBorder(trace, split, num_workers, wide=wide)
    write_microbatch(trace, graph, places, split, border)
    return _Cutting(trace, graph, split, border).run()


def cut_before_update(program: Program, *, own_statistics: bool = False) -> WorkerCut:
    """Cut a step before its update, for the whole batch: the worker computes the terms of any of its microbatches in a loop over these,
    as in a pipeline. It also returns the state that it reads, unchanged, so that a planner takes that for state.

    Args:
        own_statistics: whether each microbatch may have batch statistics of its own; as in `classify`.

    Raises:
        MicrobatchError: the batch cannot be split.
    """
    form = program.as_written
    trace, graph = laid_for_parts(form.trace, form.graph)
    places = Places(graph)
    split = classify(trace, graph, places, own_statistics=own_statistics)
    border = WorkerBorder(trace, split, 1)
    write_microbatch(trace, graph, places, split, border)
    return _Cutting(trace, graph, split, border).before_update()


class _Cutting:
    """Divides the items of a trace; the one mutable object of this module."""

    def __init__(self, trace: Trace, graph: Graph, split: Split, border: WorkerBorder) -> None:
        self.trace, self.graph, self.split, self.border = trace, graph, split, border
        self.carried = graph.carried
        self.state = {trace.inputs[position] for position, _ in graph.carried}
        self.whole, self.local, self.update = self._divided()
        self.of_whole = {v for item in self.whole for v in _made(item)} - {
            v for item in self.local for v in _made(item)
        }

    def run(self) -> WorkerCut:
        """The three programs."""
        terms, names, update_part = self._updating()
        worker = self.border.builder
        nothing = self.trace.equations[0]
        outputs = [self.border.left[v] if v in self.border.left else self.border.enter(v, nothing) for v in terms]
        worker.add(*self.local, *self.border.body)
        live = worker.drop_dead(outputs)
        made = {v for item in worker.items for v in _made(item)} | set(worker.constants)
        taken = sorted(v for v in live if v not in made)
        worker_trace = worker.finish(
            name=f"{self.trace.name} of a worker",
            **_border([(v, self._path(v)) for v in taken], list(zip(outputs, names, strict=True))),
        )
        share_of = {share: value for value, share in self.border.shares.items()}
        wanted = sorted({share_of.get(v, v) for v in taken} & self.of_whole)
        return WorkerCut(
            whole=self._whole(wanted) if wanted else None,
            worker=Part(_program(worker_trace, ()), tuple(self._input(v, share_of, wanted) for v in taken)),
            update=update_part,
            terms=tuple(map(self._term, terms)),
            batch_size=self.split.batch.size,
            num_workers=self.border.m,
        )

    def before_update(self) -> WorkerCut:
        """All that runs before the update, and the update, which reads arguments by itself."""
        needed, _, update_part = self._updating()
        terms = [v for v in needed if v not in self.trace.inputs]
        names = [f"term {n}" for n in range(len(terms))]
        sources = tuple(
            one
            if one.source == "state"
            else Input("term", terms.index(needed[one.index]))
            if needed[one.index] in terms
            else Input("argument", self._position(needed[one.index]))
            for one in update_part.inputs
        )
        builder = TraceBuilder(self.trace)
        builder.add(*items_of(self.trace.equations, self.trace.regions))
        live = builder.drop_dead(terms)
        taken = [(n, v) for n, v in enumerate(self.trace.inputs) if v in live]
        state = [(at, v) for at, (_, v) in enumerate(taken) if v in self.state]
        trace = builder.finish(
            name=f"{self.trace.name} before its update",
            **_border(
                [(v, self._path(v)) for _, v in taken],
                [*zip(terms, names, strict=True), *((v, self._path(v)) for _, v in state)],
            ),
        )
        pairs = tuple((at, len(terms) + n) for n, (at, _) in enumerate(state))
        inputs = tuple(
            Input("state" if v in self.state else "argument", n, None, tuple(self.trace.avals[v].shape))
            for n, v in taken
        )
        return WorkerCut(
            whole=None,
            worker=Part(_program(trace, pairs), inputs),
            update=replace(update_part, inputs=sources),
            terms=tuple(map(self._term, terms)),
            batch_size=self.split.batch.size,
            num_workers=1,
        )

    def _updating(self) -> tuple[list[int], list[str], Part]:
        """The values that the update takes from workers, their names, and the update."""
        update = TraceBuilder(self.trace)
        update.add(*self.update)
        live = update.drop_dead(self.trace.outputs)
        made = {v for item in update.items for v in _made(item)} | set(update.constants)
        needed = sorted(v for v in live if v not in made)
        terms = [v for v in needed if v not in self.state]
        names = [f"term {n}" for n in range(len(terms))]
        update_trace = update.finish(
            name=f"update of {self.trace.name}",
            **_border(
                [(v, self._path(v) if v in self.state else names[terms.index(v)]) for v in needed],
                list(zip(self.trace.outputs, self.trace.output_paths, strict=True)),
            ),
        )
        sources = [
            Input("state", self._position(v)) if v in self.state else Input("term", terms.index(v)) for v in needed
        ]
        at = {one.index: n for n, one in enumerate(sources) if one.source == "state"}
        pairs = tuple((at[position], output) for position, output in self.carried if position in at)
        return terms, names, Part(_program(update_trace, pairs), tuple(sources))

    def _divided(self) -> tuple[list[Item], list[Item], list[Item]]:
        """The items of the whole batch, those that each worker computes for itself, and those of the update."""
        whole, local, update = list[Item](), list[Item](), list[Item]()
        items = items_of(self.trace.equations, self.trace.regions)
        places, kinds = self.split.batch.places, self.split.kinds
        for (start, stop, _), item in zip(self.trace.walk(), items, strict=True):
            values = {v for e in self.trace.equations[start:stop] for v in (*e.reads, *e.results)}
            results = [v for e in self.trace.equations[start:stop] for v in e.results]
            before, has_batch = start in self.split.before, any(v in places for v in values)
            if before:
                whole.append(item)
                if not has_batch:
                    local.append(item)
            is_same = start in self.split.inside and all(kinds.get(v) in ("same", "zero") for v in results)
            if start in self.split.after or (not has_batch and (before or is_same)):
                update.append(item)
        return whole, local, update

    def _whole(self, wanted: Sequence[int]) -> Part:
        builder = TraceBuilder(self.trace)
        builder.add(*self.whole)
        live = builder.drop_dead(wanted)
        inputs = [(n, v) for n, v in enumerate(self.trace.inputs) if v in live]
        trace = builder.finish(
            name=f"{self.trace.name} of the whole batch",
            **_border(
                [(v, self.trace.input_paths[n]) for n, v in inputs], [(v, f"whole {n}") for n, v in enumerate(wanted)]
            ),
        )
        return Part(_program(trace, ()), tuple(Input("argument", n) for n, _ in inputs))

    def _input(self, value: int, share_of: dict[int, int], wanted: Sequence[int]) -> Input:
        if value == self.border.number:
            return Input("number")
        source = share_of.get(value, value)
        cut = self.border.cut(source) if value in share_of else None
        shape = tuple(self.trace.avals[source].shape)
        if source in wanted:
            return Input("whole", wanted.index(source), cut, shape)
        return Input("state" if source in self.state else "argument", self._position(source), cut, shape)

    def _term(self, value: int) -> Term:
        aval = self.trace.avals[value]
        n = self.trace.producers.get(value)
        kind, where = "same", self.trace.input_paths[self._position(value)] if n is None else ""
        if n is not None:
            equation = self.trace.equations[n]
            source = self.graph.nodes[n].source
            where = f"`{equation.primitive}`" + (f" in `{equation.path}`" if equation.path else "")
            where += f" at {source}" if source else ""
        if value in self.border.left and self.border.is_term(value):
            kind = "sum" if self.border.is_summed(value) else self.border.kind(value)
        elif value in self.split.batch.places:
            kind = "rows"
        cut = self.border.cut(value) if kind == "rows" else None
        return Term(kind, str(aval.dtype), tuple(aval.shape), cut, where)

    def _position(self, value: int) -> int:
        if value not in self.trace.inputs:
            raise MicrobatchError(
                "the batch cannot be split over workers: a value of the whole batch is read by the update"
            )
        return self.trace.inputs.index(value)

    def _path(self, value: int) -> str:
        if value in self.trace.inputs:
            return self.trace.input_paths[self.trace.inputs.index(value)]
        share = {share: v for v, share in self.border.shares.items()}.get(value)
        if share is not None and share in self.trace.inputs:
            return self.trace.input_paths[self.trace.inputs.index(share)]
        return "number" if value == self.border.number else f"whole {value}"


def _border(inputs: Sequence[tuple[int, str]], outputs: Sequence[tuple[Atom, str]]) -> dict[str, Any]:
    return {**flat_border(inputs, outputs), "microbatches": None}


def _program(trace: Trace, carried: tuple[tuple[int, int], ...]) -> Program:
    return program_of_trace(renumbered(trace), carried, tuple(position for position, _ in carried), ())


def _made(item: Item) -> Iterable[int]:
    return (v for equation in equations_of(item) for v in equation.results)
