"""Change which models servers run, with a replica of each at all times if memory allows it.

In: the models that each server should run. Out: the changes, made through the servers' administration: servers that have room load
first; a model leaves a server when another one serves it, after its requests there have ended; requests for a model whose only replica
has to move wait in the router.
"""

# pyright: reportMissingImports=false
# The packages of the extra `serve` need not be installed where types are checked.

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx

from autopar.errors import PlacementError
from autopar.serving.router.forward import Forwarder
from autopar.serving.router.group_servers import GroupServer
from autopar.serving.router.watch import ask


async def change_models(
    forwarder: Forwarder, wanted: Mapping[GroupServer, frozenset[str]], folders: Mapping[str, Path]
) -> None:
    """Load and unload models until each server runs those it should.

    Args:
        folders: of the models, on the servers' hosts. Models that are not in it are left alone.

    Raises:
        PlacementError: a server does not do what it is asked for. Then the servers run what they ran before, as far as they can.
    """
    before = {each: frozenset(each.models) & {*folders} for each in wanted}
    try:
        await _change(forwarder, wanted, folders)
    except PlacementError:
        with contextlib.suppress(PlacementError):
            await _change(forwarder, before, folders)
        raise


async def _change(
    forwarder: Forwarder, wanted: Mapping[GroupServer, frozenset[str]], folders: Mapping[str, Path]
) -> None:
    gains = {each: set(models) - {*each.models} for each, models in wanted.items()}
    losses = {each: ({*each.models} & {*folders}) - set(models) for each, models in wanted.items()}
    placed = {name for models in wanted.values() for name in models}
    while any(gains.values()) or any(losses.values()):
        roomy = [each for each in gains if gains[each] and not losses[each]]
        if roomy:
            work = [_load(forwarder, each, [(name, folders[name]) for name in sorted(gains[each])]) for each in roomy]
            failed = [each for each in await asyncio.gather(*work, return_exceptions=True) if each is not None]
            if failed:
                raise failed[0]
            for each in roomy:
                gains[each] = set()
            continue
        leaving = [(each, name) for each in losses for name in sorted(losses[each])]
        safe = [
            (each, name)
            for each, name in leaving
            if name not in placed or any(other is not each and other.serves(name) for other in wanted)
        ]
        server, name = (safe or leaving)[0]
        await _unload(forwarder, server, name)
        losses[server].discard(name)


async def _load(forwarder: Forwarder, server: GroupServer, models: Sequence[tuple[str, Path]]) -> None:
    """Load models on a server."""
    try:
        for name, folder in models:
            await _post(forwarder, server, "load", {"folder": str(folder.resolve()), "name": name})
    finally:
        await ask(forwarder, server)


async def _unload(forwarder: Forwarder, server: GroupServer, name: str) -> None:
    """Unload a model when its requests there have ended."""
    server.closed.add(name)
    try:
        forwarder.changed()
        await forwarder.drain(server, name)
        await _post(forwarder, server, "unload", {"model": name})
        await ask(forwarder, server)
    finally:
        server.closed.discard(name)


async def _post(forwarder: Forwarder, server: GroupServer, what: str, body: dict[str, str]) -> None:
    """Ask the administration of a server for something.

    Raises:
        PlacementError: it does not do it; the text has its reason.
    """
    keys = sorted(forwarder.limits.admin_keys)
    headers = {**forwarder.headers({}), "authorization": f"Bearer {keys[0] if keys else ''}"}
    timeout = httpx.Timeout(None, connect=5.0)
    try:
        reply = await forwarder.client.post(f"{server.url}/admin/{what}", json=body, headers=headers, timeout=timeout)
    except httpx.HTTPError as error:
        raise PlacementError(f"{server.url} did not {what} {body}: {type(error).__name__} {error}") from None
    if reply.status_code != 200:
        message = f"HTTP status {reply.status_code}"
        with contextlib.suppress(ValueError, KeyError, TypeError):
            message = json.loads(reply.content)["error"]["message"]
        raise PlacementError(f"{server.url} did not {what} {body}: {message}")
