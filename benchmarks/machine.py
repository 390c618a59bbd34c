"""Describe the machine and the package versions that a measurement used."""

from __future__ import annotations

import hashlib
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = (
    *("jax", "jaxlib", "flax", "optax", "numpy", "ortools", "transformers", "jraph", "jax-cuda12-pjrt"),
    *("faiss-cpu", "hnswlib", "usearch", "scann", "scikit-learn"),  # vector search
)


def machine() -> dict[str, str | float]:
    """Processor, cores and memory."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count() or 1,
        "memory_gb": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 10**9,
        "load": round(os.getloadavg()[0], 1),
    }


def versions() -> dict[str, str]:
    """Versions of Python and of the installed packages that affect a measurement."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def fingerprint(*files: Path) -> str:
    """A hash of the measured sources: the compiler, its data, and these files.

    A commit hash would not do: committing the results would make them outdated.
    """
    sources = [*sorted((ROOT / "autopar").rglob("*.py")), *sorted((ROOT / "cost_models").rglob("*.toml")), *files]
    digest = hashlib.sha256()
    for source in sources:
        digest.update(str(source.relative_to(ROOT)).encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:10]


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
