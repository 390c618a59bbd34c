"""Keep XLA's figures of programs, so that a program is compiled once, on any machine.

In: a lowered step. Out: figures of the compiled program, from `results/plans_compiled.jsonl` if the same program was
compiled for the same GPUs by the same JAX and flags. The file is small and in the repository. After a change of the
planner, only programs of changed plans are therefore compiled.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autopar.hardware.profile import HardwareProfile
from autopar.ir.mesh import MeshShape
from autopar.verification.figures import sent_by
from autopar.xla_compiler.compiler import CompiledStep
from autopar.xla_compiler.estimate_errors import LOOP, estimate_errors
from autopar.xla_compiler.hlo_collectives import collectives
from benchmarks.compile_cache import CachingCompiler, default_folder, key

Figures = dict[str, Any]

KEPT = Path(__file__).parents[1] / "results" / "plans_compiled.jsonl"


class Judge:
    """XLA for one kind of GPU, with a memory.

    Args:
        compiler: compiles unknown programs, and keeps compiled programs outside the repository.
        again: compile known programs too.
    """

    def __init__(self, compiler: CachingCompiler, profile: HardwareProfile, again: bool = False) -> None:
        self.compiler, self.profile, self.again = compiler, profile, again
        lines = KEPT.read_text(encoding="utf-8").splitlines() if KEPT.exists() else []
        self._known: dict[str, Figures] = {one["key"]: one for one in map(json.loads, lines)}

    def figures(
        self, module: bytes, mesh: MeshShape, num_hosts: int, options: Mapping[str, int] | None = None
    ) -> Figures:
        """Figures of a step lowered for a mesh; `compiled_now` says whether XLA compiled it now."""
        name = key(module, self.profile, mesh.num_devices, num_hosts, options)
        if name in self._known and not self.again:
            return self._known[name] | {"compiled_now": False}
        compiled = self.compiler.compile(module, self.profile, mesh.num_devices, num_hosts, options=options)
        return self.of(compiled, mesh)

    def of(self, compiled: CompiledStep, mesh: MeshShape) -> Figures:
        """Figures of a program that was just compiled; they are remembered."""
        name, found = self.compiler.last_key, {"key": self.compiler.last_key} | figures(compiled, mesh)
        if self._known.get(name) is None:
            with KEPT.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found) + "\n")
        self._known[name] = found
        return found | {"compiled_now": not self.compiler.last_hit}


def figures(compiled: CompiledStep, mesh: MeshShape) -> Figures:
    """Figures of a compiled program: seconds by XLA's own estimate (meaningless if the program has loops), and bytes on
    one GPU."""
    found = collectives(compiled.hlo_text, ignore_up_to=0)
    counts: Counter[str] = Counter()
    for one in found:
        counts[one.kind] += one.num_times
    return {
        "step_s": None if LOOP in estimate_errors(compiled.hlo_text) else compiled.step_time_s,
        "exposed_s": sum(compiled.exposed_s.values()),
        "peak_bytes": compiled.peak_bytes,
        "sent_bytes": sum(sent_by(one, mesh) for one in found),
        "counts": dict(counts),
        "compile_s": round(compiled.compile_s, 1),
    }


def new_compiler(again: bool = False) -> CachingCompiler:
    """A compiler that keeps compiled programs in the user's cache.

    Args:
        again: compile cached programs too.
    """
    return CachingCompiler(default_folder(), again)
