"""Choose the slices of tokens of TeraPipe, and the number of microbatches with them.

In: a step, and a request with schedule `terapipe` but without slices. Out: the request with both.

One stage is planned with the tokens in 1, 2, 4, ... equal slices. The seconds of a slice of l tokens after c others are fitted
to a + b l + d l (c + l / 2), as Li et al. (2021) fit theirs: a constant for its kernels, work for each token, and attention
to all tokens before. The dynamic programme then chooses slices by these prices, for each number of microbatches.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from scipy.optimize import nnls

from autopar.errors import MicrobatchError
from autopar.frontend.from_jaxpr import graph_of
from autopar.pipeline.cut.stage_programs import Cuttable
from autopar.pipeline.cut.token_slices import model_tokens
from autopar.pipeline.partition.cluster import SubmeshShape
from autopar.pipeline.partition.token_slices import SliceSeconds, best_slices
from autopar.pipeline.schedule.token_slices import terapipe
from autopar.pipeline.search.request import StageRequest
from autopar.pipeline.search.stage_costs import StageCosts
from autopar.pipeline.search.stage_layouts import stage_layouts
from autopar.transforms.microbatch.batch_dims import num_examples
from autopar.transforms.program import Program

#: The numbers of equal slices that are priced, and the most ends of slices that are considered.
_PRICED, _MOST_ENDS = (1, 2, 4, 8), 32
#: The numbers of microbatches that are considered, unless one is asked for.
_NUMBERS = (1, 2, 4, 8)


def with_token_slices(program: Program, request: StageRequest) -> StageRequest:
    """The request with slices and a number of microbatches.

    Raises:
        MicrobatchError: the step's tokens look ahead, or its batch cannot be split.
    """
    form = program.as_written
    tokens = model_tokens(form.trace, form.graph)
    num_stages, ends = _num_stages(request), _equal_ends(tokens, min(tokens, _MOST_ENDS))
    best: tuple[float, int, tuple[int, ...]] | None = None
    for count in _counts(program, request):
        priced = samples_of(program, request, tokens, num_stages, count)
        samples = [(start, stop, sum(seconds)) for start, stop, seconds in priced]
        found = best_slices({1: fitted(samples, ends)}, count, num_stages)
        assert found is not None, "each number of slices is possible"
        lengths = [
            stop - start for start, stop in itertools.pairwise([0, *(ends[i] for i in found.microbatches[0][1])])
        ]
        if best is None or found.seconds < best[0]:
            best = found.seconds, count, tuple(lengths)
    if best is None:
        raise MicrobatchError("the step's batch cannot be split into the microbatches that were asked for")
    return replace(request, schedule=terapipe(best[2]), num_microbatches=best[1])


def fitted(samples: Sequence[tuple[int, int, float]], ends: Sequence[int]) -> SliceSeconds:
    """The seconds of the slice between any two ends.

    Args:
        samples: start, stop and seconds of priced slices.
        ends: the tokens at which slices may end, from 0.
    """

    def terms(start: float, stop: float) -> list[float]:
        length = stop - start
        return [1.0, length, length * (start + length / 2)]

    matrix = np.array([terms(start, stop) for start, stop, _ in samples])
    seconds = np.array([one for *_, one in samples])
    scale = matrix.max(axis=0)
    weights = nnls(matrix / scale / seconds[:, None], np.ones(len(samples)))[0] / scale
    table = np.full((len(ends), len(ends)), math.inf)
    for i, j in itertools.combinations(range(len(ends)), 2):
        table[i, j] = weights @ terms(ends[i], ends[j])
    return table


def samples_of(
    program: Program, request: StageRequest, tokens: int, num_stages: int, count: int
) -> Iterator[tuple[int, int, tuple[float, float]]]:
    """Slices of a middle stage: start, stop, and seconds of their forward and backward pass.

    Args:
        tokens: the tokens of an example.
        num_stages, count: numbers of stages and of microbatches.
    """
    graph, sizes = program.as_written.graph, {shape.num_devices for shape in request.shapes}
    layouts = stage_layouts(graph, request.pins, request.mesh, sizes, request.cluster.num_devices, 1)
    for number in _PRICED:
        if number > tokens:
            return
        ends = _equal_ends(tokens, number)
        lengths = [stop - start for start, stop in itertools.pairwise(ends)]
        cuttable = Cuttable.of(program, own_statistics=request.own_statistics, token_slices=lengths)
        flops = np.cumsum(cuttable.chain.flops)
        starts = [0, *(1 + int(np.searchsorted(flops, flops[-1] * s / num_stages)) for s in range(1, num_stages))]
        layers = cuttable.layers(sorted(set(starts)), count)
        costs = StageCosts(layers, request.profiles, range(layers.num_layers), layouts=layouts)
        middle = layers.num_layers // 2
        run = costs.planned(middle, middle, _shape(request, num_stages))
        for (start, stop), seconds in zip(itertools.pairwise(ends), run.slices, strict=True):
            yield start, stop, seconds


def _equal_ends(tokens: int, number: int) -> list[int]:
    """The ends of equal slices, from 0."""
    return [round(tokens * n / number) for n in range(number + 1)]


def _num_stages(request: StageRequest) -> int:
    """The stages that slices are chosen for: as many as were asked for, else one per host, or one per device of one host."""
    hosts = sum(group.num_hosts for group in request.cluster.groups)
    return request.stages if request.stages != "auto" else hosts if hosts > 1 else request.cluster.num_devices


def _shape(request: StageRequest, num_stages: int) -> SubmeshShape:
    """The largest submesh that each stage may have."""
    size = max(1, request.cluster.num_devices // num_stages)
    shapes = [shape for shape in request.shapes if shape.num_devices <= size] or list(request.shapes)
    return max(shapes, key=lambda shape: (shape.num_devices <= size, shape.num_devices))


def _counts(program: Program, request: StageRequest) -> Sequence[int]:
    if request.num_microbatches != "auto":
        return (request.num_microbatches,)
    form = program.as_written
    examples = num_examples(graph_of(form.trace, form.graph.carried))
    return [count for count in _NUMBERS if examples % count == 0]
