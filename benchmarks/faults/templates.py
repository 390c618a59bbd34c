"""Every failure of nodes, exhaustively: pipelines from templates (Oobleck) are covered again with no idle node.

For f failures, n0 the fewest nodes that hold the model, and every N from (f + 1) n0 to 32. *covers*: for every sum of template sizes to N in at
least f + 1 pipelines, every way in which at most f nodes fail (up to the order of nodes inside a pipeline and of equal pipelines). *failure sets*: for the pipelines
that are planned, every set of at most f nodes, with the state of a model of 24 equal layers followed from node to node: *copied* is the mean
and the most that all nodes copy, as a share of the model. *idle*, *no template*, *lost*: cases with an idle node, a pipeline of a size without a template, a
layer that no survivor has. *fewer nodes*: for every N from n0 to (f + 1) n0 - 1, whether the number of failures that the plan says it survives is
that of an exhaustive search.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from autopar.pipeline.templates.cover import cover, template_sizes
from autopar.pipeline.templates.state import Cells, holders
from autopar.pipeline.templates.templates import PipelineTemplates, Setting, Template, assembled, sizes_needed

NUM_LAYERS, MOST_NODES = 24, 32


def measure() -> list[dict[str, Any]]:
    """A row for each f and n0."""
    return [_row(survive, fewest) for survive in (1, 2, 3) for fewest in range(1, 7)]


def _row(survive: int, fewest: int) -> dict[str, Any]:
    covers = sets = idle = no_template = lost = 0
    copied: list[float] = []
    for num_nodes in range((survive + 1) * fewest, MOST_NODES + 1):
        sizes = template_sizes(fewest, num_nodes, survive)
        for pipelines in _sums(num_nodes, sizes, survive + 1):
            for failed in _ways(pipelines, survive):
                found = cover(pipelines, failed, fewest)
                covers += 1
                idle += sum(map(len, found.pipelines)) != num_nodes - len(failed)
                no_template += any(len(one) not in sizes for one in found.pipelines)
        plan = uniform(num_nodes, fewest, survive)
        for failed in _sets(range(num_nodes), survive):
            after = plan.after(failed)
            sets += 1
            idle += {n for one in after.pipelines for n in one} != {*range(num_nodes)} - {*failed}
            lost += any(one.source is None for one in after.copies)
            copied.append(after.copied_bytes / NUM_LAYERS)
    wrong = sum(
        uniform(num_nodes, fewest, survive).survives != _survived(uniform(num_nodes, fewest, survive))
        for num_nodes in range(fewest, (survive + 1) * fewest)
    )
    return {
        "f": survive,
        "n0": fewest,
        "nodes": f"{(survive + 1) * fewest} to {MOST_NODES}",
        "covers": covers,
        "failure sets": sets,
        "idle": idle,
        "no template": no_template,
        "lost": lost,
        "copied, mean": f"{100 * float(np.mean(copied)):.0f} %",
        "copied, most": f"{100 * max(copied):.0f} %",
        "fewer nodes": f"{survive * fewest - wrong} of {survive * fewest} right",
    }


def uniform(num_nodes: int, fewest: int, survive: int) -> PipelineTemplates:
    """The planned pipelines of a model of equal layers, whose stages have a node each."""
    setting = Setting(
        program="uniform",
        hardware="none",
        devices_per_node=1,
        requested=survive,
        fewest=fewest,
        num_microbatches=4 * MOST_NODES,
        network_bytes_per_s=1e3,
    )
    templates: dict[int, Template] = {}
    for size in sizes_needed(fewest, num_nodes, survive):
        held = np.zeros((size, NUM_LAYERS), bool)
        for node in range(size):
            held[node, node * NUM_LAYERS // size : -(-(node + 1) * NUM_LAYERS // size)] = True
        stages = tuple((n,) for n in range(size))
        templates[size] = Template(held=held, seconds=lambda m, size=size: (m + size - 1) / size, stages=stages)
    cells = Cells(
        num_bytes=np.ones(NUM_LAYERS),
        array=np.arange(NUM_LAYERS),
        paths=tuple(f"layer{n}" for n in range(NUM_LAYERS)),
        synced=np.ones(NUM_LAYERS, bool),
    )
    return assembled(setting, templates, cells, range(num_nodes))


def _sums(num_nodes: int, sizes: Sequence[int], at_least: int) -> Iterator[list[tuple[int, ...]]]:
    """All pipelines with so many nodes together."""

    def sums(left: int, most: int) -> Iterator[tuple[int, ...]]:
        if left == 0:
            yield ()
        for size in range(min(left, most), sizes[0] - 1, -1):
            yield from ((size, *rest) for rest in sums(left - size, size))

    for one in sums(num_nodes, sizes[-1]):
        if len(one) >= at_least:
            nodes = iter(range(num_nodes))
            yield [tuple(itertools.islice(nodes, size)) for size in one]


def _ways(pipelines: Sequence[tuple[int, ...]], most: int) -> Iterator[tuple[int, ...]]:
    """How many nodes of which pipelines fail; of equal ways, one."""
    seen: set[tuple[tuple[int, int], ...]] = set()
    for count in range(1, most + 1):
        for hit in itertools.combinations_with_replacement(range(len(pipelines)), count):
            numbers = {n: hit.count(n) for n in hit}
            key = tuple(sorted((len(pipelines[n]), k) for n, k in numbers.items()))
            if key in seen or any(k > len(pipelines[n]) for n, k in numbers.items()):
                continue
            seen.add(key)
            yield tuple(node for n, k in numbers.items() for node in pipelines[n][:k])


def _sets(nodes: Sequence[int], most: int) -> Iterator[tuple[int, ...]]:
    return itertools.chain.from_iterable(itertools.combinations(nodes, k) for k in range(1, most + 1))


def _survived(plan: PipelineTemplates) -> int:
    """The most failures of any nodes after which enough nodes are left and have all layers, by trying all."""
    has = holders(plan.pipelines, plan.held)

    def survived(failed: tuple[int, ...]) -> bool:
        left = [cells for node, cells in has.items() if node not in failed]
        return len(left) >= plan.setting.fewest and bool(np.any(left, axis=0).all())

    count = 0
    while count < plan.num_nodes and all(map(survived, itertools.combinations(has, count + 1))):
        count += 1
    return count
