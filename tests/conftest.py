"""Eight virtual CPU devices for every test, set before anything imports JAX."""

from __future__ import annotations

import os
from pathlib import Path

_FLAG = "--xla_force_host_platform_device_count"
if _FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}=8".strip()
os.environ["JAX_PLATFORMS"] = "cpu"

import pytest  # noqa: E402

SHARED = Path(__file__).resolve().parent.parent.parent / "shared"


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """`../shared`: material beside the repository that is not part of it.

    Skips where it is absent, visibly; fails in CI, where it must not be.
    """
    if not SHARED.is_dir():
        reason = f"no {SHARED}: this test reads material that lies beside the repository"
        if os.environ.get("CI"):
            pytest.fail(f"{reason}; in CI it must be there")
        pytest.skip(reason)
    return SHARED
