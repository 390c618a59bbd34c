"""Redirect imports of documented old module names to the new modules, with a deprecation warning.

In: the name of an old module. Out: the module under its new name. Version 0.2 drops the old names.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MOVED = {
    "autopar.compiler": "autopar.xla_compiler.compiler",
    "autopar.cost.hardware": "autopar.hardware.profile",
    "autopar.mesh": "autopar.ir.mesh",
    "autopar.pipeline.schedules": "autopar.pipeline.schedule",
    "autopar.pipeline.schedules.kind": "autopar.pipeline.schedule.kind",
    "autopar.pipeline.schedules.table": "autopar.pipeline.schedule.table",
    "autopar.pipeline.simulate": "autopar.pipeline.schedule.simulate",
    "autopar.pipeline.tasks": "autopar.pipeline.schedule.tasks",
    "autopar.pipeline.timeline_text": "autopar.pipeline.draw.text",
    "autopar.rules.registry": "autopar.rules.node_view",
    "autopar.vector_search.approximate_index": "autopar.vector_search.frame.approximate_index",
    "autopar.vector_search.asked": "autopar.vector_search.data.build_request",
    "autopar.vector_search.best": "autopar.vector_search.kernels.top_k_merge",
    "autopar.vector_search.effort": "autopar.vector_search.frame.recall_tuning",
    "autopar.vector_search.index_file": "autopar.vector_search.data.index_file",
    "autopar.vector_search.metrics": "autopar.vector_search.data.metrics",
    "autopar.vector_search.place": "autopar.vector_search.data.placement",
}


class _Finder:
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        new = MOVED.get(fullname)
        if new is None:
            return None
        message = f"`{fullname}` is `{new}` now, or a name in `autopar.extend`; the old name goes with autopar 0.2"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        # Not a subclass of `importlib.abc.Loader`, whose import takes as long as everything else here.
        loader: Any = _Loader(new)
        return ModuleSpec(fullname, loader, is_package=any(old.startswith(f"{fullname}.") for old in MOVED))


class _Loader:
    """Loads a module under an old name without changing its `__spec__`."""

    def __init__(self, new: str) -> None:
        self.module = import_module(new)
        self.spec = self.module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec  # the import system has set the old name's spec


def install() -> None:
    """Install the finder of old names, in first place: other finders would import a renamed package's module twice."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
