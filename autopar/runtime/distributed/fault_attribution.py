"""Determine which process is at fault, on process 0, from the records of all processes.

In: the records of all processes as they arrive, and a clock.
Out: None, or a verdict: a text that names the process at fault. The only state is the time at which each record last
changed; clocks of different machines are never compared.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from autopar.runtime.distributed.exchange import Member, named

#: `met`: an error of the runtime, whose cause may be another process. `failed`: an error of the program itself.
State = Literal["running", "finished", "met", "failed", "stopped"]


@dataclass(frozen=True, slots=True)
class Record:
    """A process's report about itself.

    Args:
        beat: a heartbeat counter.
        calls: the number of calls of all its steps.
        in_call: whether it is inside a call.
        where: the current line of the user's code.
        state: its state.
        error: the text of its error.
        times: `step_s`, `late_s` and `device_s` of `StepTimes`, by step.
    """

    member: Member
    beat: int
    calls: int = 0
    in_call: bool = False
    where: str = ""
    state: State = "running"
    error: str = ""
    times: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "index": self.member.index,
            "host": self.member.host,
            "beat": self.beat,
            "calls": self.calls,
            "in_call": self.in_call,
            "where": self.where,
            "state": self.state,
            "error": self.error,
            "times": {name: list(times) for name, times in self.times.items()},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Record:
        rest = {name: value for name, value in data.items() if name not in ("index", "host")}
        return cls(Member(data["index"], data["host"]), **rest)


@dataclass(slots=True)
class Judge:
    """Evaluates the records of all processes.

    Args:
        members: all processes.
        timeout_s: seconds without a heartbeat after which a process is missing.
        step_timeout_s: seconds without progress of any process after which some process hangs.
    """

    members: Sequence[Member]
    timeout_s: float
    step_timeout_s: float
    latest: dict[int, Record] = field(default_factory=dict)
    _alive_s: dict[int, float] = field(default_factory=dict)
    _progress_s: float | None = None
    _met_s: float | None = None

    def verdict(self, records: Mapping[int, Record], now_s: float) -> str | None:
        """The process at fault and the reason, by the newest records; None if all is well."""
        if self._progress_s is None:
            self._progress_s = now_s
            self._alive_s = {member.index: now_s for member in self.members}
        for index, record in records.items():
            before = self.latest.get(index)
            if before is None or (record.beat, record.state) != (before.beat, before.state):
                self._alive_s[index] = now_s
            if before is None or (record.calls, record.in_call) != (before.calls, before.in_call):
                self._progress_s = now_s
            self.latest[index] = record
        return self._failed() or self._missing(now_s) or self._stuck(now_s) or self._met(now_s)

    @property
    def all_finished(self) -> bool:
        states = [self.latest[m.index].state if m.index in self.latest else "running" for m in self.members]
        return all(state == "finished" for state in states)

    def _failed(self) -> str | None:
        failed = [record for record in self.latest.values() if record.state == "failed"]
        if not failed:
            return None
        first = min(failed, key=lambda record: record.member.index)
        return f"{first.member} failed in call {first.calls} of its step: {first.error}"

    def _missing(self, now_s: float) -> str | None:
        silent = [m for m in self.members if now_s - self._alive_s[m.index] > self.timeout_s and self._is_in(m)]
        if not silent:
            return None
        silent_s = max(now_s - self._alive_s[m.index] for m in silent)
        calls = max((self.latest[m.index].calls for m in silent if m.index in self.latest), default=0)
        have, it = ("has", "it has") if len(silent) == 1 else ("have", "they have")
        return (
            f"{named(silent)} {have} given no sign of life for {silent_s:.0f} s, since call {calls} of the step: {it} died,"
            " or the machine is gone, frozen or cut off"
        )

    def _stuck(self, now_s: float) -> str | None:
        assert self._progress_s is not None
        waited_s = now_s - self._progress_s
        inside = [self.latest[m.index] for m in self.members if m.index in self.latest]
        if waited_s <= self.step_timeout_s or len(inside) < len(self.members) or self.all_finished:
            return None
        least, most = min(record.calls for record in inside), max(record.calls for record in inside)
        if least == most and len({record.state for record in inside}) == 1:
            where = "; ".join(f"{record.member}{_at(record)}" for record in inside[:4])
            return f"no process has got beyond call {most} of the step for {waited_s:.0f} s: {where}"
        behind = [record for record in inside if record.calls == least or record.state == "finished"]
        progress = f"called its step {least} times, while others wait in call {most}"
        if all(record.state == "finished" for record in behind):
            return (
                f"{named([r.member for r in behind])} left the loop after {progress.removeprefix('called its step ')}"
            )
        return f"{named([r.member for r in behind])} hangs{_at(behind[0])}: for {waited_s:.0f} s it has {progress}"

    def _met(self, now_s: float) -> str | None:
        """The text of the runtime's error, returned only after a delay in which its cause may be found."""
        met = [record for record in self.latest.values() if record.state == "met"]
        if not met:
            return None
        self._met_s = now_s if self._met_s is None else self._met_s
        if now_s - self._met_s <= self.timeout_s + 1:
            return None
        return f"{named([record.member for record in met])}: {met[0].error}"

    def _is_in(self, member: Member) -> bool:
        return member.index not in self.latest or self.latest[member.index].state in ("running", "met")


def _at(record: Record) -> str:
    return f" at {record.where}" if record.where else ""


# -- stragglers ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepTime:
    """The time of one process for a step.

    Args:
        step_s: seconds from the start of a step to the start of the next; equal on all processes, as they synchronize.
        late_s: the part of it in which the devices wait for the process between two steps.
        factor: the process's own time (`late_s` plus the device time without waiting) over the median of the others.
    """

    member: Member
    step: str
    step_s: float
    late_s: float
    factor: float

    def __str__(self) -> str:
        return (
            f"{self.member}: {self.factor:.2f} times the others' time for `{self.step}`; its devices wait"
            f" {self.late_s * 1e3:.3g} ms of each {self.step_s * 1e3:.3g} ms for its next call"
        )


def step_times(records: Mapping[int, Record]) -> tuple[StepTime, ...]:
    """The times of all processes and steps, slowest first."""
    out: list[StepTime] = []
    for step in sorted({name for record in records.values() for name in record.times}):
        timed = {i: record.times[step] for i, record in records.items() if step in record.times}
        alone_s = min(device_s for _, _, device_s in timed.values())
        own = {i: late_s + alone_s for i, (_, late_s, _) in timed.items()}
        for i, (step_s, late_s, _) in timed.items():
            others = [seconds for j, seconds in own.items() if j != i]
            usual = statistics.median(others) if others else own[i]
            factor = own[i] / usual if usual else math.inf if own[i] else 1.0
            out.append(StepTime(records[i].member, step, step_s, late_s, factor))
    return tuple(sorted(out, key=lambda time: -time.factor))
