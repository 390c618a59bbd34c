"""Send requests to a server from a process of its own, over plain sockets, and print what came back as JSON.

    python server_clients.py < spec.json

The spec has the port, and for each request `at` (seconds), `prompt`, `max_tokens`, and `leaves_after`: the number of events after which the
client disconnects, or null; with 0 it does after the reply's head. `at_once` bounds the requests in flight; null sends each at its time. Run by `server`.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

_REQUEST = "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\n\r\n"


async def one(port: int, asked: dict[str, Any]) -> tuple[str, int]:
    """How a request ended, and its number of tokens."""
    body = json.dumps(
        {
            "prompt": asked["prompt"],
            "max_tokens": asked["max_tokens"],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
    try:
        writer.write(_REQUEST.format(len(body)).encode() + body)
        status = (await reader.readline()).split()
        if len(status) < 2 or status[1] != b"200":
            return (status[1].decode() if len(status) > 1 else "closed"), 0
        if asked["leaves_after"] == 0:  # while it waits in the queue
            return "left", 0
        seen, tail = 0, b""
        while piece := await reader.read(1 << 16):
            seen += piece.count(b"data: ")
            tail = (tail + piece)[-2000:]
            if asked["leaves_after"] is not None and seen >= asked["leaves_after"]:
                return "left", 0
        if b"data: [DONE]" not in tail:
            return "cut", 0
        usage = tail[tail.rindex(b'"usage": ') :].split(b"\n", 1)[0]
        return "done", json.loads(usage[len(b'"usage": ') : -1])["completion_tokens"]
    except OSError:
        return "closed", 0
    finally:
        writer.close()


async def main() -> None:
    """Send all requests."""
    spec = json.load(sys.stdin)
    started = time.monotonic()
    slots = asyncio.Semaphore(spec["at_once"] or len(spec["requests"]))

    async def sent(asked: dict[str, Any]) -> tuple[str, int]:
        await asyncio.sleep(max(0.0, started + asked["at"] - time.monotonic()))
        async with slots:
            return await one(spec["port"], asked)

    found = await asyncio.gather(*map(sent, spec["requests"]))
    json.dump({"seconds": time.monotonic() - started, "found": found}, sys.stdout)


if __name__ == "__main__":
    asyncio.run(main())
