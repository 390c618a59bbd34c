"""The collectives that XLA's GPU compiler makes for each strategy of each rule, and for reshardings.

The compiler runs for absent GPUs. A program has many decisions, each in a named scope of its own, and collective
combining is off, so every collective can be attributed to its decision.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from test_rules_forced import ONE_DEVICE_ONLY, SAMPLES, Case, Forced

from autopar.cost.resharding_paths import Move, resharding_moves
from autopar.hardware.profile import load
from autopar.ir.mesh import MeshShape, parse_mesh
from autopar.ir.sharding import TensorSharding
from autopar.jax_interop import compat as jax_compat
from autopar.jax_interop import compilation
from autopar.jax_interop.partition_spec import named_shardings
from autopar.rules.strategies import Strategy
from autopar.runtime.jit import abstract_mesh
from autopar.xla_compiler import hlo_collectives as hlo
from autopar.xla_compiler.compiler import CompiledStep, Compiler
from autopar.xla_compiler.hlo_metadata import mesh_axes

#: Kind, mesh axes, bytes on one device (see `cost.collectives`), times a step runs it.
Sent = tuple[str, tuple[str, ...] | None, float, int]

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "collective_permute")
#: Pairs of shardings that one test moves between, of up to some thousands.
MOST_PAIRS = int(os.environ.get("RESHARDING_PAIRS", "100"))
#: Not lowered for GPUs that are not there: JAX has no rule for them on GPUs, or asks cuSOLVER for its version.
NOT_LOWERED = {"eig", "schur", "hessenberg"}
#: No merging; and no optimizing of kernels, which nobody runs.
FLAGS = (
    *(f"--xla_gpu_{kind}_combine_threshold_bytes=0" for kind in KINDS),
    "--xla_gpu_enable_triton_gemm=false",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_backend_optimization_level=0",
)


@pytest.fixture(scope="module")
def gpus(gpu_compiler: None) -> Iterator[Compiler]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", " ".join(FLAGS))
        process = Compiler(platform=None)
    with process:
        yield process


def compiled(gpus: Compiler, function: Any, args: Any, in_shardings: Any) -> CompiledStep:
    traced = jax.jit(function, in_shardings=in_shardings).trace(*args)
    module = compilation.module_bytes(traced.lower(lowering_platforms=("cuda",)))
    return gpus.compile(module, load("h100-sxm"), 8, 1)


def sent(one: hlo.Collective, mesh: MeshShape) -> Sent:
    axes = mesh_axes(one.groups, mesh, pairs=one.kind == "collective-permute")
    return one.kind, axes, sum(one.payloads(mesh.num_devices)), one.num_times


def predicted(forced: Forced, case: Case, strategy: Strategy, mesh: MeshShape) -> Counter[Sent]:
    """One all-reduce of each result over the axes on what is summed, as long as its local part; each strip that
    neighbours send each other; and what a node exchanges by itself, gathered."""
    pending = [f for f, factor in enumerate(case.rule.factors) if factor.reduction]
    wanted: Counter[Sent] = Counter()
    for position, dims in zip(case.equation.results, case.rule.results, strict=True):
        sharding, aval = strategy.sharding(dims, pending), forced.traced.avals[position]
        axes = tuple(axis for axis in mesh.axis_names if axis in sharding.unreduced)
        if axes:
            wanted["all-reduce", axes, sharding.local_size(aval.shape, mesh) * jax_compat.itemsize(aval), 1] += 1
    for axes, elements in case.strips(strategy, mesh):
        wanted["collective-permute", axes, 4.0 * elements, 1] += 1
    for one in case.rule.exchanges:
        axes = tuple(axis for axis in mesh.axis_names if axis in strategy.axes[one.factor])
        if axes:
            parts = strategy.sharding(one.dims).local_shape(one.shape, mesh)
            kept = [min(n, one.most) if dim == (one.factor,) else n for n, dim in zip(parts, one.dims, strict=True)]
            side, position = one.elements
            value = (case.equation.operands if side == "operand" else case.equation.results)[position]
            assert isinstance(value, int)
            count = math.prod(kept) * mesh.sizes(axes)
            wanted["all-gather", axes, count * jax_compat.itemsize(forced.traced.avals[value]), 1] += 1
    return wanted


def is_end_of_loop(one: hlo.Collective) -> bool:
    """What an iteration that runs until all elements have converged asks of the other devices: one boolean."""
    return one.num_elements == 1 and "while" in one.op_name


@pytest.mark.sampled(72)
@pytest.mark.parametrize("text", ["8", "2x4"])
@pytest.mark.parametrize("sample", SAMPLES)
def test_every_strategy_sends_on_gpus_what_is_predicted(sample: str, text: str, gpus: Compiler) -> None:
    mesh, forced = parse_mesh(text), Forced(sample, text, without=ONE_DEVICE_ONLY | NOT_LOWERED)
    forced.mesh = abstract_mesh(mesh)
    values = jax.eval_shape(forced.unsharded, jax.tree.leaves(forced.args))
    made = compiled(gpus, forced.forced, [values, forced.zero], NamedSharding(forced.mesh, jax.P()))
    found: dict[tuple[int, int], Counter[Sent]] = {place: Counter() for place in forced.programs()}
    nobodys: Counter[Sent] = Counter()  # XLA drops the name of some that it rewrites
    for one in hlo.collectives(made.hlo_text, ignore_up_to=0):
        place = re.search(r"case(\d+)_(\d+)_", one.op_name)
        if place is None:
            nobodys[sent(one, mesh)] += 1
        elif not is_end_of_loop(one):
            found[int(place[1]), int(place[2])][sent(one, mesh)] += 1
    wrong: list[str] = []
    for (c, s), got in found.items():
        case, strategy = forced.cases[c], forced.strategies[c][s]
        wanted = predicted(forced, case, strategy, mesh)
        missing = wanted - got
        if missing <= nobodys:
            nobodys, got = nobodys - missing, got + missing
        if got != wanted:
            wrong.append(f"{case.words(strategy)}: predicted {dict(wanted)}, compiled {dict(got)}")
    assert not wrong, "\n".join(wrong)
    assert not nobodys


# -- resharding ------------------------------------------------------------------------------


def shardings(num_dims: int, mesh: MeshShape) -> list[TensorSharding]:
    """Every way to split a tensor of so many dims, axes in any order within a dim."""
    found: list[TensorSharding] = []
    for order in itertools.permutations(mesh.axis_names):
        for dims in itertools.product([None, *range(num_dims)], repeat=len(order)):
            split: list[tuple[str, ...]] = [()] * num_dims
            for axis, d in zip(order, dims, strict=True):
                if d is not None:
                    split[d] = (*split[d], axis)
            found.append(TensorSharding(tuple(split)))
    return list(dict.fromkeys(found))


def pairs(num_dims: int, mesh: MeshShape) -> list[tuple[TensorSharding, TensorSharding]]:
    return list(itertools.permutations(shardings(num_dims, mesh), 2))


def merged(moves: Iterable[Move], mesh: MeshShape) -> Counter[Sent]:
    return Counter(
        (move.kind, tuple(axis for axis in mesh.axis_names if axis in move.axes), move.num_bytes, 1)
        for move in moves
        if move.kind != "cut"
    )


@pytest.mark.sampled(24)
@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("2x4", (64, 32)),
        ("2x2x2", (64, 32)),
        ("2x2x2", (8, 3200)),  # as many as there are devices
        ("2x4", (16, 32, 64)),
        ("2x2x2", (16, 32, 64)),
        ("2x4", (30522, 64)),  # a vocabulary that eight devices do not divide
        ("2x2x2", (30522, 64)),
    ],
)
def test_resharding_sends_on_gpus_what_is_predicted(text: str, shape: tuple[int, ...], gpus: Compiler) -> None:
    mesh = parse_mesh(text)
    devices = abstract_mesh(mesh)
    every = pairs(len(shape), mesh)
    drawn = random.Random(0).sample(every, min(MOST_PAIRS, len(every)))
    paths = [resharding_moves(source, target, shape, 4, mesh) for source, target in drawn]
    is_even = shape[0] % mesh.num_devices == 0

    def walk(tensors: list[jax.Array]) -> list[jax.Array]:
        out: list[jax.Array] = []
        for n, (tensor, (source, _), moves) in enumerate(zip(tensors, drawn, paths, strict=True)):
            with jax.named_scope(f"pair{n}_"):
                if not is_even:  # inputs and outputs must be, so the walk is between two kernels
                    tensor = constrained(jnp.tan(constrained(tensor, source, devices)), source, devices)
                for move in moves:
                    tensor = constrained(tensor, move.result, devices)
            out.append(tensor if is_even else jnp.tan(tensor).sum())
        return out

    tensors = [jax.ShapeDtypeStruct(shape, "float32")] * len(drawn)
    before = named_shardings([source for source, _ in drawn], devices) if is_even else None
    made = compiled(gpus, walk, [tensors], (before,))
    found: list[Counter[Sent]] = [Counter() for _ in drawn]
    for one in hlo.collectives(made.hlo_text):
        place = re.search(r"(?:pair|tensors\[)(\d+)", one.op_name)
        assert place or not is_even, one.op_name
        if place and not is_halo(one, mesh, shape):
            found[int(place[1])][sent(one, mesh)] += 1
    wrong = [
        f"{source} -> {target}: predicted {dict(merged(moves, mesh))}, compiled {dict(got)}"
        for (source, target), moves, got in zip(drawn, paths, found, strict=True)
        if got != merged(moves, mesh)
    ]
    assert not wrong, "\n".join(wrong)


def constrained(tensor: jax.Array, sharding: TensorSharding, devices: AbstractMesh) -> jax.Array:
    return jax.lax.with_sharding_constraint(tensor, *named_shardings([sharding], devices))


def is_halo(one: hlo.Collective, mesh: MeshShape, shape: tuple[int, ...]) -> bool:
    """Whether it moves the few rows by which padded parts begin elsewhere under a finer sharding; they are not predicted."""
    rows = sum(one.payloads(mesh.num_devices)) / (4 * math.prod(shape[1:]))
    return one.kind == "collective-permute" and shape[0] % mesh.num_devices > 0 and rows < mesh.num_devices
