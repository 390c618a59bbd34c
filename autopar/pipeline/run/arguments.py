"""A step's arguments laid out over the submeshes.

In: the leaves of the step's arguments: arrays that lie as the pipeline wants them, or whole. Out: of each stage that takes
one, its own. State that lies right stays as it is; what several stages take passes from the one whose own it is.
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
from autopar.pipeline.run.transfers import Crossing, as_it_lies, is_mine, wire
from autopar.runtime.own_arrays import is_own

#: What the pipeline holds, by register; None where there is nothing, or where it is in other processes alone.
Values = list[Any]


@dataclass(frozen=True, slots=True)
class _Taker:
    """A stage that takes an argument.

    Args:
        sharding: as it wants it.
        crossing: from where the argument lies at home, between processes; None inside one.
        prepare: lays it for the wire first, where it cannot pass as it lies: in another layout, or in memory that is
            written over before it has passed.
    """

    stage: int
    slot: Slot
    register: int
    sharding: NamedSharding
    is_mine: bool
    crossing: Crossing | None
    prepare: Any


class PipelineArguments:
    """Lays arguments out.

    Args:
        homes: by argument, the stage whose own it is, and its port.
        donated: arguments whose memory may be used again.
        may_take: whether that goes for arrays that the user made, too.

    Attributes:
        registers: by stage and slot. shared: registers that may hold what others hold, too.
        stage_of: of each register, its stage.
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
        self.takers: dict[LeafKey, list[_Taker]] = {}
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
        """Of what may reach a stage in another layout than it wants, that which it wants."""
        return dict(self._arrivals[stage])

    def place(self, leaves: Sequence[Any], values: Values) -> None:
        """Fill the registers of arguments. Of what is donated, an array that the user made is copied.

        Raises:
            BatchError: an array that lies over several processes, otherwise than the pipeline wants it.
        """
        count = Counter(map(id, leaves)) if self.donated else Counter()
        for i, takers in self.takers.items():
            home = takers[0]
            leaf = part_of(leaves[i[0]], i[1], home.sharding)
            if isinstance(leaf, jax.Array) and leaf.committed and _lies(leaf, home.sharding):
                if i in self.donated and home.is_mine and (count[id(leaves[i[0]])] > 1 or self._stays(leaves[i[0]])):
                    leaf = jax.numpy.copy(leaf)
                self._from_home(leaf, takers, values)
            elif not self._several:
                if i in self.donated and isinstance(leaf, jax.Array):
                    leaf = jax.numpy.copy(leaf)  # `device_put` may hand on the part that lies right
                for one in takers:
                    values[one.register] = jax.device_put(leaf, one.sharding, may_alias=i not in self.donated)
            else:
                self._from_host(leaf, takers, values)

    # -- inside ------------------------------------------------------------------------------

    def _stays(self, leaf: Any) -> bool:
        """Whether a leaf is the user's, and stays after the step."""
        return not (self.may_take or isinstance(leaf, StackedLeaf) or is_own(leaf))

    def _add(
        self, i: LeafKey, s: int, slot: Slot, aval: Any, at_home: NamedSharding, sharding: NamedSharding, is_home: bool
    ) -> None:
        register = self.registers.setdefault((s, slot), len(self.stage_of))
        self.stage_of.append(s)
        if i not in self.donated or not is_home:
            self.shared.add(register)
        if not is_home and at_home.device_set & sharding.device_set:  # a move inside a submesh may copy nothing
            self.shared.add(self.takers[i][0].register)
        crossing, prepare = None, None
        if not is_home:
            raw = jax_compat.raw_struct(aval)
            passing = as_it_lies(at_home, sharding)
            if passing is None:
                passing = wire(raw.shape, at_home, sharding)
            crossing = Crossing(raw.shape, raw.dtype, passing)
            if not crossing.between_processes:
                crossing = None
            elif passing.source != at_home or raw.dtype != aval.dtype or i in self.donated:
                prepare = jax.jit(_sent, out_shardings=passing.source)
            if crossing is not None and (passing.target != sharding or raw.dtype != aval.dtype):
                self._arrivals[s][slot] = sharding
        taker = _Taker(s, slot, register, sharding, is_mine(sharding), crossing, prepare)
        self.takers.setdefault(i, []).append(taker)

    def _from_home(self, leaf: Any, takers: Sequence[_Taker], values: Values) -> None:
        home, *others = takers
        values[home.register] = leaf if home.is_mine else None
        for one in others:
            if one.crossing is None:
                values[one.register] = jax.device_put(leaf, one.sharding) if one.is_mine else None
                continue
            sent = leaf if home.is_mine else None
            if sent is not None and one.prepare is not None:
                sent = one.prepare(sent)
            values[one.register] = one.crossing.move(sent)

    def _from_host(self, leaf: Any, takers: Sequence[_Taker], values: Values) -> None:
        """Every process has it whole, and takes its part of it."""
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            raise BatchError(
                f"an argument lies as {leaf.sharding}, over several processes, but the pipeline wants it as"
                f" {takers[0].sharding}: build the state with `init`, or give what each process has whole, as NumPy arrays"
            )
        is_key = isinstance(leaf, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        host = np.asarray(jax.random.key_data(leaf) if is_key else leaf)
        for one in takers:
            if one.is_mine:
                laid = jax.make_array_from_callback(host.shape, one.sharding, lambda part: host[part])
                values[one.register] = (
                    jax.random.wrap_key_data(laid, impl=jax.random.key_impl(leaf)) if is_key else laid
                )


def _sent(value: Any) -> Any:
    """An array of its own that passes between processes; of keys, their words."""
    is_key = jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(value) if is_key else jax.numpy.copy(value)


def _lies(leaf: jax.Array, sharding: NamedSharding) -> bool:
    return leaf.sharding == sharding or leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
