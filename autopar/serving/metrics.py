"""Count requests and tokens, and report them to Prometheus under vLLM's names where they mean the same.

In: what happens to requests, and the counters of engines. Out: `ModelMetrics`; `exposition`, the text of `/metrics`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

if TYPE_CHECKING:
    from autopar.serving.models import ServedModel

_FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_NEXT_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5)
_RATE_S = 30.0

#: name, meaning, and where its value comes from in the engine's `Stats`.
_GAUGES = (
    ("num_requests_running", "requests in slots", "num_running"),
    ("num_requests_waiting", "requests in the queue", "num_waiting"),
)
_COUNTERS = (
    ("prompt_tokens", "prompt tokens computed or found in the cache", ("num_prompt_tokens", "num_cached_tokens")),
    ("generation_tokens", "tokens generated", ("num_tokens",)),
    ("prefix_cache_queries", "prompt tokens looked up in the prefix cache", ("num_prompt_tokens", "num_cached_tokens")),
    ("prefix_cache_hits", "prompt tokens found in the prefix cache", ("num_cached_tokens",)),
    ("num_preemptions", "preemptions of requests", ("num_preempted",)),
)


class ModelMetrics:
    """The metrics of one model.

    Args:
        name: the model's, which labels each value.
    """

    def __init__(self, name: str) -> None:
        self.registry = CollectorRegistry()

        def histogram(title: str, about: str, buckets: Iterable[float]) -> Histogram:
            family = Histogram(f"vllm:{title}", about, ["model_name"], registry=self.registry, buckets=tuple(buckets))
            return family.labels(name)

        self._name = name
        self._first = histogram("time_to_first_token_seconds", "seconds to the first token", _FIRST_TOKEN_S)
        self._next = histogram("inter_token_latency_seconds", "seconds between two tokens", _NEXT_TOKEN_S)
        self._whole = histogram("e2e_request_latency_seconds", "seconds to the end of a reply", _FIRST_TOKEN_S)
        self._ended = Counter(
            "vllm:request_success",
            "requests by the reason of their end",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self._refused = Counter(
            "autopar:requests_refused", "requests refused with 429", ["model_name"], registry=self.registry
        ).labels(name)
        labelled = ["model_name"]
        self._gauges = {
            source: Gauge(f"vllm:{title}", about, labelled, registry=self.registry).labels(name)
            for title, about, source in _GAUGES
        }
        self._usage = Gauge(
            "vllm:kv_cache_usage_perc",
            "share of the KV cache's pages that are held, 1 for all",
            labelled,
            registry=self.registry,
        ).labels(name)
        self._queued = Gauge(
            "autopar:queued_tokens", "tokens of requests that wait", labelled, registry=self.registry
        ).labels(name)
        self._counters = [
            (Counter(f"vllm:{title}", about, labelled, registry=self.registry).labels(name), sources, [0])
            for title, about, sources in _COUNTERS
        ]
        self._seen: list[tuple[float, int]] = [(time.monotonic(), 0)]

    def first_token(self, seconds: float) -> None:
        """Record the time to the first token of a request."""
        self._first.observe(seconds)

    def next_tokens(self, seconds: float, num: int) -> None:
        """Record `num` tokens that came after `seconds`."""
        for _ in range(num):
            self._next.observe(seconds / num)

    def ended(self, reason: str, seconds: float, num_tokens: int) -> None:
        """Record the end of a request."""
        self._ended.labels(self._name, reason).inc()
        self._whole.observe(seconds)
        at, total = self._seen[-1]
        self._seen.append((time.monotonic(), total + num_tokens))
        while len(self._seen) > 2 and self._seen[0][0] < at - _RATE_S:
            del self._seen[0]

    def count_refused(self) -> None:
        """Record a request that was refused because the queue is full."""
        self._refused.inc()

    def tokens_per_s(self) -> float:
        """Tokens of requests that ended lately, per second: how fast the queue gets shorter."""
        (first, before), (last, total) = self._seen[0], self._seen[-1]
        return (total - before) / max(1e-3, last - first)

    def text(self, model: ServedModel) -> bytes:
        """The metrics in Prometheus' format."""
        stats = model.thread.stats
        for source, gauge in self._gauges.items():
            gauge.set(getattr(stats, source))
        pages = stats.held_pages + stats.evictable_pages + stats.free_pages
        self._usage.set(stats.held_pages / max(1, pages))  # a model may have none of a pool of bytes
        self._queued.set(model.queued_tokens)
        for counter, sources, last in self._counters:
            total = sum(getattr(stats, source) for source in sources)
            counter.inc(max(0, total - last[0]))
            last[0] = total
        return generate_latest(self.registry)


def exposition(models: Iterable[ServedModel]) -> bytes:
    """The metrics of all models: each family once, with a line for each model."""
    families: dict[bytes, list[bytes]] = {}
    for model in models:
        head = b""
        for line in model.metrics.text(model).splitlines():
            if line.startswith(b"# HELP"):
                head = line
                families.setdefault(head, [])
            if line.startswith(b"#") and line in families[head]:
                continue
            families[head].append(line)
    return b"".join(line + b"\n" for lines in families.values() for line in lines)
