"""References of asynchronous pipelines, one task after another, with every version of the weights kept in a list.

`numpy_stream` trains a chain of tanh layers, one per stage, in NumPy with gradients written out. `sequential` runs the compiled
pieces of a pipeline, without registers, lifetimes, donation or order of dispatch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.pipeline.cut.pieces import Slot
from autopar.pipeline.run.stacked_leaves import part_of
from autopar.pipeline.run.stream import StreamedPipeline

#: (stage, microbatch) -> versions that the forward and the backward pass read.
Reads = Callable[[int, int], tuple[int, int]]


def reads_of(rule: str, p: int, m: int) -> Reads:
    """The issue's table, for any number m of microbatches per update: `applied` counts the updates of a stage before a task,
    in the order of 1F1B."""

    def reads(s: int, k: int) -> tuple[int, int]:
        applied = max(0, k - (p - 1 - s)) // m
        if rule in ("ampnet", "pipemare"):
            return applied, k // m
        ahead = {"pipedream": applied, "vertical": max(0, k - (p - 1)) // m, "2bw": max(0, k // m - 1)}[rule]
        return ahead, ahead

    return reads


def mean_delay(p: int, m: int, s: int) -> float:
    """The mean over microbatches of the updates between what a forward pass reads under the rule "latest" and what its gradients
    are applied to."""
    return sum(k // m - (k - (p - 1 - s)) // m for k in range(p * m, p * m + m)) / m


def numpy_stream(
    weights: Sequence[np.ndarray],
    batches: Sequence[tuple[np.ndarray, np.ndarray]],
    reads: Reads,
    m: int,
    rate: float,
    annealing: int = 0,
    decay: float | None = None,
) -> tuple[list[np.ndarray], list[float]]:
    """SGD on the mean squared error. Microbatch i has the examples i, i + m, i + 2m, ...

    Args:
        annealing, decay: K and D of PipeMare; by default without its corrections.
    """
    p, versions, losses = len(weights), [[one] for one in weights], []
    delays = [mean_delay(p, m, s) for s in range(p)]
    velocities = [np.zeros_like(one) for one in weights]
    for n, (x, y) in enumerate(batches):
        exponent = 1 - min(n / annealing, 1) if annealing else 0
        gradients, loss = [np.zeros_like(one) for one in weights], 0.0
        for i in range(m):
            k, made = n * m + i, [x[i::m]]
            for s in range(p):
                made.append(np.tanh(made[-1] @ versions[s][reads(s, k)[0]]))
            loss += np.square(made[-1] - y[i::m]).sum() / y.size
            back = 2 * (made[-1] - y[i::m]) / y.size
            for s in reversed(range(p)):
                back = back * (1 - made[s + 1] ** 2)
                gradients[s] += made[s].T @ back
                ahead, behind = reads(s, k)
                back = back @ (versions[s][behind] - (behind - ahead) * velocities[s]).T
        for s in range(p):
            versions[s].append(versions[s][-1] - rate / max(delays[s], 1) ** exponent * gradients[s])
            if decay is not None and delays[s]:
                kept = decay ** (1 / delays[s])
                velocities[s] = kept * velocities[s] + (1 - kept) * (versions[s][-1] - versions[s][-2])
        losses.append(loss)
    return [own[-1] for own in versions], losses


class _Sequential:
    """Runs pieces; `known` has every value of every slot, by stage, batch, microbatch and version."""

    def __init__(self, whole: StreamedPipeline, reads: Reads) -> None:
        self.whole, self.reads, self.known = whole, reads, dict[Any, Any]()
        self.streamed, self.m = whole.streamed, whole.streamed.num_microbatches
        self.stages, self.programs = whole.streamed.stages, whole.streamed.programs
        self.result: dict[Any, Any] = {}

    def place(self, leaves: Sequence[Any], of_batch: bool, n: int) -> None:
        for leaf, uses in self.streamed.arguments.uses.items():
            if (leaf in self.whole.batch_leaves) == of_batch:
                for use in uses:
                    self.known[self._key(use.stage, use.slot, n, 0, None)] = jax.device_put(
                        part_of(leaves[leaf[0]], leaf[1], use.sharding), use.sharding
                    )

    def batch(self, n: int) -> None:
        p = len(self.stages)
        for k in range(n * self.m, (n + 1) * self.m):
            for s in range(p):
                self._run(s, "forward", n, self.reads(s, k)[0], k % self.m)
            for s in reversed(range(p)):
                ahead, behind = self.reads(s, k)
                back = behind - ahead if self.stages[s].corrected is not None else 0
                self._run(s, "backward", n, behind, k % self.m, back)
        for s, stage in enumerate(self.stages):
            for key in stage.whole:
                if isinstance(key, tuple) and (key[0] or stage.whole[key].outputs):
                    self._run(s, key, n, n, None)

    def _key(self, s: int, slot: Slot, n: int, v: int, i: int | None, back: int = 0) -> Any:
        if slot.kind == "velocity":
            return s, slot, v
        leaf = next((leaf for leaf, own in self.stages[s].arguments.items() if own == slot), None)
        of = self.streamed.sources.stages[s].of(slot) if leaf is None else self.streamed.sources.leaves[leaf]
        back = back if "version" in of and (leaf is None or self._is_weight(s, slot)) else 0
        return (
            s,
            slot,
            n if "batch" in of or (not of and leaf is None) else None,
            v if "version" in of else None,
            i,
            back,
        )

    def _is_weight(self, s: int, slot: Slot) -> bool:
        corrected = self.stages[s].corrected
        return corrected is not None and slot.value in corrected.moved

    def _value(self, s: int, slot: Slot, n: int, v: int, i: int | None, back: int = 0) -> Any:
        if slot.kind == "scale":
            return next(
                value
                for _, value in self.whole.corrected.of_update(v)
                if value.sharding.mesh == self.stages[s].stage.mesh
            )
        key = self._key(s, slot, n, v, i, back)
        if key not in self.known and slot.kind == "velocity":
            weight = self._value(s, Slot("once", slot.value), n, 0, None)
            self.known[key] = jnp.zeros_like(weight)
        if key not in self.known and back and self._is_weight(s, slot):
            velocity = self._value(s, Slot("velocity", slot.value), n, v, None)
            weight = self._value(s, slot, n, v, None)
            (self.known[key],) = self.streamed.moving_back.program(s, slot, back).jitted(
                *map(jnp.copy, (weight, velocity))
            )
        if key not in self.known:
            leaf = next((leaf for leaf, own in self.stages[s].arguments.items() if own == slot), None)
            if leaf is not None:  # state of a batch, made by the stage that is its home
                home = self.streamed.arguments.uses[leaf][0]
                use = next(use for use in self.streamed.arguments.uses[leaf] if use.stage == s)
                self.known[key] = jax.device_put(self._value(home.stage, home.slot, n, v, i), use.sharding)
            else:
                producer = next(
                    k for k, piece in self.stages[s].whole.items() if isinstance(k, tuple) and slot in piece.gives
                )
                self._run(s, producer, n, v, None, back)
        return self.known[key]

    def _run(self, s: int, key: Any, n: int, v: int, i: int | None, back: int = 0) -> None:
        program = self.programs.programs[s].get(key)
        if program is None:
            return
        each = lambda slot, count: (range(count) if i is None else [i]) if slot.kind == "each" else [None]  # noqa: E731
        taken = [
            self._value(s, slot, n, v, one, back)
            for slot, count in zip(program.takes, program.counts[0], strict=True)
            for one in each(slot, count)
        ]
        made = iter(program.jitted(*map(jnp.copy, taken)))
        for slot, count in zip(program.gives, program.counts[1], strict=True):
            for one in each(slot, count):
                self.known[self._key(s, slot, n, v + (slot.kind == "velocity"), one, back)] = next(made)
        if back and i is None:
            return
        for paths in self.programs.sends[s][key].paths:
            value = next(made)
            for path in paths:
                self.known[self._key(path.target, path.slot, n, v, i)] = path.crossing.move(value)
        for position, _ in program.results:
            leaf = self.stages[s].stage.program.outputs[position].leaf
            argument = self.streamed.argument_of.get(leaf)
            self.result[leaf] = value = next(made)
            if argument is not None:
                self.known[self._key(s, self.stages[s].arguments[argument], n + 1, v + 1, None)] = value


def sequential(
    whole: StreamedPipeline, reads: Reads, batches: Sequence[Sequence[Any]]
) -> tuple[list[Any], dict[Any, Any]]:
    """The results of each batch that are not carried, and the state by result.

    Args:
        batches: all leaves of the step's arguments, with the state at the start in the first.
    """
    run, losses = _Sequential(whole, reads), []
    run.place(batches[0], of_batch=False, n=0)
    for n, leaves in enumerate(batches):
        run.place(leaves, of_batch=True, n=n)
        run.batch(n)
        losses.append([run.result[leaf] for leaf in run.result if leaf not in run.streamed.argument_of])
    return losses, {leaf: value for leaf, value in run.result.items() if leaf in run.streamed.argument_of}
