"""Keep the servers of a router as a placement says: read it, read it again, and find a new one when rates drift.

In: a placement's file, addresses, a file of models. Out: `Placed`. New placements are found by `autopar estimate serving` in a process of
its own, from the requests that the router has seen, among the groups that there are.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from autopar.errors import AutoparError, PlacementError
from autopar.placement import Group, Placement, Trace
from autopar.placement.models_file import read_models
from autopar.placement.tables import placement_json, read_placement
from autopar.serving.limits import RequestError
from autopar.serving.router.change_models import change_models
from autopar.serving.router.forward import Forwarder
from autopar.serving.router.group_servers import GroupServer, by_url
from autopar.serving.router.observed import drifted
from autopar.serving.router.watch import watch

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacing:
    """How new placements are found.

    Args:
        models: the file of models. hardware: the profile's name; None for the visible devices.
        window_s: the seconds of requests that count, and between two looks at the rates.
        applies: whether a placement that pays within the next window is applied; if not, it is shown only.
        options: further options of `autopar estimate serving`.
    """

    models: Path
    hardware: str | None = None
    window_s: float = 600.0
    applies: bool = False
    options: tuple[str, ...] = ()


def servers_of(placement: Path | None, urls: Sequence[str]) -> list[GroupServer]:
    """A server for each group of a placement, in its order; without a placement, for each address.

    Raises:
        PlacementError: the file is no placement, the numbers differ, or an address is given twice or is none.
    """
    urls = [each.rstrip("/") for each in urls]
    for url in urls:
        if not _is_address(url) or urls.count(url) > 1:
            raise PlacementError(f"the address {url!r} is not one: give each server once, as http://HOST:PORT")
    if placement is None:
        return [GroupServer(url) for url in urls]
    running = read_placement(placement)
    groups = running.placement.groups
    if len(groups) != len(urls):
        raise PlacementError(
            f"{placement} has {len(groups)} groups, but {len(urls)} servers are given: give one for each group, in its order"
        )
    return [
        GroupServer(url, group.layout, running.firsts[number], frozenset(group.models))
        for number, (url, group) in enumerate(zip(urls, groups, strict=True))
    ]


def _is_address(url: str) -> bool:
    """
    >>> [_is_address(each) for each in ("http://gpu-1:8000", "gpu-1:8000", "http://", "http://x:99999", "http://[x")]
    [True, False, False, False, False]
    """
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


class Placed:
    """The servers of a router, and the placement that they follow.

    Args:
        forwarder: whose servers are those of `servers_of(placement, urls)`.
        replacing: how new placements are found; None for never.

    Attributes:
        replacement: the last new placement, with its gain and the cost of the change; None if there was none.
    """

    def __init__(
        self,
        forwarder: Forwarder,
        placement: Path | None = None,
        replacing: Replacing | None = None,
        *,
        poll_s: float = 1.0,
        dead_s: float = 10.0,
    ) -> None:
        self.forwarder, self._placement, self._replacing = forwarder, placement, replacing
        self._times = {"poll_s": poll_s, "dead_s": dead_s}
        self._tasks: set[asyncio.Task[None]] = set()
        self._lock = asyncio.Lock()
        self._before: tuple[Trace | None] | None = None
        self.replacement: dict[str, Any] | None = None

    def start(self) -> None:
        """Watch the servers and the rates."""
        for server in self.forwarder.servers:
            self._run(watch(self.forwarder, server, **self._times))
        if self._replacing is not None:
            self._run(self._watch_rates(self._replacing.window_s))

    def _run(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Watch no more."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def reload(self, urls: Sequence[str] | None = None) -> None:
        """Read the placement again. Servers that stay keep their requests; those that go complete theirs.

        Raises:
            PlacementError: as for `servers_of`; nothing has changed.
        """
        async with self._lock:
            old = self.forwarder.servers
            new = servers_of(self._placement, [each.url for each in old] if urls is None else urls)
            kept: list[GroupServer] = []
            for each in new:
                known = by_url(old, each.url)
                if known is None:
                    kept.append(each)
                else:
                    known.layout, known.first_device, known.placed = each.layout, each.first_device, each.placed
                    kept.append(known)
            self.forwarder.servers = kept
            for each in kept:
                if each not in old:
                    self._run(watch(self.forwarder, each, **self._times))
            self.forwarder.changed()

    # -- new placements -----------------------------------------------------------------------

    async def _watch_rates(self, window_s: float) -> None:
        """After each window, find a new placement if rates differ from those that the last one was found for."""
        while True:
            await asyncio.sleep(window_s)
            now = time.monotonic()
            trace = self.forwarder.observed.trace(now - window_s, now)
            if self._before is None:
                self._before = (trace,)
                continue
            names = drifted(self._before[0], trace)
            if names and trace is not None:
                _LOG.info("the rates of %s have drifted: looking for a new placement", ", ".join(names))
                with contextlib.suppress(AutoparError, RequestError):
                    assert self._replacing is not None
                    await self.replace(applies=self._replacing.applies)
                self._before = (trace,)

    async def replace(self, *, applies: bool) -> None:
        """Find a placement for the requests of the last window, and apply it if it pays within the next one.

        Raises:
            PlacementError, RequestError: it cannot be found or applied; `replacement` says why, too.
        """
        if self._replacing is None or self._placement is None:
            raise RequestError(
                400, "the router has no placement or no models: start it with PLACEMENT and --models FILE"
            )
        async with self._lock:
            now = time.monotonic()
            trace = self.forwarder.observed.trace(now - self._replacing.window_s, now)
            if trace is None:
                raise RequestError(
                    400, f"no request came in the last {self._replacing.window_s:g} s: there is nothing to place"
                )
            try:
                found = await self._estimate(self._replacing, trace)
                pays = found["change"]["pays_after_s"]
                self.replacement = {**found, "applied": False}
                is_worth_it = pays is not None and pays <= self._replacing.window_s
                _LOG.info(
                    "a new placement has %.1f %% of requests within bounds, the one that runs %.1f %%; the change loads %.3g GB and %s",
                    100 * found["goodput"],
                    100 * found["change"]["goodput_before"],
                    found["load_bytes"] / 1e9,
                    "brings nothing" if pays is None else f"pays after {pays:.0f} s",
                )
                if applies and is_worth_it:
                    await self._apply(found)
                    self.replacement["applied"] = True
            except (AutoparError, RequestError) as error:
                self.replacement = {**(self.replacement or {}), "applied": False, "error": str(error)}
                _LOG.warning("no new placement: %s", error)
                raise

    async def _estimate(self, replacing: Replacing, trace: Trace) -> dict[str, Any]:
        """The result of `autopar estimate serving` for a trace, starting from what runs."""
        servers = self.forwarder.servers
        groups = tuple(Group(each.layout, tuple(sorted(each.placed or ()))) for each in servers)
        with tempfile.TemporaryDirectory() as folder:
            current, requests = Path(folder, "current.json"), Path(folder, "requests.csv")
            firsts = {number: each.first_device for number, each in enumerate(servers)}
            current.write_text(json.dumps(placement_json(Placement(groups), firsts)), encoding="utf-8")
            trace.write(requests)
            num_devices = max(each.first_device + each.layout.num_devices for each in servers)
            command = [sys.executable, "-m", "autopar", "estimate", "serving", "--models", str(replacing.models)]
            command += [
                "--trace",
                str(requests),
                "--current",
                str(current),
                "--keep-groups",
                "--no-neighbours",
                "--json",
            ]
            command += ["--devices", str(num_devices), *replacing.options]
            command += ["--hardware", replacing.hardware] if replacing.hardware else []
            pipe = asyncio.subprocess.PIPE
            process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
            try:
                out, err = await process.communicate()
            finally:
                if process.returncode is None:
                    process.kill()
        if process.returncode:
            lines = err.decode(errors="replace").strip().splitlines() or ["no message"]
            raise PlacementError(f"`autopar estimate serving` has failed: {lines[-1].removeprefix('autopar: ')}")
        return json.loads(out)

    async def _apply(self, found: dict[str, Any]) -> None:
        """Load and unload models, and write the placement."""
        assert self._replacing is not None
        assert self._placement is not None
        at = {each["first_device"]: frozenset(each["models"]) for each in found["groups"]}
        wanted = {each: at.get(each.first_device, frozenset[str]()) for each in self.forwarder.servers}
        folders = {entry.name: entry.folder for entry in read_models(self._replacing.models)}
        await change_models(self.forwarder, wanted, folders)
        for server, models in wanted.items():
            server.placed = models
        groups = tuple(Group(each.layout, tuple(sorted(models))) for each, models in wanted.items())
        firsts = {number: each.first_device for number, each in enumerate(wanted)}
        saved = json.dumps(placement_json(Placement(groups), firsts), indent=1)
        self._placement.write_text(saved + "\n", encoding="utf-8")
