"""Count the communication and the kernels of attention whose sequence is sharded over `n` devices.

In: the shape of the whole attention, a method of `METHODS`, `n`, the mask, the direction.
Out: collectives and kernel calls of a device, the same on every device; why a method does not apply.

- `ring`: keys and values travel around a ring, one block per step, while the kernel runs on the previous block. In the
  backward pass their gradients follow them.
- `ulysses`: all-to-alls shard the heads instead of the sequence around one kernel call (Jacobs et al. 2023). Key heads
  that do not divide by `n` are repeated to the least common multiple of both.
- `gathered`: keys and values are all-gathered, and their gradients reduce-scattered.

Under a causal mask, `ring` and `gathered` first bring the tokens into zigzag order (see `zigzag_moves`): each device then
computes exactly `1 / n` of the pairs of chunks that a query sees.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from autopar.ir.sharding_changes import Change

METHODS = ("ring", "ulysses", "gathered")

_FLOAT32_BYTES, _INT32_BYTES = 4, 4


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The sizes of an attention.

    Args:
        num_queries, num_keys: tokens per sequence.
        num_key_heads: heads of keys and values, a divisor of `num_heads`.
        value_dim: elements per head of values and output.
        itemsize: bytes per element of queries, keys, values and output.
        has_segments: whether each token of queries and keys has an int32 segment id.
    """

    batch: int
    num_queries: int
    num_keys: int
    num_heads: int
    num_key_heads: int
    head_dim: int
    value_dim: int
    itemsize: int
    has_segments: bool = False

    @property
    def query_bytes(self) -> int:
        return self.batch * self.num_queries * self.num_heads * self.head_dim * self.itemsize

    @property
    def output_bytes(self) -> int:
        return self.batch * self.num_queries * self.num_heads * self.value_dim * self.itemsize

    @property
    def log_sum_exp_bytes(self) -> int:
        return self.batch * self.num_queries * self.num_heads * _FLOAT32_BYTES

    @property
    def key_value_bytes(self) -> int:
        return self.batch * self.num_keys * self.num_key_heads * (self.head_dim + self.value_dim) * self.itemsize

    @property
    def query_segment_bytes(self) -> int:
        return self.batch * self.num_queries * _INT32_BYTES * self.has_segments

    @property
    def key_segment_bytes(self) -> int:
        return self.batch * self.num_keys * _INT32_BYTES * self.has_segments


@dataclass(frozen=True, slots=True)
class Sent:
    """Collectives of one kind.

    Args:
        num_bytes: payload of each, by the convention of `cost.collectives`; XLA merges the arrays of one step.
        num_times: executions one after the other.
        is_hidden: whether each runs while a kernel call does.
        is_after: whether it brings results to their places, after the last kernel call.
    """

    kind: Change
    num_bytes: float
    num_times: int = 1
    is_hidden: bool = False
    is_after: bool = False


@dataclass(frozen=True, slots=True)
class KernelCall:
    """Calls of the attention kernel, one after the other, on one shape."""

    shape: AttentionShape
    is_causal: bool
    num_times: int = 1

    def flops(self, *, is_backward: bool) -> float:
        """FLOPs of the matmuls of all calls, for the pairs of a query and a key that the mask leaves."""
        shape = self.shape
        keys_per_query = (shape.num_keys + 1) / 2 if self.is_causal else shape.num_keys
        dims = 3 * shape.head_dim + 2 * shape.value_dim if is_backward else shape.head_dim + shape.value_dim
        return 2.0 * self.num_times * shape.batch * shape.num_heads * shape.num_queries * keys_per_query * dims


def refusal(method: str, shape: AttentionShape, num_devices: int, *, is_causal: bool) -> str | None:
    """Why a method cannot shard an attention over `num_devices`; None if it can."""
    if method not in METHODS:
        return f"the methods of context parallelism are {', '.join(METHODS)}, not {method!r}"
    for name, size in (("queries", shape.num_queries), ("keys", shape.num_keys)):
        if size % num_devices:
            return f"{size} {name} cannot be split over {num_devices} devices: use a multiple of {num_devices} tokens"
    if shape.num_heads % shape.num_key_heads:
        return f"{shape.num_heads} query heads are no multiple of {shape.num_key_heads} key heads"
    if is_causal and shape.num_queries != shape.num_keys:
        return f"a causal mask needs as many queries as keys, not {shape.num_queries} and {shape.num_keys}"
    if method == "ulysses":
        if shape.num_heads % num_devices:
            return f"{shape.num_heads} query heads cannot be split over {num_devices} devices: use the method 'ring'"
    elif is_causal and shape.num_queries % (2 * num_devices):
        return (
            f"{shape.num_queries} tokens cannot be split into {2 * num_devices} chunks, two per device, for the zigzag"
            f" order of a causal mask: use a multiple of {2 * num_devices} tokens"
        )
    return None


def zigzag_moves(num_devices: int) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
    """(Source, target) of the even and of the odd chunks from contiguous to zigzag order.

    Chunk `c` of `2n` is on device `c // 2`, and goes to device `c` of the first `n`, or else `2n - 1 - c`.

    >>> zigzag_moves(4)
    (((0, 0), (1, 2), (2, 3), (3, 1)), ((0, 1), (1, 3), (2, 2), (3, 0)))
    """
    even, odd = (
        tuple((chunk // 2, min(chunk, 2 * num_devices - 1 - chunk)) for chunk in range(first, 2 * num_devices, 2))
        for first in (0, 1)
    )
    return even, odd


def repeated_key_heads(shape: AttentionShape, num_devices: int) -> int:
    """The key heads that `ulysses` shards."""
    return math.lcm(shape.num_key_heads, num_devices)


def kernel_calls(method: str, shape: AttentionShape, num_devices: int, *, is_causal: bool) -> tuple[KernelCall, ...]:
    """The kernel calls of one device, forward or backward."""
    if method == "ulysses":
        heads, key_heads = shape.num_heads, repeated_key_heads(shape, num_devices)
        local = replace(shape, num_heads=heads // num_devices, num_key_heads=key_heads // num_devices)
        return (KernelCall(local, is_causal),)
    local = replace(shape, num_queries=shape.num_queries // num_devices)
    if method == "gathered" and not is_causal:
        return (KernelCall(local, is_causal),)
    local = replace(local, num_keys=shape.num_keys // num_devices)
    if num_devices == 1 or not is_causal:
        return (KernelCall(local, is_causal, num_devices),)
    pairs = replace(local, batch=2 * local.batch, num_queries=local.num_queries // 2, num_keys=local.num_keys // 2)
    return KernelCall(local, True), KernelCall(pairs, False, num_devices - 1)


def collectives(
    method: str, shape: AttentionShape, num_devices: int, *, is_causal: bool, is_backward: bool
) -> tuple[Sent, ...]:
    """The collectives of one device."""
    if num_devices == 1:
        return ()
    n = num_devices
    keys, segments = shape.key_value_bytes / n, shape.key_segment_bytes / n
    # What belongs to the queries: sent before the kernels and, as results, after them.
    queries = (shape.query_bytes + shape.query_segment_bytes) / n
    after = (shape.output_bytes + shape.log_sum_exp_bytes) / n
    if is_backward:
        queries, after = queries + after + shape.output_bytes / n, shape.query_bytes / n
    if method == "ulysses":
        return _ulysses(shape, n, is_backward=is_backward)
    if method == "ring":
        found = _ring(keys, segments, n, is_backward=is_backward)
        queries, after = queries + keys + segments, after + keys * is_backward
    else:
        found = (Sent("all-gather", n * (keys + segments)),)
        found += (Sent("reduce-scatter", n * keys, is_after=True),) if is_backward else ()
    if not is_causal:
        return found
    return (*_zigzag(queries, n), *found, *(replace(one, is_after=True) for one in _zigzag(after, n)))


def sent_bytes(
    method: str, shape: AttentionShape, num_devices: int, *, is_causal: bool, is_backward: bool
) -> dict[str, float]:
    """Bytes that a device sends, by kind of collective: the device that sends most, as chunks may stay where they are."""
    found: dict[str, float] = {}
    for one in collectives(method, shape, num_devices, is_causal=is_causal, is_backward=is_backward):
        share = 1.0 if one.kind == "collective-permute" else (num_devices - 1) / num_devices
        found[one.kind] = found.get(one.kind, 0.0) + one.num_times * one.num_bytes * share
    return found


def memory_bytes(method: str, shape: AttentionShape, num_devices: int, *, is_causal: bool, is_backward: bool) -> float:
    """Bytes that a device reads and writes outside kernels and collectives: to merge results, and to slice, stack and
    transpose operands. An estimate of XLA's fusions."""
    n = num_devices
    if n == 1:
        return 0.0
    query, keys, out = shape.query_bytes / n, shape.key_value_bytes / n, shape.output_bytes / n
    queries = query + (2 * out if is_backward else 0)
    results = query if is_backward else out
    if method == "ulysses":  # each array is transposed before and after its all-to-all
        keys *= repeated_key_heads(shape, n) / shape.num_key_heads
        return 4 * (queries + results + keys * (2 if is_backward else 1))
    if method == "gathered" and not is_causal:
        return 0.0
    sums = results * (1 + 2 * _FLOAT32_BYTES / shape.itemsize)  # a term is read, a float32 sum read and written
    if is_backward:  # terms are added to the gradients that arrive, and packed with the keys; or written to their place
        sums += (5 if method == "ring" else 2) * keys
    once = results * (1 + _FLOAT32_BYTES / shape.itemsize) + 2 * keys  # the first sum, and what the first step sends
    if not is_causal:
        return once + (n - 1) * (sums + 2 * keys)  # keys are unpacked
    once += 4 * (queries + results)  # halves are sliced and joined for either order
    if method == "ring":
        once += 4 * keys * (2 if is_backward else 1)
    return once + (n - 1) * (sums + 2 * (queries + keys))  # both halves are selected and stacked


def _zigzag(num_bytes: float, num_devices: int) -> tuple[Sent, ...]:
    """Half of the bytes by each of two permutes. One that leaves all chunks where they are is none."""
    moving = [moves for moves in zigzag_moves(num_devices) if any(source != target for source, target in moves)]
    return (Sent("collective-permute", num_bytes / 2, len(moving)),) if moving else ()


def _ring(keys: float, segments: float, num_devices: int, *, is_backward: bool) -> tuple[Sent, ...]:
    """`n - 1` moves of the keys, and of their gradients one step later. The first move of a backward pass is before its
    first kernel."""
    if not is_backward:
        return (Sent("collective-permute", keys + segments, num_devices - 1, is_hidden=True),)
    first = Sent("collective-permute", keys + segments)
    if num_devices == 2:
        return first, Sent("collective-permute", keys, is_hidden=True)
    return (
        first,
        Sent("collective-permute", keys + segments, is_hidden=True),
        *(
            [Sent("collective-permute", 2 * keys + segments, num_devices - 3, is_hidden=True)]
            if num_devices > 3
            else []
        ),
        Sent("collective-permute", keys, 2, is_hidden=True),
    )


def _ulysses(shape: AttentionShape, num_devices: int, *, is_backward: bool) -> tuple[Sent, ...]:
    """One all-to-all per array; the segment ids are gathered."""
    n = num_devices
    head_bytes = shape.batch * shape.num_keys / n * repeated_key_heads(shape, n) * shape.itemsize
    keys = [head_bytes * shape.head_dim, head_bytes * shape.value_dim]
    query, out, lse = (one / n for one in (shape.query_bytes, shape.output_bytes, shape.log_sum_exp_bytes))
    arrays = [query, *keys, out, lse, out, query, *keys] if is_backward else [query, *keys, out, lse]
    ids = shape.query_segment_bytes + shape.key_segment_bytes
    gathered = (Sent("all-gather", ids),) if ids else ()
    num_after = 3 if is_backward else 2
    before = (Sent("all-to-all", size) for size in arrays[:-num_after])
    return (*before, *gathered, *(Sent("all-to-all", size, is_after=True) for size in arrays[-num_after:]))
