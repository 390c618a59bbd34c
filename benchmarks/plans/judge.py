"""Time compiled programs by the replay, and keep the figures, so that a program is compiled once, on any machine.

In: a lowered step. Out: figures of the compiled program, from `results/plans_compiled.jsonl` if the same program was
compiled for the same GPUs by the same JAX and flags. The file is small and in the repository. After a change of the
planner, only programs of changed plans are therefore compiled.

The step time is the replay's (`autopar.xla_replay`). It is kept with a digest of the replay's rates and sources. After a
change of these, the compiled program is replayed again, from the compile cache outside the repository; it is compiled
again only if it is not there. XLA's own estimate is kept with the errors that it is known to have for the program.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import autopar
from autopar.hardware.profile import HardwareProfile
from autopar.ir.mesh import MeshShape
from autopar.verification.figures import sent_by
from autopar.verification.step_times import replayed
from autopar.xla_compiler.compiler import CompiledStep
from autopar.xla_compiler.estimate_errors import estimate_errors
from autopar.xla_compiler.gpu_target import gpus_per_slice
from autopar.xla_compiler.hlo_collectives import collectives
from autopar.xla_compiler.hlo_text import parse_module
from autopar.xla_replay import rates
from benchmarks.compile_cache import CachingCompiler, default_folder, key, load

Figures = dict[str, Any]

KEPT = Path(__file__).parents[1] / "results" / "plans_compiled.jsonl"
#: What the replay of a program depends on, besides the rates.
_SOURCES = ("xla_replay/*.py", "xla_compiler/hlo_text.py", "xla_compiler/hlo_collectives.py")


class Judge:
    """XLA for one kind of GPU and the replay, with a memory.

    Args:
        compiler: compiles unknown programs, and keeps compiled programs outside the repository.
        again: compile known programs too.
    """

    def __init__(
        self, compiler: CachingCompiler, profile: HardwareProfile, again: bool = False, kept: Path = KEPT
    ) -> None:
        self.compiler, self.profile, self.again, self.kept = compiler, profile, again, kept
        lines = kept.read_text(encoding="utf-8").splitlines() if kept.exists() else []
        self._known: dict[str, Figures] = {one["key"]: one for one in map(json.loads, lines)}

    def figures(
        self, module: bytes, mesh: MeshShape, num_hosts: int, options: Mapping[str, int] | None = None
    ) -> Figures:
        """Figures of a step lowered for a mesh; `compiled_now` says whether XLA compiled it now."""
        name = key(module, self.profile, mesh.num_devices, num_hosts, options)
        if self.again:
            return self.of(self._compiled(module, mesh, num_hosts, options), mesh, num_hosts)
        known = self._known.get(name)
        if known is not None and known.get("replay") == replay_version(self.profile):
            return known | {"compiled_now": False}
        cached = load(self.compiler.folder, name)
        if cached is not None:
            return self._keep(name, figures(cached, mesh, num_hosts, self.profile)) | {"compiled_now": False}
        return self.of(self._compiled(module, mesh, num_hosts, options), mesh, num_hosts)

    def of(self, compiled: CompiledStep, mesh: MeshShape, num_hosts: int) -> Figures:
        """Figures of the program that was just compiled; they are remembered."""
        found = self._keep(self.compiler.last_key, figures(compiled, mesh, num_hosts, self.profile))
        return found | {"compiled_now": not self.compiler.last_hit}

    def _compiled(
        self, module: bytes, mesh: MeshShape, num_hosts: int, options: Mapping[str, int] | None
    ) -> CompiledStep:
        return self.compiler.compile(module, self.profile, mesh.num_devices, num_hosts, options=options)

    def _keep(self, name: str, found: Figures) -> Figures:
        found = {"key": name} | found
        if self._known.get(name) != found:
            with self.kept.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found) + "\n")
        self._known[name] = found
        return found


def figures(compiled: CompiledStep, mesh: MeshShape, num_hosts: int, profile: HardwareProfile) -> Figures:
    """Figures of a compiled program: seconds by the replay and by XLA's estimate, and bytes on one GPU.

    `step_s` is None, and `no_replay` says why, if the program cannot be replayed.
    """
    module = parse_module(compiled.hlo_text)
    found = collectives(module, ignore_up_to=0)
    counts: Counter[str] = Counter()
    for one in found:
        counts[one.kind] += one.num_times
    replay, no_replay = replayed(module, profile.rates_name, gpus_per_slice(profile, mesh.num_devices, num_hosts))
    return {
        "replay": replay_version(profile),
        "step_s": replay and replay.step_time_s,
        "exposed_s": sum(replay.exposed_s.values()) if replay else None,
        "no_replay": no_replay,
        "xla_s": compiled.step_time_s,
        "xla_exposed_s": sum(compiled.exposed_s.values()),
        "xla_errors": list(estimate_errors(module)),
        "peak_bytes": compiled.peak_bytes,
        "sent_bytes": sum(sent_by(one, mesh) for one in found),
        "counts": dict(counts),
        "compile_s": round(compiled.compile_s, 1),
    }


@functools.cache
def replay_version(profile: HardwareProfile) -> str:
    """A digest of the replay: its rates for this GPU, and its sources."""
    package = Path(autopar.__file__).parent
    digest = hashlib.sha256(repr(rates.load(profile.rates_name)).encode())
    for file in sorted(file for pattern in _SOURCES for file in package.glob(pattern)):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def new_compiler(again: bool = False) -> CachingCompiler:
    """A compiler that keeps compiled programs in the user's cache.

    Args:
        again: compile cached programs too.
    """
    return CachingCompiler(default_folder(), again)
