"""Describe an updatable index for `stats`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autopar.vector_search.data.index import IndexStats
from autopar.vector_search.on_disk.pages import PAGE_BYTES
from autopar.vector_search.updates.page_store import PageStore
from autopar.vector_search.updates.settings import Settings
from autopar.vector_search.updates.stored_kinds import kind_of
from autopar.vector_search.updates.writer_state import WriterState


def stats_of(
    kind: str, state: WriterState, store: PageStore, settings: Settings, more: Mapping[str, Any]
) -> IndexStats:
    """The stats of the newest state.

    Args:
        more: further entries of `details`.
    """
    snapshot = state.readers.newest
    assert snapshot is not None
    details: dict[str, Any] = dict(snapshot.measured.details)
    details |= kind_of(snapshot.stored).details(snapshot)
    details |= {"delta_vectors": snapshot.delta.count, "log_bytes": state.log.size}
    details |= {"written_bytes": store.written_bytes + state.logged_bytes, "inserted_bytes": state.inserted_bytes}
    details |= {"file_bytes": store.state.num_pages * PAGE_BYTES, **more}
    memory = state.slots.memory_bytes + snapshot.stored.memory_bytes
    memory += snapshot.delta.slots.nbytes + snapshot.delta.vectors.nbytes
    return IndexStats(
        kind=kind,
        metric=settings.metric,
        dtype=settings.layout.dtype.name,
        num_vectors=snapshot.num_live,
        dim=settings.layout.dim,
        num_devices=1,
        device_bytes=memory,
        layouts=(),
        searches={},
        details=details,
        reached=snapshot.measured.reached,
    )
