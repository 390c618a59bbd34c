"""Enumerate every placement of models on devices: the reference of the search.

In: models, layouts, a number of devices. Out: all multisets of groups, each group with a layout and a set of models that fits.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from autopar.placement import Group, Layout, ModelSpec, Placement
from autopar.placement.placements import fits


def every_placement(
    models: Mapping[str, ModelSpec], layouts: Sequence[Layout], num_devices: int, budget_bytes: float
) -> Iterator[Placement]:
    """All placements in canonical form, each once; groups without models are left out."""
    names = sorted(models)
    sets = [each for num in range(1, len(names) + 1) for each in itertools.combinations(names, num)]
    groups = [Group(layout, each) for layout in layouts for each in sets]
    groups = [group for group in groups if fits(group, models, budget_bytes)]
    yield from (Placement(found).canonical() for found in _multisets(groups, num_devices))


def _multisets(groups: Sequence[Group], num_devices: int, first: int = 0) -> Iterator[tuple[Group, ...]]:
    yield ()
    for number in range(first, len(groups)):
        size = groups[number].layout.num_devices
        if size <= num_devices:
            for rest in _multisets(groups, num_devices - size, number):
                yield (groups[number], *rest)
