"""Save and restore a planned step's state: saved under one plan, restored under any other.

In: a folder and a `ParallelStep`. Out: `Checkpoints`: numbered saves by orbax, written whole or not at all, each with its plan. A
restore reads the shards of each device straight into the shardings of the current plan, whatever its mesh, and reports what
changed.
"""

from __future__ import annotations

import json
import logging
import operator
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, SupportsIndex

import jax
import numpy as np

from autopar.api.checkpoint import state_tree as checkpoint_state
from autopar.api.checkpoint.background_writes import BackgroundWrites
from autopar.api.checkpoint.folder import ABOUT, EXTRA, PLAN, CheckpointFolder, DamagedError, about_of, digest
from autopar.api.parallel_step import ParallelStep
from autopar.errors import CheckpointError, PlanFileError
from autopar.frontend.state import makes_state, state_apart
from autopar.pipeline.plan import AnyPlan
from autopar.pipeline.plan_files import plan_from_json
from autopar.pipeline.run.stacked_leaves import as_arrays
from autopar.report.diff import PlanDiff, diff
from autopar.runtime.own_arrays import make_own

_log = logging.getLogger(__name__)


class Checkpoints:
    """Numbered checkpoints of one step's state, in one folder.

        checkpoints = autopar.Checkpoints("checkpoints/gpt", train_step)
        state = checkpoints.restore_or_init(create_state, rng, batch=batch)
        ...
        checkpoints.save(number, state)

    Under `jax.distributed` every process makes one, of a folder that all see, and calls the same methods.

    Args:
        directory: a path, or a bucket's (`gs://...`); it is created at the first save.
        step: a step made by `autopar.parallelize`; its plan has the sharding of the state.
        keep: the number of newest checkpoints to keep; None keeps all.

    Raises:
        CheckpointError: `keep` or the directory is invalid.
        TypeError: `step` was not made by `parallelize`.
    """

    def __init__(self, directory: str | Path, step: ParallelStep, *, keep: int | None = 3) -> None:
        if not isinstance(step, ParallelStep):
            raise TypeError(
                f"`Checkpoints` takes a step made by `autopar.parallelize`, not a {type(step).__name__}: its plan says"
                " where the state belongs"
            )
        self._step, self._saved = step, CheckpointFolder(directory)
        self._writes = BackgroundWrites(self._saved, keep)
        self._encoded: tuple[AnyPlan, Any] | None = None
        self._last_map: PlanDiff | None = None

    @property
    def directory(self) -> str:
        """The folder of the checkpoints."""
        return self._saved.directory

    @property
    def steps(self) -> tuple[int, ...]:
        """The numbers of the complete checkpoints, in order."""
        return self._saved.steps

    @property
    def latest(self) -> int | None:
        """The newest complete checkpoint, or None."""
        return self._saved.latest

    @property
    def last_map(self) -> PlanDiff | None:
        """The difference between the plan of the checkpoint restored last and the plan it was restored under."""
        return self._last_map

    def plan(self, at: int | None = None) -> AnyPlan:
        """The plan under which a checkpoint was saved, by default the latest."""
        number = self._existing(at)
        try:
            return plan_from_json(self._saved.part(number, PLAN))
        except PlanFileError as error:
            raise self._saved.damaged(number, f"its plan cannot be read: {error}") from error

    def extra(self, at: int | None = None) -> Any:
        """The `extra` of a checkpoint; None where there is none."""
        return self._saved.extra(self._existing(at))

    def save(self, number: SupportsIndex, state: Any, *, extra: Any = None, wait: bool = False) -> None:
        """Save a state. It is copied to the host, and then written in the background, so that the step may donate it.

        The write is atomic: if the process is killed, the previous checkpoint is the latest.

        Args:
            number: the number of steps done so far; it must exceed that of every checkpoint.
            state: the step's carried state, as `init`, `restore` or the step returned it; where the step carries several
                arguments, a tuple of them.
            extra: JSON types, e.g. where in the data the next batch starts.
            wait: return only when everything is written.

        Raises:
            CheckpointError: the state is not of this step, the number is taken, `extra` is no JSON, or the folder cannot be
                written to. A failure in the background is raised by the next call.
        """
        number = _whole_number(number)
        with state_apart(state) as (arrays, _):
            plan, names = self._plan_of(arrays)
            tree = checkpoint_state.stored(as_arrays(arrays))
            leaves = checkpoint_state.leaves_of(arrays)
        plan_json, plan_digest = self._plan_json(plan)
        parts = {PLAN: plan_json} | ({} if extra is None else {EXTRA: _json(extra)})
        of_parts = {name: plan_digest if name == PLAN else digest(part) for name, part in parts.items()}
        parts[ABOUT] = about_of(names, leaves, of_parts)
        self.wait()
        latest = self.latest
        if latest is not None and number <= latest:
            there = "is there already" if number in self.steps else f"comes before step {latest}, which is there"
            raise CheckpointError(
                f"step {number} cannot be saved to {self.directory!r}: it {there}. Save to another folder, or remove"
                f" the checkpoints from {number} on"
            )
        self._writes.write(number, tree, leaves, parts)
        if wait:
            self.wait()

    def wait(self) -> None:
        """Wait until everything saved is written.

        Raises:
            CheckpointError: it could not be written.
        """
        self._writes.wait()

    def close(self) -> None:
        """Wait for all saves, and end the background threads. A `with autopar.Checkpoints(...)` block does it."""
        self._writes.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def restore(self, create_state: Any, *create_args: Any, at: int | None = None, **step_args: Any) -> Any:
        """Restore a state under the plan of this step, whatever plan and mesh it was saved under.

        Each device reads its own shards: the state is never whole on one host, unless the plan replicates it.

        Args:
            create_state: see `step.init`; only its shapes are used. Or the state, as arrays or their structs.
            create_args: its arguments.
            at: the number of a checkpoint; by default the latest.
            step_args: the step's other arguments by name (arrays or `jax.ShapeDtypeStruct`s).

        Returns:
            The state, bit by bit as it was saved, in the pytree of `create_state`.

        Raises:
            CheckpointError: there is no checkpoint, it is damaged, or it holds another program's state.
        """
        number = self._existing(at)
        target = self._step.abstract_state(create_state, *create_args, **step_args)
        with state_apart(target) as (arrays, _):
            try:
                values = self._restored(number, arrays)
            except DamagedError as error:
                last_good = self._last_good(number, arrays)
                raise self._saved.damaged(number, error.why, last_good) from error.__cause__
        with state_apart(create_state if not makes_state(create_state) else target) as (arrays, rebuild):
            template, structure = jax.tree.flatten(arrays)
            return rebuild(jax.tree.unflatten(structure, map(_as_given, values, template)))

    def restore_or_init(self, create_state: Any, *create_args: Any, **step_args: Any) -> Any:
        """Restore the latest checkpoint; where there is none, call `step.init` with the same arguments."""
        self.wait()
        if self.latest is None:
            return self._step.init(create_state, *create_args, **step_args)
        return self.restore(create_state, *create_args, **step_args)

    def _restored(self, number: int, target: Any) -> list[Any]:
        """The arrays of a checkpoint with the shardings of `target`, after their digests were checked."""
        about = self._saved.about(number)
        plan, names = self._plan_of(target)
        what = checkpoint_state.difference(about["leaves"], checkpoint_state.leaves_of(target))
        if what is not None:
            raise CheckpointError(
                f"checkpoint {number} in {self.directory!r} holds the state of another program than"
                f" `{plan.program.name}` with these arguments: {what}. Build the state as it was when it was saved (the"
                " same model, sizes and optimizer), or give the folder of this program's checkpoints"
            )
        planned = diff(_renamed(self.plan(number), about["arguments"], names), plan)
        values = self._saved.arrays(number, about, target)
        make_own(values)
        self._last_map = planned
        _log.info("restored step %d from %s: %s", number, self.directory, planned.summary)
        return values

    def _last_good(self, number: int, target: Any) -> int | None:
        """The newest other checkpoint that can be restored; all processes search it together."""
        for other in sorted(set(self.steps) - {number}, reverse=True):
            try:
                self._restored(other, target)
            except CheckpointError:
                continue
            return other
        return None

    def _existing(self, at: int | None) -> int:
        self.wait()  # what was saved just now is there, too
        return self._saved.existing(at)

    def _plan_of(self, state: Any) -> tuple[AnyPlan, tuple[str, ...]]:
        """The plan of the step's last call with a state of this structure."""
        for plan in reversed(self._step.plans):
            names = checkpoint_state.arguments_of(plan, state)
            if names is not None:
                return plan, names
        name = getattr(self._step, "__name__", "step")
        if not self._step.plans:
            raise CheckpointError(
                f"`{name}` has no plan yet, so it is not known where its state belongs: build the state with"
                " `step.init`, restore one, or run the step"
            )
        raise CheckpointError(
            f"the state is neither an argument of `{name}` nor a tuple of several, as planned: save what the"
            " step takes and returns, whole. Anything else goes along as `extra`, or into an argument of the step"
        )

    def _plan_json(self, plan: AnyPlan) -> tuple[Any, str]:
        """A plan as JSON, and its digest: the same at every save."""
        if self._encoded is None or self._encoded[0] is not plan:
            encoded = plan.to_json()
            self._encoded = plan, (encoded, digest(encoded))
        return self._encoded[1]


def _whole_number(number: Any) -> int:
    try:
        number = operator.index(number)  # NumPy's and JAX's integers too
    except TypeError:
        number = -1
    if number < 0:
        raise CheckpointError("`save` takes the number of the step first: a whole number of 0 or more")
    return number


def _renamed(plan: AnyPlan, before: Sequence[str], after: Sequence[str]) -> AnyPlan:
    """A plan whose state has the argument names of another."""
    names = dict(zip(before, after, strict=False))

    def renamed(path: str) -> str:
        root, slash, rest = path.partition("/")
        return f"{names.get(root, root)}{slash}{rest}"

    return replace(plan, inputs=tuple(replace(tensor, path=renamed(tensor.path)) for tensor in plan.inputs))


def _json(extra: Any) -> Any:
    try:
        return json.loads(json.dumps(extra, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"`extra` must be what JSON takes: dicts with text as keys, lists, texts and numbers ({error}). Arrays"
            " belong into the state"
        ) from error


def _as_given(value: Any, template: Any) -> Any:
    """A Python number if the state has one; else the array."""
    return type(template)(np.asarray(value).item()) if isinstance(template, bool | int | float | complex) else value
