"""Hold copies of workers' shards in an agent's memory, which outlives the worker.

In: copies that workers of this and of other hosts send. Out: their index, and ranges of their bytes, for new workers.
"""

from __future__ import annotations

import asyncio
from typing import Any

from autopar.membership import wire
from autopar.membership.records import Copy


class PeerMemory:
    """Copies by generation, step and owner. Older ones are dropped as soon as a newer one is complete."""

    def __init__(self) -> None:
        self._copies: dict[Copy, tuple[Any, bytes]] = {}
        self._floor = (0, 0)

    @property
    def held(self) -> tuple[Copy, ...]:
        """The copies here."""
        return tuple(sorted(self._copies))

    @property
    def num_bytes(self) -> int:
        """The bytes of all copies here."""
        return sum(len(data) for _, data in self._copies.values())

    def put(self, copy: Copy, index: Any, data: bytes) -> None:
        """Take a copy in."""
        if copy[:2] >= self._floor:
            self._copies[copy] = (index, data)

    def drop_below(self, floor: tuple[int, int]) -> None:
        """Drop copies that are older than this generation and step."""
        self._floor = floor
        for copy in [copy for copy in self._copies if copy[:2] < floor]:
            del self._copies[copy]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, changed: asyncio.Event) -> None:
        """Answer one connection until it closes.

        Raises:
            WireError: a message is none of these calls.
            OSError, asyncio.IncompleteReadError: the connection is closed.
        """
        while True:
            message, data = await wire.read(reader)
            try:
                generation, step, owner, count = map(int, message["copy"])
                copy = (generation, step, owner, count)
                call = message["call"]
                first, last = int(message.get("start", 0)), int(message.get("stop", 0))
            except (KeyError, TypeError, ValueError) as error:
                raise wire.WireError(f"a call of the peers' memory cannot be read: {error}") from error
            if call == "put":
                self.put(copy, message.get("index"), data)
                changed.set()
                wire.write(writer, {"taken": True})
            elif copy not in self._copies:
                wire.write(writer, {"missing": True})
            elif call == "index":
                wire.write(writer, {"index": self._copies[copy][0]})
            elif call == "get":
                wire.write(writer, {}, memoryview(self._copies[copy][1])[first:last])
            elif call == "drop":
                del self._copies[copy]
                changed.set()
                wire.write(writer, {})
            else:
                raise wire.WireError(f"the peers' memory has no call {call!r}")
            await writer.drain()
