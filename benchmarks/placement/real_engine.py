"""Engines on two CPU devices in real time, and the simulation of the same requests with the recorded times of their iterations.

Two models of two layers: once each on its own device, once both on both devices. In each case five traces (Gamma arrivals with CV 1 to 4)
run on the engines, each with a thread of its own as in the server. An iteration's time is recorded from the moment at which the devices
are free for it until its results are on the host. The simulation has the recorded times, in their order, and the same bounds.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

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
from benchmarks.inference.rows import row
from benchmarks.placement.small_decoder import FIELDS, OPTIONS

Row = dict[str, Any]
_NAMES = ("a", "b")
_PROMPT, _OUTPUT, _NUM_REQUESTS = 96, 24, 40
#: Burstiness, and the share of one engine's time that its requests take.
_TRACES = ((1.0, 0.4), (1.0, 0.7), (2.0, 0.5), (4.0, 0.4), (4.0, 0.6))
_BOUND = 4.0
_RUNS = 3


class SharedDevices:
    """When the devices of one or more engines are free, and a lock for dispatches to them."""

    def __init__(self) -> None:
        self.free_at = 0.0
        self.lock = threading.Lock()


class Recorder:
    """Run an engine in a thread, and record its iterations and the ends of its requests."""

    def __init__(self, engine: Engine, devices: SharedDevices) -> None:
        self.engine, self._devices = engine, devices
        self.seconds: dict[Shape, list[float]] = defaultdict(list)
        self.ends: dict[str, float] = {}
        self._dispatched: list[tuple[Shape, float]] = []
        self._wake = threading.Event()
        self._is_stopping = False
        self._dispatch, engine.runner.dispatch = engine.runner.dispatch, self._recorded  # type: ignore[method-assign]
        engine.listener = self._listen
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _recorded(self, iteration: Any, *arguments: Any) -> Any:
        with self._devices.lock:  # programs of several devices start in one order on all of them
            self._dispatched.append((iteration.shape, time.perf_counter()))
            return self._dispatch(iteration, *arguments)

    def _listen(self, update: Any, _: Any) -> None:
        now = time.perf_counter()
        shape, at = self._dispatched.pop(0)
        self.seconds[shape].append(max(1e-6, now - max(at, self._devices.free_at)))
        self._devices.free_at = now
        for name, slot in zip(update.names, update.slots.tolist(), strict=True):
            if slot in update.ended:
                self.ends[name] = now

    def _run(self) -> None:
        while not self._is_stopping:
            if not self.engine.step():
                self._wake.wait(0.05)
                self._wake.clear()

    def submit(self, prompt: list[int], max_tokens: int, name: str) -> None:
        self.engine.submit(prompt, max_tokens=max_tokens, stop_tokens=(), name=name)
        self._wake.set()

    def wait(self, num: int) -> None:
        while len(self.ends) < num:
            time.sleep(0.01)

    def stop(self) -> None:
        self._is_stopping = True
        self._wake.set()
        self._thread.join()
        self.engine.runner.dispatch = self._dispatch  # type: ignore[method-assign]
        self.engine.listener = None


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
            runs = [_compare(engines, trace, layout, placement(), _BOUND * alone_s) for _ in range(_RUNS)]
            real, simulated = max(runs, key=lambda run: abs(run[0] - run[1]))
            where = f"{name}, CV {cv:g}, load {load:g}"
            rows += [
                row(f"{where}: real, of the worst run", 100 * real, "%"),
                row(f"{where}: simulated", 100 * simulated, "%"),
                row(f"{where}: difference", 100 * abs(real - simulated), "points", at_most=5.0),
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
    engines: list[Engine], trace: Trace, layout: Layout, placement: Placement, bound_s: float
) -> tuple[float, float]:
    """The share of the requests within the bound, on the engines and in the simulation."""
    shared = SharedDevices()
    recorders = [Recorder(engine, SharedDevices() if layout == Layout() else shared) for engine in engines]
    arrivals: dict[str, float] = {}
    started = time.perf_counter() + 0.05
    for number, (at, model) in enumerate(zip(trace.arrival_s.tolist(), trace.model.tolist(), strict=True)):
        time.sleep(max(0.0, started + at - time.perf_counter()))
        arrivals[f"r{number}"] = time.perf_counter()
        recorders[model].submit([1 + number % 1000] * _PROMPT, _OUTPUT, f"r{number}")
    for number, recorder in enumerate(recorders):
        recorder.wait(int((trace.model == number).sum()))
        recorder.stop()
    ends = {name: at for recorder in recorders for name, at in recorder.ends.items()}
    real = float(np.mean([ends[name] - at <= bound_s for name, at in arrivals.items()]))
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
        models[name] = ModelSpec(name=name, slo=Slo(latency_s=bound_s), times={layout: times})
    return real, simulate(placement, models, trace, drops_late=False).goodput
