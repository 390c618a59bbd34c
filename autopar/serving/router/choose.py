"""Choose the server that a request goes to, by the length of queues and by what prefix caches have.

In: the servers that serve its model, its prompt. Out: the server with the shortest wait until the first token, by the rule that
placements are simulated with (`placement.router`). The unit is the time of one prompt token on one device:

    wait = (prompt tokens at the server that are not computed yet
            + decode work of requests beyond its slots
            + own prompt tokens that its cache does not have) / devices

So a server that has seen the prefix is preferred until others are ahead by as much work as the cache saves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.placement.router import Choice, choose_replica
from autopar.serving.router.group_servers import GroupServer
from autopar.serving.router.prompts import BLOCK_TOKENS, Prompt

#: A generated token in a full batch takes as long as so many tokens of a prompt: a step of 16 sequences as long as 160 tokens.
_PER_NEW_TOKEN = 10


def uncached_tokens(server: GroupServer, prompt: Prompt) -> int:
    """About how many tokens of a prompt a server has to compute; at least one."""
    return max(1, prompt.num_tokens - BLOCK_TOKENS * server.prefixes.matched(prompt.blocks))


def choose_server(
    servers: Sequence[GroupServer], model: str, prompt: Prompt, mean_new: Mapping[str, float]
) -> GroupServer:
    """The best of some servers that serve a model.

    Args:
        mean_new: the mean number of generated tokens, by model.
    """
    # Of equal ones that with the fewest requests.
    ordered = sorted(servers, key=lambda server: len(server.sent) / server.layout.num_devices)
    choices = [
        Choice(
            _queued(server, model, mean_new) / server.layout.num_devices,
            uncached_tokens(server, prompt) / server.layout.num_devices,
        )
        for server in ordered
    ]
    return ordered[choose_replica(choices)]


def _queued(server: GroupServer, model: str, mean_new: Mapping[str, float]) -> float:
    """The work that a new request for a model waits for."""
    queued = sum(each.waiting_tokens for each in server.sent)
    for name, state in server.models.items():
        num = server.num_sent(name) + state.num_foreign + (name == model)
        queued += max(0, num - state.num_slots) * _PER_NEW_TOKEN * mean_new.get(name, 0.0)
    return queued
