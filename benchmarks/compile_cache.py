"""Cache XLA's GPU compiles outside the repository, so that a change to predictions needs no new compiles.

In: the arguments of `autopar.xla_compiler.compiler.Compiler`. Out: its results, read from `$AUTOPAR_PROOF_CACHE` (by
default `~/.cache/autopar-proof`) if the same program was compiled before. Each compile is two files there that other
tools can read: `KEY.hlo.gz`, the compiled program, and `KEY.json`, its figures.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jax._src.interpreters import mlir  # noqa: TID251 - a context to read a module in, nothing else
from jaxlib.mlir import ir

from autopar.hardware.profile import HardwareProfile
from autopar.xla_compiler.compiler import FLAGS, Arguments, CompiledStep, Compiler
from autopar.xla_compiler.gpu_target import target_text, topology_text

#: Flags with this prefix change what XLA dumps, not what it compiles.
_DUMP = "--xla_dump_"
#: Flags that change the compiled program.
_FLAGS_OF_KEY = ("--xla_gpu_", "--xla_disable_hlo_passes")


class CachingCompiler(Compiler):
    """A compiler with a cache, which counts its hits and compiles.

    Args:
        folder: the cache folder. `KEY.around` holds the time of each compile outside XLA.
        again: compile even programs that are cached, e.g. to make XLA dump files.
    """

    def __init__(self, folder: Path, again: bool = False) -> None:
        super().__init__(platform=None)
        self.folder, self.again = folder, again
        self.last_key = ""
        self.last_hit = False
        self.last_s = 0.0
        self.last_around_s: float | None = None

    def compile(
        self,
        module: bytes,
        profile: HardwareProfile,
        num_devices: int,
        num_hosts: int,
        arguments: Arguments | None = None,
        *,
        options: Mapping[str, int] | None = None,
    ) -> CompiledStep:
        """As `autopar.xla_compiler.compiler.Compiler.compile`."""
        start = time.perf_counter()
        self.last_key = key(module, profile, num_devices, num_hosts, options)
        known = None if self.again else load(self.folder, self.last_key)
        compiled = known or super().compile(module, profile, num_devices, num_hosts, arguments, options=options)
        self.last_s = time.perf_counter() - start
        self.last_hit = known is not None
        file = self.folder / f"{self.last_key}.around"
        if known is None:
            save(self.folder, self.last_key, compiled)
            file.write_text(str(self.last_s - compiled.compile_s), encoding="utf-8")
        self.last_around_s = float(file.read_text(encoding="utf-8")) if file.exists() else None
        return compiled


def default_folder() -> Path:
    """`$AUTOPAR_PROOF_CACHE`, or the user's cache."""
    return Path(os.environ.get("AUTOPAR_PROOF_CACHE") or Path.home() / ".cache" / "autopar-proof")


def key(
    module: bytes,
    profile: HardwareProfile,
    num_devices: int,
    num_hosts: int,
    options: Mapping[str, int] | None = None,
) -> str:
    """The cache key: a hash of everything that affects a compile. Source lines are left out."""
    own = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if flag.startswith(_FLAGS_OF_KEY)]
    parts = (
        _without_places(module),
        target_text(profile).encode(),
        topology_text(profile, num_devices, num_hosts).encode(),
        " ".join((*sorted(own), *FLAGS, *(["partition_size"] if num_hosts > 1 else []))).encode(),
        *([json.dumps(dict(options), sort_keys=True).encode()] if options else []),
        f"{version('jax')} {version('jaxlib')}".encode(),
    )
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()[:24]


def load(folder: Path, name: str) -> CompiledStep | None:
    """A cached compile; None if there is none, or if an older autopar wrote it with fewer figures."""
    facts, program = folder / f"{name}.json", folder / f"{name}.hlo.gz"
    if not facts.exists() or not program.exists():
        return None
    kept = json.loads(facts.read_text(encoding="utf-8"))
    kept.setdefault("output_shardings", None)  # unknown in entries of before; only pieces of pipelines need them
    wanted = {field.name for field in fields(CompiledStep)} - {"hlo_text"}
    if not wanted <= set(kept):
        return None
    kept["flags"], kept["hosts"] = tuple(kept["flags"]), tuple(kept["hosts"])
    if kept["output_shardings"] is not None:
        kept["output_shardings"] = tuple(kept["output_shardings"])
    with gzip.open(program, "rt", encoding="utf-8") as file:
        return CompiledStep(**{name: kept[name] for name in wanted}, hlo_text=file.read())


def save(folder: Path, name: str, compiled: CompiledStep) -> None:
    """Write a compile to the cache. The figures are written last, so an interrupted write is not read as a compile."""
    folder.mkdir(parents=True, exist_ok=True)
    with gzip.open(folder / f"{name}.hlo.gz", "wt", encoding="utf-8", compresslevel=6) as file:
        file.write(compiled.hlo_text)
    kept = asdict(compiled)
    del kept["hlo_text"]
    kept["flags"] = [flag for flag in compiled.flags if not flag.startswith(_DUMP)]
    (folder / f"{name}.json").write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def _without_places(module: bytes) -> bytes:
    """The module as text without name stacks and source lines."""
    with mlir.make_ir_context():
        parsed = ir.Module.parse(module)
        text: Any = parsed.operation.get_asm(enable_debug_info=False, large_elements_limit=None)
    return text.encode()
