"""Find the collectives of a compiled program that its shardings do not need, grouped by origin.

In: compiled collectives that no decision of a plan with the same shardings predicted. Out: `Extra` rows with bytes and
time by a hardware profile. A row merges the collectives of one kind and the same axes that come from the same code in
every layer. A reduction follows from the sharding of a matmul, although another sharding may need none. A collective
that only moves data (an all-to-all, a permute, a gather of a sharded value) is unintended: XLA's partitioner inserted
it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cost.collectives import KINDS, collective, collective_time
from autopar.frontend.flat_jaxpr import module_path
from autopar.hardware.profile import HardwareProfile
from autopar.ir.mesh import MeshShape
from autopar.plans.plan import Plan
from autopar.system.name_patterns import collapse
from autopar.verification.figures import Collectives, CompiledCollective, collective_name
from autopar.xla_compiler.hlo_collectives import sent_bytes

_SUMS = tuple(kind for kind in KINDS if collective(kind).is_sum)
#: Kinds without rates in a profile -> the most similar kind with rates.
_PRICED_AS = {"ragged-all-to-all": "all-to-all", "collective-broadcast": "collective-permute"}
_NUMBER = re.compile(r"(?<=[/_])\d+(?=/|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Extra:
    """Extra compiled collectives that differ only in the number of their layer.

    Args:
        axes: mesh axes; None for groups that span no set of mesh axes.
        path: origin in XLA's metadata, such as `jvp(GPT)/h/{0..11}/attn/split`.
        source, library_source: source line in the user's code, and the innermost one outside JAX and Flax.
        count: executions per step.
        num_bytes: bytes that one device sends per step.
        time_s: total seconds per step by the hardware profile, without overlap.
    """

    kind: str
    axes: tuple[str, ...] | None
    path: str
    source: str
    library_source: str
    count: int
    num_bytes: float
    time_s: float

    @property
    def name(self) -> str:
        return collective_name(self.kind, self.axes)

    @property
    def is_sum(self) -> bool:
        """Whether it is a reduction over devices, not a mere movement of data."""
        return self.kind in _SUMS


def extras(found: Collectives, mesh: MeshShape, profile: HardwareProfile) -> tuple[Extra, ...]:
    """Group the unpredicted collectives into rows, the longest first."""
    by_key: dict[tuple[object, ...], list[CompiledCollective]] = defaultdict(list)
    for one in found.unpredicted:
        by_key[one.kind, one.axes, without_numbers(one.path), one.source, one.library_source].append(one)
    rows = []
    for members in by_key.values():
        first = members[0]
        patterns = [pattern for pattern, _ in collapse(list(dict.fromkeys(one.path for one in members)))]
        rows.append(
            Extra(
                kind=first.kind,
                axes=first.axes,
                path=patterns[0] if len(patterns) == 1 else without_numbers(first.path),
                source=first.source,
                library_source=first.library_source,
                count=sum(one.num_times for one in members),
                num_bytes=sum(one.unpredicted_bytes for one in members),
                time_s=sum(compiled_time(one, mesh, profile) for one in members),
            )
        )
    return tuple(sorted(rows, key=lambda row: -row.time_s))


def compiled_time(one: CompiledCollective, mesh: MeshShape, profile: HardwareProfile) -> float:
    """Seconds per step of the unpredicted bytes of a compiled collective."""
    axes = mesh.axis_names if one.axes is None else one.axes
    kind = _PRICED_AS.get(one.kind, one.kind)
    assert kind in KINDS
    each = one.unpredicted_bytes / one.num_times
    payload = each / sent_bytes(kind, 1.0, mesh.sizes(axes))
    return one.num_times * collective_time(kind, payload, axes, mesh, profile)


def missing_time(found: Collectives, plan: Plan) -> float:
    """Seconds per step of communication that a plan predicts and the compiled program lacks."""
    total = 0.0
    for position, rest in found.missing:
        use = plan.collectives[position]
        whole = sent_bytes(use.kind, use.bytes_per_step, plan.mesh.sizes(use.axes))
        total += use.time_s * min(1.0, rest / whole)
    return total


def origins_of(rows: Sequence[Extra]) -> tuple[tuple[str, str], ...]:
    """The modules and primitives that rows come from, in a plan's notation, without layer numbers.

    >>> row = Extra(kind="all-to-all", axes=("x",), path="transpose(jvp(GPT))/h/{0..11}/attn/split", source="",
    ...             library_source="", count=1, num_bytes=1.0, time_s=1.0)
    >>> origins_of([row])
    (('GPT/h/*/attn', 'split'),)
    """
    parts = (re.sub(r"\{[^}]*\}", "*", row.path).rpartition("/") for row in rows)
    return tuple(dict.fromkeys((without_numbers(module_path(module)), primitive) for module, _, primitive in parts))


def without_numbers(path: str) -> str:
    """Replace the layer numbers of a path by `*`.

    >>> without_numbers("GPT/h/3/attn"), without_numbers("params/block_12/qkv"), without_numbers("fc1/kernel")
    ('GPT/h/*/attn', 'params/block_*/qkv', 'fc1/kernel')
    """
    return _NUMBER.sub("*", path)
