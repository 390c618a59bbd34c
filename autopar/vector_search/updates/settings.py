"""Hold the settings of an updatable index, which its file has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.vector_search.data.inputs import DTYPES, checked_metric
from autopar.vector_search.data.metrics import Metric
from autopar.vector_search.updates.records import Layout


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of an index.

    Args:
        copies, space: maximum lists per vector, and maximum of the mean.
        recall_target: as in `build`.
        delta_share: the delta is moved into lists when it has this share of the vectors.
        delta_vectors: but not before it has so many.
        memory_bytes: bytes of lists that a checkpoint keeps in memory.
    """

    layout: Layout
    metric: Metric
    copies: int = 4
    space: float = 1.5
    recall_target: float = 0.95
    delta_share: float = 0.05
    delta_vectors: int = 1024
    memory_bytes: float = 2**26

    def saved(self) -> dict[str, Any]:
        """JSON types for the page store."""
        layout = self.layout
        return {
            "dim": layout.dim,
            "dtype": layout.dtype.name,
            "metadata": np.lib.format.dtype_to_descr(layout.metadata) if layout.metadata.names else [],
            "metric": self.metric,
            "copies": self.copies,
            "space": self.space,
            "recall_target": self.recall_target,
            "delta_share": self.delta_share,
            "delta_vectors": self.delta_vectors,
            "memory_bytes": self.memory_bytes,
        }

    @classmethod
    def loaded(cls, saved: Mapping[str, Any]) -> Settings:
        """Parse what `saved` returned.

        Raises:
            LookupError, TypeError, ValueError: invalid content.
        """
        fields = [tuple(tuple(part) if isinstance(part, list) else part for part in one) for one in saved["metadata"]]
        metadata = np.dtype(fields)
        if metadata.hasobject:
            raise ValueError("metadata of objects")
        layout = Layout(int(saved["dim"]), DTYPES[saved["dtype"]], metadata)
        return cls(
            layout,
            checked_metric(saved["metric"]),
            int(saved["copies"]),
            float(saved["space"]),
            float(saved["recall_target"]),
            float(saved["delta_share"]),
            int(saved["delta_vectors"]),
            float(saved["memory_bytes"]),
        )
