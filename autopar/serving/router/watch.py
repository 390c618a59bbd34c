"""Ask servers whether they answer, and what they serve.

In: servers. Out: their states, kept up to date. A server that refuses a connection or answers too late gets no new requests; its replies
under way go on, as one that ends still completes them. If it has not answered for a while, it is dead, and they are given up.
"""

# pyright: reportMissingImports=false
# The packages of the extra `serve` need not be installed where types are checked.

from __future__ import annotations

import asyncio
import time

import httpx

from autopar.serving.router.forward import Forwarder
from autopar.serving.router.group_servers import GroupServer, ModelState


async def watch(forwarder: Forwarder, server: GroupServer, *, poll_s: float = 1.0, dead_s: float = 10.0) -> None:
    """Ask one server, again and again.

    Args:
        poll_s: the seconds between two questions. dead_s: without an answer for so long, it is dead.
    """
    answered = time.monotonic()
    while server in forwarder.servers:
        if await ask(forwarder, server, timeout_s=max(2.0, 2 * poll_s)):
            answered = time.monotonic()
        elif server.sent and time.monotonic() - answered > dead_s:
            server.abandon()
        await asyncio.sleep(poll_s)


async def ask(forwarder: Forwarder, server: GroupServer, timeout_s: float = 2.0) -> bool:
    """Ask a server once.

    Returns:
        Whether it has answered.
    """
    why, answers, is_late = "", False, False
    try:
        reply = await forwarder.client.get(
            f"{server.url}/status", headers=forwarder.headers({}), timeout=httpx.Timeout(timeout_s)
        )
        answers = True
        if reply.status_code == 200:
            if server.came_up(_models_of(reply.json(), server)):
                forwarder.changed()
            return True
        why = f"/status has HTTP status {reply.status_code}"
        if reply.status_code == 401:
            why += ": start the router with a key of the server (--api-key-file)"
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        why, is_late = f"{type(error).__name__}: {error}".rstrip(": "), isinstance(error, httpx.TimeoutException)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"/status is not that of `autopar serve` ({error!r})"
    was_up, server.problem = server.is_up, why
    if was_up:
        server.went_down(why, keeps_cache=is_late)
        forwarder.changed()
    return answers


def _models_of(status: dict[str, object], server: GroupServer) -> dict[str, ModelState]:
    """The models in a server's status."""
    found: dict[str, ModelState] = {}
    for each in status["models"]:  # type: ignore[attr-defined]
        num = int(each["num_running"]) + int(each["num_waiting"])
        foreign = max(0, num - server.num_sent(each["name"]))
        found[str(each["name"])] = ModelState(str(each["state"]), int(each["num_slots"]), foreign)
    return found
