"""Define how weights are quantized, and read it from a `config.json`.

In: the `quantization_config` of compressed-tensors, GPTQ and AWQ checkpoints, or a name such as "int8". Out: `Quantization`. What
is not supported is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from autopar.errors import ModelError
from autopar.inference.model.config_fields import Fields

Format = Literal["made", "int-quantized", "pack-quantized", "gptq", "gptq_v2", "awq"]
#: Weights that share a scale in "int4", and what "int8" and "int4" are.
_GROUP = 64
#: The routers of mixtures of experts, which are not quantized.
_ROUTERS = (r".*\.mlp\.gate", r".*\.block_sparse_moe\.gate", r".*\.shared_expert_gate")
_MADE = re.compile(r"int(4|8)(?:-g(\d+))?")


@dataclass(frozen=True, slots=True)
class Quantization:
    """How the weights of matmuls are quantized: w = (q - zero) * scale.

    Args:
        bits: 4 or 8.
        group: the number of inputs that share a scale; None if all inputs of an output do.
        has_zeros: whether zeros are stored; otherwise the range is symmetric.
        format: how a checkpoint stores it; "made" if it stores float weights, which are quantized when they are read.
        skips: patterns of modules in the checkpoint that are not quantized.
    """

    bits: int
    group: int | None
    has_zeros: bool = False
    format: Format = "made"
    skips: tuple[str, ...] = ()

    @property
    def zero(self) -> int:
        """The q of a weight of zero, if no zeros are stored."""
        return 8 if self.bits == 4 else 0

    @property
    def per_byte(self) -> int:
        """The weights of a byte."""
        return 8 // self.bits

    def num_groups(self, num_inputs: int) -> int:
        """The number of scales of an output."""
        return 1 if self.group is None else -(-num_inputs // self.group)

    def is_skipped(self, module: str) -> bool:
        """Whether a module of the checkpoint is not quantized."""
        return any(re.fullmatch(pattern, module) for pattern in self.skips)

    @classmethod
    def named(cls, name: str) -> Quantization:
        """The quantization that a user requests.

        Args:
            name: "int8" or "int8-g128": by output channel, or by groups of 128 inputs; "int4" is "int4-g64".

        Raises:
            ModelError: there is no such quantization.
        """
        found = _MADE.fullmatch(name)
        group = int(found[2]) if found and found[2] else None
        if found is None or (group is not None and (group < 8 or group % 8)):
            raise ModelError(
                f"there is no quantization {name!r}: give int8, int4, or with the inputs that share a scale, a multiple of"
                " 8, such as int8-g128 or int4-g32"
            )
        bits = int(found[1])
        return cls(bits, _GROUP if bits == 4 and group is None else group, skips=_ROUTERS)


def quantization_of(fields: Fields) -> Quantization | None:
    """Read the quantization of a checkpoint; None if it has none.

    Raises:
        ModelError: it is not supported.
    """
    found = fields.take("quantization_config", dict, None)
    if found is None:
        return None
    inner = Fields(found, f"{fields.source}, quantization_config")
    method = inner.take("quant_method", str)
    if method not in _METHODS:
        raise inner.refused("quant_method", f"which is not supported; supported are {', '.join(_METHODS)}")
    return _METHODS[method](inner)


def _bits(fields: Fields, name: str) -> int:
    bits = fields.take(name, int)
    if bits not in (4, 8):
        raise fields.refused(name, "which is not supported; supported are 4, 8")
    return bits


def _group(fields: Fields, name: str) -> int | None:
    """A group's size; -1 stands for all inputs."""
    if fields.fields.get(name) in (-1, None):
        return None
    group = fields.take(name, int)
    if group % 8:
        raise fields.refused(name, "and must be a multiple of 8")
    return group


def _compressed_tensors(fields: Fields) -> Quantization:
    kind = fields.take("format", str)
    if kind not in ("int-quantized", "pack-quantized"):
        raise fields.refused("format", "which is not supported; supported are int-quantized, pack-quantized")
    fields.refuse("kv_cache_scheme", {})
    groups = fields.take("config_groups", dict)
    if len(groups) != 1:
        raise ModelError(f"{fields.source}: `config_groups` has {len(groups)} groups, and one is supported")
    ((name, content),) = groups.items()
    group = Fields(content, f"{fields.source}, {name}")
    group.refuse("targets", ["Linear"])
    for activations in ("input_activations", "output_activations"):
        if group.fields.get(activations) is not None:
            raise group.refused(activations, "but quantized activations are not supported: only weights are")
    weights = Fields(group.take("weights", dict), f"{fields.source}, {name}, weights")
    weights.refuse("type", "int")
    weights.refuse("strategy", "channel", "group")
    weights.refuse("actorder", "static", "weight", False)
    bits = _bits(weights, "num_bits")
    size = _group(weights, "group_size") if weights.fields.get("strategy") == "group" else None
    if kind == "int-quantized" and bits != 8:
        raise weights.refused("num_bits", "and must be 8 in the format int-quantized")
    ignored = tuple(
        f"(?:{one.removeprefix('re:')}).*" if one.startswith("re:") else re.escape(one)
        for one in fields.take("ignore", list, [])
    )
    return Quantization(bits, size, not weights.take("symmetric", bool, True), kind, ignored)  # pyright: ignore[reportArgumentType]


def _gptq(fields: Fields) -> Quantization:
    group = _group(fields, "group_size")
    if group is not None:
        fields.refuse("desc_act", False)
    kind = fields.take("checkpoint_format", str, "gptq")
    if kind not in ("gptq", "gptq_v2"):
        raise fields.refused("checkpoint_format", "which is not supported; supported are gptq, gptq_v2")
    fields.refuse("dynamic", {})
    fields.refuse("lm_head", False)
    return Quantization(_bits(fields, "bits"), group, True, kind, _ROUTERS)  # pyright: ignore[reportArgumentType]


def _awq(fields: Fields) -> Quantization:
    if fields.take("version", str, "gemm").lower() != "gemm":
        raise fields.refused("version", "which is not supported; supported is gemm")
    fields.refuse("bits", 4)
    fields.refuse("zero_point", True)
    named = fields.take("modules_to_not_convert", list, None) or []
    skips = tuple(rf".*{re.escape(name)}.*" for name in named)
    return Quantization(4, _group(fields, "group_size"), True, "awq", (*skips, *_ROUTERS))


_METHODS: dict[str, Callable[[Fields], Quantization]] = {
    "compressed-tensors": _compressed_tensors,
    "gptq": _gptq,
    "awq": _awq,
}
