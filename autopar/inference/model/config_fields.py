"""Read the fields of a `config.json` with checks: kinds, supported values, rotary embeddings, layers.

In: the fields. Out: checked values. What is not supported is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.errors import ModelError
from autopar.inference.model.rotary import Llama3Scaling, LongScaling, Rotary, Yarn

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_REQUIRED: Any = object()
#: The values of `layer_types`, and whether such a layer has a window.
_LAYER_TYPES = {"full_attention": False, "sliding_attention": True}


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of a `config.json`, with checked access."""

    fields: Mapping[str, Any]
    source: str

    def take(self, name: str, kind: type, default: Any = _REQUIRED) -> Any:
        """Return a field's value, checked to be of `kind`. An int is valid as a float, and an int must be positive."""
        value = self.fields.get(name)
        if value is None:
            if default is _REQUIRED:
                raise ModelError(f"{self.source} has no `{name}`, which this family needs")
            return default
        fits = isinstance(value, kind) or (kind is float and isinstance(value, int))
        if not fits or (isinstance(value, bool) and kind is not bool) or (kind is int and value < 1):
            wanted = "a positive int" if kind is int else f"a {kind.__name__}"
            raise ModelError(f"{self.source}: `{name}` is {value!r}, and must be {wanted}")
        return kind(value)

    def refuse(self, name: str, *supported: Any) -> None:
        """Refuse a field that is present with a value other than those supported."""
        value = self.fields.get(name)
        if value is not None and value not in supported:
            allowed = ", ".join(json.dumps(one) for one in supported)
            raise ModelError(
                f"{self.source}: `{name}` is {json.dumps(value)}, which is not supported; supported is {allowed}"
            )

    def refused(self, name: str, why: str) -> ModelError:
        """The error for a field whose value is not supported."""
        return ModelError(f"{self.source}: `{name}` is {json.dumps(self.fields.get(name))}, {why}")

    def activation(self, name: str, default: str) -> str:
        """The activation function, by the decoder's name for it."""
        value = self.take(name, str, default)
        if value not in _ACTIVATIONS:
            raise ModelError(
                f"{self.source}: `{name}` is {value!r}, which is not supported; supported are {', '.join(_ACTIVATIONS)}"
            )
        return _ACTIVATIONS[value]

    def dtype(self) -> str | None:
        return self.take("dtype", str, None) or self.take("torch_dtype", str, None)

    def numbers(self, name: str) -> tuple[float, ...]:
        """A field that is a list of numbers."""
        value = self.take(name, list)
        if not all(isinstance(one, int | float) and not isinstance(one, bool) for one in value):
            raise self.refused(name, "and must be a list of numbers")
        return tuple(map(float, value))

    def layer_types(self, num_layers: int, default: Sequence[bool]) -> tuple[bool, ...]:
        """Whether each layer has a sliding window, from `layer_types`.

        Args:
            default: the same for a file without this field.
        """
        types = self.take("layer_types", list, None)
        if types is None:
            return tuple(default)
        unknown = [one for one in types if one not in _LAYER_TYPES]
        if unknown or len(types) != num_layers:
            raise self.refused(
                "layer_types", f"and must have one of {', '.join(_LAYER_TYPES)} for each of {num_layers} layers"
            )
        return tuple(_LAYER_TYPES[one] for one in types)

    def rotary(self, default_base: float, *, share: float = 1.0, names: tuple[str, str] = ("rope_theta", "")) -> Rotary:
        """The rotary embedding, from `rope_parameters`, or from `rope_theta` and `rope_scaling`, which it replaced.

        Args:
            default_base, share: the base, and the share of a head that is rotated, of a file that has neither.
            names: the names of the two fields outside of `rope_parameters`.
        """
        base_name, share_name = names[0], names[1] or "partial_rotary_factor"
        both = self.take("rope_parameters", dict, None) or self.take("rope_scaling", dict, None) or {}
        scaling = Fields(both, f"{self.source}, rope_scaling")
        base = scaling.take("rope_theta", float, None) or self.take(base_name, float, default_base)
        share = scaling.take("partial_rotary_factor", float, None) or self.take(share_name, float, share)
        return self.scaled_rotary(scaling, Rotary(base, share=share))

    def scaled_rotary(self, scaling: Fields, plain: Rotary) -> Rotary:
        """A rotary embedding with the scaling that a file asks for."""
        kind = scaling.take("rope_type", str, None) or scaling.take("type", str, "default")
        if not 0 < plain.share <= 1:
            raise ModelError(f"{self.source}: `partial_rotary_factor` is {plain.share}, and must be in (0, 1]")
        if kind not in _SCALINGS:
            raise ModelError(
                f"{self.source}: rope_scaling of the type {kind!r} is not supported; supported are {', '.join(_SCALINGS)}"
            )
        return _SCALINGS[kind](self, scaling, plain)


# -- kinds of scaling --------------------------------------------------------------------------


def _linear(model: Fields, scaling: Fields, plain: Rotary) -> Rotary:
    return plain.changed(factor=scaling.take("factor", float))


def _dynamic(model: Fields, scaling: Fields, plain: Rotary) -> Rotary:
    """Dynamic NTK scaling changes the base beyond `max_position_embeddings`, and no sequence is longer than that."""
    scaling.take("factor", float)
    return plain


def _llama3(model: Fields, scaling: Fields, plain: Rotary) -> Rotary:
    found = Llama3Scaling(
        low_frequency_factor=scaling.take("low_freq_factor", float),
        high_frequency_factor=scaling.take("high_freq_factor", float),
        original_max_positions=scaling.take("original_max_position_embeddings", int),
    )
    return plain.changed(factor=scaling.take("factor", float), llama3=found)


def _yarn(model: Fields, scaling: Fields, plain: Rotary) -> Rotary:
    original = scaling.take("original_max_position_embeddings", int, None)
    original = original or model.take("max_position_embeddings", int)
    factor = scaling.take("factor", float, None) or model.take("max_position_embeddings", int) / original
    found = Yarn(
        original_max_positions=original,
        beta_fast=scaling.take("beta_fast", float, None) or 32.0,
        beta_slow=scaling.take("beta_slow", float, None) or 1.0,
        whole_dims=scaling.take("truncate", bool, True),
    )
    all_dims = scaling.take("mscale", float, None), scaling.take("mscale_all_dim", float, None)
    magnitude = scaling.take("attention_factor", float, None) or Yarn.magnitude(factor, *all_dims)
    return plain.changed(factor=factor, yarn=found, magnitude=magnitude)


def _longrope(model: Fields, scaling: Fields, plain: Rotary) -> Rotary:
    longest = model.take("max_position_embeddings", int)
    original = (
        scaling.take("original_max_position_embeddings", int, None)
        or model.take("original_max_position_embeddings", int, None)
        or longest
    )
    found = LongScaling(scaling.numbers("short_factor"), scaling.numbers("long_factor"), original)
    factor = scaling.take("factor", float, None) or longest / original
    magnitude = scaling.take("attention_factor", float, None) or found.magnitude(factor)
    return plain.changed(long=found, magnitude=magnitude)


_SCALINGS = {
    "default": lambda model, scaling, plain: plain,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,
}
