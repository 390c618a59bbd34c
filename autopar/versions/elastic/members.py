"""Decide who is alive, and with that who does what: the rules of the keeper of a store.

In: reports of servers and workers, and the time. Out: `View`s. No sockets, no clock, no threads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from autopar.membership.wire import Message, WireError
from autopar.versions.elastic.view import View, ended, with_copy, with_replica, with_worker, without

#: Seconds within which a member whose connection broke may come back.
CLOSED_S = 1.0


@dataclass(slots=True)
class _Member:
    """One process that has reported."""

    report: Message
    heard_s: float
    closed_s: float | None = None


class Members:
    """The members of a store, as `Rules` of a keeper.

    Attributes:
        view: who does what now.
        events: what happened, with the time.
        is_over: set to end the keeper.
    """

    def __init__(self, servers: int, shares: int, timeout_s: float, now_s: float) -> None:
        self.view = View.of(servers, shares)
        self.events: list[tuple[float, str]] = []
        self.is_over = False
        self._timeout_s, self._started_s, self._now_s = timeout_s, now_s, now_s
        self._members: dict[str, _Member] = {}
        self._refused: dict[str, str] = {}
        self._answer: tuple[int, Message] = (-1, {})

    def heard(self, name: str, report: Message, now_s: float) -> None:
        """As `Rules.heard`. A member that counts as dead comes again by its next report."""
        self._now_s = now_s
        try:
            self._refused.pop(name, None)
            member = self._members.get(name)
            if member is None:
                refusal = self._admitted(name, report)
                if refusal:
                    self._refused[name] = refusal
                    return
                member = self._members[name] = _Member(report, now_s)
            member.report, member.heard_s, member.closed_s = report, now_s, None
            if report.get("copied"):
                self._becomes(with_copy(self.view, int(report["server"]), name), f"{name} has copied")
            if report.get("over"):
                self._becomes(ended(self.view), f"{name} says that all is done")
            if report.get("leaves"):
                self._goes(name, "has left")
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise WireError(f"{name} sent a report that cannot be read: {error!r}") from error

    def closed(self, name: str, now_s: float) -> None:
        """As `Rules.closed`."""
        if name in self._members:
            self._members[name].closed_s = now_s

    def tick(self, now_s: float) -> None:
        """As `Rules.tick`."""
        self._now_s = now_s
        for name, member in list(self._members.items()):
            is_closed = member.closed_s is not None and now_s - member.closed_s > CLOSED_S
            if is_closed or now_s - member.heard_s > self._timeout_s:
                self._goes(name, "is gone")
        if now_s - self._started_s > self._timeout_s:  # members of an earlier keeper had time to come
            view = self.view
            expected = {*view.workers, *(one for chain in (*view.chains, *view.waiting) for one in chain)}
            for name in sorted(expected - self._members.keys()):
                self._goes(name, "has not come back")

    def answer(self, name: str) -> Message:
        """As `Rules.answer`."""
        if name in self._refused:
            return {"no": self._refused[name]}
        if self._answer[0] != self.view.epoch:
            self._answer = self.view.epoch, {"view": self.view.to_json()}
        return self._answer[1]

    # -- helpers -----------------------------------------------------------------------------

    def _admitted(self, name: str, report: Message) -> str:
        """Take a member in, or say why not."""
        known, view = report.get("view"), self.view
        newest = view if known is None else _newest(view, View.from_json(known))
        if newest is not view:  # of an earlier keeper, which may not have known who has come since
            for other, member in self._members.items():
                newest = _with_member(newest, other, member.report)
        server, shares = report.get("server"), int(report.get("shares", len(view.shares)))
        if server is not None and not 0 <= int(server) < len(view.chains):
            return f"server {server}: the store has servers 0 to {len(view.chains) - 1}"
        if shares != len(view.shares):
            return (
                f"the store has {shares} shares of the batch (`workers=`), and the keeper {len(view.shares)}"
                " (`shares=`): give both the same"
            )
        newest = _with_member(newest, name, report)
        if server is not None and newest.lost[int(server)]:
            return (
                f"all replicas of server {server} have died: restore it from a checkpoint"
                " (`StoreCheckpoints.restore(store)`) before it serves"
            )
        self._becomes(newest, f"{name} has come")
        return ""

    def _goes(self, name: str, how: str) -> None:
        self._members.pop(name, None)
        self._becomes(without(self.view, name), f"{name} {how}")

    def _becomes(self, view: View, event: str) -> None:
        if view.epoch != self.view.epoch:
            self.events.append((self._now_s, event))
        self.view = view


def _newest(own: View, other: View) -> View:
    """The newer of two views; one from an earlier keeper with a higher epoch than anyone has seen."""
    if (len(own.chains), len(own.shares)) != (len(other.chains), len(other.shares)) or other.epoch <= own.epoch:
        return own
    return replace(other, epoch=other.epoch + 1)


def _with_member(view: View, name: str, report: dict[str, Any]) -> View:
    if report.get("server") is None:
        return with_worker(view, name)
    return with_replica(view, int(report["server"]), name, str(report["address"]), bool(report["has_state"]))
