"""The explicit program is well-formed under any assignment, and its collectives are those that the problem prices."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import programs
import pytest
from any_choice import AnyChoice

from autopar.cost.resharding_matrix import EACH_S, InPlaceUpdate
from autopar.formulate.explicit import explicit_program
from autopar.formulate.formulation import Formulation, formulate
from autopar.hardware.profile import load
from autopar.ir.explicit_program import Communicate, Compute, ExplicitProgram
from autopar.ir.graph import Graph
from autopar.ir.mesh import parse_mesh
from autopar.ir.sharding import TensorSharding
from autopar.ir.verifier import check_explicit
from autopar.planner.program_groups import program_groups
from autopar.solve.ilp import Ilp
from autopar.solve.problem import Solver
from autopar.transforms.program import program_of

H100 = load("h100-sxm")
#: So slow that the smallest program is worth splitting.
SLOW = dataclasses.replace(H100, hbm_bytes_per_s=H100.hbm_bytes_per_s / 1e4, kernel_launch_s=0.0)


def formulated(fun: Any, *args: Any, mesh: str) -> Formulation:
    graph = program_of(fun, args, carry=None, donate=None).graph
    groups = program_groups(graph, {}).groups
    return formulate(graph, groups, parse_mesh(mesh), SLOW, pins={}, memory_budget_bytes=None)


def made_of(name: str, mesh: str, solver: Solver) -> tuple[Formulation, tuple[int, ...]]:
    program = programs.PROGRAMS[name]()
    state = jax.eval_shape(program.create_state, jax.random.key(0))
    states = state if program.num_state_args > 1 else (state,)
    f = formulated(program.step, *states, program.make_batch(0), mesh=mesh)
    return f, solver.solve(f.problem).choices


@pytest.mark.sampled(8)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("mesh", ["8", "2x4", "2x2x2"])
@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_it_is_legal_under_any_assignment(name: str, mesh: str, seed: int) -> None:
    f, choices = made_of(name, mesh, AnyChoice(seed))
    check_explicit(explicit_program(f, choices), f.graph)


def copied_s(update: InPlaceUpdate | None, op: Communicate, program: ExplicitProgram, f: Formulation) -> float:
    """The copies of the state that is updated from a reduce-scatter's result, if the dim is not outermost in the state."""
    if update is None or op.kind != "reduce-scatter":
        return 0.0
    assert op.operand is not None and op.result is not None
    before, after = (program.arrays[array].sharding for array in (op.operand, op.result))
    shape = before.local_shape(f.graph.values[program.arrays[op.result].value].shape, f.mesh)
    scattered = next(dim for dim, axes in enumerate(after.dims) if axes != before.dims[dim])
    outside = [size for dim, size in enumerate(shape) if update.order[dim] < update.order[scattered]]
    if math.prod(outside) == 1:
        return 0.0
    shard = math.prod(shape) / f.mesh.sizes(op.axes)
    copied = 2 * sum(update.itemsizes) * shard / SLOW.memory_bytes_per_s
    return copied + len(update.itemsizes) * SLOW.kernel_launch_s


@pytest.mark.sampled(4)
@pytest.mark.parametrize("mesh", ["8", "2x4"])
@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_its_communication_is_what_the_problem_prices(name: str, mesh: str) -> None:
    f, choices = made_of(name, mesh, Ilp())
    program = explicit_program(f, choices)
    sends = program.communications
    own = sum(float(seconds[choice]) for seconds, choice in zip(f.compute_s, choices, strict=True))
    sent = 0.0
    for op in sends:
        if op.kind != "cut":
            seconds = f.time(op.kind, op.axes, op.num_bytes, combinable=op.combinable)
            turned = 2 * op.num_bytes / SLOW.memory_bytes_per_s if op.is_inner else 0.0
            sent += op.num_times * (seconds + (EACH_S + turned) * (op.cause == "reshard")) * max(len(op.flows), 1)
            sent += op.num_times * sum(copied_s(f.flows[flow].update, op, program, f) for flow in op.flows)
    assert sent > 0
    assert not any(op.cause == "halo" for op in sends)
    assert own + sent == pytest.approx(f.problem.evaluate(choices), rel=1e-9)


@pytest.fixture(scope="module")
def mlp() -> tuple[ExplicitProgram, Graph]:
    f, choices = made_of("mlp", "2x4", AnyChoice(0))
    return explicit_program(f, choices), f.graph


def test_an_illegal_program_is_refused(mlp: tuple[ExplicitProgram, Graph]) -> None:
    program, graph = mlp
    sent = next(i for i, op in enumerate(program.ops) if isinstance(op, Communicate) and op.kind == "all-gather")
    computed = next(i for i, op in enumerate(program.ops) if isinstance(op, Compute) and any(op.operands))

    def with_op(at: int, **changes: Any) -> ExplicitProgram:
        ops = list(program.ops)
        ops[at] = dataclasses.replace(ops[at], **changes)  # pyright: ignore[reportCallIssue]
        return dataclasses.replace(program, ops=tuple(ops))

    check_explicit(program, graph)
    last = max(program.made.values())
    for wrong in (
        with_op(sent, axes=()),
        with_op(sent, kind="all-to-all", axes=("data", "model")),
        with_op(sent, operand=last),
        with_op(computed, operands=(last,)),
        dataclasses.replace(program, ops=program.ops[:-1]),
        dataclasses.replace(program, ops=(*program.ops, program.ops[computed])),
        dataclasses.replace(program, outputs=program.outputs[::-1]),
    ):
        with pytest.raises(AssertionError):
            check_explicit(wrong, graph)


def test_gathered_parts_that_begin_elsewhere_send_rows_to_the_neighbour() -> None:
    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((16, 32), (32, 258), (258, 16))]
    f = formulated(lambda a, b, c: (a @ b) @ c, *shapes, mesh="2x4")
    fine, coarse = ((), ("data", "model")), ((), ("data",))
    (flow,) = (flow for flow in f.flows if f.graph.values[flow.value].shape == (16, 258))
    choices = [0] * len(f.decisions)
    choices[flow.source] = next(i for i, one in enumerate(flow.made) if one == TensorSharding(fine))
    choices[flow.target] = next(i for i, one in enumerate(flow.wanted) if one == TensorSharding(coarse))
    program = explicit_program(f, choices)
    check_explicit(program, f.graph)
    sent, gather = (op for op in program.communications if op.flows == (f.flows.index(flow),))
    assert (gather.kind, gather.axes, gather.operand) == ("all-gather", ("model",), sent.result)
    # Parts of 129 columns are four of 33, which end three columns later.
    assert (sent.kind, sent.axes, sent.num_bytes) == ("collective-permute", ("data", "model"), 3 * 16 * 4)


def test_the_sum_of_a_scatter_is_whole_before_several_dims_are_split() -> None:
    rows, updates = jax.ShapeDtypeStruct((32,), "int32"), jax.ShapeDtypeStruct((32, 128), "float32")
    scatter = formulated(lambda i, x: jax.numpy.zeros((64, 128)).at[i].add(x), rows, updates, mesh="2x4")
    matmul = formulated(lambda x: x.T @ x, updates, mesh="2x4")
    pending = TensorSharding(((), ()), ("data", "model"))

    def kinds(f: Formulation, *dims: tuple[str, ...]) -> list[str]:
        (value,) = f.graph.outputs
        assert value is not None
        return [move.kind for move in f.moves(value, pending, TensorSharding(dims))]

    assert kinds(scatter, ("data",), ("model",)) == ["all-reduce", "cut"]
    assert kinds(scatter, ("data", "model"), ()) == ["reduce-scatter"]
    assert kinds(matmul, ("data",), ("model",)) == ["reduce-scatter", "reduce-scatter"]
