"""Detect which process of a training run died, hangs or is slow, and stop the others (`watch`).

In: the steps that a training loop calls.
Out: a context around the loop. A thread in each process regularly reports to the coordination service that it is alive,
its number of calls and its current line. Process 0 evaluates the reports (`Judge`). Its verdict stops every process: by
an exception if the loop has an error, else by ending the process. No device takes part, and no step waits.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import sysconfig
import threading
import time
import traceback as tracebacks
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Protocol

import jax

from autopar.errors import ProcessError, StepSignatureError
from autopar.jax_interop.processes import coordinator_address, leave_without_waiting
from autopar.runtime.distributed.coordination_store import ServiceLostError
from autopar.runtime.distributed.exchange import Exchange, Member, among_processes
from autopar.runtime.distributed.fault_attribution import Judge, Record, State, StepTime, step_times
from autopar.runtime.distributed.process_sentinel import Sentinel
from autopar.runtime.distributed.step_clock import StepClock
from autopar.system.source_paths import PACKAGE

_LOG = logging.getLogger("autopar")
_ROOT = "autopar/watch"

#: The exit code of a process that is stopped.
EXIT_CODE = 1

#: Heartbeats per timeout, and the longest time between two heartbeats.
_BEATS_PER_TIMEOUT, _LONGEST_BEAT_S = 6, 5.0

#: Seconds that process 0, which runs the service, ends after the others have acknowledged the verdict.
_LAST_S = 2.0

#: Steps before a straggler is reported, and seconds before it is reported again.
_STEPS_BEFORE_REPORT, _REPORT_INTERVAL_S = 10, 300.0


class Watched(Protocol):
    """A step that can be timed, made by `parallelize`."""

    clock: StepClock | None

    @property
    def name(self) -> str: ...


class Watch:
    """A watchdog over the processes of a training run.

    Used as a context around the training loop. On exit, a process waits until all have left.

    Args:
        steps: the steps that the loop calls, made by `parallelize`.
        timeout_s: seconds without a heartbeat after which a process is missing: it died, or its machine is down.
        step_timeout_s: seconds without the start or end of any call after which the processes behind hang. Must exceed
            every pause of the loop: compilation, evaluation, saving.
        straggler_factor: a process whose own time for a step exceeds the others' by this factor is logged.

    Raises:
        ProcessError: on exit, if a process died, hangs, failed or left early. If the loop is inside a call that does
            not return, the process ends with `EXIT_CODE` instead.
        StepSignatureError: a step was not made by `parallelize`.
    """

    def __init__(
        self,
        *steps: Watched,
        timeout_s: float = 60.0,
        step_timeout_s: float = 1800.0,
        straggler_factor: float = 1.5,
    ) -> None:
        if timeout_s <= 0 or step_timeout_s <= 0:
            raise ProcessError(f"timeouts must be above 0 s; got {timeout_s:g} and {step_timeout_s:g}")
        for step in steps:
            if not hasattr(step, "clock"):
                raise StepSignatureError(
                    f"`watch` takes steps made by `autopar.parallelize`, whose calls it counts; got a {type(step).__name__}"
                )
        self._steps, self._factor = steps, straggler_factor
        self._timeout_s, self._step_timeout_s = timeout_s, step_timeout_s
        self._beat_s = min(timeout_s / _BEATS_PER_TIMEOUT, _LONGEST_BEAT_S)
        self._exchange: Exchange | None = None
        self._members: tuple[Member, ...] = ()
        self._folder = ""
        self._state: State = "running"
        self._error_text = ""
        self._beats = 0
        self._heard_s = time.monotonic()
        self._verdict: str | None = None
        self._judged = threading.Event()  # there is a verdict, or all have finished
        self._over = threading.Event()
        self._leaving = False  # the loop's own thread deals with the verdict
        self._records: dict[int, Record] = {}
        self._reported_s: dict[int, float] = {}
        self._loop_thread = 0
        self._sentinel: Sentinel | None = None

    # -- the context -------------------------------------------------------------------------

    def __enter__(self) -> Watch:
        for step in self._steps:
            step.clock = StepClock(step.name)
        self._loop_thread = threading.get_ident()
        self._exchange = among_processes()
        if self._exchange is None:
            return self
        members = self._exchange.judged(
            "the start of `watch`",
            [self._timeout_s, self._step_timeout_s],
            lambda all_values: [[one.by.index, one.by.host] for one in all_values],
        )
        self._members = tuple(Member(index, host) for index, host in members)
        number = self._exchange.service.count_up(f"{_ROOT}/number/{self._exchange.index}")
        self._folder = f"{_ROOT}/{number}"
        self._sentinel = Sentinel(str(self._exchange.me), str(self._members[0]), coordinator_address())
        self._heard_s = time.monotonic()
        for work in (self._send_heartbeats, self._guard):
            threading.Thread(target=work, name=f"autopar watch: {work.__name__}", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self._exchange is not None:
                self._leave(error)
        finally:
            self._over.set()
            if self._sentinel is not None:
                self._sentinel.withdraw()
            for step in self._steps:
                if step.clock is not None:
                    step.clock.stop()
                    step.clock = None

    def _leave(self, error: BaseException | None) -> None:
        """Report how the loop ended, and wait for the others or for the verdict."""
        finished = error is None or (isinstance(error, SystemExit) and not error.code)
        self._leaving = True
        self._error_text = (
            "" if error is None else f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        )
        self._state = "finished" if finished else "met" if _of_runtime(error) else "failed"
        while not self._judged.wait(1.0):
            pass
        if self._verdict is None:
            return
        self._acknowledge()
        leave_without_waiting()
        if self._state == "failed":
            return  # the error itself propagates
        raise ProcessError(self._verdict) from error

    # -- results -----------------------------------------------------------------------------

    def step_times(self) -> tuple[StepTime, ...]:
        """The time of each process for a step, as last reported, slowest first."""
        if self._exchange is None:
            return step_times({0: self._record(Member(0, socket.gethostname()))})
        self._put_record()
        return step_times(self._all_records())

    def stragglers(self) -> tuple[StepTime, ...]:
        """The processes that delay the others."""
        return tuple(one for one in self.step_times() if one.factor >= self._factor)

    # -- threads -----------------------------------------------------------------------------

    def _send_heartbeats(self) -> None:
        """Report that this process is alive; on process 0 evaluate the records, on the others read the verdict."""
        exchange = self._exchange
        assert exchange is not None
        judge = Judge(self._members, self._timeout_s, self._step_timeout_s)
        while not self._over.is_set():
            try:
                self._put_record()
                answer = self._judge(judge) if exchange.index == 0 else self._verdict_of_process_0()
            except ServiceLostError as error:
                answer = {"verdict": str(error).replace("process 0", str(self._members[0]), 1)}
            self._heard_s = time.monotonic()
            if answer is not None:
                self._verdict = answer["verdict"]
                self._judged.set()
                return
            self._over.wait(self._beat_s)

    def _judge(self, judge: Judge) -> dict[str, Any] | None:
        assert self._exchange is not None
        self._records = self._all_records()
        verdict = judge.verdict(self._records, time.monotonic())
        if verdict is None and not judge.all_finished:
            self._name_stragglers()
            return None
        answer = {"verdict": verdict}
        self._exchange.service.put(f"{self._folder}/verdict/0", json.dumps(answer).encode())
        return answer

    def _verdict_of_process_0(self) -> dict[str, Any] | None:
        assert self._exchange is not None
        found = self._exchange.service.folder(f"{self._folder}/verdict")
        return json.loads(found["0"]) if found else None

    def _guard(self) -> None:
        """End this process by the verdict, or if the service does not answer, as a call to it may hang too."""
        while not self._over.is_set():
            silent_s = time.monotonic() - self._heard_s
            if silent_s > self._timeout_s + self._beat_s and not self._judged.is_set():
                self._verdict = (
                    f"{self._members[0]}, which all others report to, has not answered for {silent_s:.0f} s: it is gone,"
                    " frozen or cut off"
                )
                self._judged.set()
            if self._judged.wait(self._beat_s / 2):
                break
        if self._verdict is None or self._over.is_set():
            return
        if not self._leaving:
            time.sleep(self._beat_s)  # an error may be about to reach the loop
        if self._leaving:
            return
        self._stop()

    def _stop(self) -> None:
        """End this process, whose loop is inside a call that does not return."""
        assert self._exchange is not None and self._verdict is not None
        sys.stderr.write(f"autopar: {self._verdict}. {self._exchange.me} stops here:\n")
        tracebacks.print_stack(sys._current_frames().get(self._loop_thread), file=sys.stderr)
        self._acknowledge()
        assert self._sentinel is not None
        self._sentinel.withdraw()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT_CODE)

    def _acknowledge(self) -> None:
        """Acknowledge the verdict; process 0, which runs the service, ends last. The call hangs if the service does not
        answer, so a separate thread makes it, and the wait for it is short."""
        self._state = "stopped" if self._state != "failed" else "failed"
        patience_s = 2 * self._beat_s + 1.0
        acknowledgement = threading.Thread(
            target=self._send_acknowledgement, args=(patience_s,), name="autopar goodbye", daemon=True
        )
        acknowledgement.start()
        acknowledgement.join(patience_s + _LAST_S)

    def _send_acknowledgement(self, patience_s: float) -> None:
        assert self._exchange is not None
        try:
            self._put_record()
            deadline = time.monotonic() + patience_s
            while self._exchange.index == 0 and time.monotonic() < deadline:
                others = [r for r in self._all_records().values() if r.member.index]
                if all(r.state in ("stopped", "failed") for r in others):
                    time.sleep(_LAST_S)
                    return
                time.sleep(min(0.1, self._beat_s))
        except ServiceLostError:
            return

    # -- records -----------------------------------------------------------------------------

    def _record(self, member: Member) -> Record:
        clocks = [step.clock for step in self._steps if step.clock is not None]
        times = {clock.name: clock.times() for clock in clocks}
        return Record(
            member=member,
            beat=self._beats,
            calls=sum(clock.num_calls for clock in clocks),
            in_call=any(clock.in_call for clock in clocks),
            where=_place(sys._current_frames().get(self._loop_thread)),
            state=self._state,
            error=self._error_text,
            times={name: (t.step_s, t.late_s, t.device_s) for name, t in times.items() if t is not None},
        )

    def _put_record(self) -> None:
        assert self._exchange is not None
        self._beats += 1
        record = json.dumps(self._record(self._members[self._exchange.index]).to_json()).encode()
        self._exchange.service.put(f"{self._folder}/of/{self._exchange.index}", record, overwrite=True)

    def _all_records(self) -> dict[int, Record]:
        assert self._exchange is not None
        found = self._exchange.service.folder(f"{self._folder}/of")
        return {int(index): Record.from_json(json.loads(record)) for index, record in found.items()}

    def _name_stragglers(self) -> None:
        now_s = time.monotonic()
        timed = {i: r for i, r in self._records.items() if r.calls >= _STEPS_BEFORE_REPORT}
        for one in step_times(timed) if len(timed) == len(self._members) else ():
            if one.factor >= self._factor and now_s - self._reported_s.get(one.member.index, -1e9) > _REPORT_INTERVAL_S:
                self._reported_s[one.member.index] = now_s
                _LOG.warning("straggler: %s", one)


def watch(
    *steps: Watched, timeout_s: float = 60.0, step_timeout_s: float = 1800.0, straggler_factor: float = 1.5
) -> Watch:
    """Watch a training loop; see `Watch`."""
    return Watch(*steps, timeout_s=timeout_s, step_timeout_s=step_timeout_s, straggler_factor=straggler_factor)


def _of_runtime(error: BaseException | None) -> bool:
    """Whether another process may have caused an error: a collective that was aborted."""
    return isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error)


_LIBRARIES = tuple({sysconfig.get_paths()[name] for name in ("purelib", "platlib", "stdlib", "platstdlib")})


def _place(frame: FrameType | None) -> str:
    """The innermost line of the user's code: `train.py:12 (load)`."""
    innermost = frame
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((*_LIBRARIES, str(PACKAGE))):
            break
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return ""
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} ({frame.f_code.co_name})"
