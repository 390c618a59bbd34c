"""`autopar doctor`: report installed packages, devices and compilers, and what to install for which command.

In: this machine. Out: a table or JSON; exit code 1 if autopar cannot run here.
"""

from __future__ import annotations

import argparse
import platform
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from typing import TYPE_CHECKING, Any, Literal

from autopar.cli import options as shared
from autopar.cli.terminal import output
from autopar.errors import AutoparError
from autopar.system.install_command import requirement
from autopar.version import __version__

if TYPE_CHECKING:
    from rich.console import Console

#: The extras of the package, and their purpose. `_gpu_compiler` examines the extra `verify`.
_EXTRAS = {
    "inference": "tokenizers, for `autopar generate` and text in `autopar.inference`",
    "plot": "`--plot`",
    "search": "the vector search example, with FAISS to compare with",
}
_STYLES = {"ok": "green", "missing": "yellow", "broken": "red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """The state of a package, device or compiler.

    Args:
        state: "missing" where only some commands need it; "broken" where autopar cannot run.
        advice: what to do; empty where nothing is to be done.
    """

    name: str
    state: Literal["ok", "missing", "broken"]
    found: str
    advice: str = ""


def add_command(added: Any) -> None:
    """Add the command to a parser's commands."""
    about = "report installed packages, devices and compilers, and what to install for which command"
    doctor = added.add_parser("doctor", help=about, description=about)
    shared.add_json(doctor)
    doctor.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Examine the machine. The exit code is 1 where autopar cannot run."""
    found = [*examine()]
    output(options, lambda: [asdict(one) for one in found], lambda console: _render(found, console))
    return 1 if any(one.state == "broken" for one in found) else 0


def examine() -> Iterator[Finding]:
    """Examine this machine: packages, devices, XLA's GPU compiler, extras."""
    yield Finding("autopar", "ok", f"{__version__}, Python {platform.python_version()}, {platform.platform()}")
    required = _requirements()
    for name, wanted in required.get("", {}).items():
        yield _package(name, wanted)
    yield _devices()
    yield _gpu_compiler()
    for extra, purpose in _EXTRAS.items():
        missing = [name for name in required.get(extra, {}) if _version(name) is None]
        advice = f"for {purpose}: {_pip(requirement(extra))}" if missing else ""
        yield Finding(f"autopar[{extra}]", "missing" if missing else "ok", ", ".join(missing) or purpose, advice)


def _package(name: str, wanted: str) -> Finding:
    found, text = _version(name), f"{name}{wanted}"
    if found is None:
        return Finding(name, "broken", "not installed", _pip(text))
    is_right = _is_in_range(found, wanted)
    return Finding(name, "ok" if is_right else "broken", f"{found} (needs {wanted})", "" if is_right else _pip(text))


def _devices() -> Finding:
    try:
        import jax

        devices = jax.devices()
    except Exception as error:  # whatever a plugin of JAX raises
        line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        return Finding("devices", "broken", f"JAX finds none: {line}", "check the driver, JAX_PLATFORMS and XLA_FLAGS")
    from autopar.hardware.profile import detect

    kind, kind_of_platform = devices[0].device_kind, devices[0].platform
    text = f"{len(devices)} x {kind} ({kind_of_platform}), {jax.process_count()} process(es)"
    try:
        return Finding("devices", "ok", f"{text}, hardware profile {detect(kind, kind_of_platform)}")
    except AutoparError:
        return Finding(
            "devices", "missing", f"{text}, no hardware profile", "measure one: autopar calibrate -o mine.toml"
        )


def _gpu_compiler() -> Finding:
    """XLA's GPU compiler, which verifies plans for GPUs that this machine does not have."""
    from autopar.xla_compiler.gpu_target import require_wheels

    try:
        require_wheels()
    except AutoparError as error:
        reason = str(error).splitlines()[0]
        return Finding(
            "XLA's GPU compiler", "missing", reason, f"for verify and diagnose: {_pip(requirement('verify'))}"
        )
    return Finding("XLA's GPU compiler", "ok", "verify and diagnose compile for GPUs that this machine need not have")


def _render(found: list[Finding], console: Console) -> None:
    from rich.text import Text

    from autopar.system.text_tables import new_table

    table = new_table("", "state", "found", "what to do")
    for one in found:
        table.add_row(Text(one.name), Text(one.state, _STYLES[one.state]), Text(one.found), Text(one.advice))
    console.print(table)


def _requirements() -> dict[str, dict[str, str]]:
    """By extra ("" for the package itself), the required packages with their version ranges."""
    found: dict[str, dict[str, str]] = {}
    for text in requires("autopar") or ():
        requirement, _, marker = text.partition(";")
        name = re.match(r"[\w.-]+", requirement)
        extra = re.search(r"extra\s*==\s*['\"]([\w-]+)", marker)
        if name is not None:
            wanted = re.sub(r"\[.*?\]", "", requirement[name.end() :]).strip()
            found.setdefault(extra[1] if extra else "", {})[name[0]] = wanted
    return found


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _is_in_range(found: str, wanted: str) -> bool:
    """Whether a version is in a range such as `>=0.10,<0.13`, by its leading numbers."""
    numbers = _numbers(found)
    for comparison in filter(None, wanted.split(",")):
        match = re.match(r"(>=|<=|==|<|>)(.*)", comparison.strip())
        if match is None:
            continue
        bound = _numbers(match[2])
        here = (numbers + (0,) * len(bound))[: len(bound)]
        holds = {">=": here >= bound, "<=": here <= bound, "==": here == bound, "<": here < bound, ">": numbers > bound}
        if not holds[match[1]]:
            return False
    return True


def _numbers(text: str) -> tuple[int, ...]:
    leading = re.match(r"\d+(\.\d+)*", text.strip())
    return tuple(int(part) for part in leading[0].split(".")) if leading else ()


def _pip(requirement: str) -> str:
    return f"{sys.executable} -m pip install '{requirement}'"
