"""Describe the rows of a flat array that a model's pages are in, where several models share one pool of bytes."""

from __future__ import annotations

from dataclasses import dataclass

from jax.sharding import PartitionSpec


@dataclass(frozen=True, slots=True)
class PageRows:
    """The rows of one array.

    Args:
        shape: of all rows, `[rows, page_size, kv_heads, head_dim]`, on all devices. spec: its sharding.
        num_layers: a page has a row for each layer, one after the other.
    """

    shape: tuple[int, int, int, int]
    spec: PartitionSpec
    num_layers: int

    @property
    def scratch(self) -> int:
        """The number of the scratch page: the last rows."""
        return self.shape[0] - self.num_layers

    @property
    def pins(self) -> dict[str, PartitionSpec]:
        """The shardings of the rows in a plan."""
        return {f"resident/pages/0/{name}": self.spec for name in ("keys", "values")}
