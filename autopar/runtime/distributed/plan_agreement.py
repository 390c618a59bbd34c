"""Agree on one plan among all processes: process 0 makes it after all have traced the same program.

In: on each process, how to trace its step, its options, and the given plan if there is one.
Out: the plan, equal everywhere; or on every process an error that names the process that differs and the difference.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Any, TypeVar

import jax
import numpy as np

from autopar.errors import ProcessError
from autopar.frontend.equations import LiteralOperand
from autopar.hardware.profile import HardwareProfile, detect, load
from autopar.plans.json_codec import decoder, encode
from autopar.plans.records import Placement, ProgramSignature
from autopar.runtime.distributed.device_order import devices_per_domain
from autopar.runtime.distributed.exchange import Exchange, Given, Member, named
from autopar.transforms.program import Program
from autopar.version import __version__

#: A plan of one program or of a pipelined step; a dataclass.
P = TypeVar("P", bound=Placement)

#: Options of a step that may differ between processes: they do not change the plan.
_OWN_OPTIONS = ("progress", "cache", "dump")


def agreed_plan(
    exchange: Exchange,
    name: str,
    traced: Callable[[], Program],
    planned: Callable[[Program], P],
    read: Callable[[Any], P],
    options: Mapping[str, Any],
    fixed: P | None,
) -> tuple[P, Program]:
    """The plan of a step, the same on all processes, and this process's traced program.

    Args:
        name: the step's name.
        traced: traces the step here.
        planned: plans a program; called on process 0 only, and only without a fixed plan.
        read: reads a plan from JSON types.
        options: the options of `autopar.plan`.
        fixed: a given plan, which the caller compares with the program.

    Raises:
        ProcessError: on every process, if one has another program, plan, options, versions or devices, could not trace
            its step, or does not arrive.
        AutoparError: on every process, if planning on process 0 raises it.
    """
    program, failure = None, None
    try:
        program = traced()
    except Exception as error:
        failure = error
    described = _description(program, failure, options, fixed)
    try:
        exchange.judged(f"planning `{name}`", described, _same_everywhere)
    except ProcessError:
        if failure is not None:
            raise failure from None  # here it has its traceback
        raise
    assert program is not None
    if fixed is not None:
        return fixed, program
    mine = program
    plan = read(exchange.made_once(f"the plan of `{name}`", lambda: planned(mine).to_json()))  # read on process 0 too
    trees = {"in_tree": program.trace.in_tree, "out_tree": program.trace.out_tree}  # absent from the exchanged JSON
    return replace(plan, **trees), program  # type: ignore[type-var]


def with_hosts(hardware: Any) -> HardwareProfile:
    """The hardware to plan for, limited to the number of devices that fast links connect here."""
    devices = jax.devices()
    if hardware is None:
        hardware = detect(devices[0].device_kind, devices[0].platform)
    profile = hardware if isinstance(hardware, HardwareProfile) else load(hardware)
    here, domain = devices_per_domain(devices), profile.nvlink_domain_devices
    return replace(
        profile,
        devices_per_host=min(profile.devices_per_host, here),
        nvlink_domain_devices=None if domain is None else min(domain, here),
    )


# -- the description of a process ------------------------------------------------------------


def _description(
    program: Program | None, failure: Exception | None, options: Mapping[str, Any], fixed: Placement | None
) -> dict[str, Any]:
    devices = jax.local_devices()
    described: dict[str, Any] = {
        "failure": None if failure is None else f"{type(failure).__name__}: {failure}",
        "versions": {package: version(package) for package in ("jax", "jaxlib")} | {"autopar": __version__},
        "devices": [len(devices), devices[0].device_kind, devices[0].platform],
        "options": {name: _option_text(value) for name, value in options.items() if name not in _OWN_OPTIONS},
        "given plan": None if fixed is None else _digest(json.dumps(fixed.to_json(), sort_keys=True)),
    }
    if program is not None:
        first = program.as_traced
        described |= {"program": encode(first.signature), "constants": _constants(first)}
    return described


def _option_text(value: Any) -> str:
    """An option as text that is equal in every process."""
    if isinstance(value, jax.sharding.Mesh):
        return f"{dict(value.shape)} of devices {[device.id for device in value.devices.flat]}"
    if hasattr(value, "to_json"):
        return _digest(json.dumps(value.to_json(), sort_keys=True))
    if isinstance(value, Mapping):
        return str({key: str(item) for key, item in sorted(value.items())})
    text = repr(value)
    return type(value).__qualname__ if re.search(r" at 0x[0-9a-f]+", text) else text


def _constants(program: Program) -> dict[str, str]:
    """Digests of the program's constants, by the source line that uses them."""
    by_place: dict[str, Any] = {}
    names = Counter[str]()
    for node, equation in zip(program.graph.nodes, program.trace.equations, strict=True):
        for operand in equation.operands:
            if isinstance(operand, LiteralOperand):
                place = node.source.rsplit("/", 1)[-1] or node.path or node.primitive
                by_place.setdefault(place, hashlib.sha256()).update(_bytes_of(operand.value))
    for _, constant in program.trace.constants:
        shape = tuple(np.shape(constant))
        names[str(shape)] += 1
        by_place[f"constant {names[str(shape)]} of shape {shape}"] = hashlib.sha256(_bytes_of(constant))
    return {place: digest.hexdigest()[:16] for place, digest in by_place.items()}


def _bytes_of(value: Any) -> bytes:
    """A constant's type and content; for global arrays the type only, as every process has a part of the content."""
    if isinstance(value, jax.Array):
        if not value.is_fully_addressable:
            return f"{value.dtype}{value.shape}".encode()
        if jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
            value = jax.random.key_data(value)
    array = np.asarray(value)
    return f"{array.dtype}{array.shape}".encode() + array.tobytes()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


# -- the comparison on process 0 -------------------------------------------------------------


def _same_everywhere(given: Sequence[Given]) -> None:
    """Refuse descriptions that differ."""
    failed = [one for one in given if one.value["failure"] is not None]
    if failed:
        first = failed[0]
        raise ProcessError(f"{named([one.by for one in failed])} could not trace the step: {first.value['failure']}")
    differing: dict[str, list[Member]] = {}
    reference = given[0]
    for one in given[1:]:
        said = _difference(reference, one)
        if said is not None:
            differing.setdefault(said, []).append(one.by)
    if differing:
        said = "; ".join(f"{named(members)}: {text}" for text, members in differing.items())
        raise ProcessError(
            f"all processes must run the same program by the same plan, but these differ from {reference.by}: {said}."
            " Start every process from the same code, with the same options and versions"
        )


def _difference(reference: Given, other: Given) -> str | None:
    """How a process differs from process 0, as text."""
    here, there = other.value, reference.value
    for what in ("versions", "options"):
        for name in sorted({*here[what], *there[what]}):
            mine, theirs = here[what].get(name, "not given"), there[what].get(name, "not given")
            if mine != theirs:
                kind = "option" if what == "options" else "version of"
                return f"the {kind} {name} is {mine}, and {theirs} on process 0"
    if here["devices"] != there["devices"]:
        return f"it has {_devices_text(here)}, and process 0 {_devices_text(there)}"
    if here["given plan"] != there["given plan"]:
        ways = {True: "none", False: "another"}
        return f"its given plan is {ways[here['given plan'] is None]}, unlike process 0's"
    signatures = [decoder(ProgramSignature)(side["program"]) for side in (there, here)]
    words = signatures[0].difference(signatures[1], of_planned="on process 0", of_other="there")
    if words is not None:
        return f"its program differs: {words}"
    if list(here["constants"].values()) != list(there["constants"].values()):
        places = sorted({*here["constants"], *there["constants"]})
        place = next(p for p in places if here["constants"].get(p) != there["constants"].get(p))
        return f"a constant of its program differs: {place}"
    return None


def _devices_text(described: Mapping[str, Any]) -> str:
    count, kind, platform = described["devices"]
    return f"{count} {platform} device{'s' * (count != 1)} ({kind})"
