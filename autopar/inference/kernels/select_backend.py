"""Which attention backend to use: each that can run here is held against the reference, and timed beside it.

In: the sizes of one device's part of a program. Out: `Chosen`: a name for `attend_paged`, and why it and not the others.
It is done once, at start-up, on random pages, in which NaNs stand wherever no token is to be read.
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

#: Largest difference from the reference that is rounding alone, by the bytes of an element: of outputs of about 1.
_TOLERANCE = {8: 1e-5, 4: 1e-5, 2: 2e-2}
#: So much faster than the reference a backend has to be: less is noise, and would change with every start.
_CLEARLY = 1.1
#: Of the random pages, keys and values: rows share pages beyond that.
_MOST_BYTES = 256 * 2**20
_ROUNDS = 5
_REPEATS = 8  # in one call, so that its dispatch does not count
_NUM_DRAWN = 2**20 + 7  # random numbers, which fill all pages by repetition

_attend = jax.jit(attend_paged, static_argnums=0)


@dataclass(frozen=True, slots=True)
class Problem:
    """Attention of one layer, as one device computes it.

    Args:
        rows, tokens: of the queries. heads, kv_heads, head_dim: those that the device has.
        pages_per_sequence: of the longest.
        dtype: of queries and pages.
        typical_length: tokens of a sequence, for the timing; by default half of the longest.
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

    @property
    def longest(self) -> int:
        """Tokens."""
        return self.page_size * self.pages_per_sequence

    @property
    def page_bytes(self) -> int:
        """Of one page, keys and values."""
        return 2 * self.page_size * self.kv_heads * self.head_dim * jnp.dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class Chosen:
    """What to use, and why not the others.

    Args:
        name: of the backend, for `attend_paged`.
        differences: of each that ran, the largest absolute difference from the reference.
        seconds: of each that was timed, for one call at the typical length.
        not_taken: of each other candidate, why.
    """

    name: str
    differences: Mapping[str, float]
    seconds: Mapping[str, float]
    not_taken: Mapping[str, str]

    def __str__(self) -> str:
        """One line for each candidate."""
        times = {name: f" ({1e6 * seconds:,.0f} us)" for name, seconds in self.seconds.items()}
        lines = [f"attention by {self.name}{times.get(self.name, '')}"]
        return "\n".join(
            [*lines, *(f"  not {name}{times.get(name, '')}: {why}" for name, why in self.not_taken.items())]
        )


def choose_backend(problem: Problem, candidates: Sequence[str] | None = None, *, device: Any = None) -> Chosen:
    """The fastest that is right.

    Args:
        candidates: names, beside the reference; by default all that are of use on the device's platform. One that cannot
            run, raises, is wrong or is not clearly faster is not taken, and it is told why.
        device: a `jax.Device` to try them on; by default the first.

    Raises:
        InferenceError: a candidate has a name that no backend has.
    """
    device = jax.devices()[0] if device is None else device
    if candidates is None:
        candidates = [name for name, backend in BACKENDS.items() if device.platform in backend.platforms]
    not_taken = {name: why for name in candidates if (why := _cannot_run(name, problem, device.platform))}
    tried = [name for name in candidates if name != REFERENCE and name not in not_taken]
    if not tried:
        return Chosen(REFERENCE, {}, {}, not_taken)
    with jax.default_device(device):
        differences = _differences(problem, tried, not_taken)
        right = [name for name in tried if name not in not_taken]
        seconds = _seconds(problem, [REFERENCE, *right], not_taken) if right else {}
    slow = seconds.get(REFERENCE, math.inf)
    name = min(seconds, key=lambda each: seconds[each], default=REFERENCE)
    name = name if seconds.get(name, slow) * _CLEARLY <= slow else REFERENCE
    for other in seconds.keys() - {name, REFERENCE}:
        needed = f"has to be {_CLEARLY} times as fast" if name == REFERENCE else f"{name} is faster"
        not_taken[other] = f"it is {slow / seconds[other]:.2f} times as fast as {REFERENCE}, and {needed}"
    if name != REFERENCE and REFERENCE in seconds:
        not_taken[REFERENCE] = f"{name} is {slow / seconds[name]:.2f} times as fast"
    return Chosen(name, differences, seconds, not_taken)


def _cannot_run(name: str, problem: Problem, platform: str) -> str:
    backend = backend_named(name)
    if platform not in backend.platforms:
        return f"it runs on {' and '.join(backend.platforms)}, and this is {platform}"
    return backend.refused(problem.page_size, problem.head_dim) or ""


# -- parity --------------------------------------------------------------------------------------


def _differences(problem: Problem, names: Sequence[str], not_taken: dict[str, str]) -> dict[str, float]:
    """Largest differences from the reference, at the precision of the dtype; of those that are wrong or raise, why."""
    last = problem.longest - problem.tokens
    starts = [last, 0, -1, *np.random.default_rng(0).integers(0, last + 1, problem.rows)]  # -1 is idle
    draws = [_random(problem, np.array(starts[n : n + problem.rows])) for n in range(0, 4, problem.rows)]
    tolerance = _TOLERANCE[jnp.dtype(problem.dtype).itemsize]
    found: dict[str, float] = {}
    with jax.default_matmul_precision("highest"):
        for name in names:
            try:
                found[name] = max(_difference(name, arrays) for arrays in draws)
            except Exception as error:  # whatever a kernel's compiler says, the server starts
                not_taken[name] = _first_line(error)
                continue
            if found[name] > tolerance:
                not_taken[name] = f"it differs by {found[name]:.1e} from {REFERENCE}, and may by {tolerance:.0e}"
    return found


def _difference(name: str, arrays: Sequence[Any]) -> float:
    """Infinite where something is no number."""
    got, wanted = (np.asarray(_attend(each, *arrays), np.float32) for each in (name, REFERENCE))
    is_real = np.asarray(arrays[-1]) >= 0
    difference = np.abs(got - wanted)[is_real].max(initial=0.0)
    return float(difference) if np.isfinite(difference) else math.inf


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"


def _random(problem: Problem, starts: Any) -> tuple[jax.Array, KVPages, jax.Array, jax.Array]:
    """Queries, pages, tables and positions from `starts` on, -1 for a row that is idle; NaNs wherever no token is read."""
    rng = np.random.default_rng(1)
    wanted = problem.rows * problem.pages_per_sequence
    num_pages = min(wanted, max(problem.pages_per_sequence, _MOST_BYTES // problem.page_bytes))
    shuffled = np.concatenate([rng.permutation(num_pages) for _ in range(-(-wanted // num_pages))])
    tables = shuffled[:wanted].reshape(problem.rows, -1).astype(np.int32)
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


def _seconds(problem: Problem, names: Sequence[str], not_taken: dict[str, str]) -> dict[str, float]:
    """Of one call, the least of several rounds in which all take turns."""
    length = problem.longest // 2 if problem.typical_length is None else problem.typical_length
    start = min(max(0, length - problem.tokens), problem.longest - problem.tokens)
    queries, pages, tables, positions = _random(problem, np.full(problem.rows, start))
    least: dict[str, float] = {}
    for number in range(_ROUNDS + 1):
        for name in [name for name in names if name not in not_taken]:
            begin = time.perf_counter()
            try:
                _attend_again_and_again(name, queries, pages, tables, positions).block_until_ready()
            except Exception as error:
                not_taken[name] = _first_line(error)
                least.pop(name, None)
                continue
            if number:  # the first compiles
                least[name] = min(least.get(name, math.inf), (time.perf_counter() - begin) / _REPEATS)
    return least


@partial(jax.jit, static_argnums=0)
def _attend_again_and_again(name: str, queries: Any, pages: Any, tables: Any, positions: Any) -> jax.Array:
    """One after the other, each with the rows in another order, so that nothing is computed once for all."""

    def again(_: Any, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        queries, tables = carry
        return attend_paged(name, queries, pages, tables, positions), jnp.roll(tables, 1, 0)

    return jax.lax.fori_loop(0, _REPEATS, again, (queries, tables))[0]
