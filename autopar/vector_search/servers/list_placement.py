"""Place lists on servers by load and bytes, so that a query needs few servers, and hot lists have more replicas.

In: lists in the order of their places, in which near lists are adjacent; their loads. Out: which server has which list.
A replica of all lists is a division of the order into runs of equal weight, one run per server. The runs of each
further replica are shifted, so lists at the border of a run are inside one of another server, and one server can answer
for both sides. The lists with the highest load are on all servers: whoever is asked anyway can answer for them.
"""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from autopar.errors import SearchError

#: Share of the bytes that is on all servers.
_HOT_SHARE = 0.05
#: Sets of servers that are compared for a query.
_MAX_COVERS = 500


def placed(
    order: NDArray[np.int64], loads: NDArray[np.floating], num_bytes: NDArray[np.int64], num_servers: int, replicas: int
) -> NDArray[np.bool_]:
    """bool `[num_lists, num_servers]`: which server has which list; each list is on at least `replicas`.

    Args:
        order: lists, near ones adjacent.
        loads: how often each list is read, in any unit.
        num_bytes: bytes of each list.

    Raises:
        SearchError: fewer servers than replicas.
    """
    if num_servers < 1 or not 1 <= replicas <= num_servers:
        raise SearchError(
            f"`num_servers` is {num_servers} and `replicas` is {replicas}: give at least one server per replica"
        )
    has = np.zeros((len(order), num_servers), np.bool_)
    weights = (loads * num_bytes).astype(np.float64)
    if not weights.any():
        weights = num_bytes.astype(np.float64)
    along = np.cumsum(weights[order])
    share = (along - weights[order] / 2) / max(along[-1], 1e-30) * num_servers  # of each list, in runs
    for replica in range(replicas):
        run = (share + replica / replicas).astype(np.int64) % num_servers
        taken = np.zeros(num_servers, np.bool_)
        for each in range(num_servers):
            lists = order[run == each]
            free = ~taken & ~has[lists].any(axis=0)
            if not free.any():  # a list may not be on a server twice; another server takes a second run
                free = ~has[lists].any(axis=0)
            kept = np.flatnonzero(free)
            if not len(kept):  # lists one by one, where they fit
                for which in lists.tolist():
                    has[which, np.flatnonzero(~has[which])[0]] = True
                continue
            server = int(kept[np.argmin(weights @ has[:, kept])]) if replica else each
            has[lists, server] = True
            taken[server] = True
    hot = np.argsort(-loads / np.maximum(num_bytes, 1), kind="stable")
    room = np.cumsum(num_bytes[hot]) <= _HOT_SHARE * num_bytes.sum()
    is_hot = loads[hot] > 2 * loads.mean()
    has[hot[room & is_hot]] = True
    return has


def chosen(
    is_probed: NDArray[np.bool_], has: NDArray[np.bool_], is_up: NDArray[np.bool_], loads: NDArray[np.floating]
) -> NDArray[np.int64]:
    """int64 `[num_queries, num_lists]`: the server that answers for each list that a query probes, -1 for none.

    Each query uses as few servers as have its lists; of equally few, those with the lowest load, and of lists that several
    of them have, each goes to the one with the lowest load.

    Args:
        is_probed: bool `[num_queries, num_lists]`.
        has: as from `placed`.
        is_up: bool `[num_servers]`.
        loads: load of each server so far; what is chosen is added.
    """
    found = np.full(is_probed.shape, -1, np.int64)
    usable = has & is_up[None]
    for query, probed in enumerate(is_probed):
        lists = np.flatnonzero(probed & usable.any(axis=1))
        if not lists.size:
            continue
        there = usable[lists]
        servers = _cover(there, loads)
        there = there[:, servers]
        for row in np.argsort(there.sum(axis=1), kind="stable").tolist():
            own = servers[there[row]]
            server = own[np.argmin(loads[own])]
            found[query, lists[row]] = server
            loads[server] += 1
    return found


def num_requested(is_probed: NDArray[np.bool_], has: NDArray[np.bool_]) -> int:
    """The number of servers that queries use altogether, if all are up.

    Args:
        is_probed: bool `[num_queries, num_lists]`.
        has: as from `placed`.
    """
    loads = np.zeros(has.shape[1])
    servers = chosen(is_probed, has, np.ones(has.shape[1], np.bool_), loads)
    return sum(len(np.unique(row[row >= 0])) for row in servers)


def _cover(there: NDArray[np.bool_], loads: NDArray[np.floating]) -> NDArray[np.int64]:
    """The fewest servers that have all lists; of equally few, those whose highest load is the lowest.

    Args:
        there: bool `[num_lists, num_servers]`, each list on at least one.
    """
    num_servers = there.shape[1]
    for count in range(1, num_servers + 1):
        if math.comb(num_servers, count) > _MAX_COVERS:
            break
        every = np.array(list(combinations(range(num_servers), count)))
        covers = every[there[:, every].any(axis=2).all(axis=0)]
        if len(covers):
            return covers[np.lexsort((loads[covers].sum(axis=1), loads[covers].max(axis=1)))[0]]
    taken: list[int] = []  # greedy: too many to compare
    left = there
    while len(left):
        covered = left.sum(axis=0)
        best = np.flatnonzero(covered == covered.max())
        taken.append(int(best[np.argmin(loads[best])]))
        left = left[~left[:, taken[-1]]]
    return np.array(taken)
