"""Train in the gaps of an engine, with recorded times on a fake clock: the time per output token, and how much of the idle time is used.

A decoder of two layers is served on one CPU device, and each iteration's time is recorded; so is that of each microbatch and update of a
train step of the same decoder. Then the engine itself, with its scheduler and its decisions on gaps, runs nine traces (Gamma arrivals with
CV 1 to 4, three rates) on a clock that these times advance, once without and once beside the training. No guard is given, so it is 1.2 times a
decode step. The share of the idle time is the training's seconds over those in which the devices were idle without it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from numpy.typing import NDArray

from autopar.api.microbatched_step import MicrobatchedStep
from autopar.inference import Decoder, DecoderConfig, Engine
from autopar.inference.schedule.requests import Iteration, Shape
from autopar.inference.serve.lending import GUARD_FACTOR, Lending
from autopar.inference.serve.runner import Runner
from autopar.inference.step.step import Out
from autopar.placement import Trace, Traffic, synthetic_trace
from benchmarks.inference.rows import row
from benchmarks.placement.small_decoder import FIELDS, OPTIONS

Row = dict[str, Any]
_PROMPT, _OUTPUT, _NUM_REQUESTS = 96, 24, 300
_MICROBATCHES, _BATCH = 8, (16, 65)
#: Burstiness, and arrivals per time of a request alone.
_TRACES = tuple((cv, load) for cv in (1.0, 2.0, 4.0) for load in (0.3, 0.8, 1.5))
Seconds = Mapping[Hashable, Sequence[float]]


def measure() -> list[Row]:
    config = DecoderConfig.of(FIELDS)
    mesh = Mesh(np.array(jax.devices()[:1]), ("model",))
    params = Decoder(config).init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    more: dict[str, Any] = {"options": OPTIONS, "mesh": mesh, "hardware": "cpu-host", "num_pages": 200}
    engine = Engine.of(config, params, attention="gather", cache=False, shares_prefixes=False, **more)
    iterations, alone_s = recorded_iterations(engine)
    pieces = recorded_pieces(config, params, mesh)
    shortest = float(np.median(iterations[Shape()]))
    rows = [
        row("decode step, median", 1e3 * shortest, "ms"),
        row("microbatch, median", 1e3 * float(np.median(pieces["microbatch"])), "ms"),
        row("update, median", 1e3 * float(np.median(pieces["update"])), "ms"),
    ]
    for number, (cv, load) in enumerate(_TRACES):
        traffic = Traffic(model="a", rate_per_s=load / alone_s, cv=cv, prompt_tokens=_PROMPT, output_tokens=_OUTPUT)
        trace = synthetic_trace([traffic], _NUM_REQUESTS * alone_s / load, seed=number)
        without, beside = (replay(engine.runner, trace, iterations, each) for each in ({}, pieces))
        where = f"CV {cv:g}, load {load:g}"
        ratio = float(np.percentile(beside.tpot_s, 99) / np.percentile(without.tpot_s, 99))
        idle_s = without.end_s - without.busy_s
        rows += [
            row(f"{where}: TPOT p99 without", 1e3 * float(np.percentile(without.tpot_s, 99)), "ms"),
            row(f"{where}: TPOT p99 beside training, of that without", ratio, "x", at_most=1.2),
            row(f"{where}: idle without", 100 * idle_s / without.end_s, "%"),
            row(f"{where}: idle time used", 100 * beside.lent_s / idle_s, "%", at_least=50),
            row(f"{where}: TTFT p99 without", 1e3 * float(np.percentile(without.ttft_s, 99)), "ms"),
            row(f"{where}: TTFT p99 beside training", 1e3 * float(np.percentile(beside.ttft_s, 99)), "ms"),
        ]
    engine.runner.close()
    return rows


# -- record --------------------------------------------------------------------------------------


class _Recorder:
    """Stands where work that an engine's devices are lent to stands, and records the times of iterations."""

    def __init__(self) -> None:
        self.seconds: dict[Hashable, list[float]] = defaultdict(list)

    def note(self, _: Any, processed: Any) -> None:
        self.seconds[processed.shape].append(processed.seconds)

    def run_in_gap(self) -> bool:
        return False


def recorded_iterations(engine: Engine) -> tuple[dict[Hashable, list[float]], float]:
    """The seconds of iterations by shape, and of a request alone."""
    recorder: Any = _Recorder()
    engine.shared.lent = recorder
    alone: list[float] = []
    for _ in range(3):
        started = engine.runner.clock()
        engine.submit([1] * _PROMPT, max_tokens=_OUTPUT, stop_tokens=()).result()
        alone.append(engine.runner.clock() - started)
    for number in range(24):
        engine.submit([1 + number] * _PROMPT, max_tokens=8 + 3 * (number % 8), stop_tokens=())
    engine.run()
    for _ in range(20):  # a program that did not run, because several steps in one call took its place
        for shape, seconds in engine.runner.seconds().items():
            if len(recorder.seconds[shape]) < 20:
                recorder.seconds[shape].append(seconds)
    engine.shared.lent = None
    return dict(recorder.seconds), float(np.median(alone))


def recorded_pieces(config: DecoderConfig, params: Any, mesh: Mesh) -> dict[Hashable, list[float]]:
    """The seconds of microbatches and updates of a train step of the same decoder, by kind."""
    model: Any = Decoder(config)
    optimizer = optax.adamw(1e-3)

    def step(state: Any, batch: jax.Array) -> Any:
        params, moments = state

        def loss_of(params: Any) -> jax.Array:
            logits = model.apply(params, batch[:, :-1])[0]
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

        loss, gradients = jax.value_and_grad(loss_of)(params)
        updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), loss

    divided = MicrobatchedStep(step, _MICROBATCHES, mesh=mesh, hardware="cpu-host")
    state, seconds = (params, optimizer.init(params)), defaultdict[Hashable, list[float]](list)
    batch = np.random.default_rng(0).integers(0, config.vocab_size, _BATCH).astype(np.int32)
    for number in range(4):
        running = divided.begin(state, batch)
        while (kind := running.next_kind) is not None:
            started = time.perf_counter()
            jax.block_until_ready(running.run())
            if number:  # the first compiles
                seconds[kind].append(time.perf_counter() - started)
    return dict(seconds)


# -- replay --------------------------------------------------------------------------------------


class _Times:
    """Recorded seconds, each once, and then from the beginning."""

    def __init__(self, seconds: Seconds) -> None:
        self._seconds, self._next = seconds, dict.fromkeys(seconds, 0)

    def next_s(self, kind: Hashable) -> float:
        at = self._next[kind]
        self._next[kind] = (at + 1) % len(self._seconds[kind])
        return self._seconds[kind][at]


class _Dispatched:
    """An iteration that ends at a time of the fake clock."""

    def __init__(self, devices: ReplayedDevices, iteration: Iteration, end_s: float) -> None:
        self._devices, self.iteration, self._end_s = devices, iteration, end_s

    def fetch(self, **_: bool) -> Out:
        """Results in which each row has the token 1."""
        self._devices.now_s = max(self._devices.now_s, self._end_s)
        shape = self.iteration.shape
        rows = OPTIONS.num_slots + shape.rows
        tokens = np.ones((rows, max(shape.steps, shape.width)), np.int32)
        return Out(tokens, np.ones(rows, np.int32), np.zeros(tokens.shape, np.float32), np.ones(rows, bool))  # type: ignore[arg-type]


class ReplayedDevices:
    """A runner on a fake clock (`Runner`), and work in pieces on the same devices (`Work`).

    Attributes:
        now_s: the clock. busy_s: the seconds of iterations.
    """

    is_asleep = False
    num_compiled = 0

    def __init__(self, runner: Runner, iterations: Seconds, pieces: Seconds) -> None:
        self.served, self.layout, self.shardings = runner.served, runner.layout, runner.shardings
        self._iterations, self._pieces = _Times(iterations), _Times(pieces)
        self.now_s = self.busy_s = self._free_s = 0.0
        self._num_pieces = 0

    def clock(self) -> float:
        """The time."""
        return self.now_s

    def start(self, *_: Any) -> None:
        """As `Runner.start`."""

    def dispatch(self, iteration: Iteration, _: Any = None) -> Any:
        """As `Runner.dispatch`; iterations run in order."""
        seconds = self._iterations.next_s(iteration.shape)
        self._free_s = max(self._free_s, self.now_s) + seconds
        self.busy_s += seconds
        return _Dispatched(self, iteration, self._free_s)

    @property
    def next_kind(self) -> str:
        """As `Work.next_kind`: the training never ends."""
        return "update" if self._num_pieces % (_MICROBATCHES + 1) == _MICROBATCHES else "microbatch"

    def run(self) -> None:
        """As `Work.run`."""
        self.now_s = self._free_s = max(self._free_s, self.now_s) + self._pieces.next_s(self.next_kind)
        self._num_pieces += 1


class Replayed:
    """What a replay has measured.

    Attributes:
        tpot_s, ttft_s: of each request; the first only of those with two tokens and more.
        end_s: when the last request had ended. busy_s: the seconds of iterations. lent_s: those of the work.
    """

    def __init__(self, arrivals: dict[str, float], times: dict[str, list[float]]) -> None:
        self.ttft_s: NDArray[np.float64] = np.array([each[0] - arrivals[name] for name, each in times.items()])
        long = [each for each in times.values() if len(each) > 1]
        self.tpot_s: NDArray[np.float64] = np.array([(each[-1] - each[0]) / (len(each) - 1) for each in long])
        self.end_s = max(each[-1] for each in times.values())
        self.busy_s = self.lent_s = 0.0


def replay(runner: Runner, trace: Trace, iterations: Seconds, pieces: Seconds) -> Replayed:
    """Run an engine on the fake clock.

    Args:
        pieces: of the training; none to run without one.
    """
    devices: Any = ReplayedDevices(runner, iterations, pieces)
    engine = Engine(devices, shares_prefixes=False)
    arrivals: dict[str, float] = {}
    times: dict[str, list[float]] = defaultdict(list)

    def note(update: Any, _: Any) -> None:
        for name, num in zip(update.names, update.num_new.tolist(), strict=True):
            times[name] += [devices.now_s] * num

    engine.listener = note
    lending = None
    if pieces:
        decode_s = min(float(np.median(each)) / shape.steps for shape, each in iterations.items() if not shape.rows)  # type: ignore[attr-defined]
        lending = engine.shared.lent = Lending(devices, engine.shared.members, GUARD_FACTOR * decode_s, devices.clock)
        for kind, each in [*iterations.items(), *pieces.items()]:
            lending.note_time(kind, max(each[:8]))
    todo = list(zip(trace.arrival_s.tolist(), trace.prompt_tokens.tolist(), trace.output_tokens.tolist(), strict=True))
    for number, (arrival_s, prompt, output) in enumerate(todo):
        while devices.now_s < arrival_s:
            if not engine.step():
                devices.now_s = arrival_s
        arrivals[f"r{number}"] = arrival_s
        engine.submit([1 + number % 1000] * prompt, max_tokens=output, stop_tokens=(), name=f"r{number}")
    while len(times) < len(todo) or engine.stats.num_running or engine.stats.num_waiting:
        engine.step()
    found = Replayed(arrivals, times)
    found.busy_s, found.lent_s = devices.busy_s, lending.seconds if lending is not None else 0.0
    return found
