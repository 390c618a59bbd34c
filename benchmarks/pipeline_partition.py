"""Compare the package's stage partitioner with five others, by the objective of 1F1B.

Prices are formulas over a hardware profile, not plans: matmuls at the device's rate, Megatron's all-reduces inside a
submesh, gradients all-reduced over its data-parallel groups, ZeRO-1, and rematerialization that keeps only each layer's
input. Of the splits into data and model parallelism, a stage has the fastest, and as a second option the one with least
memory. A price takes no time to compute, so the searches themselves are compared. A query is one price that a
partitioner requests. The package's partitioner knows which layers are equal (`layer_keys`). Its first row also assumes
that a run of layers costs at least as much as its parts (`growth`); the row below does not. Random search and learning
look at 1,000 partitions each; the others try every number of stages that divides the devices.

Programs: GPT 39B (48 equal layers, an embedding, a head) on 8 hosts of 8 V100s; ResNet-152 on 2 hosts of 8 V100s, whose
blocks differ in FLOPs, bytes between them and parameters; GPT 6.7B on one host of 8 A100s and two of 8 V100s.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autopar.cost.collectives import collective_time
from autopar.hardware.profile import HardwareProfile, load
from autopar.ir.mesh import MeshShape
from autopar.pipeline.partition.cluster import Cluster, DeviceGroup, SubmeshShape
from autopar.pipeline.partition.exact import ExactPartitioner
from autopar.pipeline.partition.problem import Growth, Partitioner, PartitionProblem, StageCost
from autopar.pipeline.schedule.one_forward_one_backward import ONE_F_ONE_B
from autopar.pipeline.schedule.table import objective_of
from benchmarks.baselines.stages_equal import EqualLayers, EqualOperators
from benchmarks.baselines.stages_min_cut import MinCut
from benchmarks.baselines.stages_random import RandomSearch
from benchmarks.baselines.stages_reinforce import Reinforce

Row = dict[str, str | float | int]
_OWN, _ASKING = "autopar", "autopar, all prices asked"
_PARTITIONS = 1000  # number of partitions for learning and random search


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer, for one example.

    Args:
        flops: FLOPs of its forward pass.
        params: number of parameters.
        out_elements: elements that it passes to the next layer.
        inner_elements: elements that are live while it runs.
        key: equal layers have equal keys.
    """

    flops: float
    params: float
    out_elements: float
    inner_elements: float
    key: str


@dataclass(frozen=True, slots=True)
class Model:
    """A train step over layers.

    Args:
        dtype, num_bytes: type and bytes of matmul operands and activations.
        state_bytes: bytes per parameter that every replica holds, and bytes that ZeRO-1 shards over replicas.
        splits: whether a layer can be sharded as in Megatron.
        batch, num_microbatches: examples per step, and its number of microbatches.
    """

    layers: tuple[Layer, ...]
    dtype: str
    num_bytes: int
    state_bytes: tuple[float, float]
    splits: bool
    batch: int
    num_microbatches: int

    @property
    def microbatch(self) -> int:
        """Examples per microbatch."""
        return self.batch // self.num_microbatches


def gpt(hidden: int, num_layers: int, *, batch: int, num_microbatches: int) -> Model:
    """A GPT with sequences of 1,024 and a vocabulary of 51,200; float16 with float32 masters and Adam."""
    length, vocabulary = 1024, 51_200
    stream = float(length * hidden)
    embedding = Layer(0.0, float(vocabulary * hidden), stream, stream, "embedding")
    block = Layer(
        2.0 * length * 12 * hidden**2 + 4.0 * length**2 * hidden, 12.0 * hidden**2, stream, 17 * stream, "block"
    )
    head = Layer(2.0 * length * hidden * vocabulary, float(vocabulary * hidden), 1.0, 3.0 * length * vocabulary, "head")
    layers = (embedding, *[block] * num_layers, head)
    return Model(layers, "float16", 2, (4.0, 12.0), True, batch, num_microbatches)


def resnet152(*, batch: int, num_microbatches: int) -> Model:
    """Bottleneck blocks of He et al. 2015, images of 224 pixels a side; float32 with momentum."""
    layers = [Layer(2.4e8, 9.4e3, 64 * 56.0**2, 2 * 64 * 112.0**2, "stem")]
    before = 64
    for stage, (count, width) in enumerate(((3, 64), (8, 128), (36, 256), (3, 512))):
        size = 56 // 2**stage
        for number in range(count):
            params = before * width + 9 * width**2 + 4 * width**2 + (4 * before * width if number == 0 else 0)
            out = 4.0 * width * size**2
            inner = out + 2 * width * size**2
            layers.append(
                Layer(
                    2.0 * params * size**2, params, out, inner, f"stage {stage}, {'first' if number == 0 else 'other'}"
                )
            )
            before = 4 * width
    layers.append(Layer(4.1e6, 2.05e6, 1.0, 1000.0, "head"))
    return Model(tuple(layers), "float32", 4, (8.0, 4.0), False, batch, num_microbatches)


PROGRAMS: dict[str, tuple[Model, Cluster]] = {
    "GPT 39B, 8x8 V100": (
        gpt(8192, 48, batch=1024, num_microbatches=256),
        Cluster((DeviceGroup("v100-sxm-16", 8, 8),)),
    ),
    "ResNet-152, 2x8 V100": (
        resnet152(batch=1536, num_microbatches=24),
        Cluster((DeviceGroup("v100-sxm-16", 2, 8),)),
    ),
    "GPT 6.7B, 8 A100 and 2x8 V100": (
        gpt(4096, 32, batch=512, num_microbatches=64),
        Cluster((DeviceGroup("v100-sxm-16", 2, 8), DeviceGroup("a100-sxm-40", 1, 8))),
    ),
}


def measure(program: str) -> list[Row]:
    """One row for each partitioner."""
    model, cluster = PROGRAMS[program]
    flops = [layer.flops for layer in model.layers]
    cuts = [0.0, *(layer.out_elements for layer in model.layers[:-1])]
    every: dict[str, Partitioner] = {
        _OWN: ExactPartitioner(),
        _ASKING: ExactPartitioner(),
        "equal layers": EqualLayers(),
        "equal operators": EqualOperators(flops),
        "minimum cut": MinCut(flops, cuts),
        "random search": RandomSearch(_PARTITIONS),
        "reinforcement learning": Reinforce(flops, _PARTITIONS),
    }
    rows: list[Row] = []
    for name, partitioner in every.items():
        problem = problem_of(model, cluster)  # a new one: no partitioner profits from another's prices
        if name == _ASKING:
            problem = replace(problem, growth=Growth.UNKNOWN)
        begin = time.perf_counter()
        found = partitioner.partition(problem)
        seconds = time.perf_counter() - begin
        among = f" among {found.among}" if found.among else ""
        rows.append(
            {
                "partitioner": name,
                "step_s": found.cost_s,
                "over the best": "",
                "stages": len(found.stages),
                "devices of each": _sizes([stage.submesh.shape for stage in found.stages]),
                "queries": found.num_queries,
                "seconds": seconds,
                "outcome": found.status.value.split(":")[0] + among if found.stages else "found nothing that fits",
            }
        )
    best = min(float(row["step_s"]) for row in rows)
    for row in rows:
        row["over the best"] = f"{float(row['step_s']) / best - 1:+.1%}" if row["stages"] else ""
    return rows


def problem_of(model: Model, cluster: Cluster) -> PartitionProblem:
    """The partition problem of a model on a cluster, with prices by formula."""
    profiles = {kind: load(kind) for kind in cluster.kinds}
    cost = functools.cache(lambda first, last, shape: price(model, first, last, shape, profiles[shape.kind]))

    def transfer_s(boundary: int, source: SubmeshShape, target: SubmeshShape, same_host: bool) -> float:
        num_bytes = model.layers[boundary - 1].out_elements * model.microbatch * model.num_bytes
        senders = min(source.num_devices, target.num_devices)  # each device sends its part
        ends = (profiles[source.kind], profiles[target.kind])
        links = [end.host_link if same_host else end.network_link for end in ends]
        rate, latency = min(link.bytes_per_s for link in links), max(link.latency_s for link in links)
        return 2 * (num_bytes / senders / rate + latency)

    return PartitionProblem(
        num_layers=len(model.layers),
        cluster=cluster,
        cost=cost,
        transfer_s=transfer_s,
        objective=objective_of(ONE_F_ONE_B, model.num_microbatches, 1),
        budget_bytes={kind: profile.usable_bytes for kind, profile in profiles.items()},
        growth=Growth.SUPERADDITIVE,
        layer_keys=[layer.key for layer in model.layers],
        shapes=tuple(replace(shape, option=option) for shape in cluster.shapes() for option in range(1 + model.splits)),
    )


def price(model: Model, first: int, last: int, shape: SubmeshShape, profile: HardwareProfile) -> StageCost | None:
    """The price of layers on a submesh.

    Option 0 is the fastest split into data and model parallelism that fits a microbatch, or the one with least memory
    if none fits; option 1 is the one with least memory. None if there are fewer examples than devices.
    """
    layers, found = model.layers[first : last + 1], []
    for num_model in range(1, shape.devices_per_host + 1 if model.splits else 2):
        num_data = shape.num_devices // num_model
        if shape.devices_per_host % num_model or num_data > model.microbatch:
            continue
        cost = _split(model, layers, MeshShape(("data", "model"), (num_data, num_model)), profile)
        seconds = model.num_microbatches * (cost.forward_s + cost.backward_s) + cost.update_s
        held = cost.bytes_with(1)
        small = shape.option or held > profile.usable_bytes
        found.append(((held, 0.0) if small else (0.0, seconds), cost))
    return min(found, key=lambda pair: pair[0])[1] if found else None


def _split(model: Model, layers: Sequence[Layer], mesh: MeshShape, profile: HardwareProfile) -> StageCost:
    num_data, num_model = (mesh.size(axis) for axis in ("data", "model"))
    examples = math.ceil(model.microbatch / num_data)
    send: Callable[..., float] = functools.partial(collective_time, mesh=mesh, profile=profile)
    compute_s = sum(layer.flops for layer in layers) * examples / num_model / profile.matrix_rate(model.dtype)
    compute_s += len(layers) * 10 * profile.kernel_launch_s
    moved = [layer.out_elements * examples * model.num_bytes for layer in layers]
    sent_s = sum(2 * send("all-reduce", num_bytes, ("model",)) for num_bytes in moved)
    params = sum(layer.params for layer in layers) / num_model
    update_s = send("all-reduce", params * model.num_bytes, ("data",))
    update_s += 2 * params * sum(model.state_bytes) / num_data / profile.hbm_bytes_per_s
    replicated, divided = model.state_bytes
    return StageCost(
        forward_s=compute_s + sent_s,
        backward_s=3 * compute_s + 2 * sent_s,  # the forward pass again, and two matmuls per forward matmul
        update_s=update_s,
        state_bytes=params * (replicated + divided / num_data),
        flight_bytes=sum(moved),
        working_bytes=max(layer.inner_elements for layer in layers) * examples * model.num_bytes / num_model,
    )


def _sizes(shapes: Sequence[SubmeshShape]) -> str:
    """Devices of each stage; equal neighbours as a count."""
    parts: list[tuple[int, str, int]] = []
    for shape in shapes:
        if parts and parts[-1][:2] == (shape.num_devices, shape.kind):
            parts[-1] = (*parts[-1][:2], parts[-1][2] + 1)
        else:
            parts.append((shape.num_devices, shape.kind, 1))
    several = len({kind for _, kind, _ in parts}) > 1
    return ", ".join(f"{n} x {size}{f' {kind}' if several else ''}" for size, kind, n in parts)
