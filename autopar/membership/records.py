"""What agents report, and what the keeper assigns to them. Both are whole states: a lost message is made up by the next."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from autopar.membership.wire import WireError

#: A copy of one worker's shards, as of one step: generation, step, rank of the worker, workers in the generation.
Copy = tuple[int, int, int, int]
#: `none`: no process; `running`; `yielded`: ended at a step border on request; `finished`: its data has ended; `failed`: anything else.
WorkerState = Literal["none", "running", "yielded", "finished", "failed"]


@dataclass(frozen=True, slots=True)
class Report:
    """What an agent says of itself.

    Args:
        agent: its name, which no other agent has.
        host, pid: the host's name, and the agent's process there.
        memory: the address at which it serves copies.
        coordinator: an address on its host at which a new service of JAX may listen.
        generation: that of its last worker.
        worker: the state of that worker.
        why: how the worker failed.
        position: the steps that the worker has done.
        stops_at: the step at whose border the worker stops, once a border is requested.
        step_s: seconds that the worker's devices took for the same work as those of others: one microbatch where these are dealt, else a
            small program.
        standby: whether the next process waits for its place.
        leaving: whether the agent is to leave.
        rehearsed: the rehearsal it took part in last, and whether it succeeded.
        held: the copies in its memory.
    """

    agent: str
    host: str
    pid: int
    memory: str
    coordinator: str
    generation: int = 0
    worker: WorkerState = "none"
    why: str = ""
    position: int = 0
    stops_at: int | None = None
    step_s: float = 0.0
    standby: bool = False
    leaving: bool = False
    rehearsed: tuple[int, bool] = (0, True)
    held: tuple[Copy, ...] = ()

    def __str__(self) -> str:
        return f"{shown(self.agent)} (host {shown(self.host)})"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Report:
        """The inverse of `to_json`.

        Raises:
            WireError: the data is no report.
        """
        try:
            fields = dict(data)
            fields["held"] = tuple(_copy(one) for one in fields["held"])
            number, succeeded = fields["rehearsed"]
            fields["rehearsed"] = int(number), bool(succeeded)
            return _checked(cls(**fields))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise WireError(f"an agent sent a report that cannot be read: {error}") from error


def shown(text: str, most: int = 200) -> str:
    """A text of another process, for people: one line, without characters that control a terminal.

    >>> shown("a\\x1b[2J\\nb")
    'a\\\\x1b[2J\\\\nb'
    """
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text[:most])


def _checked(report: Report) -> Report:
    """A report whose fields have their types.

    Raises:
        ValueError: one has not.
    """
    texts = (report.agent, report.host, report.memory, report.coordinator, report.why)
    numbers = (report.pid, report.generation, report.position, 0 if report.stops_at is None else report.stops_at)
    flags = (report.standby, report.leaving)
    is_typed = (
        all(isinstance(one, str) for one in texts)
        and all(isinstance(one, int) and one >= 0 for one in numbers)
        and all(isinstance(one, bool) for one in flags)
        and isinstance(report.step_s, int | float)
        and 0 <= report.step_s < math.inf
        and report.worker in get_args(WorkerState)
    )
    if not is_typed:
        raise ValueError("a field has another type, or a number is out of range")
    return report


def _copy(one: Sequence[Any]) -> Copy:
    generation, step, owner, count = map(int, one)
    return generation, step, owner, count


@dataclass(frozen=True, slots=True)
class Restore:
    """Where a new generation finds the state.

    Args:
        generation, step: of the copies.
        sources: for each worker that made a copy, the addresses of agents that have it.
    """

    generation: int
    step: int
    sources: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Place:
    """A worker's place in a generation, or in a rehearsal.

    Args:
        generation: its number; that of the rehearsal, if it is one.
        rank, count: of the worker, and the number of workers.
        coordinator: the address of JAX's coordination service, which worker 0 starts.
        restore: where the state is; None where no complete copy is.
        partners: the addresses of the agents that take copies of this worker's shards: its own first.
        every: steps between copies.
        timeout_s: seconds without a sign of life after which a process counts as dead.
        rehearsal: whether to compile only.
        microbatches: how many each worker computes, by rank; empty where all run one program on equal parts of the batch.
    """

    generation: int
    rank: int
    count: int
    coordinator: str
    restore: Restore | None
    partners: tuple[str, ...]
    every: int
    timeout_s: float
    rehearsal: bool = False
    microbatches: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Place:
        fields = dict(data)
        found = fields["restore"]
        if found is not None:
            found = Restore(found["generation"], found["step"], tuple(map(tuple, found["sources"])))
        lists = {name: tuple(fields[name]) for name in ("partners", "microbatches")}
        return cls(**{**fields, "restore": found, **lists})


@dataclass(frozen=True, slots=True)
class Assignment:
    """What the keeper wants of an agent.

    Args:
        phase: `run`: a worker in `place`; `idle`: none; `over`: the job has ended.
        place: of the worker.
        border: the step at whose border the worker is to end: `ask`, while that is being agreed on; None for none.
        rehearsal: a place in which the waiting process is to compile ahead.
        floor: the oldest copies to keep: generation and step.
        code: the exit code of the job, once it is over.
        timeout_s: see `Place`.
    """

    phase: Literal["run", "idle", "over"]
    place: Place | None = None
    border: int | Literal["ask"] | None = None
    rehearsal: Place | None = None
    floor: tuple[int, int] = (0, 0)
    code: int = 0
    timeout_s: float = 10.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Assignment:
        """The inverse of `to_json`.

        Raises:
            WireError: the data is no assignment.
        """
        try:
            fields = dict(data)
            for name in ("place", "rehearsal"):
                fields[name] = None if fields[name] is None else Place.from_json(fields[name])
            return cls(**{**fields, "floor": tuple(fields["floor"])})
        except (KeyError, TypeError, ValueError) as error:
            raise WireError(f"the keeper sent an assignment that cannot be read: {error}") from error


@dataclass(frozen=True, slots=True)
class Terms:
    """The user's terms for the keeper.

    Args:
        wanted: the number of members.
        least: the fewest with which the job goes on.
        timeout_s: seconds without a sign of life after which a process counts as dead.
        step_timeout_s: seconds without any step done after which a generation counts as hanging.
        copies: agents on other hosts that have a copy of each shard.
        every: steps between copies.
        ahead: for how many fewer members the program is compiled ahead.
        attempts: generations in a row that may fail without getting further than those before.
        spares_after: how much slower than the others a member may be before a spare replaces it; 0 for never.
        microbatches: into how many the batch is divided, which are dealt to members by their speed; 0 for equal parts in one program.
    """

    wanted: int
    least: int = 1
    timeout_s: float = 10.0
    step_timeout_s: float = 1800.0
    copies: int = 1
    every: int = 10
    ahead: int = 2
    attempts: int = 5
    spares_after: float = 2.0
    microbatches: int = 0


@dataclass(slots=True)
class Seen:
    """What the keeper knows of an agent.

    Args:
        heard_s: when it last reported.
        closed_s: since when it has no connection; None while it has one.
    """

    report: Report
    heard_s: float
    closed_s: float | None = None
