"""What a router knows of a server: whether it answers, its models, the requests sent to it, and the prefixes that it has seen.

In: results of polls, requests that begin and end. Out: `GroupServer`.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from autopar.placement import Layout

#: Blocks of prompts that are remembered per server: half a million tokens.
_MOST_BLOCKS = 8192
_ONE = Layout()


class Prefixes:
    """The blocks of the prompts that were sent to a server lately, as far as its prefix cache may have them."""

    def __init__(self, most: int = _MOST_BLOCKS) -> None:
        self._blocks: OrderedDict[bytes, None] = OrderedDict()
        self._most = most

    def matched(self, blocks: Sequence[bytes]) -> int:
        """The number of first blocks that are known."""
        for number, block in enumerate(blocks):
            if block not in self._blocks:
                return number
        return len(blocks)

    def add(self, blocks: Sequence[bytes]) -> None:
        """Remember blocks. Of one prompt the last ones are forgotten first."""
        for block in reversed(blocks[: self._most]):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        """Forget all."""
        self._blocks.clear()


class ModelState(NamedTuple):
    """What a server says of a model.

    Args:
        num_slots: its slots. num_foreign: the requests that run or wait there and that this router did not send.
    """

    state: str
    num_slots: int
    num_foreign: int


@dataclass(eq=False, slots=True)
class Sent:
    """A request at a server.

    Args:
        waiting_tokens: the tokens of its prompt that are to be computed; 0 once it has begun.
        task: what reads the reply.
    """

    model: str
    waiting_tokens: float
    task: asyncio.Task[None] | None = None


@dataclass(eq=False)
class GroupServer:
    """A server, which runs the models of one group.

    Args:
        url: its address. layout, first_device: of its group. placed: the models that the placement gives it; None without a
            placement.

    Attributes:
        is_up: whether it gets new requests: it answered when it was asked last. epoch: how often it came up.
        is_draining: whether it gets no new requests because someone asked for that. closed: models with no new requests here.
        problem: why it is not up. models: what it reports. sent: the requests that are there.
    """

    url: str
    layout: Layout = _ONE
    first_device: int = 0
    placed: frozenset[str] | None = None
    is_up: bool = False
    epoch: int = 0
    is_draining: bool = False
    closed: set[str] = field(default_factory=set)
    problem: str = "not asked yet"
    models: Mapping[str, ModelState] = field(default_factory=dict)
    sent: set[Sent] = field(default_factory=set)
    prefixes: Prefixes = field(default_factory=Prefixes)

    def serves(self, model: str) -> bool:
        """Whether new requests for a model may be sent."""
        is_open = self.is_up and not self.is_draining and model not in self.closed
        return is_open and model in self.models and self.models[model].state == "ready"

    def num_sent(self, model: str) -> int:
        """The requests for a model that have not ended."""
        return sum(each.model == model for each in self.sent)

    def came_up(self, models: Mapping[str, ModelState]) -> bool:
        """It has answered.

        Returns:
            Whether that changes what it can be asked for.
        """
        is_new = not self.is_up or {n: m.state for n, m in models.items()} != {
            n: m.state for n, m in self.models.items()
        }
        self.epoch += not self.is_up
        self.is_up, self.problem, self.models = True, "", models
        return is_new

    def went_down(self, why: str, *, keeps_cache: bool = False) -> None:
        """It does not answer, or it is gone, and its cache with it."""
        self.is_up, self.problem = False, why
        if not keeps_cache:
            self.prefixes.clear()

    def abandon(self) -> None:
        """End the requests that are there: it is dead."""
        for each in list(self.sent):
            if each.task is not None:
                each.task.cancel()

    def described(self) -> dict[str, Any]:
        """The state, for people and programs."""
        state = "draining" if self.is_draining else "up" if self.is_up else "down"
        missing = sorted((self.placed or frozenset()) - {*self.models}) if self.is_up else []
        return {
            "url": self.url,
            "state": state,
            "problem": self.problem,
            "first_device": self.first_device,
            "layout": self.layout.describe(),
            "models": {name: each.state for name, each in self.models.items()},
            "missing": missing,
            "num_requests": len(self.sent),
        }


def by_url(servers: Iterable[GroupServer], url: str) -> GroupServer | None:
    """The server with an address."""
    return next((each for each in servers if each.url == url.rstrip("/")), None)
