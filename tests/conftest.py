"""Give every test eight virtual CPU devices, before anything imports JAX.

XLA compiles for CPUs without its backend's optimizations, which take most of the time here and do not change the
sharding.
"""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

for _flag, _value in {"--xla_force_host_platform_device_count": 8, "--xla_backend_optimization_level": 0}.items():
    if _flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_flag}={_value}".strip()
os.environ["JAX_PLATFORMS"] = "cpu"
# Plans are kept in a cache of the tests' own, empty at first: nothing is taken from an earlier run, nothing is left.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="autopar-tests-cache-")
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)
# The first process of a session makes this, for those that it starts too (`once_a_session`).
if "AUTOPAR_TESTS_RESULTS" not in os.environ:
    os.environ["AUTOPAR_TESTS_RESULTS"] = tempfile.mkdtemp(prefix="autopar-tests-results-")
    atexit.register(shutil.rmtree, os.environ["AUTOPAR_TESTS_RESULTS"], ignore_errors=True)

# A process that a test starts finds what it imports compiled, whatever the environment says: compiling it takes half as long as
# importing it, and tests start some two hundred.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a job in a shell's background; tests interrupt themselves
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest  # noqa: E402

if TYPE_CHECKING:
    from chromium import Tab

    from autopar.xla_compiler.compiler import Compiler


@pytest.hookimpl(tryfirst=True)  # before `-m "not slow"` is applied
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test that is `sampled(n)`, one case among each n neighbours stays in the fast tier: at each place in turn, so that
    of two parameters that are crossed neither keeps one value. The others are `slow`; a case that is so already does not count."""
    num_seen = Counter[str]()
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark is None or item.get_closest_marker("slow"):
            continue
        test = item.nodeid.partition("[")[0]
        block, place = divmod(num_seen[test], mark.args[0])
        num_seen[test] += 1
        if place != block % mark.args[0]:
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """What importing has made stays: the garbage collector need not look through it again and again."""
    gc.collect()
    gc.freeze()


SHARED = Path(__file__).resolve().parent.parent.parent / "shared"


@pytest.fixture
def uncollected() -> Iterator[None]:
    """No garbage collection: a Ctrl-C that arrives in Hypothesis's callback of the collector is lost."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """`../shared`: material beside the repository that is not part of it.

    Skips where it is absent, visibly; fails in CI, where it must not be.
    """
    if not SHARED.is_dir():
        _skip_but_in_ci(f"no {SHARED}: this test reads material that lies beside the repository")
    return SHARED


@pytest.fixture(scope="session")
def gpu_compiler() -> None:
    """XLA's compiler for GPUs that are not there. Skips where its wheels are absent, and says how to get them."""
    from autopar.errors import VerifyError
    from autopar.xla_compiler.gpu_target import require_wheels

    try:
        require_wheels()
    except VerifyError as error:
        _skip_but_in_ci(f"XLA's GPU compiler is not here: {error}")


@pytest.fixture(scope="session")
def absent_gpus(gpu_compiler: None) -> Iterator[Compiler]:
    """One process for all tests that look at the programs it compiles, and not at the process."""
    from autopar.xla_compiler.compiler import Compiler

    with Compiler(platform=None) as process:
        yield process


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    """A tab of a browser, for the tests of a module."""
    from chromium import NAMES, chromium, find_chromium

    command = find_chromium()
    if command is None:
        pytest.skip(f"no Chromium ({', '.join(NAMES)}): on Debian, apt-get install chromium-headless-shell")
    with chromium(command) as opened:
        yield opened


def _skip_but_in_ci(reason: str) -> None:
    if os.environ.get("CI"):
        pytest.fail(f"{reason}; in CI it must be there")
    pytest.skip(reason)
