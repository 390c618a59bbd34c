"""List what stages send to each other.

In: the programs of stages; or, before they are cut, a step's flow, its layers, and the stage of each layer.
Out: `Exchange`s. A value goes directly from the stage that makes it to each stage that reads it. Before stages are cut,
only the large values of the forward pass are known; their gradients are assumed to return the same way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.pipeline.cut.extract_stages import LeafKey, Port
from autopar.pipeline.cut.flow import Flow
from autopar.pipeline.cut.stage_programs import StageProgram
from autopar.pipeline.partition.sends import Exchange, When


@dataclass(frozen=True, slots=True)
class Passing:
    """A value that one layer makes and others read. Bytes are those of the whole batch."""

    producer: int
    readers: tuple[int, ...]
    num_bytes: float


def passing_of(flow: Flow, layer_of: Sequence[int]) -> tuple[Passing, ...]:
    """The values that pass between layers in the forward pass."""
    layer = dict(zip(flow.forward, layer_of, strict=True))
    found: list[Passing] = []
    for i, own in layer.items():
        for value in flow.units[i].results:
            readers = {layer[r] for r in flow.readers.get(value, ()) if r in layer} - {own}
            if readers:
                found.append(Passing(own, tuple(sorted(readers)), flow.num_bytes(iter((value,)))))
    return tuple(found)


def crossing_bytes(passing: Iterable[Passing], boundary: int) -> float:
    """Bytes of the values that one layer makes before a boundary, and another reads after it.

    Args:
        boundary: the first layer after it.
    """
    return sum(one.num_bytes for one in passing if one.producer < boundary <= one.readers[-1])


def exchanges_of_layers(passing: Iterable[Passing], stage_of: Sequence[int], *, trains: bool) -> tuple[Exchange, ...]:
    """What stages of these layers send to each other in each microbatch.

    Args:
        passing: with the bytes of one microbatch.
        stage_of: the stage of each layer.
        trains: whether gradients return.
    """
    found: dict[tuple[int, int, When], list[float]] = defaultdict(list)
    for one in passing:
        source = stage_of[one.producer]
        for target in {stage_of[reader] for reader in one.readers} - {source}:
            found[source, target, "microbatch"].append(one.num_bytes)
            if trains:
                found[target, source, "microbatch"].append(one.num_bytes)
    return _exchanges(found)


def exchanges_of(stages: Sequence[StageProgram]) -> tuple[Exchange, ...]:
    """What stages send to each other: in each microbatch; at the start of a step, parameters that several stages read,
    from the stage that updates them, and what is computed before the first microbatch; at its end, such as terms of
    the gradients of these parameters."""
    found: dict[tuple[int, int, When], list[float]] = defaultdict(list)
    producers: dict[Port, tuple[int, When]] = {
        port: (s, when) for s, stage in enumerate(stages) for port, when in _sent(stage)
    }
    homes: dict[LeafKey, int] = {}
    for s, stage in enumerate(stages):
        homes.update({stage.inputs[position].leaf: s for position, _ in _carried(stage)})
    for t, stage in enumerate(stages):
        graph = stage.program.graph
        for port, value in zip(stage.inputs, graph.inputs, strict=True):
            if port.kind in ("inside", "outside"):
                source, when = producers[port]
            elif port.kind == "argument" and port.leaf in homes:
                source, when = homes[port.leaf], "start"
            else:
                continue
            if source != t and value is not None:
                found[source, t, when].append(graph.values[value].num_bytes)
    return _exchanges(found)


def _carried(stage: StageProgram) -> Iterator[tuple[int, int]]:
    """Positions of arguments that the stage updates, and of their results."""
    return (pair for pair in stage.program.graph.carried if stage.inputs[pair[0]].kind == "argument")


def _sent(stage: StageProgram) -> Iterator[tuple[Port, When]]:
    """The values that a stage sends, and when."""
    trace = stage.program.trace
    ends = next((one.exit[0] for one in trace.regions if one.source is trace.microbatches), len(trace.equations))
    for port, value in zip(stage.outputs, trace.outputs, strict=True):
        if port.kind == "inside":
            yield port, "microbatch"
        elif port.kind == "outside":
            made = trace.producers.get(value, 0) if isinstance(value, int) else 0
            yield port, "start" if made < ends else "end"


def _exchanges(found: Mapping[tuple[int, int, When], list[float]]) -> tuple[Exchange, ...]:
    """Exchanges by source, target and time, from the sizes of their values."""
    return tuple(
        Exchange(source, target, sum(sizes), len(sizes), when)
        for (source, target, when), sizes in sorted(found.items())
    )
