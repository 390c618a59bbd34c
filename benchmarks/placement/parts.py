"""Measure the placement of many models on one cluster.

*md1*: AlpaServe's example of two models and two devices (section 3.1): the mean latency in the simulator and by the formula of M/D/1
queues.
*goodput*: eight models on eight devices (`settings.py`): the share of requests within their bounds on traces that the search did not
see, by the placement that is found, and by replication, which is the same search with one device per group.
*overhead*: cases in which model parallelism costs more than it brings: steady arrivals and layouts with an overhead of `alpha`. The
search must choose groups of one device.
*brute force*: the search against all placements, each simulated.
*rates*: the placement that is found against the bound of CP-SAT, in requests per second without queueing; and the simulated goodput of
both placements.
*scale*: CPU seconds of a search for 24 models on 16 devices.
*real engine*: engines on two CPU devices, driven by ten traces in real time, and the simulation of the same traces with the recorded
times of their iterations; three runs, of which the worst counts for each trace.
*update weights*: an engine whose weights a second thread replaces under load: tokens that the weights in force would not have given.
*lend*: training in the gaps of an engine, on a fake clock that recorded times of iterations and microbatches advance.
*kv pool*: random operations of models with different pages on one pool of bytes, against an oracle that has the bytes.

AlpaServe (Li et al., OSDI 2023) reports up to 10 times the rate or 6 times the burstiness at 99 % of the bounds.
"""

from __future__ import annotations

import importlib
from typing import Any

Row = dict[str, Any]


def measure(program: str) -> list[Row]:
    """The rows of one part, measured by the module of that name; text after a colon selects one of its programs."""
    name, _, of = program.partition(": ")
    module = importlib.import_module(f"benchmarks.placement.{name.replace(' ', '_')}")
    rows = module.measure(of) if of else module.measure()
    return [{"part": name, **row} for row in rows]
