"""Verification of plans with stages: its pieces are those that the executor runs, and its figures are of these."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from dense_step import BATCH, LAYERS, WIDTH, arguments, step
from jax.sharding import NamedSharding, PartitionSpec
from pipelines import pipelined

import autopar
from autopar.cli.main import main
from autopar.errors import HardwareError, PlanFileError, PlanMismatchError
from autopar.hardware.profile import load
from autopar.ir.mesh import parse_mesh
from autopar.ir.sharding import TensorSharding
from autopar.jax_interop.absent_devices import absent_devices, serialized_output_shardings
from autopar.pipeline.run.abstract_run import AbstractRun, run_on_types
from autopar.pipeline.run.executor import Pipeline, PlannedStage
from autopar.pipeline.run.instructions import Call
from autopar.pipeline.run.same_program import without_module_name
from autopar.pipeline.run.uneven_values import UnevenValues
from autopar.runtime import jit as execute
from autopar.transforms.program import program_of
from autopar.verification.compile_pieces import absent_pipeline
from autopar.xla_compiler.compiler import Compiler
from benchmarks.pipeline.memory_count import run_counted

Digests = dict[tuple[int, Any], set[str]]


def digest(lowered: jax.stages.Lowered) -> str:
    return hashlib.sha256(without_module_name(lowered.as_text()).encode()).hexdigest()


def executed(pipeline: Pipeline, args: Any) -> Digests:
    """Run a step, and return what each piece was lowered to for the arrays that it got."""
    found: Digests = {}
    values = pipeline.begin(jax.tree.leaves(args))
    for one in pipeline.instructions.steps:
        if isinstance(one, Call):
            inputs = [values[i] for i in one.reads]
            one.settle(inputs)
            of = found.setdefault((one.stage, one.key), set())
            for link in one.program.links:
                of.add(digest(link.jitted.lower(*link.taken(inputs))))
        one.run(values)
    return found


@dataclass(frozen=True, slots=True)
class Compiled:
    temp_bytes: float
    output_bytes: float
    alias_bytes: float
    output_shardings: list[str]


def on_types(pipeline: Pipeline, changed: Callable[[list[str]], list[str]] = list) -> tuple[AbstractRun, Digests]:
    """Go through a step with types, compiling for the devices here.

    Args:
        changed: what replaces the shardings that XLA chose.
    """

    def compiled(stage: int, digest: str, lowered: jax.stages.Lowered) -> Compiled:
        del stage, digest
        program: Any = lowered.compile()
        sizes = program.memory_analysis()
        return Compiled(
            sizes.temp_size_in_bytes,
            sizes.output_size_in_bytes,
            sizes.alias_size_in_bytes,
            changed(serialized_output_shardings(program.runtime_executable())),
        )

    run = run_on_types(pipeline, compiled)
    found: Digests = {}
    for piece in run.pieces:
        found.setdefault((piece.stage, piece.key), set()).update(link.digest for link in piece.links)
    return run, found


@pytest.mark.parametrize(
    ("mesh", "schedule", "width"),
    [
        ("4", "1f1b", WIDTH),
        pytest.param("data=2,model=2", "zb-h1", WIDTH, marks=pytest.mark.slow),
        ("4", "gpipe", 50),  # no multiple of four: some values have uneven parts
    ],
)
def test_pieces_are_those_of_the_executor(mesh: str, schedule: str, width: int) -> None:
    args = arguments(width)
    options: dict[str, Any] = {"num_stages": 2, "num_microbatches": 4, "mesh": mesh, "schedule": schedule}
    run, pipeline = pipelined(step, args, **options)
    state, loss = run(*args)
    plain, expected = jax.jit(step)(*args)
    assert loss == pytest.approx(float(expected), rel=1e-5)
    for one, other in zip(jax.tree.leaves(state), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    found, digests = on_types(pipelined(step, args, **options)[1])
    assert digests == executed(pipeline, args)
    assert {piece.count for piece in found.pieces if piece.phase in ("forward", "weight")} == {4}
    assert {piece.count for piece in found.pieces if piece.phase == "update"} == {1}


@pytest.mark.parametrize("dtype", ["float32", "bool"])
def test_an_uneven_value_passes_padded_and_stays_sharded(dtype: str) -> None:
    """Both changes are local, and the padding is not read. Left to itself, XLA would gather the value."""
    mesh, shape = execute.make_mesh(parse_mesh("4"), jax.devices()[:4]), (6, 50)
    trace: Any = SimpleNamespace(inputs=(), avals={n: jax.ShapeDtypeStruct(shape, dtype) for n in (1, 2, 3)})
    by_column = TensorSharding(((), ("data",)))
    planned = {1: (by_column,), 2: (TensorSharding(((), ())),), 3: (by_column,)}
    uneven = UnevenValues(planned, trace, parse_mesh("4"), mesh, others={3})
    assert uneven.shapes.keys() == {1}
    values = jax.random.normal(jax.random.key(0), shape).astype(dtype)
    passed = jax.jit(lambda x: uneven.padded(1, x))(values)
    assert passed.shape == (6, 52) and passed.sharding.shard_shape(passed.shape) == (6, 13)
    text = jax.jit(lambda x: uneven.padded(1, uneven.whole(1, x))).lower(passed).compile().as_text()
    assert text and not re.search("all-gather|all-reduce|all-to-all|collective-permute", text)
    whole = NamedSharding(mesh, PartitionSpec())
    np.testing.assert_array_equal(jax.jit(lambda x: uneven.whole(1, x), out_shardings=whole)(passed), values)
    assert uneven.padded(2, values) is values and uneven.whole(2, values) is values


def with_keys(state: Any, batch: jax.Array) -> Any:
    """A step whose state has a PRNG key, a counter and an empty array."""
    params, key, count, empty = state
    key, drawn = jax.random.split(key)

    def loss(params: list[jax.Array]) -> jax.Array:
        x = batch
        for n, kernel in enumerate(params):
            keeps = jax.random.bernoulli(jax.random.fold_in(drawn, n), 0.9, x.shape)
            x = jnp.where(keeps, jnp.tanh(x @ kernel), 0)
        return jnp.mean((x - batch) ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    return (jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), key, count + 1, empty), value


def test_keys_and_empty_arrays_have_pieces_too() -> None:
    params = [jax.random.normal(key, (WIDTH, WIDTH)) for key in jax.random.split(jax.random.key(0), LAYERS)]
    args = ((params, jax.random.key(1), jnp.int32(0), jnp.zeros((0, 3))), jnp.ones((BATCH, WIDTH)))
    options: dict[str, Any] = {"num_stages": 2, "num_microbatches": 2, "mesh": "4"}
    _, pipeline = pipelined(with_keys, args, **options)
    _, digests = on_types(pipelined(with_keys, args, **options)[1])
    assert digests == executed(pipeline, args)
    absent = on_absent_gpus(pipelined(with_keys, args, **options)[1])
    nothing = Compiled(0.0, 0.0, 0.0, [])
    found = run_on_types(absent, lambda stage, digest, lowered: nothing)
    assert len(found.pieces) == len({(piece.stage, piece.key) for piece in found.pieces}) == len(digests)


def with_adam(state: Any, batch: jax.Array) -> Any:
    params, moments = state

    def loss(params: list[jax.Array]) -> jax.Array:
        x = batch
        for kernel in params:
            x = jnp.tanh(x @ kernel)
        return jnp.mean((x - batch) ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    updates, moments = optax.adam(1e-3).update(gradients, moments, params)
    return (optax.apply_updates(params, updates), moments), value


@pytest.mark.parametrize("mesh", ["4", "data=2,model=2"])
def test_new_state_overwrites_the_state_that_it_replaces(mesh: str) -> None:
    """If a new parameter overwrote a moment of its shape, which is still read, XLA would copy both moments."""
    params = [jnp.ones((WIDTH, WIDTH)) for _ in range(LAYERS)]
    args = ((params, optax.adam(1e-3).init(params)), jnp.ones((BATCH, WIDTH)))
    _, pipeline = pipelined(with_adam, args, num_stages=2, num_microbatches=2, mesh=mesh)
    results, used = pipeline.instructions.results, pipeline.arguments.uses
    values = pipeline.begin(jax.tree.leaves(args))
    pairs = ((used[before][0].register, results[after].registers[0]) for before, after in pipeline.carried.items())
    wanted = {before: after for before, after in pairs if values[before].ndim}  # not the counter
    found: dict[int, int] = {}
    for one in pipeline.instructions.steps:
        if isinstance(one, Call):
            inputs = [values[i] for i in one.reads]
            one.settle(inputs)
            text = one.program.jitted.lower(*inputs).as_text()
            aliases = re.findall(r"%arg(\d+): [^%]*?tf\.aliasing_output = (\d+)", text)
            found |= {one.reads[int(i)]: one.writes[int(n)] for i, n in aliases}
        one.run(values)
    assert len(wanted) == 3 * LAYERS and {register: found.get(register) for register in wanted} == wanted


def on_absent_gpus(pipeline: Pipeline) -> Pipeline:
    """A pipeline on stand-ins for eight GPUs."""
    devices = absent_devices(["NVIDIA H100 80GB HBM3"] * 8, "gpu", "cuda")
    stages = [
        PlannedStage(one.program, one.plan, execute.make_mesh(one.plan.mesh, devices[4 * n : 4 * n + 4]))
        for n, one in enumerate(pipeline.stages)
    ]
    return Pipeline(stages, pipeline.schedule, pipeline.num_outputs, pipeline.literals)


def test_other_pieces_are_noticed() -> None:
    """Had XLA chosen other shardings between pieces, or the plan another microbatch, the programs would differ."""
    args = arguments()
    _, pipeline = pipelined(step, args, num_stages=2, num_microbatches=4, mesh="4")
    known = executed(pipeline, args)
    _, replicated = on_types(pipelined(step, args, num_stages=2, num_microbatches=4, mesh="4")[1], lambda shardings: [])
    _, halved = on_types(pipelined(step, args, num_stages=2, num_microbatches=8, mesh="4")[1])
    assert replicated != known and halved != known
    assert halved.keys() == known.keys()


def test_peaks_hold_what_the_executor_holds() -> None:
    """The peak grows by the activations that each further microbatch in flight stashes."""
    args = arguments(batch=4096)
    peaks: dict[str, tuple[float, ...]] = {}
    flight: dict[str, tuple[float, ...]] = {}
    for schedule in ("gpipe", "1f1b"):
        _, pipeline = pipelined(step, args, num_stages=2, num_microbatches=8, mesh="4", schedule=schedule)
        peaks[schedule] = on_types(pipeline)[0].peak_bytes
        flight[schedule] = run_counted(pipeline, jax.tree.leaves(args))[1].flight_bytes
    # gpipe has eight microbatches in flight on both submeshes, 1f1b two and one.
    for submesh, fewer in enumerate((6, 7)):
        grown = peaks["gpipe"][submesh] - peaks["1f1b"][submesh]
        assert grown == pytest.approx(fewer * flight["gpipe"][submesh], rel=0.2)


def test_pieces_on_absent_gpus_are_those_on_devices_here() -> None:
    """Stand-ins for GPUs change nothing but the platform that a piece is lowered for."""
    args = arguments()
    _, pipeline = pipelined(step, args, num_stages=2, num_microbatches=4, mesh="4")
    absent = on_absent_gpus(pipeline)
    here = {(c.stage, c.key): c for c in pipeline.instructions.steps if isinstance(c, Call)}
    values = pipeline.begin(jax.tree.leaves(args))
    call = next(one for one in absent.instructions.steps if isinstance(one, Call))
    inputs = [values[i] for i in call.reads]
    mesh = absent.stages[call.stage].mesh
    types = [
        jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=NamedSharding(mesh, one.sharding.spec)) for one in inputs
    ]
    call.settle(types)
    here[call.stage, call.key].settle(inputs)
    lowered = call.program.jitted.trace(*types).lower()
    assert lowered._lowering._platforms == ("cuda",)
    assert digest(lowered) == digest(here[call.stage, call.key].program.jitted.lower(*inputs))


# -- whole verifications ---------------------------------------------------------------------

H100 = {"num_devices": 4, "hardware": "h100-sxm", "stages": 2, "num_microbatches": 4, "schedule": "1f1b"}


@pytest.mark.slow
@pytest.mark.usefixtures("gpu_compiler")
def test_a_plan_is_compared_with_its_pieces(absent_gpus: Compiler, tmp_path: Path) -> None:
    args = jax.eval_shape(lambda: arguments(512, 2048))
    plan: Any = autopar.plan(step, *args, **H100)
    found: Any = autopar.verify(step, *args, plan=plan, hardware="h100-sxm", compiler=absent_gpus)
    assert [len(stage.pieces) for stage in found.stages] == [4, 4] and found.fits
    for stage, planned in zip(found.stages, plan.stages, strict=True):
        times = {one.phase: one for one in stage.times}
        assert times["forward"].predicted_s == planned.cost.forward_s and times["forward"].count == 4
        assert all(one.replayed_s for one in stage.times)
        once = [piece for piece in stage.pieces if piece.phase == "update"]
        replayed = [link.compiled.replay.step_time_s for piece in once for link in piece.links]
        assert times["update"].replayed_s == pytest.approx(sum(replayed))
    # The simulated step with replayed times: at least what the slowest submesh is busy.
    busy = max(sum(one.count * (one.replayed_s or 0.0) for one in stage.times) for stage in found.stages)
    assert found.step_time.predicted == plan.prediction.step_time_s
    assert found.step_time.compiled is not None and found.step_time.compiled > busy
    text = str(found)
    assert "Times of tasks" in text and "before 0" in text and "pieces" in text
    document = json.loads(json.dumps(found.to_json()))
    assert document["version"] == 2 and document["stages"][0]["pieces"][1]["name"] == "forward"
    (tmp_path / "v.json").write_text(json.dumps(document))
    autopar.write_report(plan, tmp_path / "r.html", verification=tmp_path / "v.json")
    assert "forward x4" in (tmp_path / "r.html").read_text()
    tight = autopar.verify(
        step, *args, plan=replace(plan, memory_budget_bytes=1e6), hardware="h100-sxm", compiler=absent_gpus
    )
    assert not tight.fits and tight.off[-1] == "memory budget" and "OVER" in str(tight)
    slower = replace(plan, prediction=replace(plan.prediction, step_time_s=2 * plan.prediction.step_time_s))
    off = autopar.verify(step, *args, plan=slower, hardware="h100-sxm", compiler=absent_gpus)
    assert "step time" in off.off and not off.holds


def test_a_plan_that_does_not_fit_its_program_is_refused() -> None:
    args = jax.eval_shape(lambda: arguments(64, 256))
    plan: Any = autopar.plan(step, *args, **H100)
    profiles = {"h100-sxm": load("h100-sxm")}
    other = program_of(step, jax.eval_shape(lambda: arguments(32, 256)), carry=None, donate=None)
    with pytest.raises(PlanMismatchError, match="stage 0 of the plan of `step` differs from the step's stage"):
        absent_pipeline(plan, other, profiles)
    program = program_of(step, args, carry=None, donate=None)
    with pytest.raises(HardwareError, match=r"'cpu-host' has no \[xla_target\]"):
        absent_pipeline(plan, program, {"h100-sxm": load("cpu-host")})


@pytest.mark.usefixtures("gpu_compiler")
def test_a_damaged_plan_is_an_error_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = jax.eval_shape(lambda: arguments(64, 256))
    plan: Any = autopar.plan(step, *args, **H100)
    document = plan.to_json()
    document["stages"][1]["last_layer"] = -1
    file = tmp_path / "damaged.plan.json"
    file.write_text(json.dumps(document))
    with pytest.raises(PlanFileError, match="last_layer"):
        autopar.load_plan(file)
    assert main(["verify", "examples.train_gpt:target", "--plan", str(file)]) == 2
    assert "last_layer" in capsys.readouterr().err
