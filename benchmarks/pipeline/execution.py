"""Run pipeline steps on eight virtual CPU devices, and compare them with the unsharded step and the simulator.

A row is a model, float32 and SGD, in 8 microbatches: a number of stages, each on one device, or on two with every
parameter matrix sharded over them; and a schedule. Interleaved schedules have two stages per submesh.

*Largest error*: the error of the losses and of each parameter over two steps, in norm, relative to the unsharded step
(or, for tiny values, to a thousandth of what was added to all). *Of changes*: the same for what the two steps added to
each parameter; a parameter near 1 keeps no digits of a change below 1e-7. *Most held*: bytes on one device of the stage
that holds most while microbatches run, counted over the pipeline's arrays. *Less than gpipe*: how much less all stages
hold together; *predicted*: the same from the schedule's microbatches in flight, times the bytes of one. *Per task*:
dispatch time of a step outside the jitted functions, divided by the number of tasks; the minimum of some steps.
*Sleeps*: the makespan over the simulated one, with each piece replaced by a sleep (20 ms forward, 40 ms backward,
halves of that if it is split) that returns prepared arrays. Moves, registers and order are the pipeline's, with one
thread per submesh. The minimum of three counts, because other load lengthens it.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from autopar.frontend.equations import LiteralOperand
from autopar.pipeline.cut.flow import Chain
from autopar.pipeline.cut.stage_programs import Cuttable, StageProgram
from autopar.pipeline.run.executor import Pipeline, PlannedStage
from autopar.pipeline.run.instructions import Call
from autopar.pipeline.run.measured import run_measured
from autopar.pipeline.schedule.in_flight import in_flight
from autopar.pipeline.schedule.simulate import simulate
from autopar.pipeline.schedule.table import SCHEDULES as TABLE
from autopar.pipeline.schedule.table import build
from autopar.pipeline.schedule.tasks import Task
from autopar.planner.planner import plan_program
from autopar.planner.request import PlanRequest
from autopar.plans.plan import Plan
from autopar.runtime import jit as execute
from autopar.transforms.program import Program, program_of
from benchmarks.pipeline.memory_count import Held, run_counted

Row = dict[str, Any]

MICROBATCHES, BATCH, WIDTH = 8, 16, 32
STEPS, RATE = 2, 0.1
#: Every schedule that trains, with its usual number of stages on each submesh.
SCHEDULES = tuple((name, kind.virtuals[0]) for name, kind in TABLE.items() if kind.backward != "none")
SLEEPS_S = {"forward": 0.02, "backward": 0.04, "input": 0.02, "weight": 0.02, "update": 0.0}
#: Number of timed steps.
_TIMED = 15
_QUICKLY = {"xla_backend_optimization_level": 0}


@dataclass(frozen=True, slots=True)
class Model:
    """A step, a function that makes its state, and its batches by seed."""

    step: Callable[..., Any]
    create: Callable[[jax.Array], Any]
    batch: Callable[[int], Any]

    def state(self) -> Any:
        """A copy of the state on the host, for each run to donate."""
        return jax.device_get(jax.jit(self.create)(jax.random.key(0)))


@dataclass(frozen=True, slots=True)
class Trained:
    """Losses, each parameter, and each parameter's change."""

    losses: list[float]
    parameters: list[np.ndarray]
    changes: list[np.ndarray]


def measure(name: str) -> list[Row]:
    """The rows of one model."""
    model = MODELS[name]()
    with tempfile.TemporaryDirectory() as folder:  # schedules share pieces
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        program = program_of(model.step, (model.state(), model.batch(0)), carry=None, donate=None)
        plain = _plain(model)
        rows = []
        for num_stages in (2, 4):
            for per_stage in (1, 2):
                rows += _rows(model, program, plain, num_stages, per_stage)
        return rows


def _rows(model: Model, program: Program, plain: Trained, num_stages: int, per_stage: int) -> Iterator[Row]:
    """One row per schedule."""
    planned: dict[int, list[tuple[StageProgram, Plan]]] = {}
    most: Held | None = None
    for schedule, virtual in SCHEDULES:
        if virtual not in planned:
            stages = _stages(program, num_stages * virtual)
            planned[virtual] = [(stage, _plan(stage, per_stage)) for stage in stages]
        pipeline = _pipeline(program, planned[virtual], schedule, num_stages, virtual)
        trained, held = _trained(model, pipeline)
        most = held if schedule == "gpipe" else most
        less = "", ""
        if schedule in ("1f1b", "zb-h1") and most is not None:
            less = _less(most, held, pipeline)
        yield {
            "stages": num_stages,
            "devices of each": per_stage,
            "schedule": schedule,
            "largest error": _error(trained, plain),
            "of changes": _error_of_changes(trained, plain),
            "most held (kB)": max(held.loop_bytes) / 1e3,
            "less than gpipe (kB)": less[0],
            "predicted (kB)": less[1],
            "per task (us)": _overhead_us(model, pipeline),
            "sleeps / simulated": _sleeps(model, pipeline),
        }


def _less(most: Held, held: Held, pipeline: Pipeline) -> tuple[float, float]:
    stages = range(len(held.loop_bytes))
    less = sum(most.loop_bytes[s] - held.loop_bytes[s] for s in stages)
    flying = in_flight(pipeline.schedule)
    fewer = [MICROBATCHES - flying[s][s] for s in stages]
    return less / 1e3, sum(most.flight_bytes[s] * fewer[s] for s in stages) / 1e3


# -- a step in stages ------------------------------------------------------------------------


def _stages(program: Program, count: int) -> tuple[StageProgram, ...]:
    """Stages with equally many layers of about equal FLOPs."""
    cuttable = Cuttable.of(program)
    return cuttable.layers(equal_starts(cuttable.chain, count), MICROBATCHES).stages(range(count))


def equal_starts(chain: Chain, count: int) -> list[int]:
    """Starts of layers with about equal FLOPs, each at the narrowest place nearby."""
    upto, total = np.cumsum(chain.flops), sum(chain.flops)
    starts, reach = [0], max(len(chain.units) // (4 * count), 1)
    for layer in range(1, count):
        at = int(np.searchsorted(upto, total * layer / count))
        places = range(max(at - reach, starts[-1] + 1), min(at + reach, len(chain.units) - 1) + 1)
        starts.append(min(places, key=lambda i: (chain.cut_bytes[i - 1], abs(i - at))))
    return starts


def _plan(stage: StageProgram, num_devices: int) -> Plan:
    """A plan with every matrix of the state sharded if there are two devices."""
    graph, pins = stage.program.graph, {}
    for position, _ in graph.carried if num_devices > 1 else ():
        shape = graph.values[graph.inputs[position]].shape
        dims = [dim for dim, size in enumerate(shape) if size % num_devices == 0]
        if len(shape) > 1 and dims:
            pins[graph.input_paths[position]] = PartitionSpec(*(None,) * dims[-1], "model")
    request = PlanRequest(mesh=f"model={num_devices}", hardware="cpu-host", pin=pins)
    return plan_program(stage.program, request)


def _pipeline(
    program: Program, planned: Sequence[tuple[StageProgram, Plan]], schedule: str, num_stages: int, virtual: int
) -> Pipeline:
    built = build(schedule, num_stages, MICROBATCHES, virtual=virtual)
    stages = []
    for submeshes, (stage, plan) in zip(built.replicas, planned, strict=True):
        size = plan.mesh.num_devices
        own = [jax.devices()[submesh * size : (submesh + 1) * size] for submesh in submeshes]
        mesh, *replicas = (execute.make_mesh(plan.mesh, devices) for devices in own)
        stages.append(PlannedStage(stage, plan, mesh, tuple(replicas)))
    outputs = program.trace.outputs
    literals = {i: one.value for i, one in enumerate(outputs) if isinstance(one, LiteralOperand)}
    return Pipeline(stages, built, len(outputs), literals, compiler_options=_QUICKLY)


# -- measurements ----------------------------------------------------------------------------


def _plain(model: Model) -> Trained:
    state, losses = model.state(), []
    step = jax.jit(model.step)
    for seed in range(STEPS):
        state, loss = step(state, model.batch(seed))
        losses.append(float(loss))
    return Trained(losses, *_changes(model, state))


def _trained(model: Model, pipeline: Pipeline) -> tuple[Trained, Held]:
    state, losses, held = model.state(), [], None
    structure = jax.tree.structure(state)
    for seed in range(STEPS):
        leaves = jax.tree.leaves((state, model.batch(seed)))
        if held is None:
            out, held = run_counted(pipeline, leaves)
        else:
            out = pipeline.run(leaves)
        state = jax.tree.unflatten(structure, out[:-1])
        losses.append(float(out[-1]))
    assert held is not None
    return Trained(losses, *_changes(model, state)), held


def _changes(model: Model, state: Any) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Parameters, and their changes."""
    both = zip(jax.tree.leaves(state), jax.tree.leaves(model.state()), strict=True)
    pairs = [(np.asarray(after), np.asarray(before)) for after, before in both]
    pairs = [pair for pair in pairs if np.issubdtype(pair[0].dtype, np.floating)]
    return [after for after, _ in pairs], [after - before for after, before in pairs]


def _error(one: Trained, other: Trained) -> float:
    """The largest error of the losses and of each parameter."""
    losses = max(abs(a - b) / abs(b) for a, b in zip(one.losses, other.losses, strict=True))
    return max(losses, _apart(one.parameters, other.parameters, _least(other)))


def _error_of_changes(one: Trained, other: Trained) -> float:
    return _apart(one.changes, other.changes, _least(other))


def _least(other: Trained) -> float:
    """The norm below which errors are relative to this value."""
    return 1e-3 * float(np.sqrt(sum(np.square(change).sum() for change in other.changes)))


def _apart(some: Sequence[np.ndarray], others: Sequence[np.ndarray], least: float) -> float:
    """The largest difference in norm, relative to the array's norm, or to `least` if that is larger."""
    norms = [(float(np.linalg.norm(a - b)), float(np.linalg.norm(b))) for a, b in zip(some, others, strict=True)]
    return max(apart / max(norm, least) for apart, norm in norms)


def _overhead_us(model: Model, pipeline: Pipeline) -> float:
    """Microseconds per task of a step's dispatch outside the jitted functions."""
    calls = [one for one in pipeline.instructions.steps if isinstance(one, Call)]
    programs = {id(one.program): one.program for one in calls}.values()
    inside = [0.0]

    def timed(jitted: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            start_s = time.perf_counter()
            made = jitted(*args)
            inside[0] += time.perf_counter() - start_s
            return made

        return run

    bare = {id(one): one.jitted for one in programs}
    batch = {i: s for i, s in pipeline.in_shardings.items() if i not in pipeline.carried}
    leaves = jax.tree.leaves((model.state(), model.batch(0)))
    leaves = [jax.device_put(leaf, batch[i]) if i in batch else leaf for i, leaf in enumerate(leaves)]
    found = []
    for one in programs:
        if one.jitted is not None:
            one.jitted = timed(one.jitted)
    for _ in range(_TIMED):
        inside[0] = 0.0
        start_s = time.perf_counter()
        out = pipeline.run(leaves)
        whole_s = time.perf_counter() - start_s
        found.append(whole_s - inside[0])
        jax.block_until_ready(out)
        for (i, _), (result, _) in pipeline.carried.items():
            leaves[i] = out[result]
    for one in programs:
        one.jitted = bare[id(one)]
    return 1e6 * min(found[1:]) / sum(one.task is not None for one in calls)


def _sleeps(model: Model, pipeline: Pipeline) -> float:
    """The measured makespan with sleeps over the simulated one; the minimum of three."""
    values = pipeline.begin(jax.tree.leaves((model.state(), model.batch(0))))
    kept: dict[int, list[Any]] = {}
    for one in pipeline.instructions.steps:
        freed, one.frees = one.frees, ()
        one.run(values)
        one.frees = freed
        if isinstance(one, Call) and id(one.program) not in kept:
            made = [values[i] for i in one.writes]
            kept[id(one.program)] = [jax.device_put(value, value.sharding, may_alias=False) for value in made]
        for i in freed:
            values[i] = None
    calls = [one for one in pipeline.instructions.steps if isinstance(one, Call)]
    bare = {id(one.program): (one.program, one.program.jitted) for one in calls}

    def sleeping(seconds: float, made: Sequence[Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            time.sleep(seconds)
            return made

        return run

    runs = {(one.stage, one.key) for one in calls}
    for one in calls:
        seconds = SLEEPS_S[one.task.phase] if one.task is not None else 0.0
        one.program.jitted = sleeping(seconds, kept[id(one.program)])

    def seconds_of(task: Task) -> float:
        return SLEEPS_S[task.phase] if (task.stage, task.phase) in runs else 0.0

    simulated = simulate(pipeline.schedule, seconds_of).makespan_s
    ratios = []
    for _ in range(3):
        leaves = jax.tree.leaves((model.state(), model.batch(0)))
        ratios.append(run_measured(pipeline, leaves, time.perf_counter)[1].makespan_s / simulated)
    for program, jitted in bare.values():
        program.jitted = jitted
    return min(ratios)


# -- models ----------------------------------------------------------------------------------


def _mlp() -> Model:
    def create(rng: jax.Array) -> Any:
        return [
            {"kernel": jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5, "bias": jnp.zeros(WIDTH)}
            for key in jax.random.split(rng, 8)
        ]

    def step(params: Any, batch: Any) -> Any:
        def loss_of(params: Any) -> jax.Array:
            x = batch["x"]
            for layer in params:
                x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
            return jnp.mean((x - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(params)
        return jax.tree.map(lambda p, g: p - RATE * g, params, grads), loss

    def batch(seed: int) -> Any:
        x = np.random.default_rng(seed).normal(size=(BATCH, WIDTH)).astype(np.float32)
        return {"x": x, "y": np.roll(x, 1, axis=1)}

    return Model(step, create, batch)


def _gpt() -> Model:
    """The model of `examples/train_gpt.py`, with smaller sizes."""
    from benchmarks.models import demo

    module = demo()
    module.__dict__.update(HIDDEN=WIDTH, HEADS=4, SEQ=16, BATCH=BATCH, NUM_LAYERS=4)

    def batch(seed: int) -> Any:
        windows = np.random.default_rng(seed).integers(0, module.VOCAB, (BATCH, 17), dtype=np.int32)
        return {"inputs": windows[:, :-1], "targets": windows[:, 1:]}

    return _by_sgd(module.train_step, module.create_state, batch)


def _bert() -> Model:
    from transformers import BertConfig

    from benchmarks.zoo import language

    config = BertConfig(
        vocab_size=259,
        hidden_size=WIDTH,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=2 * WIDTH,
        max_position_embeddings=32,
    )
    training = language.bert(config, batch=BATCH, seq=16)
    return _by_sgd(training.step, training.create_state, training.make_batch)


def _gpt2() -> Model:
    from transformers import GPT2Config

    from benchmarks.zoo import language

    config = GPT2Config(vocab_size=251, n_positions=32, n_embd=WIDTH, n_layer=4, n_head=4)
    training = language.gpt2(config, batch=BATCH, seq=16)
    return _by_sgd(training.step, training.create_state, training.make_batch)


def _by_sgd(
    step: Callable[..., Any], create: Callable[[jax.Array], Any], batch: Callable[[int], Mapping[str, Any]]
) -> Model:
    """A `TrainState`'s step with another optimizer."""
    tx = optax.sgd(RATE)

    def create_state(rng: jax.Array) -> Any:
        state = create(rng)
        return state.replace(tx=tx, opt_state=tx.init(state.params))

    return Model(step, create_state, batch)


MODELS: Mapping[str, Callable[[], Model]] = {"MLP": _mlp, "GPT": _gpt, "HF BERT": _bert, "HF GPT-2": _gpt2}
