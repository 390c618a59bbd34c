"""Place a step's arguments on the submeshes of the stages that use them.

In: the leaves of the step's arguments, sharded as the pipeline expects or whole.
Out: one array per stage that uses the leaf. An array that already has the expected sharding is not copied. When several
stages use one argument, its home stage sends it to the others. Replicas of stages send within their replica; the first
replica of the home stage sends to the others what they do not have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding

from autopar.errors import BatchError
from autopar.jax_interop import compat as jax_compat
from autopar.pipeline.cut.extract_stages import LeafKey
from autopar.pipeline.cut.pieces import Slot
from autopar.pipeline.run.instances import Instances
from autopar.pipeline.run.piece_programs import StagePieces
from autopar.pipeline.run.stacked_leaves import StackedLeaf, held_part, part_of
from autopar.pipeline.run.transfers import Crossing, Leg, Wire, is_mine, unchanged_wire, wire
from autopar.runtime.own_arrays import is_own

#: The arrays of the pipeline, by register; None for an empty register and for an array that only other processes have.
Values = list[Any]


class Registers(Protocol):
    """Arrays by register, such as `Values`."""

    def __getitem__(self, register: int, /) -> Any: ...
    def __setitem__(self, register: int, value: Any, /) -> None: ...


@dataclass(frozen=True, slots=True)
class _ArgumentUse:
    """One stage's use of an argument.

    Args:
        stage: the instance of the stage.
        source: the position, in the uses of the argument, of the one that sends it; None for the home stage.
        is_replica: whether it is another replica of the home stage.
        sharding: the sharding that the stage expects.
        crossing: the transfer from the source if it crosses processes; None inside one process.
        prepare: the function that reshards or copies the array before the transfer; None if neither is needed. A
            donated array is copied because its memory may be overwritten before the transfer ends.
    """

    stage: int
    slot: Slot
    register: int
    source: int | None
    is_replica: bool
    sharding: NamedSharding
    is_mine: bool
    crossing: Crossing | None
    prepare: Any

    def crossing_from(self, source: NamedSharding) -> StateCrossing:
        """The transfer of a new value of the argument, from its home stage, during a stream of batches."""
        wire = Wire(source, self.sharding) if self.crossing is None else self.crossing.wire
        return StateCrossing(wire, self.crossing, self.prepare)


@dataclass(frozen=True, slots=True)
class StateCrossing:
    """Moves new values of state from its home stage to another one; like a `Crossing`."""

    wire: Wire
    crossing: Crossing | None
    prepare: Any
    is_here: bool = False

    @property
    def is_mine(self) -> bool:
        return is_mine(self.wire.source) or is_mine(self.wire.target)

    @property
    def legs(self) -> list[Leg]:
        return [] if self.crossing is None else self.crossing.legs

    def move(self, value: Any) -> Any:
        """Start to move an array; None stands for an array that only other processes have."""
        if self.crossing is None:
            return None if value is None else jax.device_put(value, self.wire.target)
        return self.crossing.move(value if value is None or self.prepare is None else self.prepare(value))


class PipelineArguments:
    """Places arguments.

    Args:
        stages: the instances of all stages.
        homes: the home stage of each argument, and the port of that stage.
        donated: arguments whose memory the step may reuse.
        may_take: whether the step may also reuse the memory of donated arrays that the user made.

    Attributes:
        registers: the register of each instance and slot.
        shared: registers whose array may also be in another register.
        stage_of: the instance of each register.
    """

    def __init__(
        self,
        stages: Sequence[StagePieces],
        instances: Instances,
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
        for i, (stage, port) in homes.items():
            self.uses[i] = []
            for replica, home in enumerate(instances.of(stage)):
                self._add(i, stages[home], home, port, 0 if replica else None, is_replica=replica > 0)
                source = len(self.uses[i]) - 1
                for s in range(len(stages)):
                    if s != home and instances.replica(s) == replica and i in stages[s].arguments:
                        self._add(i, stages[s], s, port, source)

    @property
    def num_registers(self) -> int:
        """The number of registers of arguments, which come first."""
        return len(self.stage_of)

    def arrivals(self, stage: int) -> dict[Slot, NamedSharding]:
        """The expected shardings of a stage's arguments that may arrive with another sharding."""
        return dict(self._arrivals[stage])

    def place(self, leaves: Sequence[Any], values: Registers, only: Collection[LeafKey] | None = None) -> None:
        """Fill the registers of arguments. A donated array that the user made is copied, unless `may_take`.

        Args:
            only: the arguments to place; by default all.

        Raises:
            BatchError: an array spans several processes with another sharding than the pipeline expects.
        """
        count = Counter(map(id, leaves)) if self.donated else Counter()
        for i, uses in self.uses.items():
            if only is not None and i not in only:
                continue
            home, given = uses[0], leaves[i[0]]
            leaf = part_of(given, i[1], home.sharding)
            if _is_in_place(leaf, home.sharding):
                is_copied = i in self.donated and (count[id(given)] > 1 or self._is_users(given))
                self._from_home(i, leaf, given, is_copied, values)
            elif not self._several:
                is_taken = i in self.donated and isinstance(leaf, jax.Array)
                for one in uses:  # `device_put` may return the shards that are already in place
                    own = jax.numpy.copy(leaf) if is_taken else leaf
                    values[one.register] = jax.device_put(own, one.sharding, may_alias=i not in self.donated)
            else:
                self._from_host(leaf, uses, values)

    # -- helpers -----------------------------------------------------------------------------

    def _is_users(self, leaf: Any) -> bool:
        """Whether the user owns a leaf, so that it must outlive the step."""
        return not (self.may_take or isinstance(leaf, StackedLeaf) or is_own(leaf))

    def _add(
        self, i: LeafKey, stage: StagePieces, s: int, port: Any, source: int | None, *, is_replica: bool = False
    ) -> None:
        slot, sharding = stage.arguments[i], stage.shardings[port]
        aval = stage.layout.trace.avals[slot.value]
        register = self.registers.setdefault((s, slot), len(self.stage_of))
        self.stage_of.append(s)
        if i not in self.donated or not (source is None or is_replica):
            self.shared.add(register)
        crossing, prepare = None, None
        if source is not None:
            at_source = self.uses[i][source].sharding
            if at_source.device_set & sharding.device_set:  # a transfer inside a submesh may not copy
                self.shared.add(self.uses[i][source].register)
            raw = jax_compat.raw_struct(aval)
            passing = unchanged_wire(at_source, sharding)
            if passing is None:
                passing = wire(raw.shape, at_source, sharding)
            crossing = Crossing(raw.shape, raw.dtype, passing)
            if not crossing.between_processes:
                crossing = None
            elif passing.source != at_source or raw.dtype != aval.dtype or i in self.donated:
                prepare = jax.jit(_sent, out_shardings=passing.source)
            if crossing is not None and (passing.target != sharding or raw.dtype != aval.dtype):
                self._arrivals[s][slot] = sharding
        use = _ArgumentUse(s, slot, register, source, is_replica, sharding, is_mine(sharding), crossing, prepare)
        self.uses[i].append(use)

    def _from_home(self, i: LeafKey, leaf: Any, given: Any, is_copied: bool, values: Registers) -> None:
        """Place an argument that is already at home, on the first replica at least.

        Args:
            leaf: as the home stage has it. given: as the caller gave it.
            is_copied: whether it must outlive the step.
        """
        uses = self.uses[i]
        for one in uses:
            held: Any = leaf if one.source is None else held_part(given, i[1], one.sharding) if one.is_replica else None
            if one.source is None or _is_in_place(held, one.sharding):
                own = jax.numpy.copy(held) if is_copied and one.is_mine else held
                values[one.register] = own if one.is_mine else None
                continue
            source = uses[one.source]
            sent = values[source.register]
            if one.crossing is None:
                values[one.register] = jax.device_put(sent, one.sharding) if one.is_mine else None
                continue
            if sent is not None and one.prepare is not None:
                sent = one.prepare(sent)
            values[one.register] = one.crossing.move(sent)

    def _from_host(self, leaf: Any, uses: Sequence[_ArgumentUse], values: Registers) -> None:
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


def _is_in_place(leaf: Any, sharding: NamedSharding) -> bool:
    """Whether a leaf is an array with this sharding."""
    return isinstance(leaf, jax.Array) and leaf.committed and _is_sharded_as(leaf, sharding)


def _is_sharded_as(leaf: jax.Array, sharding: NamedSharding) -> bool:
    return leaf.sharding == sharding or leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
