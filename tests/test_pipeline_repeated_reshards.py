"""Pieces reshard a value for themselves, each that reads it: priced and listed so."""

from __future__ import annotations

from typing import Any

import jax
import pytest
from dense_step import arguments, step

import autopar
from autopar.ir.device_program import Buffer, Op, OpKind
from autopar.pipeline.search.repeated_reshards import phases_of
from autopar.xla_compiler.compiler import Compiler

#: Node 0 brings a value into the loop, 1 and 2 are of the forward pass, 3 of the input part, 4 of the weight part.
PHASE_OF = {1: "forward", 2: "forward", 3: "input", 4: "weight"}


def op(node: int, reads: tuple[int, ...], writes: tuple[int, ...], collective: str = "", kind: OpKind = "fusion") -> Op:
    return Op(kind, node, reads, writes, read_bytes=0.0, written_bytes=0.0, collective=collective)


def phases(*ops: Op) -> list[tuple[str, ...]]:
    """Buffers 0 and 1 are value 0 and its resharded form, 2 and 3 those of value 1; 4 is something else."""
    buffers = [Buffer(8.0, 0), Buffer(8.0, 0, moved=True), Buffer(8.0, 1), Buffer(8.0, 1, moved=True), Buffer(8.0, 2)]
    return phases_of(ops, buffers, PHASE_OF, {0})


def test_a_gather_runs_where_its_result_is_read() -> None:
    gather = op(0, (0,), (1,), "all-gather")
    forward, of_inputs, of_weights = (op(n, (1,), (4,)) for n in (1, 3, 4))
    assert phases(gather, forward)[0] == ("forward",)
    assert phases(gather, forward, of_weights)[0] == ("forward", "weight")
    assert phases(gather, forward, of_inputs, of_weights)[0] == ("forward", "input")  # both parts share it
    assert phases(gather, op(9, (1,), (4,))) == [(), ()]  # outside the loop


def test_a_resharding_of_what_a_pass_makes_runs_where_it_is_read() -> None:
    assert phases(op(1, (2,), (3,), "all-to-all"), op(4, (3,), (4,)))[0] == ("weight",)
    assert phases(op(1, (2,), (3,)), op(3, (3,), (4,)))[0] == ("input",)  # a cut
    assert phases(op(1, (2,), (2,)), op(3, (2,), (4,)))[0] == ("forward",)  # an update in place makes the value
    assert phases(op(1, (2,), (3,), "all-to-all"))[0] == ("forward",)  # nobody reads it


def test_a_reduction_runs_where_its_terms_are() -> None:
    assert phases(op(2, (2,), (3,), "reduce-scatter"), op(3, (3,), (4,)))[0] == ("forward",)
    assert phases(op(0, (0,), (1,), kind="border"), op(1, (1,), (4,)))[0] == ()


@pytest.mark.usefixtures("gpu_compiler")
def test_gathers_are_listed_for_each_pass_that_needs_them(absent_gpus: Compiler) -> None:
    """With little memory, layers are split over the devices, and what they read is gathered for either pass."""
    args = jax.eval_shape(lambda: arguments(2048, 4096))
    options: dict[str, Any] = {"num_devices": 8, "stages": 2, "num_microbatches": 4, "schedule": "1f1b", "mesh": "4"}
    plan: Any = autopar.plan(step, *args, hardware="h100-sxm", memory_budget_bytes=60e6, **options)
    again = [use for stage in plan.stages for use in stage.plan.collectives if "again" in use.cause]
    assert again and {(use.kind, use.phase, use.num_times) for use in again} == {("all-gather", "backward", 4)}
    found: Any = autopar.verify(step, *args, plan=plan, hardware="h100-sxm", compiler=absent_gpus)
    assert not [name for stage in found.stages for name in stage.off]
