"""Replay a trace with a plan's sharding constraints; `jit` compiles the result.

In: a `Plan`, a `Trace`, and a mesh.
Out: `Replay.run`, a function of the step's arguments. Every value that crosses from one planned node to another gets a
constraint, which leaves XLA's SPMD partitioner no choice. Name stacks and source lines are kept. Loops and branches are
rebuilt around the equations of their sections. Equations that were rewritten to treat a dim as two run in their
original form if the plan does not shard that dim.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from autopar.frontend.equations import Equation, LiteralOperand, Region
from autopar.frontend.trace import Trace
from autopar.frontend.user_shardings import run_shard_map
from autopar.jax_interop import compat as jax_compat
from autopar.plans.plan import Plan
from autopar.plans.records import EarlyReduction, UnfusedReduction, split_dims
from autopar.rules.table import traits_of
from autopar.runtime.manual.region import run_region, whole_region
from autopar.runtime.planned_shardings import PlannedShardings, Scope
from autopar.transforms.split_dims.undo import as_written, run_whole


class OtherShapesError(TypeError):
    """The arguments differ from the planned ones; the caller plans again."""


class Replay:
    """Evaluates a trace equation by equation and constrains values as planned."""

    def __init__(self, plan: Plan, trace: Trace, mesh: Mesh | AbstractMesh) -> None:
        self.trace, self.mesh = trace, mesh
        self.is_on_cpu = isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == "cpu"
        self.shardings = PlannedShardings(plan, trace, mesh)
        self.early_reductions = defaultdict[int, list[EarlyReduction]](list)
        for one in plan.early_reductions:
            self.early_reductions[one.node].append(one)
        self.manual = {region.node: region for region in plan.regions}
        self.as_written = as_written(trace, split_dims(plan.constraints))
        separate = (one for one in plan.unfused_reductions if self.as_written.keys().isdisjoint(one.nodes))
        self.separate = {n: one for one in separate for n in _sums(one, trace)}
        self.behind = {n: self._in_memory(one, n) for n, one in self.separate.items()}
        self.remaining = _last_reads(trace, plan.early_reductions, self.behind)

    def run(self, leaves: Sequence[Any]) -> list[Any]:
        """Compute the step's results from the leaves of its arguments."""
        self._check(leaves)
        self.shardings.constrain_swapped_results(self.manual.keys() | self.as_written.keys())
        scope = Scope(dict(zip(self.trace.inputs, leaves, strict=True)))
        scope.values.update(self.trace.constants)
        end = len(self.trace.equations)
        self._span(scope, 0, end)
        return [self.shardings.traced_operand(scope, end, i, atom) for i, atom in enumerate(self.trace.outputs)]

    def part(self, given: Mapping[int, Any]) -> Part:
        """A part of the step, to run equation by equation.

        Args:
            given: values that other parts produced, with their shardings.
        """
        return Part(self, Scope({**dict(self.trace.constants), **given}, forgets=False))

    def _span(self, scope: Scope, start: int, stop: int) -> None:
        for n, after, region in self.trace.walk(start, stop):
            if region is None:
                self._equation(scope, n)
            else:
                self._region(scope, region)
            for position in self.remaining.get(after - 1, ()) if scope.forgets else ():
                scope.values.pop(position, None)
                scope.resharded.pop(position, None)

    def _equation(self, scope: Scope, n: int) -> None:
        equation = self.trace.equations[n]
        whole = self.as_written.get(n)
        if whole is not None and whole.start != n:  # its first equation runs it
            return
        take = self.shardings.traced_operand if whole is None else self.shardings.operand
        with _context(equation):
            if n in self.separate and self.behind[n] <= scope.values.keys():
                operands = self._behind_barrier(scope, self.separate[n], n)
            else:
                operands = [take(scope, n, i, atom) for i, atom in enumerate(equation.operands)]
            for one in self.early_reductions.get(n, ()):
                operands[one.operand] = self._after(scope, operands[one.operand], one.values)
            if whole is not None:
                self.shardings.define(scope, self.trace.equations[whole.stop - 1], run_whole(whole, operands))
                return
            for position, value in zip(equation.results, self._run(n, equation, operands), strict=True):
                path = self.shardings.at_definition.get(position, ())
                if n in self.manual:  # the region itself takes all steps but the last
                    path = path[-1:]
                scope.values[position] = self.shardings.defined(position, value, path)

    def _run(self, n: int, equation: Equation, operands: Sequence[Any]) -> Sequence[Any]:
        """Run an equation; if the plan has a manual region for it, under `shard_map`."""
        if n in self.manual:
            paths = [self.shardings.at_definition.get(position, ()) for position in equation.results]
            targets = [path[-1] if path else None for path in paths]
            return run_region(self.manual[n], equation.source, operands, self.mesh, targets)
        # Without devices JAX cannot lower such a primitive even for one.
        if traits_of(equation.primitive).partitioned and (self.mesh.size > 1 or isinstance(self.mesh, AbstractMesh)):
            return run_region(
                whole_region(n, equation), equation.source, operands, self.mesh, [None] * len(equation.results)
            )
        if equation.primitive == "shard_map":
            return run_shard_map(equation.source, operands, self.mesh)
        if traits_of(equation.primitive).constrains:  # the plan has it as a constraint on its own mesh
            return operands
        if self.is_on_cpu and traits_of(equation.primitive).in_place == "slice":
            # XLA's CPU compiler fuses an in-place update with a slice of a microbatch and then reads what it has
            # already overwritten. A barrier materializes the update first.
            operands = [operands[0], jax.lax.optimization_barrier(operands[1]), *operands[2:]]
        return jax_compat.bind(equation.source, operands)

    def _after(self, scope: Scope, operand: Any, values: Sequence[int]) -> Any:
        """An operand behind a barrier that waits for other values, if this part of the step computes them."""
        known = [
            self.shardings.resharded(scope, position, self.shardings.scattered.get(position, ()))
            for position in values
            if position in scope.values
        ]
        return jax.lax.optimization_barrier([operand, *known])[0]

    def _in_memory(self, one: UnfusedReduction, n: int) -> set[int]:
        """The materialized values from which a separate reduction is computed."""
        found, left = set[int](), [n]
        while left:
            atoms = self.trace.equations[left.pop()].reads
            inside = [atom for atom in atoms if self.trace.producers.get(atom) in one.nodes]
            left += [self.trace.producers[atom] for atom in inside]
            found.update(set(atoms) - set(inside))
        return found

    def _behind_barrier(self, scope: Scope, one: UnfusedReduction, n: int) -> list[Any]:
        """The operands of a separate reduction, or of the equations computed for it. Values in memory are read
        through a barrier of their own, so that XLA does not merge the reads with others."""
        known = scope.behind[one]
        equation, operands = self.trace.equations[n], list[Any]()
        for i, atom in enumerate(equation.operands):
            producer = None if isinstance(atom, LiteralOperand) else self.trace.producers.get(atom)
            key = atom if producer in one.nodes else (atom, self.shardings.at_operand.get((n, i)))
            if isinstance(atom, LiteralOperand):
                operands.append(atom.value)
                continue
            if key not in known and producer in one.nodes:
                made = self.trace.equations[producer]
                with _context(made):
                    again = self._run(producer, made, self._behind_barrier(scope, one, producer))
                    for position, value in zip(made.results, again, strict=True):
                        path = self.shardings.at_definition.get(position, ())
                        known[position] = self.shardings.defined(position, value, path)
            elif key not in known:
                known[key] = jax.lax.optimization_barrier(self.shardings.traced_operand(scope, n, i, atom))
            operands.append(known[key])
        return operands

    def _region(self, scope: Scope, region: Region) -> None:
        """Run a loop or branches, and define their results."""
        equations = self.trace.equations
        entering = range(*region.enter)
        given = {n: self.shardings.traced_operand(scope, n, 0, equations[n].operands[0]) for n in entering}
        with _context(equations[region.enter[0]] if entering else equations[region.exit[0]]):
            results = getattr(self, f"_{region.kind}")(scope, region, given)
        leaving = [n for n in range(*region.exit) if equations[n].results] or list(entering)
        for n, value in zip(leaving, results, strict=True):
            self.shardings.define(scope, equations[n], [value])

    def _barrier(self, scope: Scope, region: Region, given: dict[int, Any]) -> Sequence[Any]:
        return jax.lax.optimization_barrier(list(given.values()))

    def _scan(self, scope: Scope, region: Region, given: dict[int, Any]) -> Sequence[Any]:
        carries, slices = (self._pieces(region.enter, piece) for piece in ("enter_carry", "enter_slice"))
        leave = self._section(scope, region, 0, given)
        num_carries = len(carries)

        def body(carry: list[Any], one: list[Any]) -> tuple[list[Any], list[Any]]:
            outs = leave(dict(zip((*carries, *slices), (*carry, *one), strict=True)))
            return outs[:num_carries], outs[num_carries:]

        params = region.source.params
        carry, stacks = jax.lax.scan(
            body,
            self._start(given, carries),
            [given[n] for n in slices],
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        return [*carry, *stacks]

    def _while(self, scope: Scope, region: Region, given: dict[int, Any]) -> Sequence[Any]:
        carries = self._pieces(region.enter, "enter_carry")
        test, body = (self._section(scope, region, i, given) for i in range(2))

        def entered(carry: list[Any]) -> dict[int, Any]:
            return dict(zip(carries, carry, strict=True))

        def condition(carry: list[Any]) -> Any:
            rows = test(entered(carry))[0]  # under `vmap` one for each row
            return jax.numpy.any(rows) if jax.numpy.ndim(rows) else rows

        def iteration(carry: list[Any]) -> list[Any]:
            after = body(entered(carry))
            if not self._has_rows(region):
                return after
            rows = test(entered(carry))[0]  # those that have ended stay as they are
            return [
                jax.numpy.where(jax.lax.expand_dims(rows, range(rows.ndim, new.ndim)), new, old)
                for new, old in zip(after, carry, strict=True)
            ]

        return jax.lax.while_loop(condition, iteration, self._start(given, carries))

    def _has_rows(self, region: Region) -> bool:
        """Whether a loop has a condition per row, as `vmap` makes it."""
        (n,) = self._pieces(region.exit, "predicate")
        (atom,) = self.trace.equations[n].operands
        return not isinstance(atom, LiteralOperand) and self.trace.avals[atom].shape != ()

    def _cond(self, scope: Scope, region: Region, given: dict[int, Any]) -> Sequence[Any]:
        branches = [self._section(scope, region, i, given) for i in range(len(region.sections))]
        chosen, *entering = range(*region.enter)

        def run(branch: Callable[[dict[int, Any]], list[Any]], *operands: Any) -> list[Any]:
            return branch(dict(zip(entering, operands, strict=True)))

        functions = [lambda *operands, branch=branch: run(branch, *operands) for branch in branches]
        return jax.lax.switch(given[chosen], functions, *(given[n] for n in entering))

    def _section(
        self, scope: Scope, region: Region, section: int, given: dict[int, Any]
    ) -> Callable[[dict[int, Any]], list[Any]]:
        """A function from the inputs of a section, by their equations, to its outputs."""
        equations = self.trace.equations
        leaving = list(region.leaving(section, equations))

        def run(entered: dict[int, Any]) -> list[Any]:
            inside = scope.inner()
            for n, value in (given | entered).items():
                self.shardings.define(inside, equations[n], [value] if equations[n].results else [])
            self._span(inside, *region.sections[section])
            outs = [(n, self.shardings.traced_operand(inside, n, i, equations[n].operands[i])) for n, i in leaving]
            return [self.shardings.as_carried(n, value) for n, value in outs]

        return run

    def _start(self, given: dict[int, Any], carries: Sequence[int]) -> list[Any]:
        """The initial carry of a loop with the loop's shardings."""
        return [self.shardings.as_carried(n, given[n]) for n in carries]

    def _pieces(self, span: tuple[int, int], piece: str) -> list[int]:
        return [n for n in range(*span) if self.trace.equations[n].piece == piece]

    def _check(self, leaves: Sequence[Any]) -> None:
        for path, position, leaf in zip(self.trace.input_paths, self.trace.inputs, leaves, strict=True):
            aval = self.trace.avals[position]
            if (leaf.shape, leaf.dtype) != (aval.shape, aval.dtype):
                raise OtherShapesError(
                    f"`{path}` was planned as {aval.dtype}{list(aval.shape)}, got {leaf.dtype}{list(leaf.shape)}"
                )


@dataclass(frozen=True, slots=True)
class Part:
    """A subset of a step's equations and the values computed so far. Made by `Replay.part`."""

    replay: Replay
    scope: Scope

    def run(self, start: int, stop: int) -> None:
        """Run equations, including loops and branches among them."""
        self.replay._span(self.scope, start, stop)

    def enter(self, n: int) -> Any:
        """The value that enters a loop, with its sharding inside; for a stack, one value per iteration."""
        shardings, equation = self.replay.shardings, self.replay.trace.equations[n]
        value = self.operand(n, 0)
        if equation.piece == "enter_carry":
            return shardings.as_carried(n, value)
        (position,) = equation.results
        path = shardings.at_definition.get(position, ())
        if not equation.takes_slice:
            return shardings.defined(position, value, path)
        each = (jax.lax.index_in_dim(value, i, keepdims=False) for i in range(value.shape[0]))
        return tuple(shardings.defined(position, one, path) for one in each)

    def leave(self, n: int) -> Any:
        """The value that leaves an iteration of a loop."""
        return self.replay.shardings.as_carried(n, self.operand(n, 0))

    def define(self, n: int, value: Any) -> None:
        """Define the result of an equation."""
        self.replay.shardings.define(self.scope, self.replay.trace.equations[n], [value])

    def replace(self, position: int, value: Any) -> None:
        """Let a value that was computed be another one from now on, in its sharding."""
        path = self.replay.shardings.at_definition.get(position, ())
        self.scope.values[position] = self.replay.shardings.defined(position, value, path[-1:])
        self.scope.resharded.pop(position, None)

    def operand(self, n: int, i: int) -> Any:
        """An operand of an equation with its planned sharding."""
        atom = self.replay.trace.equations[n].operands[i]
        return self.replay.shardings.traced_operand(self.scope, n, i, atom)

    def value(self, position: int) -> Any:
        """A computed value with the sharding of its definition."""
        return self.scope.values[position]

    def output(self, i: int) -> Any:
        """A result of the whole step."""
        trace = self.replay.trace
        return self.replay.shardings.traced_operand(self.scope, len(trace.equations), i, trace.outputs[i])


def _context(equation: Equation) -> Any:
    source = equation.source
    return jax_compat.equation_context(source.source_info.traceback, equation.name_stack, source.ctx.manager)


def _sums(one: UnfusedReduction, trace: Trace) -> list[int]:
    """The last equations of an unfused reduction: no other equation of the reduction reads their results."""
    read = {value for n in one.nodes for value in trace.equations[n].reads}
    return [n for n in one.nodes if read.isdisjoint(trace.equations[n].results)]


def _last_reads(
    trace: Trace, early_reductions: Sequence[EarlyReduction], behind: Mapping[int, set[int]]
) -> dict[int, list[int]]:
    """For each equation, the values that it reads or waits for last. Values read in a loop live until its end.

    Args:
        behind: the inputs of each separate reduction.
    """
    last = {value: users[-1] for value, users in trace.users.items()}
    for one in early_reductions:
        last |= {value: max(last.get(value, 0), one.node) for value in one.values}
    for n, values in behind.items():
        last |= {value: max(last.get(value, 0), n) for value in values}
    for output in trace.outputs:
        if isinstance(output, int):
            last.pop(output, None)
    by_equation: dict[int, list[int]] = defaultdict(list)
    for value, n in last.items():
        by_equation[n].append(value)
    return by_equation
