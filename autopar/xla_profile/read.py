"""Read a JAX profile: find its files, select the program, and divide its kernels into steps.

In: the folder or file that `jax.profiler.trace` wrote. Out: `Profile`. On GPUs, kernels are the events of a device's
streams; on CPUs, those of host threads that run an HLO instruction for a device.
"""

from __future__ import annotations

import os
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from autopar.errors import ProfileFileError, VerifyError
from autopar.jax_interop.xplane import Event, Plane, hlo_modules, module_text, read_planes
from autopar.xla_compiler.hlo_text import Module, parse_module
from autopar.xla_profile.profile import DeviceRuns, KernelRun, Profile, Step, by_instruction, issued_kind, kind_of

_RECORD = "record one around a few steps: `with jax.profiler.trace(FOLDER): ...`"
_GRAPHS = "XLA_FLAGS=--xla_gpu_enable_command_buffer="
_GPU = "/device:GPU:"
#: Steps that take this many times the median are left out: compilation, first use of a communicator, other work.
_OUTLIER = 2.0
#: Instructions whose events on a CPU contain those of the instructions that they call.
_CALLS = ("while", "conditional", "call")


@dataclass(slots=True)
class _Device:
    """The events of one device, with the names of their lines."""

    name: str
    events: list[tuple[Event, str]] = field(default_factory=list)
    modules: list[Event] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Host:
    """One file: the profile of one process."""

    data: bytes
    devices: tuple[_Device, ...]
    platform: str
    device_kind: str


def read_profile(path: str | os.PathLike[str], *, program: str | None = None, hlo_text: str | None = None) -> Profile:
    """Read the runs of one program.

    Args:
        path: folder that `jax.profiler.trace` wrote, or one `.xplane.pb` file. Of several recordings in a folder, the
            newest is read, with the files of all its processes.
        program: name of the HLO module, e.g. `jit_train_step`; by default the one with the most device time.
        hlo_text: optimized HLO of the program, where the profile does not hold it.

    Raises:
        ProfileFileError: no profile, no events of a device, no such program, or no complete step.
        VerifyError: `hlo_text` is no HLO module.
    """
    files = _files(Path(path))
    hosts = [_host(file, f"{file.name.removesuffix('.xplane.pb')} " if len(files) > 1 else "") for file in files]
    devices = [device for host in hosts for device in host.devices]
    if not any(device.events for device in devices):
        raise ProfileFileError(f"the profile {str(path)!r} has no kernel of a GPU or CPU device; {_RECORD}")
    seconds = _program_seconds(devices)
    chosen = _chosen(seconds, program, path)
    text = hlo_text or next(filter(None, (_hlo_of(host, chosen) for host in hosts)), "")
    module = _module(text) if hlo_text is None else parse_module(hlo_text)
    resolve = _Resolver(module)
    notes: dict[str, None] = {}
    found = tuple(_steps(device, chosen, resolve, module, notes) for device in devices)
    found = _kept([device for device in found if device.steps], notes)
    if not found:
        raise ProfileFileError(f"the profile {str(path)!r} has no complete step of {chosen!r}; {_RECORD}")
    if note := _unattributed(found):
        notes[note] = None
    if not text:
        notes[
            "the profile does not hold the program's HLO, or a damaged one: operations have no modules; pass --hlo FILE"
        ] = None
    return Profile(
        files=tuple(map(str, files)),
        program=chosen,
        platform=hosts[0].platform,
        device_kind=next((host.device_kind for host in hosts if host.device_kind), ""),
        devices=found,
        hlo_text=text,
        other_programs=tuple((name, spent) for name, spent in seconds.items() if name not in (chosen, "")),
        notes=tuple(notes),
    )


def with_partitions(hlo_text: str, num_devices: int) -> str:
    """HLO text with a number of partitions, if it has none: XLA leaves it out of some modules."""
    head, newline, rest = hlo_text.partition("\n")
    return hlo_text if not head or "num_partitions=" in head else f"{head}, num_partitions={num_devices}{newline}{rest}"


# -- files ---------------------------------------------------------------------------------------


def _files(path: Path) -> list[Path]:
    """The files of the newest recording."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ProfileFileError(f"there is no profile {str(path)!r}; {_RECORD}")
    by_recording: dict[Path, list[Path]] = defaultdict(list)
    for file in path.rglob("*.xplane.pb"):
        by_recording[file.parent].append(file)
    if not by_recording:
        raise ProfileFileError(f"the folder {str(path)!r} holds no *.xplane.pb file; {_RECORD}")
    return sorted(by_recording[max(by_recording, key=lambda folder: (folder.name, folder))])


def _host(file: Path, prefix: str) -> _Host:
    try:
        data = file.read_bytes()
        planes = read_planes(data)
    except OSError as error:
        raise ProfileFileError(f"cannot read the profile {str(file)!r}: {error.strerror}") from error
    except ValueError as error:
        raise ProfileFileError(f"{str(file)!r} is no JAX profile, or a damaged one ({error}); {_RECORD}") from error
    gpus = [plane for plane in planes if plane.name.startswith(_GPU)]
    if any(line.events for plane in gpus for line in plane.lines):
        kinds = (str(value) for plane in gpus for key, value in plane.stats.items() if key.endswith("device_name"))
        return _Host(data, tuple(_gpu(plane, prefix) for plane in gpus), "gpu", next(kinds, ""))
    return _Host(data, tuple(_cpus(planes, prefix)), "cpu", "cpu")


def _gpu(plane: Plane, prefix: str) -> _Device:
    device = _Device(prefix + plane.name.removeprefix("/device:"))
    for line in plane.lines:
        if line.name.startswith("Stream"):
            device.events += [(event, line.name) for event in line.events if event.duration_ns > 0]
        elif line.name == "XLA Modules":
            device.modules += line.events
    return device


def _cpus(planes: Iterable[Plane], prefix: str) -> list[_Device]:
    """The virtual devices of a host, whose operations run on any of its threads."""
    found: dict[int, _Device] = {}
    for plane in planes:
        for line in plane.lines:
            for event in line.events:
                number = int(event.stats.get("device_ordinal", 0))
                device = found.setdefault(number, _Device(f"{prefix}CPU:{number}"))
                device.events.append((event, line.name))
    return [found[number] for number in sorted(found)]


# -- programs ------------------------------------------------------------------------------------


def _program_seconds(devices: Iterable[_Device]) -> dict[str, float]:
    """Device seconds by module name, the most first; events of no program under the empty name."""
    found: Counter[str] = Counter()
    for device in devices:
        for event, _ in device.events:
            found[str(event.stats.get("hlo_module", ""))] += event.duration_ns * 1e-9  # type: ignore[assignment]
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


def _chosen(seconds: Mapping[str, float], program: str | None, path: str | os.PathLike[str]) -> str:
    known = [name for name in seconds if name]
    if not known:
        raise ProfileFileError(
            f"no kernel in the profile {str(path)!r} names its HLO module; record it with {_GRAPHS}, for XLA's"
            " CUDA graphs hide the names"
        )
    if program is None:
        return known[0]
    if program in known or f"jit_{program}" in known:
        return program if program in known else f"jit_{program}"
    raise ProfileFileError(f"the profile has no program {program!r}; it has {', '.join(known)}")


def _hlo_of(host: _Host, program: str) -> str:
    """The HLO of the program's version with the most events; empty where the file does not hold it."""
    try:
        modules = hlo_modules(host.data, {program})
        numbers: Counter[int] = Counter()
        for device in host.devices:
            for event, _ in device.events:
                if event.stats.get("hlo_module") == program and str(event.stats.get("program_id", "")).isdigit():
                    numbers[int(event.stats["program_id"])] += 1
        for number, _ in numbers.most_common():
            if (program, number) in modules:
                return module_text(modules[program, number])
        return module_text(next(iter(modules.values()))) if len(modules) == 1 else ""
    except ValueError:
        return ""


def _module(text: str) -> Module | None:
    try:
        return parse_module(text) if text else None
    except VerifyError:
        return None


class _Resolver:
    """Names of kernels and instructions -> instructions of the program."""

    def __init__(self, module: Module | None) -> None:
        known = by_instruction(module) if module else {}
        self.known = known
        self.kinds = {name: issued_kind(module, one) for name, one in known.items()} if module else {}
        # XLA names a kernel as its fusion, with other characters than letters and digits as underscores.
        self.by_kernel = {re.sub(r"\W", "_", name): name for name, one in known.items() if one.opcode == "fusion"}
        self.callers = {name for name, one in known.items() if one.opcode in _CALLS}

    def run(self, event: Event, line: str) -> KernelRun | None:
        """The run of an event; None for an instruction whose own instructions have events too."""
        operation = str(event.stats.get("hlo_op", "")) or self.by_kernel.get(event.name, "")
        is_call = operation in self.callers if self.known else re.match(r"(while|conditional)(\.|$)", operation)
        if is_call and event.name == operation:
            return None
        kind = kind_of("", event.name) or self.kinds.get(operation, kind_of(operation))
        start = event.start_ns * 1e-9
        return KernelRun(operation, event.name, kind, start, start + event.duration_ns * 1e-9, line)


# -- steps ---------------------------------------------------------------------------------------


def _steps(
    device: _Device, program: str, resolve: _Resolver, module: Module | None, notes: dict[str, None]
) -> DeviceRuns:
    own = [(event, line) for event, line in device.events if event.stats.get("hlo_module", program) == program]
    if all("run_id" in event.stats for event, _ in own):
        by_run: dict[object, list[KernelRun]] = defaultdict(list)
        for event, line in own:
            if run := resolve.run(event, line):
                by_run[event.stats["run_id"]].append(run)
        steps = [_step(runs) for runs in by_run.values()]
        return DeviceRuns(device.name, tuple(sorted(steps, key=lambda step: step.start_s)))
    runs = [run for run in (resolve.run(event, line) for event, line in own) if run]
    runs.sort(key=lambda run: run.start_s)
    windows = [event for event in device.modules if event.name.split("(")[0] == program]
    starts = sorted(event.start_ns * 1e-9 for event in windows) if windows else _starts(runs, module)
    groups: list[list[KernelRun]] = [[] for _ in starts]
    at = -1
    for run in runs:
        while at + 1 < len(starts) and run.start_s >= starts[at + 1] - 1e-12:
            at += 1
        if at >= 0:
            groups[at].append(run)
    if runs and starts and runs[0].start_s < starts[0]:
        notes["the profile begins within a step, which is left out"] = None
    return DeviceRuns(device.name, tuple(_step(group) for group in groups if group))


def _step(runs: Iterable[KernelRun]) -> Step:
    ordered = tuple(sorted(runs, key=lambda run: run.start_s))
    return Step(ordered[0].start_s, max(run.end_s for run in ordered), ordered)


def _starts(runs: Sequence[KernelRun], module: Module | None) -> list[float]:
    """Starts of steps, where the profile does not mark them: the runs of the program's first operation."""
    counts = Counter(run.operation for run in runs if run.operation)
    if not counts:
        return []
    entry = module.main.instructions if module else ()
    order = [one.name for one in entry if one.name in counts and one.opcode not in _CALLS]
    if not order:
        usual = statistics.mode(counts.values())
        order = [run.operation for run in runs if counts[run.operation] == usual]
    first = order[0]
    leading = _called_before(module, first) if module else set()
    stream = next(run.stream for run in runs if run.operation == first)
    starts, before, is_leading = [], "", False
    for run in runs:
        if run.stream != stream:
            continue
        begins = run.operation == first and not is_leading and (before != first or len(counts) == 1)
        if begins or (run.operation in leading and not is_leading):
            starts.append(run.start_s)
        is_leading = run.operation in leading or (is_leading and run.operation != first)
        before = run.operation
    return starts


def _called_before(module: Module, first: str) -> set[str]:
    """The loops and calls of the entry computation before an instruction, with all instructions in them."""
    waiting, found = [], set[str]()
    for one in module.main.instructions:
        if one.name == first:
            break
        if one.opcode in _CALLS:
            waiting.append(one)
    while waiting:
        one = waiting.pop()
        found.add(one.name)
        waiting += [inner for called in module.called(one) for inner in called.instructions if inner.name not in found]
    return found


def _kept(devices: Sequence[DeviceRuns], notes: dict[str, None]) -> tuple[DeviceRuns, ...]:
    """The devices without incomplete steps and outliers."""
    found, dropped = [], 0
    for device in devices:
        steps = device.steps
        counts = Counter(name for step in steps for name in {run.operation for run in step.runs})
        usual = {name for name, count in counts.items() if 2 * count > len(steps)}
        median = statistics.median(step.seconds for step in steps)
        kept = tuple(
            step
            for step in steps
            if usual <= {run.operation for run in step.runs} and step.seconds <= _OUTLIER * median
        )
        dropped = max(dropped, len(steps) - len(kept))
        found.append(DeviceRuns(device.name, kept or steps))
    if dropped:
        notes[
            f"{dropped} step{'s' if dropped > 1 else ''} of a device left out: incomplete, or over twice the median"
        ] = None
    return tuple(found)


def _unattributed(devices: Sequence[DeviceRuns]) -> str:
    """A note on kernels without an HLO instruction."""
    runs = [run for device in devices for step in device.steps for run in step.runs]
    total = sum(run.seconds for run in runs)
    unknown = sum(run.seconds for run in runs if not run.operation)
    if unknown < 0.01 * total:
        return ""
    return (
        f"{100 * unknown / total:.0f} % of the kernels' time names no HLO instruction, as in XLA's CUDA graphs; record the"
        f" profile with {_GRAPHS}"
    )
