"""The cost of collectives: formulas, links, and the collectives of a resharding."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from autopar.cost.collective_entry import link_of
from autopar.cost.collectives import KINDS, collective_time
from autopar.cost.resharding_matrix import EACH_S, ReshardingTimes
from autopar.cost.resharding_paths import Move, resharding_moves, rows_from_next
from autopar.hardware import profile as hardware
from autopar.ir.mesh import MeshShape, factorisations, parse_mesh
from autopar.ir.sharding import TensorSharding

PROFILE = replace(
    hardware.load(Path(__file__).parent / "profiles" / "alpha_beta.toml"),
    host_link=hardware.LinkProfile(bytes_per_s=1e9, latency_s=1e-6),
    collective_launch_s=1e-5,
)
MESH = parse_mesh("2x4")
SHAPE = (8, 16)  # of 4-byte elements: 512 bytes


def sharding(*dims: tuple[str, ...], unreduced: tuple[str, ...] = ()) -> TensorSharding:
    return TensorSharding(dims, unreduced)


WHOLE = sharding((), ())
D, M = ("data",), ("model",)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("all-reduce", 2 * 3 / 4 * 1e6 / 1e9 + 6e-6 + 1e-5),
        ("all-gather", 3 / 4 * 1e6 / 1e9 + 3e-6 + 1e-5),
        ("reduce-scatter", 3 / 4 * 1e6 / 1e9 + 3e-6 + 1e-5),
        ("all-to-all", 3 / 4 * 1e6 / 1e9 + 3e-6 + 1e-5),
        ("collective-permute", 1e6 / 1e9 + 1e-6 + 1e-5),
    ],
)
def test_each_collective_costs_what_its_formula_says(kind: str, expected: float) -> None:
    assert collective_time(kind, 1e6, M, MESH, PROFILE) == pytest.approx(expected)


@pytest.mark.parametrize("kind", KINDS)
def test_more_bytes_and_more_devices_cost_more(kind: str) -> None:
    times = [collective_time(kind, size, M, MESH, PROFILE) for size in (1e3, 1e6, 1e9)]
    assert times == sorted(times)
    assert collective_time(kind, 1e6, D, MESH, PROFILE) <= collective_time(kind, 1e6, M, MESH, PROFILE)
    assert collective_time(kind, 1e6, M, parse_mesh("8x1"), PROFILE) == 0


def test_combined_collectives_share_the_launch() -> None:
    alone = collective_time("all-reduce", 1e3, M, MESH, PROFILE)
    combined = collective_time("all-reduce", 1e3, M, MESH, PROFILE, combinable=True)
    assert combined < alone / 5
    large = PROFILE.combine_threshold_bytes * 2.0
    assert collective_time("all-reduce", large, M, MESH, PROFILE, combinable=True) == pytest.approx(
        collective_time("all-reduce", large, M, MESH, PROFILE)
    )


def test_collectives_that_xla_does_not_combine_pay_their_own_launch() -> None:
    alone = collective_time("all-to-all", 1e3, M, MESH, PROFILE)
    assert collective_time("all-to-all", 1e3, M, MESH, PROFILE, combinable=True) == alone


def test_an_axis_that_leaves_the_host_rides_the_network() -> None:
    mesh = parse_mesh("2x8")
    assert link_of(M, mesh, PROFILE) == PROFILE.host_link
    assert link_of(D, mesh, PROFILE) == PROFILE.network_link
    assert link_of(("data", "model"), mesh, PROFILE) == PROFILE.network_link
    assert link_of(D, parse_mesh("8"), PROFILE) == PROFILE.host_link


def collectives_of(moves: tuple[Move, ...]) -> list[Move]:
    return [move for move in moves if move.kind != "cut"]


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        (WHOLE, WHOLE, []),
        (WHOLE, sharding(D, M), []),  # each device cuts out its part
        (sharding(D, ()), WHOLE, [("all-gather", D, 512)]),
        (sharding(D, ()), sharding((), D), [("all-to-all", D, 256)]),
        (sharding(D, M), WHOLE, [("all-gather", M, 256), ("all-gather", D, 512)]),  # dim by dim
        (sharding((), (), unreduced=D), WHOLE, [("all-reduce", D, 512)]),
        (sharding((), (), unreduced=D), sharding(D, ()), [("reduce-scatter", D, 512)]),
        (sharding((), M, unreduced=D), sharding((), M), [("all-reduce", D, 128)]),
        (sharding((), (), unreduced=D), sharding((), M), [("all-reduce", D, 512)]),  # a sum is taken where it is made
        (sharding((), (), unreduced=("data", "model")), sharding(D, ()),
         [("reduce-scatter", D, 512), ("all-reduce", M, 256)]),
        (sharding((), (), unreduced=("data", "model")), sharding(D, M),
         [("reduce-scatter", D, 512), ("reduce-scatter", M, 256)]),
        (sharding(("data", "model"), ()), sharding(D, ()), [("all-gather", M, 256)]),
        (sharding(("data", "model"), ()), sharding(("model", "data"), ()),
         [("collective-permute", ("model", "data"), 64)]),
        (sharding(M, (), unreduced=D), sharding(("data", "model"), ()),
         [("reduce-scatter", D, 128), ("collective-permute", ("data", "model"), 64)]),
    ],
)  # fmt: skip
def test_resharding_takes_the_expected_collectives(
    source: TensorSharding, target: TensorSharding, expected: list[tuple[object, ...]]
) -> None:
    moves = collectives_of(resharding_moves(source, target, SHAPE, 4, MESH))
    assert [(m.kind, m.axes, m.num_bytes) for m in moves] == expected


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        # 30522 / 8 rows are padded to 3816: four such parts are not half of the rows.
        (sharding(D, M), sharding(("data", "model"), ()), [("all-gather", M, 15261 * 256), ("all-gather", D, 30522 * 256)]),
        (sharding(("data", "model"), ()), sharding(D, M), [("all-gather", ("data", "model"), 30528 * 256)]),
        (sharding((), M), sharding(("data", "model"), ()), [("all-gather", M, 30522 * 256)]),
        # Whole rows are free to be split along one axis.
        (sharding((), M), sharding(M, ()), [("all-to-all", M, 7631 * 256)]),
        (sharding(M, ()), sharding((), M), [("all-to-all", M, 7631 * 256)]),
    ],
)  # fmt: skip
def test_padded_parts_are_gathered_where_they_begin_elsewhere(
    source: TensorSharding, target: TensorSharding, expected: list[tuple[object, ...]]
) -> None:
    moves = collectives_of(resharding_moves(source, target, (30522, 64), 4, MESH))
    assert [(m.kind, m.axes, m.num_bytes) for m in moves] == expected


@pytest.mark.parametrize(
    ("dim", "shape", "inner"),
    [
        (1, (8, 32, 64), True),
        (0, (8, 32, 64), False),
        (2, (8, 32, 64), False),
        (1, (2, 32, 64), False),
        (1, (32, 64), False),
    ],
)
def test_what_is_gathered_inside_others_is_copied(dim: int, shape: tuple[int, ...], inner: bool) -> None:
    """Parts of devices lie one after another: of (batch, sequence, features) the sequence's are not in the batch's order, but
    of one sequence they are, and of features a product reads them so."""
    whole = [D if d == 0 and shape[0] == 2 else () for d in range(len(shape))]  # one on each
    split = [M if d == dim else axes for d, axes in enumerate(whole)]
    moves = resharding_moves(sharding(*split), sharding(*whole), shape, 4, MESH)
    assert [(m.kind, m.is_inner) for m in moves] == [("all-gather", inner)]
    moves = resharding_moves(sharding(*whole, unreduced=M), sharding(*split), shape, 4, MESH)
    assert [(m.kind, m.is_inner) for m in moves] == [("reduce-scatter", inner)]


def all_shardings() -> list[TensorSharding]:
    """Every way to lay two axes on two dims, either order."""
    dims = [(), D, M, (*D, *M), (*M, *D)]
    return [sharding(a, b) for a in dims for b in dims if not set(a) & set(b)]


@pytest.mark.parametrize("shape", [SHAPE, (6, 4)])
def test_moves_lead_from_any_sharding_to_any_other_and_each_is_one_collective(shape: tuple[int, int]) -> None:
    for source in all_shardings():
        for target in all_shardings():
            moves = resharding_moves(source, target, shape, 4, MESH)
            assert (moves[-1].result if moves else source) == target
            assert len(moves) <= 6
            cost_free = not collectives_of(moves)
            keeps_all = all(t[: len(s)] == s for s, t in zip(source.dims, target.dims, strict=True))
            assert cost_free == keeps_all


def laid(mesh: MeshShape, rank: int, *, pending: bool) -> tuple[TensorSharding, ...]:
    """Every way to lay each axis of a mesh on a dim, on none, or (if asked) to leave the tensor unreduced along it."""
    places = [None, *range(rank), *(["pending"] if pending else [])]
    out = []
    for chosen in itertools.product(places, repeat=len(mesh.axis_names)):
        on = list(zip(mesh.axis_names, chosen, strict=True))
        dims = tuple(tuple(axis for axis, place in on if place == dim) for dim in range(rank))
        out.append(TensorSharding(dims, tuple(axis for axis, place in on if place == "pending")))
    return tuple(out)


@pytest.mark.parametrize(
    ("mesh", "shapes"),
    [("8", [(8, 16), (7, 50257)]), ("2x16", [(32, 8, 6), (3, 64, 1), (50257, 5, 32)]), ("2x2x3", [(12, 6), (8, 9)])],
)
def test_the_matrix_of_times_is_that_of_the_paths_collectives(mesh: str, shapes: list[tuple[int, ...]]) -> None:
    times = ReshardingTimes(parse_mesh(mesh), PROFILE)
    for shape in [*shapes, shapes[0][::-1]]:  # one after the other: what it remembers must not mix them up
        made = laid(parse_mesh(mesh), len(shape), pending=True)
        wanted = laid(parse_mesh(mesh), len(shape), pending=False)[::-1]
        for combinable in (True, False):
            expected = [
                [
                    sum(
                        EACH_S
                        + collective_time(m.kind, m.num_bytes, m.axes, parse_mesh(mesh), PROFILE, combinable=combinable)
                        + m.is_inner * 2 * m.num_bytes / PROFILE.hbm_bytes_per_s
                        for m in collectives_of(resharding_moves(source, target, shape, 2, parse_mesh(mesh)))
                    )
                    for target in wanted
                ]
                for source in made
            ]
            found = times.matrix(made, wanted, shape, 2, combinable=combinable)
            np.testing.assert_allclose(found, expected, rtol=1e-14, atol=0)  # but for the order of sums


def test_meshes_are_read_and_factored() -> None:
    assert parse_mesh("data=2, model=4") == parse_mesh("2x4")
    assert [str(m) for m in factorisations(12)] == ["12", "2x6", "3x4", "4x3", "6x2"]
    assert [str(m) for m in factorisations(1)] == ["1"]


def test_uneven_dims_are_padded_in_local_shapes() -> None:
    assert sharding(("data", "model"), ()).local_shape((50257, 3), MESH) == (6283, 3)
    assert not sharding(D, ()).divides((7, 2), MESH)


@pytest.mark.parametrize("of_each", [2, 4, 8])
def test_rows_from_the_next_device_are_all_that_finer_parts_need(of_each: int) -> None:
    """Checked device by device, for two parts, of which the second has none to ask for."""
    for size in range(2 * of_each, 300):
        coarse, fine = -(-size // 2), -(-size // (2 * of_each))
        needed = min(of_each * fine, size) - coarse
        assert rows_from_next(size, 2, of_each) == max(needed, 0), size
    assert rows_from_next(50257, 2, 8) == 7 and rows_from_next(258, 2, 4) == 3
