"""Random programs under random strategies compute the same as unsharded.

Programs are drawn from all primitives with a rule (`random_operations`), planned for a random mesh by a solver with
random strategies, and run. CI runs 500 fixed programs; to run others:

    FUZZ_PROGRAMS=10000 FUZZ_SEED=1 python -m pytest tests/test_fuzz.py -n 2

hypothesis shrinks a failure and prints it as text.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from random_operations import COMBINATORS, OPERATIONS, Operation
from random_programs import RandomProgram, kind_of, random_program
from test_rules_forced import ONE_DEVICE_ONLY

from autopar.ir.mesh import parse_mesh
from autopar.rules.table import RULES
from autopar.runtime import jit as execute
from autopar.transforms.program import program_of
from tests.planned import plan_program

NUM_PROGRAMS = int(os.environ.get("FUZZ_PROGRAMS", "500"))
SEED = int(os.environ.get("FUZZ_SEED", "0"))
NUM_PARTS = 40
#: One combinator for about every twelve operations.
EVERYTHING = (*OPERATIONS, *COMBINATORS)
#: Relative to the largest element, and absolute.
TOLERANCES = {False: (2e-4, 2e-5), True: (4e-2, 1e-2)}
#: What XLA's CPU back end cannot compile, with or without a plan: a Fourier transform whose operand it has itself laid
#: out in another order.
REFUSED = ("fft_thunk.cc",)
QUICK: Any = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def raw(leaf: Any) -> Any:
    return np.asarray(jax.random.key_data(leaf) if kind_of(leaf.dtype) == "key" else leaf)


def numbers(leaf: Any) -> np.ndarray:
    return leaf.astype(np.complex128) if np.iscomplexobj(leaf) else leaf.astype(np.float64)


def far(got: Any, expected: Any, *, loose: bool) -> float:
    """By how much the largest difference exceeds its tolerance; 0 where it does not."""
    got, expected = raw(got), raw(expected)
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    if got.dtype.kind in "biu":
        return float(np.sum(got != expected))
    got, expected = numbers(got), numbers(expected)
    same = (got == expected) | (np.isnan(got) & np.isnan(expected))
    if same.all():
        return 0.0
    finite = np.isfinite(expected)
    if not np.isfinite(got[~same]).all() or not finite[~same].all():
        return np.inf
    relative, absolute = TOLERANCES[loose]
    allowed = relative * np.max(np.abs(expected[finite]), initial=0.0) + absolute
    return max(0.0, float(np.max(np.abs(got - expected)[~same])) - allowed)


def compiled(function: Any, args: Any) -> Any:
    try:
        return jax.block_until_ready(function.lower(*args).compile(QUICK)(*args))
    except jax.errors.JaxRuntimeError as error:  # at compilation, or when it runs
        hypothesis.assume(not any(refusal in str(error) for refusal in REFUSED))
        raise


def mismatches(program: RandomProgram) -> list[str]:
    """Outputs that the planned program computes otherwise."""
    args = program.arguments()
    traced = program_of(program.step, args, carry=None, donate=None)
    plan = plan_program(traced, mesh=program.mesh, hardware="cpu-host", solver=oracles.RandomSolver(program.strategies))
    devices = jax.devices()[: parse_mesh(program.mesh).num_devices]
    planned = execute.jit_plan(plan, traced.of(plan).trace, execute.make_mesh(plan.mesh, devices))
    expected = jax.tree.leaves(compiled(jax.jit(program.step), args))
    got = jax.tree.leaves(compiled(planned, program.arguments()))
    loose = program.tolerances()
    off = [far(g, e, loose=is_loose) for g, e, is_loose in zip(got, expected, loose, strict=True)]
    if any(off):  # is it a wrong result, or a program that makes much of little?
        shaken = [_shaken(program, args, seed) for seed in range(3)] + _in_float32(program, args)
        for n, leaves in enumerate(zip(*shaken, strict=True)):
            slack = [np.max(np.abs(numbers(raw(leaf)) - numbers(raw(expected[n]))), initial=0.0) for leaf in leaves]
            off[n] = max(0.0, off[n] - 10 * max(slack))
    return [f"output {n}: off by {excess:.3g}" for n, excess in enumerate(off) if excess > 0]


def _shaken(program: RandomProgram, args: Any, seed: int) -> list[Any]:
    return jax.tree.leaves(jax.jit(lambda *a: program.step(*a, noise=jax.random.key(seed)))(*args))


def _in_float32(program: RandomProgram, args: Any) -> list[list[Any]]:
    """Where bfloat16 is given, what float32 in its place gives: how far rounding takes even the unsharded program. None
    where the program needs bfloat16."""
    wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32) if leaf.dtype == jnp.bfloat16 else leaf, args)
    try:
        return [jax.tree.leaves(jax.jit(program.step)(*wide))] if any(program.tolerances()) else []
    except TypeError:
        return []


#: A random program is large and takes its time: that is no fault of the test.
UNWATCHED = [
    hypothesis.HealthCheck.data_too_large,
    hypothesis.HealthCheck.filter_too_much,
    hypothesis.HealthCheck.too_slow,
    hypothesis.HealthCheck.large_base_example,
]


@pytest.mark.sampled(40)
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_random_programs_compute_the_same_under_random_strategies(part: int) -> None:
    @hypothesis.seed(1000 * SEED + part)
    @hypothesis.settings(
        max_examples=NUM_PROGRAMS // NUM_PARTS,
        deadline=None,
        database=None,
        suppress_health_check=UNWATCHED,
    )
    @hypothesis.given(st.randoms(use_true_random=False).map(lambda rng: random_program(rng, EVERYTHING)))
    def check(program: RandomProgram) -> None:
        off = mismatches(program)
        assert not off, f"{off}\n{program}"

    check()


#: Not drawn: what jaxlib 0.12.0.1 compiles for one device alone; and what is split by its own words (`test_structure`).
NOT_DRAWN = ONE_DEVICE_ONLY | {"shard_map"}


class EachName(random.Random):
    """Of several names, one drawn least so far."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.drawn: Counter[str] = Counter()

    def choice(self, seq: Any) -> Any:
        if not all(isinstance(option, str) for option in seq):
            return super().choice(seq)
        name = min(seq, key=lambda option: (self.drawn[option], self.random()))
        self.drawn[name] += 1
        return name


def primitives(operation: Operation) -> Iterator[str]:
    """What a program of one operation alone consists of, with and without its gradient."""
    drawn = random_program(EachName(0), [operation], least=40, most=40)
    for mode in ("forward", "gradient"):
        program = replace(drawn, mode=mode)
        traced = program_of(program.step, program.arguments(), carry=None, donate=None)
        yield from (equation.primitive for equation in traced.trace.equations)


@pytest.mark.slow
def test_every_primitive_that_has_a_rule_is_drawn() -> None:
    drawn = {primitive for operation in {*EVERYTHING} for primitive in primitives(operation)}
    assert set(RULES) - drawn - NOT_DRAWN == set()
