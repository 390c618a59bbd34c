"""Count what a router does, and report it to Prometheus.

In: what happens to requests; the servers. Out: the text of `/metrics`.
"""

# pyright: reportMissingImports=false
# The packages of the extra `serve` need not be installed where types are checked.

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from autopar.serving.router.group_servers import GroupServer


class RouterMetrics:
    """The metrics of a router."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()

        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(f"autopar:router_{name}", about, labels, registry=self._registry)

        def gauge(name: str, about: str) -> Gauge:
            return Gauge(f"autopar:router_{name}", about, ["server"], registry=self._registry)

        self._replies = counter("replies", "replies by server, model and HTTP status", "server", "model", "status")
        self._again = counter(
            "sent_again", "requests sent to another server, by what the first one did", "server", "why"
        )
        self._prompt = counter("prompt_tokens", "about how many prompt tokens were sent to servers")
        self._matched = counter("matched_tokens", "those of them in a prefix that the server has seen lately")
        self._up = gauge("server_up", "1 if the server answers")
        self._draining = gauge("server_draining", "1 if the server gets no new requests")
        self._num = gauge("num_requests", "requests at the server")

    def replied(self, server: str, model: str, status: int) -> None:
        """A server has replied."""
        self._replies.labels(server, model, str(status)).inc()

    def sent_again(self, server: str, why: str) -> None:
        """A server did not reply: it was "lost", or "refused" the request."""
        self._again.labels(server, why).inc()

    def chosen(self, num_prompt: int, num_matched: float) -> None:
        """A server was chosen for a prompt, a part of which it has seen."""
        self._prompt.inc(num_prompt)
        self._matched.inc(max(0.0, num_matched))

    def text(self, servers: Sequence[GroupServer]) -> bytes:
        """The metrics in Prometheus' format."""
        for each in (self._up, self._draining, self._num):
            each.clear()
        for server in servers:
            self._up.labels(server.url).set(server.is_up)
            self._draining.labels(server.url).set(server.is_draining)
            self._num.labels(server.url).set(len(server.sent))
        return generate_latest(self._registry)
