"""Run pieces one after the other, each in a process of its own, and record their results.

In: the pieces, a time limit in minutes, and folders of plans and results. Out: a line in a file for each piece; names
of the pieces that failed. If a piece fails or takes too long, its error is recorded, with what it had measured until
then, and the next one runs. Pieces with a whole result are skipped, so the same command resumes a stopped run.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.gpu import records
from benchmarks.gpu.child import HOST, MARK
from benchmarks.gpu.pieces import LIMIT_S, PIECES, selected
from benchmarks.gpu.setting import Record
from benchmarks.machine import ROOT

#: With less time than this left, no piece is started: a share of the piece's own time, enough for its first figures; in a
#: dry run, seconds.
_LEAST_SHARE, _LEAST_S = 0.6, 20.0
_TAIL = 1500


class PieceError(Exception):
    """A process ended without a record; the message is its last output."""


@dataclass(frozen=True, slots=True)
class Run:
    """How pieces are run.

    Args:
        plans, results: folders.
        scale: `full` or `tiny`.
        environment: environment variables of the processes, in addition to this one's.
        report: function that prints a line for the user.
        at_once: number of concurrent pieces: one if figures are needed.
    """

    plans: Path
    results: Path
    scale: str
    environment: Mapping[str, str]
    report: Callable[[str], None]
    at_once: int = 1
    _children: list[subprocess.Popen[str]] = field(default_factory=list, init=False, repr=False)
    _stopped: threading.Event = field(default_factory=threading.Event, init=False, repr=False)

    def measure(self, only: str, again: bool, seconds: float) -> list[str]:
        """Measure the pieces that `only` selects, within this many seconds.

        Returns:
            The names of the pieces that failed.

        Raises:
            PieceError: JAX does not start here.
        """
        deadline = time.monotonic() + seconds
        host = self.child(HOST, 0.0, min(LIMIT_S, seconds))["host"]
        driver = host["driver"].get("driver_version", "no NVIDIA driver")
        self.report(f"{host['num_devices']} x {host['card']}, {driver}, jax {host['versions']['jax']}")
        with ThreadPoolExecutor(self.at_once) as pool:
            found = [pool.submit(self._one, name, host, deadline) for name in self._pending(host, only, again)]
            try:
                return [name for name in (each.result() for each in found) if name]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                self._stopped.set()  # pieces stopped from here on have not failed; what they kept counts
                self._end_all()
                raise

    def _one(self, name: str, host: Record, deadline: float) -> str:
        """Measure a piece if there is time, and record the result; returns its name if it failed."""
        left = deadline - time.monotonic()
        if left < (_LEAST_SHARE * PIECES[name].seconds if self.scale == "full" else _LEAST_S):
            self.report(f"{name}: left for another run, which goes on here")
            return ""
        began = time.monotonic()
        record = self._record(name, host, min(LIMIT_S, left))
        if self._stopped.is_set() and "found" not in record:
            return ""
        records.add(self.results, record)
        self.report(f"{name}: {_outcome(record)} ({time.monotonic() - began:.0f} s)")
        return name if "error" in record else ""

    def _pending(self, host: Record, only: str, again: bool) -> Sequence[str]:
        """The pieces still to measure, in order; those that failed, or were measured in part, come last."""
        wanted = [name for name in selected(only) if PIECES[name].least_devices <= host["num_devices"]]
        blank = {name: self._blank(name, host) for name in wanted}
        kept = [] if again else records.read(self.results)
        done = {records.key(record) for record in kept if "found" in record and "partial" not in record}
        tried = {records.key(record) for record in kept}
        for name in (name for name in wanted if records.key(blank[name]) in done):
            self.report(f"{name}: measured already (--again to repeat)")
        pending = [name for name in wanted if records.key(blank[name]) not in done]
        return sorted(pending, key=lambda name: records.key(blank[name]) in tried)

    def _blank(self, name: str, host: Record) -> Record:
        return {"piece": name, "scale": self.scale, "sources": records.sources(), "host": host}

    def _record(self, name: str, host: Record, limit_s: float) -> Record:
        try:
            return self._blank(name, host) | self.child(name, min(PIECES[name].seconds, limit_s), limit_s)
        except PieceError as error:
            return self._blank(name, host) | {"error": str(error)}

    def child(self, name: str, seconds: float, limit_s: float) -> Record:
        """The last record that a process measuring `name` prints.

        If the process fails or is stopped after `limit_s`, and has printed a record, the reason is under `partial`.

        Raises:
            PieceError: it prints no record.
        """
        given = (name, str(self.plans), str(self.results), self.scale, str(seconds), str(limit_s))
        command = [sys.executable, "-m", "benchmarks.gpu.child", *given]
        # A session of its own, so that all its child processes end with it.
        child = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._children.append(child)
        stopped = ""
        try:
            out, said = child.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            _end(child)
            out, said = child.communicate()
            stopped = f"stopped after {limit_s:.0f} s"
        except BaseException:
            _end(child)
            raise
        found = [line for line in out.splitlines() if line.startswith(MARK) and line.endswith("}")]
        for folder in (sys.prefix, ROOT):  # a record has no folders of the machine
            said = said.replace(f"{folder}/", "")
        error = _error(child.returncode, said[-_TAIL:], stopped)
        if not found:
            raise PieceError(error or f"ended with exit code {child.returncode}, and said nothing")
        record = json.loads(found[-1].removeprefix(MARK))
        return record | {"partial": error} if error else record

    def _end_all(self) -> None:
        for child in self._children:
            _end(child)


def _error(code: int, said: str, stopped: str) -> str:
    """Why a process ended; empty if it succeeded."""
    if stopped:
        return f"{said}\n{stopped}"
    if code < 0:
        return f"{said}\nended by {signal.Signals(-code).name}"
    return said.strip() or f"ended with exit code {code}, and said nothing" if code else ""


def _outcome(record: Record) -> str:
    """One line about a record."""
    for key, words in {"error": "failed", "partial": "measured in part"}.items():
        if key in record:
            return f"{words}: {record[key].strip().splitlines()[-1][:300]}"
    return "measured"


def _end(child: subprocess.Popen[str]) -> None:
    """End a process and its child processes, if it is still running."""
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
