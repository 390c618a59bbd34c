"""Place a step's arguments on the submeshes of the stages that use them.

In: the leaves of the step's arguments, sharded as the pipeline expects or whole.
Out: one array per stage that uses the leaf. An array that already has the expected sharding is not copied. When several
stages use one argument, its home stage sends it to the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from autopar.errors import BatchError
from autopar.jax_interop import compat as jax_compat
from autopar.pipeline.cut.extract_stages import LeafKey
from autopar.pipeline.cut.pieces import Slot
from autopar.pipeline.run.piece_programs import StagePieces
from autopar.pipeline.run.stacked_leaves import StackedLeaf, part_of
from autopar.pipeline.run.transfers import Crossing, is_mine, unchanged_wire, wire
from autopar.runtime.own_arrays import is_own

#: The arrays of the pipeline, by register; None for an empty register and for an array that only other processes have.
Values = list[Any]


@dataclass(frozen=True, slots=True)
class _ArgumentUse:
    """One stage's use of an argument.

    Args:
        sharding: the sharding that the stage expects.
        crossing: the transfer from the home stage if it crosses processes; None inside one process.
        prepare: the function that reshards or copies the array before the transfer; None if neither is needed. A
            donated array is copied because its memory may be overwritten before the transfer ends.
    """

    stage: int
    slot: Slot
    register: int
    sharding: NamedSharding
    is_mine: bool
    crossing: Crossing | None
    prepare: Any


class PipelineArguments:
    """Places arguments.

    Args:
        homes: the home stage of each argument, and the port of that stage.
        donated: arguments whose memory the step may reuse.
        may_take: whether the step may also reuse the memory of donated arrays that the user made.

    Attributes:
        registers: the register of each stage and slot.
        shared: registers whose array may also be in another register.
        stage_of: the stage of each register.
    """

    def __init__(
        self,
        stages: Sequence[StagePieces],
        homes: Mapping[LeafKey, tuple[int, Any]],
        donated: Collection[LeafKey],
        *,
        may_take: bool = False,
    ) -> None:
        self.registers: dict[tuple[int, Slot], int] = {}
        self.shared: set[int] = set()
        self.stage_of: list[int] = []
        self.donated, self.may_take = donated, may_take
        self.uses: dict[LeafKey, list[_ArgumentUse]] = {}
        self._arrivals: list[dict[Slot, NamedSharding]] = [{} for _ in stages]
        self._several = jax.process_count() > 1
        for i, (home, port) in homes.items():
            at_home = stages[home].shardings[port]
            order = [home, *(s for s in range(len(stages)) if s != home)]
            for s in order:
                slot = stages[s].arguments.get(i)
                if slot is not None:
                    aval = stages[s].layout.trace.avals[slot.value]
                    self._add(i, s, slot, aval, at_home, stages[s].shardings[port], s == home)

    def arrivals(self, stage: int) -> dict[Slot, NamedSharding]:
        """The expected shardings of a stage's arguments that may arrive with another sharding."""
        return dict(self._arrivals[stage])

    def place(self, leaves: Sequence[Any], values: Values) -> None:
        """Fill the registers of arguments. A donated array that the user made is copied, unless `may_take`.

        Raises:
            BatchError: an array spans several processes with another sharding than the pipeline expects.
        """
        count = Counter(map(id, leaves)) if self.donated else Counter()
        for i, uses in self.uses.items():
            home = uses[0]
            leaf = part_of(leaves[i[0]], i[1], home.sharding)
            if isinstance(leaf, jax.Array) and leaf.committed and _is_sharded_as(leaf, home.sharding):
                if i in self.donated and home.is_mine and (count[id(leaves[i[0]])] > 1 or self._is_users(leaves[i[0]])):
                    leaf = jax.numpy.copy(leaf)
                self._from_home(leaf, uses, values)
            elif not self._several:
                if i in self.donated and isinstance(leaf, jax.Array):
                    leaf = jax.numpy.copy(leaf)  # `device_put` may return the shards that are already in place
                for one in uses:
                    values[one.register] = jax.device_put(leaf, one.sharding, may_alias=i not in self.donated)
            else:
                self._from_host(leaf, uses, values)

    # -- helpers -----------------------------------------------------------------------------

    def _is_users(self, leaf: Any) -> bool:
        """Whether the user owns a leaf, so that it must outlive the step."""
        return not (self.may_take or isinstance(leaf, StackedLeaf) or is_own(leaf))

    def _add(
        self, i: LeafKey, s: int, slot: Slot, aval: Any, at_home: NamedSharding, sharding: NamedSharding, is_home: bool
    ) -> None:
        register = self.registers.setdefault((s, slot), len(self.stage_of))
        self.stage_of.append(s)
        if i not in self.donated or not is_home:
            self.shared.add(register)
        if not is_home and at_home.device_set & sharding.device_set:  # a transfer inside a submesh may not copy
            self.shared.add(self.uses[i][0].register)
        crossing, prepare = None, None
        if not is_home:
            raw = jax_compat.raw_struct(aval)
            passing = unchanged_wire(at_home, sharding)
            if passing is None:
                passing = wire(raw.shape, at_home, sharding)
            crossing = Crossing(raw.shape, raw.dtype, passing)
            if not crossing.between_processes:
                crossing = None
            elif passing.source != at_home or raw.dtype != aval.dtype or i in self.donated:
                prepare = jax.jit(_sent, out_shardings=passing.source)
            if crossing is not None and (passing.target != sharding or raw.dtype != aval.dtype):
                self._arrivals[s][slot] = sharding
        use = _ArgumentUse(s, slot, register, sharding, is_mine(sharding), crossing, prepare)
        self.uses.setdefault(i, []).append(use)

    def _from_home(self, leaf: Any, uses: Sequence[_ArgumentUse], values: Values) -> None:
        home, *others = uses
        values[home.register] = leaf if home.is_mine else None
        for one in others:
            if one.crossing is None:
                values[one.register] = jax.device_put(leaf, one.sharding) if one.is_mine else None
                continue
            sent = leaf if home.is_mine else None
            if sent is not None and one.prepare is not None:
                sent = one.prepare(sent)
            values[one.register] = one.crossing.move(sent)

    def _from_host(self, leaf: Any, uses: Sequence[_ArgumentUse], values: Values) -> None:
        """Place a leaf that every process has whole: each process keeps its own shards."""
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            raise BatchError(
                f"an argument is sharded as {leaf.sharding} over several processes, but the pipeline expects"
                f" {uses[0].sharding}: build the state with `init`, or give every process the whole array in NumPy"
            )
        is_key = isinstance(leaf, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        host = np.asarray(jax.random.key_data(leaf) if is_key else leaf)
        for one in uses:
            if one.is_mine:
                sharded = jax.make_array_from_callback(host.shape, one.sharding, lambda part: host[part])
                values[one.register] = (
                    jax.random.wrap_key_data(sharded, impl=jax.random.key_impl(leaf)) if is_key else sharded
                )


def _sent(value: Any) -> Any:
    """A copy that passes between processes. A PRNG key passes as its raw data."""
    is_key = jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(value) if is_key else jax.numpy.copy(value)


def _is_sharded_as(leaf: jax.Array, sharding: NamedSharding) -> bool:
    return leaf.sharding == sharding or leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
