"""Conformance of `autopar.xla_model` with XLA's own passes, on every supported JAX release.

Small steps with pinned inputs are planned for eight H100s, predicted pass by pass, and compiled for eight absent ones.
The compiled program shows the effect of each pass: bytes sent (SPMD partitioner), number of collectives (combiners),
number of kernels (fusion), temporaries (buffer assignment), hidden collectives and estimated step time (latency-hiding
scheduler).
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from on_absent_gpus import compiled
from planned import plan_and_candidate

import autopar.xla_model
from autopar.ir.mesh import MeshShape
from autopar.plans.plan import Plan
from autopar.transforms.program import program_of
from autopar.xla_compiler import hlo_collectives as hlo
from autopar.xla_compiler.compiler import CompiledStep, Compiler
from autopar.xla_compiler.hlo_metadata import mesh_axes
from autopar.xla_model.imitated import CHECKED, PASSES
from autopar.xla_model.timeline import Timeline

pytestmark = pytest.mark.contract

WIDTH, ROWS = 1024, 8192


def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def layers(x: jax.Array, ws: dict[str, jax.Array]) -> jax.Array:
    for w in ws.values():
        x = jnp.tanh(x @ w)
    return x


def attention(x: jax.Array, ws: dict[str, jax.Array]) -> jax.Array:
    """Attention with one head and eight sequences per device, between norms."""
    y = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)
    q, k, v = (jnp.einsum("bsd,dh->bsh", y, ws[name]) for name in "qkv")
    weights = jax.nn.softmax(jnp.einsum("bqh,bkh->bqk", q, k) * 0.125)
    return x + jnp.einsum("bqk,bkh->bqh", weights, v) @ ws["o"]


def heads(x: jax.Array, ws: dict[str, jax.Array]) -> jax.Array:
    """Attention with 16 heads, whose matmuls read queries, keys and values in other orders of dims."""
    q, k, v = ((x @ ws[name]).reshape(*x.shape[:2], 16, -1) for name in "qkv")
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    return x + jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape) @ ws["o"]


def dropped(dtype: Any) -> Callable[..., jax.Array]:
    """Causal attention with dropout of its weights, whose softmax is computed in a dtype."""

    def model(x: jax.Array, ws: dict[str, jax.Array]) -> jax.Array:
        q, k, v = (jnp.einsum("bsd,dh->bsh", x, ws[name]) for name in "qkv")
        scores = jnp.einsum("bqh,bkh->bqk", q, k).astype(dtype)
        is_before = jnp.tri(x.shape[1], dtype=bool)
        weights = jax.nn.softmax(jnp.where(is_before, scores, jnp.finfo(dtype).min)).astype(x.dtype)
        is_kept = x[:, :, None, 0] < x[:, None, :, 1]
        weights = weights * (is_kept.astype(x.dtype) / jnp.asarray(0.9, x.dtype))
        return x + jnp.einsum("bqk,bkh->bqh", weights, v) @ ws["o"]

    return model


def scanned(x: jax.Array, ws: dict[str, jax.Array]) -> jax.Array:
    return jax.lax.scan(lambda y, w: (jnp.tanh(y @ w) + y, None), x, ws["w"])[0]


def biased(x: jax.Array, ws: dict[str, jax.Array]) -> jax.Array:
    """Two layers with biases and the exact GELU, whose derivative reads what the first matmul makes."""
    y = jax.nn.gelu(x @ ws["a"] + ws["b"], approximate=False)
    return x + y @ ws["c"] + ws["d"]


def gated(x: jax.Array, ws: dict[str, jax.Array]) -> jax.Array:
    """Two matmuls of one operand: its gradient is a sum of two partial sums."""
    y = jnp.tanh(x * ws["scale"])
    return (jnp.tanh(y @ ws["a"]) * (y @ ws["b"])) @ ws["c"]


def tied(x: jax.Array, ws: dict[str, jax.Array]) -> jax.Array:
    """An autoencoder: the gradient of its weights is a sum of two, one of them transposed."""
    return jnp.tanh(x @ ws["a"]) @ ws["a"].T


def step_of(model: Callable[..., jax.Array]) -> Callable[..., Any]:
    """A step of gradient descent with momentum."""

    def step(ws: Any, momenta: Any, x: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(lambda w: jnp.mean(model(x, w) ** 2))(ws)
        momenta = jax.tree.map(lambda m, g: 0.9 * m + g, momenta, grads)
        return jax.tree.map(lambda w, m: w - 0.1 * m, ws, momenta), momenta, loss

    return step


@dataclass(frozen=True)
class Case:
    model: Callable[..., jax.Array]
    weights: dict[str, jax.ShapeDtypeStruct]
    batch: jax.ShapeDtypeStruct
    mesh: str
    pins: dict[str, P]


_SQUARES = {name: array(WIDTH, WIDTH) for name in "abcd"}
_DATA = P("data")
_DATA_PARALLEL = {"x": _DATA, "ws/*": P(), "momenta/*": P()}
_COLUMNS, _ROWS = P(None, "model"), P("model", None)
CASES = {
    "data parallel": Case(layers, _SQUARES, array(ROWS, WIDTH), "8", _DATA_PARALLEL),
    "FSDP": Case(layers, _SQUARES, array(ROWS, WIDTH), "8", {"x": _DATA, "ws/*": _DATA, "momenta/*": _DATA}),
    "Megatron": Case(
        layers,
        _SQUARES,
        array(ROWS, WIDTH),
        "2x4",
        {"x": _DATA}
        | {f"{of}/{name}": _COLUMNS if name in "ac" else _ROWS for of in ("ws", "momenta") for name in "abcd"},
    ),
    "attention": Case(
        attention,
        {name: array(512, 512, dtype=jnp.bfloat16) for name in "qkvo"},
        array(64, 512, 512, dtype=jnp.bfloat16),
        "8",
        _DATA_PARALLEL,
    ),
    "heads": Case(
        heads,
        {name: array(1024, 1024, dtype=jnp.bfloat16) for name in "qkvo"},
        array(32, 512, 1024, dtype=jnp.bfloat16),
        "8",
        _DATA_PARALLEL,
    ),
    **{
        f"dropout after a softmax in {jnp.dtype(dtype).name}": Case(
            dropped(dtype),
            {name: array(512, 512, dtype=jnp.bfloat16) for name in "qkvo"},
            array(64, 1024, 512, dtype=jnp.bfloat16),
            "8",
            _DATA_PARALLEL,
        )
        for dtype in (jnp.float32, jnp.bfloat16)
    },
    "biases": Case(
        biased,
        {"a": array(WIDTH, 4 * WIDTH), "b": array(4 * WIDTH), "c": array(4 * WIDTH, WIDTH), "d": array(WIDTH)},
        array(ROWS, WIDTH),
        "8",
        _DATA_PARALLEL,
    ),
    "two partial sums": Case(
        gated,
        {
            "scale": array(WIDTH),
            "a": array(WIDTH, 4 * WIDTH),
            "b": array(WIDTH, 4 * WIDTH),
            "c": array(4 * WIDTH, WIDTH),
        },
        array(ROWS // 16, WIDTH),
        "8",
        {"x": _DATA}
        | {f"{of}/{name}": P("data") if name == "c" else P(None, "data") for of in ("ws", "momenta") for name in "abc"}
        | {f"{of}/scale": P() for of in ("ws", "momenta")},
    ),
    "tied weights": Case(
        tied,
        {"a": array(WIDTH, 2 * WIDTH)},
        array(ROWS, WIDTH),
        "2x4",
        {"x": P(("data", "model")), "ws/*": P("model"), "momenta/*": P("model")},
    ),
    "scan": Case(scanned, {"w": array(6, WIDTH, WIDTH)}, array(ROWS, WIDTH), "8", _DATA_PARALLEL),
}


@dataclass(frozen=True)
class Figures:
    """The figures that show the effect of each pass.

    Args:
        sent: bytes by kind of collective and mesh axes.
        listed: the same, as the plan lists its collectives.
        collectives: operations by kind.
        kernels: kernels that a device launches.
        hidden: collectives that overlap with a kernel.
        seconds: step time by XLA's estimator.
    """

    sent: dict[tuple[str, tuple[str, ...]], float]
    listed: dict[tuple[str, tuple[str, ...]], float]
    collectives: dict[str, int]
    kernels: int
    temporary_bytes: float
    hidden: dict[str, int]
    seconds: float


def predicted(plan: Plan, timeline: Timeline) -> Figures:
    sent: dict[tuple[str, tuple[str, ...]], float] = defaultdict(float)
    listed: dict[tuple[str, tuple[str, ...]], float] = defaultdict(float)
    for use in plan.collectives:
        if use.num_bytes > 256:
            listed[use.kind, use.axes] += use.num_bytes * use.num_times
    collectives: Counter[str] = Counter()
    kernels = 0
    hidden: Counter[str] = Counter()
    for ran in timeline.ran:
        op = ran.op
        if op.kind != "collective":
            is_kernel = op.kind not in ("border", "view", "loop")
            kernels += is_kernel * (op.num_launches - 1 + (op.written_bytes > 40))
        elif op.payload_bytes > 256:
            sent[op.collective, op.axes] += op.payload_bytes * ran.num_iterations
            collectives[op.collective] += 1
            hidden[op.collective] += any(
                other.op.kind != "collective" and other.end_s > other.start_s
                and other.start_s < ran.end_s and other.end_s > ran.start_s for other in timeline.ran
            )  # fmt: skip
    return Figures(
        dict(sent),
        dict(listed),
        dict(collectives),
        kernels,
        timeline.temporary_bytes,
        dict(+hidden),
        timeline.step_time_s,
    )


_HEADER = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_LINE = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_COLLECTIVE = re.compile(rf"({'|'.join(hlo.KINDS)})(-start)?")
_KERNELS = frozenset(["fusion", "custom-call", "copy", "async-start"])


@dataclass(frozen=True)
class Line:
    """An HLO instruction."""

    name: str
    shape: str
    operation: str
    rest: str

    @property
    def called(self) -> list[str]:
        return re.findall(r"(?:calls|to_apply)=%?([\w.\-]+)", self.rest)


def computations(text: str) -> dict[str, list[Line]]:
    """Instructions of each computation, in their scheduled order."""
    found: dict[str, list[Line]] = {}
    for line in text.splitlines():
        if header := _HEADER.match(line):
            found[header[1]] = []
        elif one := _LINE.match(line):
            found[next(reversed(found))].append(Line(*one.groups()))
    return found


def seen(made: CompiledStep, mesh: MeshShape) -> Figures:
    """The figures of XLA's program, without collectives of scalars and kernels of loop counters."""
    sent: dict[tuple[str, tuple[str, ...]], float] = defaultdict(float)
    collectives: Counter[str] = Counter()
    for one in hlo.collectives(made.hlo_text):
        axes = mesh_axes(one.groups, mesh, pairs=one.kind == "collective-permute")
        sent[one.kind, axes or ()] += sum(one.payloads(mesh.num_devices)) * one.num_times
        collectives[one.kind] += 1
    inside = computations(made.hlo_text)

    def collective(line: Line) -> str:
        """The kind of collective of an instruction, possibly wrapped in a computation; else empty."""
        if found := _COLLECTIVE.fullmatch(line.operation):
            return found[1]
        return next((kind for name in line.called for one in inside[name] if (kind := collective(one))), "")

    run = inside.keys() - {name for lines in inside.values() for line in lines for name in line.called}
    kernels, hidden = 0, Counter[str]()
    for lines in (inside[name] for name in run):
        flying: dict[str, str] = {}
        for line in lines:
            kind, is_small = collective(line), not re.search(r"\[[\d,]*\d{2}", line.shape)
            if kind and line.operation.endswith("-start") and not is_small:
                flying[line.name] = kind
            elif line.operation.endswith("-done"):
                flying.pop(re.findall(r"%([\w.\-]+)", line.rest)[0], None)
            elif line.operation in _KERNELS and not kind and not is_small:
                kernels += 1
                hidden.update(flying.values())
                flying.clear()
    assert made.step_time_s is not None
    return Figures(dict(sent), dict(sent), dict(collectives), kernels, made.temp_bytes, dict(hidden), made.step_time_s)


# -- comparison ------------------------------------------------------------------------------


def made_both_ways(case: Case, compiler: Compiler) -> tuple[Figures, Figures]:
    args = case.weights, case.weights, case.batch
    program = program_of(step_of(case.model), args, carry=None, donate=None)
    plan, made = plan_and_candidate(program, mesh=case.mesh, hardware="h100-sxm", pin=case.pins)
    timeline = made.parts.simulation.timeline(estimated=True, combine_threshold_bytes=plan.combine_threshold_bytes)
    return predicted(plan, timeline), seen(compiled(compiler, plan, program, *args), plan.mesh)


@pytest.fixture(scope="module", params=CASES)
def both(request: pytest.FixtureRequest, absent_gpus: Compiler) -> tuple[str, Figures, Figures]:
    return request.param, *made_both_ways(CASES[request.param], absent_gpus)


#: Known ratio of predicted to compiled with JAX 0.10, 0.11 and 0.12; 1 where none is given. A prediction may be between the
#: ratio and 1, and `MARGIN` beyond either.
MARGIN = 0.02
RELEASES = sorted({".".join(version.split(".")[:2]) for version in CHECKED})
MEASURED: dict[str, dict[str, tuple[float, float, float]]] = {
    "kernels": {
        # Weights sharded by columns are transposed and copied to leave the step in their input layout.
        "Megatron": (0.81, 0.81, 0.81),
        # In the model the root of the variance is a kernel of its own; XLA computes it in its user.
        "attention": (1.03, 1.03, 1.03),
        "heads": (0.97, 1.0, 1.0),
        # In the model both columns that the kept weights depend on are sliced before; XLA slices one in its users.
        "dropout after a softmax in float32": (1.06, 1.06, 1.06),
        "dropout after a softmax in bfloat16": (1.07, 1.07, 1.07),
        # In the model the sums of a bias's gradient share a kernel with what they sum.
        "biases": (0.90, 0.90, 0.90),
        "two partial sums": (0.94, 0.94, 1.0),
        "tied weights": (1.09, 1.09, 1.09),
        # XLA's loops have separate kernels for slices of stacks and for copies of an iteration's results.
        "scan": (0.68, 0.67, 0.67),
    },
    "temporary_bytes": {
        # The order of kernels, which differs between releases, determines which values are live together.
        "data parallel": (1.33, 0.80, 1.0),
        "FSDP": (0.90, 1.12, 0.90),
        "Megatron": (0.91, 1.0, 0.91),
        "heads": (1.12, 1.0, 1.0),
        "dropout after a softmax in float32": (1.09, 1.09, 1.09),
        "dropout after a softmax in bfloat16": (1.08, 1.08, 1.08),
        "two partial sums": (1.20, 1.20, 1.0),
        "tied weights": (0.78, 1.0, 0.78),
        # Unexplained: XLA's loops keep two to three more values of an iteration.
        "scan": (0.95, 0.84, 0.87),
    },
    "seconds": {
        # XLA's schedules expose 125, 55 and 0 us of all-reduces; 11 us are predicted.
        "data parallel": (0.61, 0.76, 0.90),
        # Exposed collectives agree; kernels take 34 us more in XLA's estimate, a sixth.
        "FSDP": (0.87, 0.87, 0.87),
        "Megatron": (0.93, 0.93, 0.93),
        "attention": (0.97, 0.97, 0.97),
        # Unexplained: the kernels take 60 us more in JAX 0.10 than in 0.12.
        "heads": (0.84, 1.0, 0.98),
        "dropout after a softmax in float32": (1.0, 0.98, 1.0),
        "dropout after a softmax in bfloat16": (1.0, 0.98, 1.0),
        "biases": (0.97, 0.97, 0.97),
        # Unexplained; the hidden collectives are the same in all releases but 0.11.
        "two partial sums": (0.65, 0.88, 1.08),
    },
}
#: JAX 0.11 starts some collectives too late to overlap with a kernel: kind -> how many do.
HIDDEN = {
    ("FSDP", "0.11"): {"reduce-scatter": 0},
    ("Megatron", "0.11"): {"all-reduce": 0},
    ("attention", "0.11"): {"all-reduce": 0},
    ("dropout after a softmax in float32", "0.11"): {"all-reduce": 0},
    ("dropout after a softmax in bfloat16", "0.11"): {"all-reduce": 0},
    ("two partial sums", "0.11"): {"reduce-scatter": 0},
    ("tied weights", "0.11"): {"all-reduce": 0},
}


def release() -> str:
    """The release whose figures apply: the tested one, or that of a newer patch."""
    found = ".".join(jax.__version__.split(".")[:2])
    assert found in RELEASES, "compare xla_model with the XLA of this JAX, then add it to xla_model/imitated.py"
    return found


def assert_close(figure: str, both: tuple[str, Figures, Figures]) -> None:
    name, ours, xlas = both
    ratio = getattr(ours, figure) / getattr(xlas, figure)
    measured = MEASURED[figure].get(name, (1.0, 1.0, 1.0))[RELEASES.index(release())]
    assert min(measured, 1.0) - MARGIN <= ratio <= max(measured, 1.0) + MARGIN, (ours, xlas)


def test_the_spmd_partitioner_makes_the_predicted_collectives(both: tuple[str, Figures, Figures]) -> None:
    _, ours, xlas = both
    assert ours.sent == xlas.sent
    assert ours.listed == pytest.approx(ours.sent, abs=256)  # a loss that another collective carries


def test_the_combiners_make_as_many_collectives(both: tuple[str, Figures, Figures]) -> None:
    _, ours, xlas = both
    assert ours.collectives == xlas.collectives


def test_fusion_leaves_as_many_kernels(both: tuple[str, Figures, Figures]) -> None:
    assert_close("kernels", both)


def test_buffer_assignment_takes_as_much_memory(both: tuple[str, Figures, Figures]) -> None:
    assert_close("temporary_bytes", both)


def test_the_scheduler_hides_the_same_collectives(both: tuple[str, Figures, Figures]) -> None:
    name, ours, xlas = both
    if CASES[name].model is scanned:
        return  # XLA schedules a loop's body separately, so its collectives are not those of the step
    expected = Counter(ours.hidden | HIDDEN.get((name, release()), {}))
    assert dict(+expected) == xlas.hidden


def test_the_scheduler_estimates_the_same_step_time(both: tuple[str, Figures, Figures]) -> None:
    if CASES[both[0]].model is scanned:
        return  # XLA takes a loop for one short operation
    assert_close("seconds", both)


def test_every_module_names_the_pass_it_models() -> None:
    folder = Path(autopar.xla_model.__file__).parent
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__", "imitated"}
    assert sorted(name for one in PASSES for name in one.modules) == sorted(modules)
    for one in PASSES:
        said = import_module(f"autopar.xla_model.{one.modules[0]}").__doc__ or ""
        assert all(source.rpartition("/")[2] in said for source in one.sources), (one.name, said)
