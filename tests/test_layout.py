"""Arrays laid out over servers: as fast as the best of all assignments, BytePS's split, and rows where arrays are too large."""

from __future__ import annotations

import itertools
import math
import random
import re
from fractions import Fraction
from typing import Any

import pytest

from autopar.errors import StoreError
from autopar.extend.layouts import ArraySize, Layout, Piece, plan_layout
from autopar.extend.layouts import Server as AnyServer
from autopar.versions.layout.servers import clock_costs
from autopar.versions.traffic import byteps_bytes, byteps_shares, parameter_server_bytes


def Server(*rates: Any, **named: Any) -> AnyServer:
    """A server whose messages cost nothing, if they are not said to."""
    return AnyServer(*rates, **{"message_s": 0.0} | named) if len(rates) < 3 else AnyServer(*rates, **named)


def sizes_of(*num_bytes: int) -> dict[str, ArraySize]:
    return {f"{number:02}": ArraySize(1, size) for number, size in enumerate(num_bytes)}


def bytes_of(layout: Layout, sizes: dict[str, ArraySize]) -> list[int]:
    return [
        sum(piece.num_rows * sizes[key].row_bytes for key, piece in layout.keys_of(server).items())
        for server in range(layout.num_servers)
    ]


def check(layout: Layout, sizes: dict[str, ArraySize], servers: list[AnyServer], workers: int) -> None:
    """Every row is somewhere once, and the seconds are those of what the servers have."""
    for key, size in sizes.items():
        first = 0
        for piece in layout.pieces[key]:
            assert piece.first_row == first and (piece.num_rows or not size.num_rows)
            first += piece.num_rows
        assert first == size.num_rows
        assert len({piece.server for piece in layout.pieces[key]}) == len(layout.pieces[key])
    costs = clock_costs(servers, workers, sum(size.num_bytes for size in sizes.values()))
    for server, cost in enumerate(costs):
        have = bytes_of(layout, sizes)[server]
        assert layout.seconds[server] == cost.seconds(have, len(layout.keys_of(server)))
    assert max(layout.seconds) >= layout.bound_s


def drawn_servers(rng: random.Random, count: int, workers: int) -> list[AnyServer]:
    owners = [*range(workers), *[None] * count]
    rng.shuffle(owners)
    return [
        Server(
            rng.choice([1.0, 2.0, 10.0]),
            rng.choice([math.inf, 3.0, 20.0]),
            rng.choice([0.0, 0.5, 5.0]),
            rng.choice([None, owners[number]]),
        )
        for number in range(count)
    ]


def test_whole_arrays_are_placed_as_the_best_of_all_assignments() -> None:
    rng = random.Random(0)
    seen = set()
    for _ in range(150):
        count, workers = rng.randint(1, 4), rng.randint(1, 4)
        sizes = sizes_of(*(rng.randint(0, 30) for _ in range(rng.randint(1, 6))))
        servers = drawn_servers(rng, count, workers)
        layout = plan_layout(sizes, servers, workers, whole=None)
        check(layout, sizes, servers, workers)
        costs = clock_costs(servers, workers, sum(size.num_bytes for size in sizes.values()))

        def slowest(where: tuple[int, ...], costs: Any = costs, sizes: Any = sizes) -> Fraction:
            loads: list[list[int]] = [[] for _ in costs]
            for server, size in zip(where, sizes.values(), strict=True):
                loads[server].append(size.num_bytes)
            return max(cost.seconds(sum(load), len(load)) for cost, load in zip(costs, loads, strict=True))

        best = min(map(slowest, itertools.product(range(count), repeat=len(sizes))))
        assert max(layout.seconds) == best and layout.is_optimal
        seen.add((any(cost.byte_s < 0 for cost in costs), any(cost.byte_s == 0 for cost in costs)))
    assert seen >= {(True, False), (False, True), (False, False)}


def test_divided_arrays_take_at_most_a_row_and_a_message_more_than_the_bound() -> None:
    rng = random.Random(1)
    divided = 0
    for _ in range(200):
        count, workers = rng.randint(1, 4), rng.randint(2, 4)
        sizes = {f"{n:02}": ArraySize(rng.randint(1, 40), rng.randint(1, 3)) for n in range(rng.randint(1, 5))}
        servers = drawn_servers(rng, count, workers)
        layout = plan_layout(sizes, servers, workers, tolerance=0.0)
        check(layout, sizes, servers, workers)
        costs = clock_costs(servers, workers, sum(size.num_bytes for size in sizes.values()))
        most = max(3 * cost.byte_s + (len(sizes) + 1) * cost.piece_s for cost in costs)
        messages = 2 * len(servers) * Fraction(max(server.message_s for server in servers))
        assert max(layout.seconds) <= layout.bound_s + most + messages
        whole = plan_layout(sizes, servers, workers, whole=None)
        assert max(layout.seconds) <= max(whole.seconds)
        divided += any(len(pieces) > 1 for pieces in layout.pieces.values())
    assert divided > 50


def test_rows_are_divided_as_the_best_of_all_divisions() -> None:
    """Without costs of messages; every division of the rows of two arrays over two servers is tried."""
    rng = random.Random(2)
    for _ in range(100):
        sizes = {key: ArraySize(rng.randint(1, 9), 1) for key in "ab"}
        servers = [Server(float(rng.randint(1, 4))) for _ in range(2)]
        layout = plan_layout(sizes, servers, 2, tolerance=0.0)
        costs = clock_costs(servers, 2, sum(size.num_bytes for size in sizes.values()))
        total = sum(size.num_rows for size in sizes.values())
        best = min(max(costs[0].seconds(own), costs[1].seconds(total - own)) for own in range(total + 1))
        assert max(layout.seconds) == best


@pytest.mark.parametrize(("n", "k"), [(4, 0), (4, 1), (4, 2), (4, 4), (3, 5), (2, 1), (1, 0), (1, 2), (8, 3)])
def test_byteps_is_the_layout_of_equal_links(n: int, k: int) -> None:
    """Workers' machines and idle CPU machines get the shares of the closed form."""
    own, cpu = byteps_shares(n, k)
    unit = own.denominator * cpu.denominator * 4
    sizes = {"w": ArraySize(unit, 4)}
    servers = [Server(1e9, worker=worker) for worker in range(n)] + [Server(1e9) for _ in range(k)]
    layout = plan_layout(sizes, servers, n)
    if n == 1:  # the worker's own machine serves it without any traffic, which BytePS does not consider
        assert bytes_of(layout, sizes) == [4 * unit] + [0] * k
        assert layout.seconds == (0,) * (k + 1)
        return
    found = bytes_of(layout, sizes)
    assert max(layout.seconds) == layout.bound_s == max(byteps_bytes(4 * unit, n, k)) / Fraction(1e9)
    assert layout.is_optimal
    if n > 2 and k < n:  # between two workers, any split is as fast
        assert found == [4 * unit * own] * n + [4 * unit * cpu] * k
    formula = parameter_server_bytes(found, n)
    for worker in range(n):
        assert layout.seconds[worker] == formula.colocated_bytes[worker] / Fraction(1e9)
    for server in range(n, n + k):
        assert layout.seconds[server] == formula.server_bytes[server] / Fraction(1e9)


def test_a_faster_link_gets_more_and_a_slow_update_less() -> None:
    sizes = {"w": ArraySize(1200, 1)}
    assert bytes_of(plan_layout(sizes, [Server(1.0), Server(2.0)], 3), sizes) == [400, 800]
    # a byte takes 2/1 + 1/2 s, and 2/1 s: the second serves five parts of nine
    assert bytes_of(plan_layout(sizes, [Server(1.0, 2.0), Server(1.0)], 1), sizes) == [533, 667]


def test_arrays_are_divided_only_where_it_pays() -> None:
    sizes = {"a": ArraySize(104, 1), "b": ArraySize(100, 1)}
    servers = [Server(1.0), Server(1.0)]
    assert all(len(pieces) == 1 for pieces in plan_layout(sizes, servers, 2).pieces.values())
    assert bytes_of(plan_layout(sizes, servers, 2, tolerance=0.0), sizes) == [102, 102]
    dear = [Server(1.0, message_s=100.0)] * 2
    one = {"w": ArraySize(90, 1)}
    assert len(plan_layout(one, dear, 1).pieces["w"]) == 1
    assert len(plan_layout(one, servers, 1).pieces["w"]) == 2
    assert plan_layout(one, servers, 1, whole=["w"]).pieces == {"w": (Piece(0, 0, 90),)}


def test_a_large_model_is_laid_out_soon_and_well() -> None:
    rng = random.Random(3)
    sizes = {f"{n:04}": ArraySize(rng.choice([1, 768, 3072]), rng.choice([4, 3072])) for n in range(1500)}
    servers = [Server(1e9 * (1 + number % 3), message_s=1e-5) for number in range(16)]
    layout = plan_layout(sizes, servers, 16)
    check(layout, sizes, servers, 16)
    assert max(layout.seconds) <= layout.bound_s * Fraction(105, 100)
    assert re.fullmatch(
        r"1500 arrays on 16 servers, \d+ of them divided by rows: a clock takes the slowest.*", str(layout)
    )


@pytest.mark.parametrize(
    ("servers", "workers", "message"),
    [
        ([], 1, "a layout needs at least one server"),
        ([Server(0.0)], 1, "`link_bytes_per_s` of server 0 is 0.0: give a positive number"),
        ([Server(math.inf)], 1, "`link_bytes_per_s` of server 0 is inf"),
        ([Server(1.0, -1.0)], 1, "`update_bytes_per_s` of server 0 is -1.0"),
        ([Server(1.0), Server(1.0, message_s=math.nan)], 1, "`message_s` of server 1 is nan"),
        ([Server(1.0, worker=2)], 2, "server 0 is with worker 2: there are workers 0 to 1"),
        ([Server(worker=0), Server(worker=0)], 2, "worker 0 is with two servers: a machine is one server"),
        ([Server()], 0, "`num_workers` is 0: give a whole number, at least 1"),
    ],
)
def test_servers_that_cannot_be_are_refused(servers: list[AnyServer], workers: int, message: str) -> None:
    with pytest.raises(StoreError, match=re.escape(message)):
        plan_layout(sizes_of(1, 2), servers, workers)
    with pytest.raises(StoreError, match="`tolerance` is -1"):
        plan_layout(sizes_of(1), [Server()], 1, tolerance=-1)


def test_nothing_to_lay_out() -> None:
    assert plan_layout({}, [Server(), Server()], 2).seconds == (0, 0)
    empty = {"a": ArraySize(0, 12), "b": ArraySize(5, 0)}
    layout = plan_layout(empty, [Server(), Server(worker=0)], 2)
    check(layout, empty, [Server(), Server(worker=0)], 2)
