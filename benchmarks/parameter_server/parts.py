"""Measure a versioned store: what a pull and a push cost, and what consistency policies cost and gain with stragglers.

*overhead*: medians of 2,000 calls on two CPU devices, each with its transfer finished, called in turn with `jax.device_put`.
*stragglers*: 4 workers and 200 clocks; one worker, drawn for each clock, takes 5 times as long: simulated with free messages,
and as threads that sleep for 20 and 100 ms.
*digits*, *text*: the loss of a model over simulated time and over updates, where 4 workers take a second for a batch, and one drawn
for each iteration 5 seconds. The simulator decides when a worker reads and when its update arrives; a real store trains. Each
policy has the best learning rate of one grid, by the loss at 200 s. Local SGD and DiLoCo take 5 iterations of their own per clock, and
count as one update for each of their clocks; DiLoCo's outer optimizer is SGD with Nesterov momentum 0.9. Digits: a network of one
hidden layer on scikit-learn's digits, SGD, the mean loss of all images. Text: a decoder of two layers (Flax) that predicts the next byte of the
Python reference that comes with Python (`pydoc_data`), Adam, the loss per byte of text that it is not trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from benchmarks.parameter_server import calls, digits, stragglers, text
from benchmarks.parameter_server.convergence import Row, converged

_PARTS: Mapping[str, Callable[[], list[Row]]] = {
    "overhead": calls.rows,
    "stragglers": stragglers.rows,
    "digits": lambda: converged("digits", digits.task()),
    "text": lambda: converged("text", text.task()),
}


def measure(program: str) -> list[Row]:
    """Rows of one of the programs `overhead`, `stragglers`, `digits`, `text`."""
    return _PARTS[program]()
