"""Select an attention backend: compare each candidate with the reference, and time both.

In: the sizes of one device's part of a program. Out: `BackendChoice`: a name for `attend_paged`, and why the others are
rejected. The selection runs once, at start-up, on random pages with NaNs wherever no token may be read.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.inference.kernels.paged_attention import BACKENDS, REFERENCE, attend_paged, backend_named
from autopar.inference.kv_cache.device_pages import KVPages
from autopar.inference.kv_cache.scores import PLAIN, Scores

#: Tolerated difference from the reference, by the bytes of an element, for outputs of about 1: rounding alone.
_TOLERANCE = {8: 1e-5, 4: 1e-5, 2: 2e-2}
#: Speedup over the reference that a backend needs. A smaller one is noise, and the choice would change at every start.
_MIN_SPEEDUP = 1.1
#: Size of the random pages, keys and values together. Rows share pages if they need more.
_MAX_BYTES = 256 * 2**20
_ROUNDS = 5
_REPEATS = 8  # per call, to amortize its dispatch
_NUM_DRAWN = 2**20 + 7  # random numbers, repeated to fill all pages

_attend = jax.jit(attend_paged, static_argnums=(0, 5))


@dataclass(frozen=True, slots=True)
class Problem:
    """The sizes of one layer's attention on one device.

    Args:
        rows, tokens: the number of rows of queries, and the tokens per row.
        heads, kv_heads, head_dim: the heads that are on the device, and their size.
        pages_per_sequence: the pages of the longest sequence.
        dtype: the dtype of queries and pages.
        typical_length: the tokens of a sequence for the timing; by default half of the longest.
        scores: how dot products become weights.
    """

    rows: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    pages_per_sequence: int
    dtype: Any = jnp.float32
    typical_length: int | None = None
    scores: Scores = PLAIN

    @property
    def longest(self) -> int:
        """The tokens of the longest sequence."""
        return self.page_size * self.pages_per_sequence

    @property
    def page_bytes(self) -> int:
        """The bytes of one page, keys and values together."""
        return 2 * self.page_size * self.kv_heads * self.head_dim * jnp.dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """The backend to use, and why the others are rejected.

    Args:
        name: the backend's name, for `attend_paged`.
        differences: the largest absolute difference from the reference, for each backend that ran.
        seconds: the time of one call at the typical length, for each backend that was timed.
        rejected: the reason, for each other candidate.
    """

    name: str
    differences: Mapping[str, float]
    seconds: Mapping[str, float]
    rejected: Mapping[str, str]

    def __str__(self) -> str:
        """One line per candidate."""
        times = {name: f" ({1e6 * seconds:,.0f} us)" for name, seconds in self.seconds.items()}
        lines = [f"attention by {self.name}{times.get(self.name, '')}"]
        return "\n".join(
            [*lines, *(f"  not {name}{times.get(name, '')}: {why}" for name, why in self.rejected.items())]
        )


def choose_backend(problem: Problem, candidates: Sequence[str] | None = None, *, device: Any = None) -> BackendChoice:
    """Select the fastest correct backend.

    Args:
        candidates: the names of backends to try besides the reference; by default all that support the device's
            platform. One that cannot run, raises, is wrong or is not clearly faster than the reference is rejected.
        device: the `jax.Device` to run on; by default the first.

    Raises:
        InferenceError: no backend has the name of a candidate.
    """
    device = jax.devices()[0] if device is None else device
    if candidates is None:
        candidates = [name for name, backend in BACKENDS.items() if device.platform in backend.platforms]
    rejected = {name: why for name in candidates if (why := _cannot_run(name, problem, device.platform))}
    tried = [name for name in candidates if name != REFERENCE and name not in rejected]
    if not tried:
        return BackendChoice(REFERENCE, {}, {}, rejected)
    with jax.default_device(device):
        differences = _differences(problem, tried, rejected)
        correct = [name for name in tried if name not in rejected]
        seconds = _seconds(problem, [REFERENCE, *correct], rejected) if correct else {}
    reference_s = seconds.get(REFERENCE, math.inf)
    name = min(seconds, key=lambda each: seconds[each], default=REFERENCE)
    name = name if seconds.get(name, reference_s) * _MIN_SPEEDUP <= reference_s else REFERENCE
    for other in seconds.keys() - {name, REFERENCE}:
        why = f"must be {_MIN_SPEEDUP} times as fast" if name == REFERENCE else f"{name} is faster"
        rejected[other] = f"it is {reference_s / seconds[other]:.2f} times as fast as {REFERENCE}, and {why}"
    if name != REFERENCE and REFERENCE in seconds:
        rejected[REFERENCE] = f"{name} is {reference_s / seconds[name]:.2f} times as fast"
    return BackendChoice(name, differences, seconds, rejected)


def _cannot_run(name: str, problem: Problem, platform: str) -> str:
    backend = backend_named(name)
    if platform not in backend.platforms:
        return f"it runs on {' and '.join(backend.platforms)}, and this device is a {platform}"
    if problem.scores.slopes is not None and backend.run is not None:
        return f"ALiBi is computed by {REFERENCE}"
    return backend.refused(problem.page_size, problem.head_dim) or ""


# -- parity --------------------------------------------------------------------------------------


def _differences(problem: Problem, names: Sequence[str], rejected: dict[str, str]) -> dict[str, float]:
    """The largest difference of each backend from the reference. Those that are wrong or raise are added to `rejected`."""
    last = problem.longest - problem.tokens
    starts = [last, 0, -1, *np.random.default_rng(0).integers(0, last + 1, problem.rows)]  # -1 is an idle row
    draws = [_random(problem, np.array(starts[n : n + problem.rows])) for n in range(0, 4, problem.rows)]
    tolerance = _TOLERANCE[jnp.dtype(problem.dtype).itemsize]
    found: dict[str, float] = {}
    with jax.default_matmul_precision("highest"):
        for name in names:
            try:
                found[name] = max(_difference(name, problem.scores, arrays) for arrays in draws)
            except Exception as error:  # a failure in a kernel's compiler must not stop the server
                rejected[name] = _first_line(error)
                continue
            if found[name] > tolerance:
                rejected[name] = f"it differs by {found[name]:.1e} from {REFERENCE}; the tolerance is {tolerance:.0e}"
    return found


def _difference(name: str, scores: Scores, arrays: Sequence[Any]) -> float:
    """The largest difference from the reference; infinite if an output is NaN or infinite."""
    got, expected = (np.asarray(_attend(each, *arrays, scores), np.float32) for each in (name, REFERENCE))
    is_real = np.asarray(arrays[-1]) >= 0
    difference = np.abs(got - expected)[is_real].max(initial=0.0)
    return float(difference) if np.isfinite(difference) else math.inf


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"


def _random(problem: Problem, starts: Any) -> tuple[jax.Array, KVPages, jax.Array, jax.Array]:
    """Make random queries, pages, tables and positions, with NaNs in the pages wherever no token may be read.

    Args:
        starts: the first position of each row; -1 for an idle row.
    """
    rng = np.random.default_rng(1)
    num_entries = problem.rows * problem.pages_per_sequence
    num_pages = min(num_entries, max(problem.pages_per_sequence, _MAX_BYTES // problem.page_bytes))
    shuffled = np.concatenate([rng.permutation(num_pages) for _ in range(-(-num_entries // num_pages))])
    tables = shuffled[:num_entries].reshape(problem.rows, -1).astype(np.int32)
    positions = np.where(starts[:, None] < 0, -1, starts[:, None] + np.arange(problem.tokens)).astype(np.int32)
    is_read = np.zeros((num_pages + 1, problem.page_size), bool)
    num_read = np.maximum(positions.max(1) + 1, 0)[:, None] - np.arange(problem.pages_per_sequence) * problem.page_size
    np.logical_or.at(is_read, tables, np.arange(problem.page_size) < num_read[:, :, None])
    shape = (num_pages + 1, problem.page_size, problem.kv_heads, problem.head_dim)

    def normal(*shape: int) -> Any:
        return np.resize(rng.standard_normal(_NUM_DRAWN, np.float32), shape)

    pages = (np.where(is_read[..., None, None], normal(*shape), np.nan) for _ in range(2))
    keys, values = (jnp.asarray(each, problem.dtype) for each in pages)
    queries = jnp.asarray(normal(problem.rows, problem.tokens, problem.heads, problem.head_dim), problem.dtype)
    return queries, KVPages(keys, values), jnp.asarray(tables), jnp.asarray(positions)


# -- time ----------------------------------------------------------------------------------------


def _seconds(problem: Problem, names: Sequence[str], rejected: dict[str, str]) -> dict[str, float]:
    """The time of one call of each backend: the minimum over several rounds, in which the backends alternate."""
    length = problem.longest // 2 if problem.typical_length is None else problem.typical_length
    start = min(max(0, length - problem.tokens), problem.longest - problem.tokens)
    queries, pages, tables, positions = _random(problem, np.full(problem.rows, start))
    least: dict[str, float] = {}
    for number in range(_ROUNDS + 1):
        for name in [name for name in names if name not in rejected]:
            begin = time.perf_counter()
            try:
                _attend_repeatedly(name, problem.scores, queries, pages, tables, positions).block_until_ready()
            except Exception as error:
                rejected[name] = _first_line(error)
                least.pop(name, None)
                continue
            if number:  # the first round compiles
                least[name] = min(least.get(name, math.inf), (time.perf_counter() - begin) / _REPEATS)
    return least


@partial(jax.jit, static_argnums=(0, 1))
def _attend_repeatedly(name: str, scores: Scores, queries: Any, pages: Any, tables: Any, positions: Any) -> jax.Array:
    """Run attention in a loop. The tables are rotated each time, so that XLA cannot hoist anything out of the loop."""

    def iterate(_: Any, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        queries, tables = carry
        return attend_paged(name, queries, pages, tables, positions, scores), jnp.roll(tables, 1, 0)

    return jax.lax.fori_loop(0, _REPEATS, iterate, (queries, tables))[0]
