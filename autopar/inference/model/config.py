"""Read a decoder's configuration from the `config.json` of a checkpoint.

In: the fields in Hugging Face's format. Out: `DecoderConfig`, the same for every family. An unsupported family or value is
refused by name, so a model that loads computes what was trained.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autopar.errors import ModelError
from autopar.inference.model.rotary import Llama3Scaling, Rotary

_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
_REQUIRED: Any = object()


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """The configuration of a decoder of any family.

    Args:
        family: the `model_type` in `config.json`: "llama", "mistral", "qwen2", "qwen3" or "gpt2".
        max_positions: the longest sequence that the model supports, in tokens.
        norm: "rms" or "layer". norm_epsilon: the term added to the variance.
        activation: "silu", "gelu" or "gelu_tanh". gated: whether the feed-forward network has a gate (SwiGLU).
        rotary: the rotary embedding; None if positions are learned.
        tied: whether the head shares the weight of the embedding.
        qkv_bias, out_bias, mlp_bias: whether these projections have a bias.
        qk_norm: whether queries and keys are normalized in each head.
        dtype: the name of the dtype that `config.json` gives; None if it gives none.
    """

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_size: int
    max_positions: int
    norm: str
    norm_epsilon: float
    activation: str
    gated: bool
    rotary: Rotary | None
    tied: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    dtype: str | None

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> DecoderConfig:
        """Read the configuration of a model's folder, or of a JSON file in the format of `config.json`.

        Raises:
            ModelError: there is no `config.json`, it is not JSON, or it has an unsupported field or value.
        """
        path = Path(folder)
        path = path if path.suffix == ".json" and not path.is_dir() else path / "config.json"
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ModelError(
                f"{path} cannot be read: {error.strerror or error}. A model is a folder with config.json and"
                " *.safetensors, as Hugging Face's `save_pretrained` writes it"
            ) from None
        except ValueError as error:
            raise ModelError(f"{path} is not JSON: {error}. Copy it again from where it came from") from None
        if not isinstance(fields, dict):
            raise ModelError(f"{path} holds no JSON object. Copy it again from where it came from")
        return cls.of(fields, str(path))

    @classmethod
    def of(cls, fields: Mapping[str, Any], source: str = "config.json") -> DecoderConfig:
        """Make the configuration from the fields of a `config.json`.

        Args:
            source: the name of the file in error texts.

        Raises:
            ModelError: a family, field or value is not supported, or a field is missing.
        """
        reader = _Fields(fields, source)
        family = reader.take("model_type", str)
        if family not in _FAMILIES:
            raise ModelError(
                f"{source}: model_type is {family!r}, which is not supported. Use a checkpoint of one of"
                f" {', '.join(sorted(_FAMILIES))}"
            )
        reader.refuse("quantization_config", None)
        config = _FAMILIES[family](reader)
        if config.num_heads % config.num_kv_heads:
            raise ModelError(
                f"{source}: there are {config.num_heads} heads for {config.num_kv_heads} heads of keys and values, and the"
                " first number must be a multiple of the second"
            )
        if config.rotary and config.head_dim % 2:
            raise ModelError(f"{source}: head_dim is {config.head_dim}, and must be even for the rotary embedding")
        return config


@dataclass(frozen=True, slots=True)
class _Fields:
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

    def activation(self, name: str, default: str) -> str:
        value = self.take(name, str, default)
        if value not in _ACTIVATIONS:
            raise ModelError(
                f"{self.source}: `{name}` is {value!r}, which is not supported; supported are {', '.join(_ACTIVATIONS)}"
            )
        return _ACTIVATIONS[value]

    def dtype(self) -> str | None:
        return self.take("dtype", str, None) or self.take("torch_dtype", str, None)

    def rotary(self, default_base: float) -> Rotary:
        """The rotary embedding, from `rope_parameters`, or from `rope_theta` and `rope_scaling`, which it replaced."""
        both = self.take("rope_parameters", dict, None) or self.take("rope_scaling", dict, None) or {}
        scaling = _Fields(both, f"{self.source}, rope_scaling")
        base = scaling.take("rope_theta", float, None) or self.take("rope_theta", float, default_base)
        kind = scaling.take("rope_type", str, None) or scaling.take("type", str, "default")
        for fields in (self, scaling):
            fields.refuse("partial_rotary_factor", 1)
        if kind == "default":
            return Rotary(base)
        if kind == "linear":
            return Rotary(base, factor=scaling.take("factor", float))
        if kind != "llama3":
            raise ModelError(
                f"{self.source}: rope_scaling of the type {kind!r} is not supported; supported are default, linear, llama3"
            )
        return Rotary(
            base,
            factor=scaling.take("factor", float),
            llama3=Llama3Scaling(
                low_frequency_factor=scaling.take("low_freq_factor", float),
                high_frequency_factor=scaling.take("high_freq_factor", float),
                original_max_positions=scaling.take("original_max_position_embeddings", int),
            ),
        )


def _llama(fields: _Fields) -> DecoderConfig:
    bias = fields.take("attention_bias", bool, False)
    return _like_llama(
        fields, qkv_bias=bias, out_bias=bias, mlp_bias=fields.take("mlp_bias", bool, False), max_positions=2048
    )


def _mistral(fields: _Fields) -> DecoderConfig:
    """A LLaMA, whose tokens see as many tokens as the window has. A sequence within the window needs no mask for it."""
    config = _like_llama(fields, qkv_bias=False, kv_heads=8, max_positions=131072)
    window = fields.take("sliding_window", int, None) if "sliding_window" in fields.fields else 4096
    return config if window is None else replace(config, max_positions=min(config.max_positions, window))


def _qwen2(fields: _Fields) -> DecoderConfig:
    _refuse_windows(fields)
    return _like_llama(fields, qkv_bias=True, max_positions=32768)


def _qwen3(fields: _Fields) -> DecoderConfig:
    _refuse_windows(fields)
    bias = fields.take("attention_bias", bool, False)
    return _like_llama(fields, qkv_bias=bias, out_bias=bias, qk_norm=True, head_dim=128, max_positions=32768)


def _refuse_windows(fields: _Fields) -> None:
    fields.refuse("use_sliding_window", False)
    layer_types = fields.fields.get("layer_types")
    if layer_types is not None:
        fields.refuse("layer_types", ["full_attention"] * len(layer_types))


def _like_llama(
    fields: _Fields,
    *,
    qkv_bias: bool,
    max_positions: int,
    out_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    head_dim: int | None = None,
    kv_heads: int | None = None,
) -> DecoderConfig:
    """The configuration of the LLaMA family and its successors. The defaults are those of `transformers`."""
    hidden, heads = fields.take("hidden_size", int), fields.take("num_attention_heads", int)
    return DecoderConfig(
        family=fields.take("model_type", str),
        vocab_size=fields.take("vocab_size", int),
        hidden_size=hidden,
        num_layers=fields.take("num_hidden_layers", int),
        num_heads=heads,
        num_kv_heads=fields.take("num_key_value_heads", int, kv_heads or heads),
        head_dim=fields.take("head_dim", int, head_dim or hidden // heads),
        mlp_size=fields.take("intermediate_size", int),
        max_positions=fields.take("max_position_embeddings", int, max_positions),
        norm="rms",
        norm_epsilon=fields.take("rms_norm_eps", float, 1e-6),
        activation=fields.activation("hidden_act", "silu"),
        gated=True,
        rotary=fields.rotary(10_000.0),
        tied=fields.take("tie_word_embeddings", bool, False),
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        dtype=fields.dtype(),
    )


def _gpt2(fields: _Fields) -> DecoderConfig:
    fields.refuse("scale_attn_weights", True)
    fields.refuse("scale_attn_by_inverse_layer_idx", False)
    fields.refuse("add_cross_attention", False)
    hidden, heads = fields.take("n_embd", int), fields.take("n_head", int)
    if hidden % heads:
        raise ModelError(f"{fields.source}: `n_embd` is {hidden}, and must be a multiple of `n_head`, {heads}")
    return DecoderConfig(
        family="gpt2",
        vocab_size=fields.take("vocab_size", int),
        hidden_size=hidden,
        num_layers=fields.take("n_layer", int),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        mlp_size=fields.take("n_inner", int, 4 * hidden),
        max_positions=fields.take("n_positions", int),
        norm="layer",
        norm_epsilon=fields.take("layer_norm_epsilon", float, 1e-5),
        activation=fields.activation("activation_function", "gelu_new"),
        gated=False,
        rotary=None,
        tied=fields.take("tie_word_embeddings", bool, True),
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        qk_norm=False,
        dtype=fields.dtype(),
    )


_FAMILIES: dict[str, Callable[[_Fields], DecoderConfig]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
}
