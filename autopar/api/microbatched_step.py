"""Run a train step microbatch by microbatch, each when the caller wants it.

In: a user's step, the number of microbatches. Out: `MicrobatchedStep`, whose `begin` gives the `Microbatches` of one batch. The step is
cut where gradient accumulation cuts it, and the numbers are those of gradient accumulation.
"""

from __future__ import annotations

import copy
import functools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from autopar.api.workers.combine import SHARES
from autopar.api.workers.division import PASSED, Division, divided
from autopar.api.workers.gradient_work import GradientWork
from autopar.api.workers.traced_step import TracedStep, arguments_of, state_arguments_of, traced_step
from autopar.errors import OptionError
from autopar.frontend.call import Call, opened
from autopar.frontend.step import Step
from autopar.runtime import jit as execute
from autopar.transforms.microbatch.slices import COMBINE
from autopar.versions.consistency.table import find

_READ = ("mesh", "num_devices", "static_argnames", "carry", "per_microbatch_statistics")

Kind = Literal["microbatch", "update"]


@dataclass(frozen=True, slots=True)
class _Cut:
    """A step for arguments of certain shapes, cut and planned.

    Args:
        update: the function from the state and the terms to the new state. noted: what it returns besides.
        seconds: of each kind of piece, once they are measured.
    """

    traced: TracedStep
    work: GradientWork
    update: Any
    noted: deque[list[Any]]
    seconds: dict[Kind, float] = field(default_factory=dict)


class MicrobatchedStep:
    """A train step whose microbatches are started one by one, for example in the gaps of a server (`Engine.lend`).

    Args:
        step: a function such as `(state, batch) -> (state, loss)`.
        num_microbatches: divides the batch.
        options: `mesh`, `num_devices`, `hardware`, `memory_budget_bytes` and others, as for `parallelize`.

    Raises:
        OptionError: an option is unknown, or `num_microbatches` is not a positive number.
    """

    def __init__(self, step: Callable[..., Any], num_microbatches: int, **options: Any) -> None:
        if not isinstance(num_microbatches, int) or isinstance(num_microbatches, bool) or num_microbatches < 1:
            raise OptionError(
                f"`num_microbatches` is {num_microbatches!r}: give a positive number that divides the batch"
            )
        for name in options:
            if name not in _READ and name not in PASSED:
                known = ", ".join((*_READ, *PASSED))
                raise OptionError(f"`{name}` is no option of a step in microbatches; it takes {known}")
        self.called = Step.of(step, options.get("static_argnames"))
        self.num_microbatches = num_microbatches
        self._options = options
        self._cuts: dict[Any, _Cut] = {}

    @property
    def name(self) -> str:
        """The name of the user's step."""
        return self.called.name

    def begin(self, *args: Any, **kwargs: Any) -> Microbatches:
        """Begin the step on one batch; nothing is computed yet. The arguments are those of the step.

        Raises:
            MicrobatchError: the step cannot be cut, or the number of microbatches does not divide the batch.
        """
        with opened(self.called, args, kwargs) as call:
            leaves = jax.tree.leaves(call.trees)
            execute.check_not_deleted(call.input_paths, leaves)
            cut = self._of(call)
            return Microbatches(cut, leaves)

    def begin_with(self, state: Any, batch: Any) -> Microbatches:
        """Begin the step with a state and a batch: a tuple where either is several arguments, as for `WorkersStep.stream`."""
        return self.begin(*arguments_of(self.called, state_arguments_of(self.called, state, {}), batch, {}))

    def _of(self, call: Call) -> _Cut:
        if call.key not in self._cuts:
            key, traced = call.key, traced_step(call, self._options.get("carry"))
            options = {
                name: option for name, option in self._options.items() if name not in ("static_argnames", "carry")
            }
            one = divided({**options, "workers": 1})
            division = Division(one.devices * self.num_microbatches, one.options)
            own = bool(self._options.get("per_microbatch_statistics"))
            work, noted = GradientWork(traced, division, find("bsp"), own_statistics=own), deque[list[Any]]()
            self._cuts[key] = _Cut(traced, work, work.updating(noted.append), noted)
            return self._cuts[key]
        return self._cuts[call.key]


class Microbatches:
    """One batch of a `MicrobatchedStep`. `run` is called until `next_kind` is None; then there is a `result`."""

    def __init__(self, cut: _Cut, leaves: Sequence[Any]) -> None:
        self._cut, self._traced, self._work = cut, cut.traced, cut.work
        self._state = cut.traced.state_leaves(leaves)
        self._read = cut.work.placed(self._state)
        self._shares = deque(cut.work.deal(leaves))
        self._pushed: list[dict[str, Any]] = []
        self._outputs: list[Any] | None = None

    @property
    def next_kind(self) -> Kind | None:
        """What `run` does next: a microbatch, or the update after the last one; None after that."""
        return "microbatch" if self._shares else "update" if self._outputs is None else None

    def run(self) -> Any:
        """Dispatch the next microbatch, or the update. Returns arrays that are ready when it is done."""
        assert self.next_kind is not None, "all has been run"
        if self._shares:
            made = self._work.run(0, self._read, self._shares.popleft())
            self._add(made)
            return made
        self._read = {}
        self._state, _ = self._cut.update(self._state, None, self._pushed)
        self._pushed, self._outputs = [], self._cut.noted.popleft()
        return self._state

    @property
    def result(self) -> Any:
        """What the step returns."""
        assert self._outputs is not None, "the update has not run"
        outputs, paths = list(self._outputs), self._traced.paths
        for position, output in self._traced.pairs:
            outputs[output] = self._state[paths[position]]
        return self._traced.whole_result(outputs)

    def state_and_rest(self) -> tuple[Any, Any]:
        """The new state, and what the step returns besides."""
        assert self._outputs is not None, "the update has not run"
        leaves: list[Any] = [None] * len(self._traced.paths)
        for path, leaf in self._state.items():
            leaves[self._traced.paths.index(path)] = leaf
        return self._traced.state(leaves), self._traced.rest(self._outputs)

    def seconds(self, clock: Callable[[], float]) -> dict[Kind, float]:
        """The largest seconds of each kind of piece. The first time for arguments of these shapes, the batch is run twice for that, and
        what it gives is dropped: the first run compiles, the second is measured."""
        found = self._cut.seconds
        for _ in range(0 if found else 2):
            found.clear()
            other = copy.copy(self)
            other._shares, other._pushed = self._shares.copy(), []
            while (kind := other.next_kind) is not None:
                started = clock()
                jax.block_until_ready(other.run())
                found[kind] = max(found.get(kind, 0.0), clock() - started)
        return dict(found)

    def _add(self, made: dict[str, Any]) -> None:
        """Add a microbatch's terms to those before. Values for each example stay apart."""
        terms = dict(zip(self._work.keys, self._work.terms, strict=True))
        if not self._pushed:
            self._pushed = [{**made, SHARES: np.int32(1)}]
            return
        first = self._pushed[0]
        kinds = tuple(
            (key, terms[key].kind, terms[key].dtype) for key in made if terms[key].kind not in ("rows", "same")
        )
        both = tuple({key: each[key] for key, _, _ in kinds} for each in (first, made))
        self._pushed[0] = {**first, **_combined(*both, kinds), SHARES: first[SHARES] + np.int32(1)}
        if apart := {key: value for key, value in made.items() if terms[key].kind == "rows"}:
            self._pushed.append({**apart, SHARES: np.int32(0)})


@functools.partial(jax.jit, static_argnums=2)
def _combined(
    before: Mapping[str, jax.Array], new: Mapping[str, jax.Array], kinds: tuple[tuple[str, str, str], ...]
) -> dict[str, jax.Array]:
    """Combine the terms of two microbatches, in the dtypes of `combine.combined`.

    Args:
        kinds: the key, the kind and the dtype of each term.
    """
    found: dict[str, jax.Array] = {}
    for key, kind, name in kinds:
        values = before[key], new[key]
        if kind == "sum" and jnp.issubdtype(jnp.dtype(name), jnp.floating) and jnp.finfo(name).bits < 32:
            values = tuple(value.astype(jnp.float32) for value in values)
        found[key] = COMBINE[kind](*values)
    return found
