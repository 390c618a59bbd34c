"""Predict how fast a model is on each layout, by plans of an engine's programs for absent devices.

In: a decoder's configuration, an engine's options, a hardware profile. Out: `StepTimes` by layout.

The layers of one kind are equal, so programs with few layers are planned, and the time and the memory of a layer are the
difference between two depths. If a decoder has layers of several kinds, its average layer counts. A pipeline stage has its share of the layers; the first also has the embedding, and the last the
head and the sampling. Between stages, the activations of all rows cross a link of the host.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp

from autopar.api.planned_function import plan_of
from autopar.errors import PlacementError
from autopar.hardware.profile import HardwareProfile
from autopar.inference.estimate.estimate import PaperInference
from autopar.inference.model.config import DecoderConfig
from autopar.inference.model.layer_kinds import LayerKind
from autopar.inference.schedule.requests import Options, Shape
from autopar.inference.serve.layout import Key, Served
from autopar.ir.mesh import MeshShape
from autopar.jax_interop.partition_spec import partition_spec
from autopar.placement.layouts import Layout, StepTimes
from autopar.plans.plan import Plan

#: The numbers of layers that are planned.
_DEPTHS = (2, 4)
#: The number of a layer in the path of a weight or a page.
_LAYER = re.compile(r"(?:\blayers_|^resident/pages/)(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedSpec:
    """A model and its engine's static sizes.

    Args:
        options: slots, the longest sequence, chunk shapes. dtype: of weights and cache; by default the configuration's.
        page_size: tokens per page.
    """

    config: DecoderConfig
    options: Options
    dtype: str = ""
    page_size: int = 16

    def served(self, kind: LayerKind, num_layers: int) -> Served:
        """The model with this number of layers of one kind, as the engine sees it."""
        options = self.options
        case = PaperInference(
            config=replace(self.config, num_layers=num_layers, layers=(kind,) * num_layers),
            batch=options.num_slots,
            prompt=1,
            output=1,
            max_length=options.max_length,
            dtype=self.dtype,
            page_size=self.page_size,
        )
        return replace(case.served, options=options)


@dataclass(frozen=True, slots=True)
class _Figures:
    """Predicted figures of all layers on one stage, as a layer's and the rest's."""

    layer_s: Mapping[Shape, float]
    rest_s: Mapping[Shape, float]
    layer_bytes: float
    embedding_bytes: float
    head_bytes: float
    tied_bytes: float
    temporary_bytes: float
    token_bytes_of_layer: float


def estimate_times(
    spec: ServedSpec, layouts: Sequence[Layout], profile: HardwareProfile, **planning: Any
) -> dict[Layout, StepTimes]:
    """Predict the times and the memory of a model on layouts.

    Args:
        planning: options of `autopar.plan`: time_limit_s, cache.

    Raises:
        PlacementError: a pipeline has more stages than the model has layers. AutoparError: planning fails.
    """
    found: dict[Layout, StepTimes] = {}
    figures: dict[int, _Figures] = {}
    for layout in layouts:
        if layout.pipeline > spec.config.num_layers:
            raise PlacementError(
                f"a pipeline of {layout.pipeline} stages needs as many layers, but the model has {spec.config.num_layers}"
            )
        if layout.tensor not in figures:
            figures[layout.tensor] = _mean_figures(spec, layout.tensor, profile, planning)
        found[layout] = _times(spec, layout, figures[layout.tensor], profile)
    return found


def _mean_figures(spec: ServedSpec, tensor: int, profile: HardwareProfile, planning: Mapping[str, Any]) -> _Figures:
    """The figures of the average layer, and of the rest beside layers of the most frequent kind."""
    counts = Counter(spec.config.layers).most_common()
    found = [_figures(spec, kind, tensor, profile, planning) for kind, _ in counts]
    shares = [count / spec.config.num_layers for _, count in counts]

    def mean(values: Iterable[float]) -> float:
        return sum(share * value for share, value in zip(shares, values, strict=True))

    return replace(
        found[0],
        layer_s={shape: mean(each.layer_s[shape] for each in found) for shape in found[0].layer_s},
        layer_bytes=mean(each.layer_bytes for each in found),
        temporary_bytes=max(each.temporary_bytes for each in found),
        token_bytes_of_layer=mean(each.token_bytes_of_layer for each in found),
    )


def _figures(
    spec: ServedSpec, kind: LayerKind, tensor: int, profile: HardwareProfile, planning: Mapping[str, Any]
) -> _Figures:
    """Plan the programs at two depths, and split their figures into a layer's and the rest's."""
    most = spec.config.num_layers
    deep = min(most, _DEPTHS[1])
    shallow = min(_DEPTHS[0], max(1, deep - 1))
    plans = {deep: _plans(spec, kind, deep, tensor, profile, planning)}
    if shallow < deep:  # with the same shardings, or the difference is not that of a layer
        plans[shallow] = _plans(spec, kind, shallow, tensor, profile, planning, _pins(plans[deep][Shape()]))
    layer_s: dict[Shape, float] = {}
    rest_s: dict[Shape, float] = {}
    for shape in plans[deep]:
        times = {depth: plans[depth][shape].prediction.step_time_s for depth in plans}
        each = times[deep] / deep
        if deep > shallow and times[deep] > times[shallow]:
            each = min(each, (times[deep] - times[shallow]) / (deep - shallow))
        layer_s[shape], rest_s[shape] = each, max(0.0, times[deep] - deep * each)
    inputs = plans[deep][Shape()].inputs
    is_layer = "layers_"
    layers = sum(t.num_bytes for t in inputs if t.path.startswith("params/") and is_layer in t.path)
    embedding = sum(t.num_bytes for t in inputs if t.path.startswith("params/") and "/embed" in t.path)
    rest = sum(t.num_bytes for t in inputs if t.path.startswith("params/") and is_layer not in t.path)
    tied = sum(t.num_bytes for t in inputs if t.path.startswith("params/") and "/embed/" in t.path)
    pages = sum(t.num_bytes for t in inputs if t.path.startswith("resident/pages/"))
    predictions = [plan.prediction for plan in plans[deep].values()]
    return _Figures(
        layer_s=layer_s,
        rest_s=rest_s,
        layer_bytes=layers / deep,
        embedding_bytes=embedding,
        head_bytes=rest - embedding,
        tied_bytes=tied if spec.config.tied else 0.0,
        temporary_bytes=max(each.temporary_bytes + each.output_bytes for each in predictions),
        token_bytes_of_layer=pages / deep / ((_num_pages(spec) + 1) * spec.page_size),
    )


def _num_pages(spec: ServedSpec) -> int:
    """The pages of all slots at full length."""
    return spec.options.num_slots * -(-spec.options.max_length // spec.page_size)


def _plans(
    spec: ServedSpec,
    kind: LayerKind,
    depth: int,
    tensor: int,
    profile: HardwareProfile,
    planning: Mapping[str, Any],
    pins: Mapping[str, Any] = MappingProxyType({}),
) -> dict[Shape, Plan]:
    """Plan one decode step and each chunk shape, with the shardings of the decode step.

    Args:
        pins: shardings of weights and pages, also of layers that this depth does not have; by default those that are planned.
    """
    served, mesh = spec.served(kind, depth), MeshShape(("model",), (tensor,))
    options = {**planning, "mesh": mesh, "hardware": profile}
    plans: dict[Shape, Plan] = {}
    for key in _planned_keys(spec.options):
        function, arguments = served.program(key, _num_pages(spec))
        known = {path: each for path, each in pins.items() if int(max(_LAYER.findall(path) or "0")) < depth}
        plans[key] = plan_of(function, arguments, {**options, "pin": known}, ("resident",))
        pins = pins or _pins(plans[key])
    return plans


def _pins(plan: Plan) -> dict[str, Any]:
    """The shardings of weights and pages."""
    fixed = (tensor for tensor in plan.inputs if tensor.path.startswith(("params/", "resident/")))
    return {tensor.path: partition_spec(tensor.sharding) for tensor in fixed}


def _planned_keys(options: Options) -> list[Any]:
    keys: list[Key] = [Shape(), *(shape for shape in options.shapes if shape.rows or shape.width > 1)]
    return keys


def _times(spec: ServedSpec, layout: Layout, figures: _Figures, profile: HardwareProfile) -> StepTimes:
    """Divide the layers into stages, so that the slowest stage of a decode step is as fast as it can be."""
    stages, config = layout.pipeline, spec.config
    num_layers = _divide(config.num_layers, stages, figures.rest_s[Shape()], figures.layer_s[Shape()])
    itemsize = jnp.dtype(spec.served(spec.config.layers[0], 1).dtype).itemsize
    stage_s: dict[Shape, tuple[float, ...]] = {}
    for shape in spec.options.shapes:
        one = shape if shape in figures.layer_s else Shape()  # several steps take several times as long
        rows = spec.options.num_slots * shape.width + shape.rows * shape.length
        link = profile.host_link
        send_s = link.latency_s + rows * config.hidden_size * itemsize / link.bytes_per_s
        seconds = [count * figures.layer_s[one] for count in num_layers]
        seconds[-1] += figures.rest_s[one]
        seconds = [each + (send_s if number < stages - 1 else 0.0) for number, each in enumerate(seconds)]
        stage_s[shape] = tuple(each * shape.steps for each in seconds)
    weights = [count * figures.layer_bytes for count in num_layers]
    weights[0] += figures.embedding_bytes
    weights[-1] += figures.head_bytes + (figures.tied_bytes if stages > 1 else 0.0)
    return StepTimes(
        layout=layout,
        options=spec.options,
        stage_s=stage_s,
        weight_bytes=max(weights),
        temporary_bytes=figures.temporary_bytes,
        token_bytes=max(num_layers) * figures.token_bytes_of_layer,
        page_size=spec.page_size,
        window=spec.config.for_length(spec.options.max_length).window,
    )


def _divide(num_layers: int, stages: int, rest_s: float, layer_s: float) -> list[int]:
    """The layers of each stage: at least one, and as even as possible in time with what the last stage has besides.

    >>> _divide(24, 4, 2.0, 1.0), _divide(2, 2, 5.0, 1.0)
    ([7, 7, 6, 4], [1, 1])
    """
    counts, seconds = [1] * stages, [layer_s] * stages
    seconds[-1] += rest_s
    for _ in range(num_layers - stages):
        at = min(range(stages), key=seconds.__getitem__)
        counts[at] += 1
        seconds[at] += layer_s
    return counts
