"""Take the rows of a batch that a process's microbatches have.

In: a `Deal`, a cut step, arrays of the batch: this process's rows, or whole ones. Out: `OwnRows`, which stands for the whole array in a
call of the step; the part of each microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from autopar.api.workers.work import as_array, share_of
from autopar.errors import BatchError
from autopar.membership.deal import Deal
from autopar.plans.records import TensorPlan
from autopar.transforms.microbatch.batch_dims import leading_dim
from autopar.transforms.microbatch.worker_programs import Input, WorkerCut
from autopar.transforms.program import Program


def rows_of(deal: Deal, batch_size: int) -> np.ndarray:
    """The rows of this process's microbatches, one microbatch after another: microbatch j of m has the rows j, m + j, ... All rows
    are in order.

    Raises:
        BatchError: the number of microbatches does not divide the batch.
    """
    check_divides(deal, batch_size)
    if len(deal.own) == deal.num_microbatches:
        return np.arange(batch_size)
    return np.concatenate([np.arange(number, batch_size, deal.num_microbatches) for number in deal.own])


def check_divides(deal: Deal, batch_size: int) -> None:
    """Refuse batches that cannot be cut into equal microbatches.

    Raises:
        BatchError: the number of microbatches does not divide the batch.
    """
    if batch_size % deal.num_microbatches:
        fits = [str(n) for n in range(len(deal.counts), batch_size + 1) if batch_size % n == 0]
        raise BatchError(
            f"{batch_size} examples cannot be divided into {deal.num_microbatches} microbatches (`autopar keep --microbatches`): choose one of"
            f" {', '.join(fits[:8])}, or change the batch"
        )


@dataclass(frozen=True, slots=True, eq=False)
class OwnRows:
    """The rows of a process; a leaf that stands for the whole array.

    Args:
        shape, dtype: of the whole array.
        own: the rows of `rows_of`, or all rows.
    """

    shape: tuple[int, ...]
    dtype: Any
    own: Any

    @property
    def is_whole(self) -> bool:
        """Whether it has all rows."""
        return tuple(self.own.shape) == self.shape


class Rows:
    """The rows of a step's batch in one process.

    Args:
        num_rows: of the whole batch.
        positions: of the step's inputs that have a row for each example.
    """

    def __init__(self, deal: Deal, cut: WorkerCut, program: Program) -> None:
        self._deal, self._cut = deal, cut
        self.num_rows, positions = leading_dim(program.as_written.graph)
        self.positions = frozenset(positions)

    def problem(self, position: int, tensor: TensorPlan, array: Any) -> str | None:
        """Why an array does not fit an input of the step; None if it fits."""
        is_key = jax.numpy.issubdtype(array.dtype, jax.dtypes.extended)
        dtype = str(array.dtype if is_key else jax.dtypes.canonicalize_dtype(array.dtype))
        shape = tuple(array.shape)
        if dtype != tensor.dtype:
            return f"`{tensor.path}` is {dtype}, and the plan was made for {tensor.dtype}: convert it first"
        if shape == tensor.shape:
            return None
        if position not in self.positions:
            return f"`{tensor.path}` has shape {shape}, and the plan takes {tensor.shape}"
        own = (self._num_own, *tensor.shape[1:])
        if shape == own:
            return None
        return f"`{tensor.path}` has shape {shape}, and the plan takes {own}, the rows of this process (`run.rows`), or the whole, {tensor.shape}"

    def taken(self, position: int, tensor: TensorPlan, array: Any) -> Any:
        """An array of the batch as an argument of the step."""
        if position not in self.positions:
            return array
        if jax.numpy.issubdtype(array.dtype, jax.dtypes.extended):
            return OwnRows(tensor.shape, array.dtype, array)
        dtype = jax.numpy.dtype(tensor.dtype)
        return OwnRows(tensor.shape, dtype, np.asarray(array, dtype=dtype))

    def part(self, one: Input, leaves: Sequence[Any], whole: Sequence[Any], microbatch: int) -> Any:
        """What a microbatch reads of an input of the worker.

        Args:
            whole: what is computed from the whole batch.
        """
        leaf = whole[one.index] if one.source == "whole" else leaves[one.index]
        if one.cut is None:
            return leaf
        if isinstance(leaf, OwnRows) and not leaf.is_whole:
            size = self.num_rows // self._deal.num_microbatches
            start = (microbatch - self._deal.own.start) * size
            return leaf.own[start : start + size]
        return share_of(one.cut, as_array(leaf.own if isinstance(leaf, OwnRows) else leaf), microbatch)

    def whole_inputs(self, leaves: Sequence[Any]) -> list[Any]:
        """The inputs of the program of the whole batch.

        Raises:
            BatchError: this process has its own rows only.
        """
        assert self._cut.whole is not None
        found = [leaves[one.index] for one in self._cut.whole.inputs]
        if any(isinstance(leaf, OwnRows) and not leaf.is_whole for leaf in found):
            raise BatchError(
                "the step reads a value of the whole batch before its gradients, such as a number of marked examples: give all rows of"
                " each batch in every process, or divide by it after the sums"
            )
        return [leaf.own if isinstance(leaf, OwnRows) else leaf for leaf in found]

    @property
    def _num_own(self) -> int:
        return self.num_rows // self._deal.num_microbatches * len(self._deal.own)
