"""Engines on two CPU devices in real time, and the simulation of the same requests with the recorded times of their iterations.

Two models of two layers: once each on its own device, once both on both devices. In each case five traces (Gamma arrivals with CV 1 to 4)
run on the engines, each in the thread that a server has for it. An iteration's time is recorded from the moment at which the engine has
a request and the devices are free for it, until its results are on the host, so the host's time between two iterations is in it. The
simulation has the recorded times, in their order, and the recorded arrivals. The shares of the requests within three bounds are compared.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from numpy.typing import NDArray

from autopar.inference import DecoderConfig, Engine
from autopar.inference.model.decoder import Decoder
from autopar.inference.schedule.requests import Shape
from autopar.placement import (
    Group,
    Layout,
    ModelSpec,
    Placement,
    Slo,
    StepTimes,
    Trace,
    Traffic,
    simulate,
    synthetic_trace,
)
from autopar.placement.recorded import Recording
from autopar.serving.engine_thread import EngineThread
from benchmarks.inference.rows import row
from benchmarks.placement.small_decoder import FIELDS, OPTIONS

Row = dict[str, Any]
_NAMES = ("a", "b")
_PROMPT, _OUTPUT, _NUM_REQUESTS = 96, 24, 120
#: Burstiness, and the share of one engine's time that its requests take.
_TRACES = ((1.0, 0.4), (1.0, 0.7), (2.0, 0.5), (4.0, 0.4), (4.0, 0.6))
#: Bounds as multiples of the latency of a request alone: most requests wait longer than the first, few longer than the last.
_BOUNDS = (1.5, 2.0, 4.0)
_RUNS = 3
_NO_BOUND_S = 1e9


class SharedDevices:
    """When the results of the last iteration on some devices were there, and a lock for dispatches to them."""

    def __init__(self) -> None:
        self.free_at = 0.0
        self.lock = threading.Lock()


class Recorder:
    """Run an engine in the thread of a server, and record its iterations and the ends of its requests.

    An iteration takes from the moment at which the engine has a request and the devices are free until the results are on the host.
    """

    def __init__(self, engine: Engine, devices: SharedDevices) -> None:
        self.seconds: dict[Shape, list[float]] = defaultdict(list)
        self.ends: dict[str, float] = {}
        self._engine, self._devices = engine, devices
        self._shapes: deque[Shape] = deque()
        self._num_submitted, self._busy_since = 0, 0.0
        self._dispatch, engine.runner.dispatch = engine.runner.dispatch, self._recorded  # type: ignore[method-assign]
        self._thread = EngineThread(engine, self._fail)
        self._send, engine.listener = engine.listener, self._listen

    def _recorded(self, iteration: Any, *arguments: Any) -> Any:
        with self._devices.lock:  # programs of several devices start in one order on all of them
            self._shapes.append(iteration.shape)
            return self._dispatch(iteration, *arguments)

    def _listen(self, update: Any, out: Any) -> None:
        now = time.perf_counter()
        self.seconds[self._shapes.popleft()].append(max(1e-6, now - max(self._busy_since, self._devices.free_at)))
        self._devices.free_at = now
        for name, slot in zip(update.names, update.slots.tolist(), strict=True):
            if slot in update.ended:
                self.ends[name] = now
        assert self._send is not None
        self._send(update, out)

    def _fail(self, error: BaseException) -> None:
        raise error

    async def submit(self, prompt: list[int], max_tokens: int, name: str, arrived: float) -> None:
        """Queue a request that arrived at a time."""

        def add() -> None:
            if self._num_submitted == len(self.ends):  # the engine is idle
                self._busy_since = arrived
            self._num_submitted += 1
            self._engine.submit(prompt, max_tokens=max_tokens, stop_tokens=(), name=name)

        await self._thread.call(add)

    async def stop(self) -> None:
        """Wait for all requests, and end the thread."""
        while len(self.ends) < self._num_submitted:
            await asyncio.sleep(0.01)
        await self._thread.stop()
        self._engine.runner.dispatch = self._dispatch  # type: ignore[method-assign]
        self._engine.listener = None


def _engines(meshes: list[Mesh]) -> list[Engine]:
    config = DecoderConfig.of(FIELDS)
    engines: list[Engine] = []
    for number, mesh in enumerate(meshes):
        params = Decoder(config).init(jax.random.key(number), jnp.zeros((1, 1), jnp.int32))
        more = {"options": OPTIONS, "mesh": mesh, "hardware": "cpu-host", "num_pages": 200, "shares_prefixes": False}
        engines.append(Engine.of(config, params, attention="gather", cache=False, **more))
    return engines


def measure() -> list[Row]:
    devices = np.array(jax.devices())
    cases: dict[str, tuple[list[Mesh], Layout, Callable[[], Placement]]] = {
        "a device for each": (
            [Mesh(devices[:1], ("model",)), Mesh(devices[1:2], ("model",))],
            Layout(),
            lambda: Placement((Group(Layout(), ("a",)), Group(Layout(), ("b",)))),
        ),
        "both on both": (
            [Mesh(devices[:2], ("model",))] * 2,
            Layout(2),
            lambda: Placement((Group(Layout(2), _NAMES),)),
        ),
    }
    rows: list[Row] = []
    for name, (meshes, layout, placement) in cases.items():
        engines = _engines(meshes)
        alone_s = _alone_s(engines[0])
        for number, (cv, load) in enumerate(_TRACES):
            rate = load / alone_s / (1 if layout == Layout() else 2)
            traffic = [
                Traffic(model=each, rate_per_s=rate, cv=cv, prompt_tokens=_PROMPT, output_tokens=_OUTPUT)
                for each in _NAMES
            ]
            trace = synthetic_trace(traffic, _NUM_REQUESTS / (2 * rate), seed=number)
            runs = [_compare(engines, trace, layout, placement()) for _ in range(_RUNS)]
            where = f"{name}, CV {cv:g}, load {load:g}"
            rows.append(row(f"{where}: requests", trace.num_requests))
            for bound in _BOUNDS:
                within = [[float(np.mean(each <= bound * alone_s)) for each in run] for run in runs]
                real, simulated = max(within, key=lambda each: abs(each[0] - each[1]))
                what = f"{where}, within {bound:g}x of alone"
                rows += [
                    row(f"{what}: real, of the worst run", 100 * real, "%"),
                    row(f"{what}: simulated", 100 * simulated, "%"),
                    row(f"{what}: difference", 100 * abs(real - simulated), "points", at_most=5.0),
                ]
        for engine in engines:
            engine.runner.close()
    return rows


def _alone_s(engine: Engine) -> float:
    """The seconds of a request alone, the median of five."""
    found = []
    for number in range(6):
        started = time.perf_counter()
        engine.submit([1 + number] * _PROMPT, max_tokens=_OUTPUT, stop_tokens=()).result()
        found.append(time.perf_counter() - started)
    return float(np.median(found[1:]))


def _compare(
    engines: list[Engine], trace: Trace, layout: Layout, placement: Placement
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The seconds of each request, on the engines and in the simulation."""
    recorders, arrivals = asyncio.run(_served(engines, trace, shared=layout != Layout()))
    ends = {name: at for recorder in recorders for name, at in recorder.ends.items()}
    latencies = np.array([ends[f"r{number}"] - at for number, at in enumerate(arrivals)])
    models: dict[str, ModelSpec] = {}
    for name, recorder in zip(_NAMES, recorders, strict=True):
        typical = {shape: float(np.median(each)) for shape, each in recorder.seconds.items()}
        slowest = max(typical.values())
        times = StepTimes(
            layout=layout,
            options=OPTIONS,
            stage_s={shape: (typical.get(shape, slowest),) for shape in OPTIONS.shapes},
            recording=Recording(recorder.seconds),
        )
        models[name] = ModelSpec(name=name, slo=Slo(latency_s=_NO_BOUND_S), times={layout: times})
    arrived = replace(trace, arrival_s=np.array(arrivals) - arrivals[0])
    simulated = simulate(placement, models, arrived, drops_late=False)
    return latencies, simulated.latency_s


async def _served(engines: list[Engine], trace: Trace, *, shared: bool) -> tuple[list[Recorder], list[float]]:
    """Serve a trace in real time. Returns what was recorded, and when each request arrived."""
    devices = SharedDevices()
    recorders = [Recorder(engine, devices if shared else SharedDevices()) for engine in engines]
    arrivals: list[float] = []
    waiting: list[asyncio.Task[None]] = []
    started = time.perf_counter() + 0.05
    for number, (at, model) in enumerate(zip(trace.arrival_s.tolist(), trace.model.tolist(), strict=True)):
        await asyncio.sleep(max(0.0, started + at - time.perf_counter()))
        arrivals.append(time.perf_counter())
        prompt = [1 + number % 1000] * _PROMPT
        submitted = recorders[model].submit(prompt, _OUTPUT, f"r{number}", arrivals[-1])
        waiting.append(asyncio.create_task(submitted))
    await asyncio.gather(*waiting)
    for recorder in recorders:
        await recorder.stop()
    return recorders, arrivals
