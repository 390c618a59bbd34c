"""Measure asynchronous pipelines: versions and idle time, the order with sleeps, convergence, speed.

*rules*: for 2 to 8 equal stages without transfers, forward passes of 1 and backward passes of 2 units: the copies of the weights of
each stage, the delay of its gradients (least and largest, in updates), and the corrected copies at once, after filling, over 200 updates, and
the idle time after filling in the simulator.
*sleeps*: makespan over the simulated one, with each piece of a real stream replaced by a sleep (100 ms forward, 200 ms backward) that returns prepared
arrays. Order, registers and moves are the stream's, with a thread per submesh; the least of three.
*convergence*: the decoder of two layers of `examples/async_pipeline.py`, character by character on the Python reference that comes with Python
(`pydoc_data`), Adam with a warm-up of 100 updates; the mean loss of the last 50 of 600 updates, on the same batches under each rule, in two stages with four
microbatches per update, and in four stages with one, where gradients are up to 3 updates late. PipeMare anneals over 150 updates.
*speed*: the models and clusters of `benchmarks/pipeline/clusters.py`: the step of each schedule in stages of its own, the fastest of 128, 256 and 512 microbatches, by
the prices of layers. Then with fewer microbatches of the same size, in the stages of 1F1B: one for each stage, as in PipeDream-2BW's smallest
batch, and a single one per update, as in PipeDream and AMPNet, where 1F1B is model parallelism without a pipeline.

The papers report: PipeDream (SOSP 2019) up to 5.3 times faster to the same accuracy than data parallelism; PipeDream-2BW (ICML 2021) up to 20 times faster than without
a pipeline, and up to 3.2 times faster than GPipe; PipeMare (MLSys 2021) up to 4.3 times the utilization of synchronous pipelines, or 2.7 times less memory; AMPNet (2017) shorter
training on CPUs, without one number. What these simulations show is smaller, for three reasons. With 1,024 sequences per update there are many more microbatches than stages, so the bubble that
asynchrony removes is a few percent; with m = p it is close to half of a GPipe step, and with m = 1 all but 1/p of the time. GPipe's other handicap in these papers,
recomputation that 1F1B does not need, is a choice of the planner here for each schedule. And the gains over data parallelism, on networks of 10 to 25 Gb/s, are those of
stages in place of all-reduces, which synchronous pipelines have too.
"""

from __future__ import annotations

import importlib
from typing import Any

Row = dict[str, Any]


def measure(program: str) -> list[Row]:
    """Rows of one of the programs `rules`, `sleeps`, `convergence`, `speed`, measured by the module of that name."""
    return importlib.import_module(f"benchmarks.asynchronous.{program}").rows()
