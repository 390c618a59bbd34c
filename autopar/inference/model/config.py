"""Read a decoder's configuration from the `config.json` of a checkpoint.

In: the fields in Hugging Face's format. Out: `DecoderConfig`, the same for every family. An unsupported family or value is
refused by name, so a model that loads computes what was trained.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from autopar.errors import ModelError
from autopar.inference.kv_cache.scores import Scores
from autopar.inference.model.config_fields import Fields
from autopar.inference.model.families import FAMILIES
from autopar.inference.model.layer_kinds import LAYER_MODULES, LayerKind
from autopar.inference.model.quantization import Quantization, quantization_of


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """The configuration of a decoder of any family.

    Args:
        family: the `model_type` in `config.json`, such as "llama" or "gemma2".
        max_positions: the longest sequence that the model supports, in tokens.
        layers: what differs between layers: rotary embedding, window, experts.
        norm: "rms"; "rms_one", whose factor is one plus the weight; or "layer". norm_epsilon: the term added to the variance.
        activation: "silu", "relu", "gelu" or "gelu_tanh". gated: whether the feed-forward network has a gate (SwiGLU).
        tied: whether the head shares the weight of the embedding.
        qkv_bias, out_bias, mlp_bias: whether these projections have a bias.
        dtype: the name of the dtype that `config.json` gives; None if it gives none.
        learned_positions: whether positions have a learned embedding.
        qk_norm: whether queries and keys are normalized: in each "head", or over "all" heads.
        pre_norm, post_norm: whether attention and the feed-forward network have a norm before, and one after them.
        parallel: whether attention and the feed-forward network read the same hidden states, and their results are added.
        shared_norm: whether they share the norm before them, if they are parallel.
        attention_scale: the factor of dot products of queries and keys; by default 1 / sqrt(head_dim).
        attention_softcap, logit_softcap: the bounds of attention scores and of logits by tanh.
        slopes: the slope of each head (ALiBi).
        quantization: how the weights of matmuls are quantized; None if they are floats.
        embedding_scale, residual_scale, logit_scale: the factors of embeddings, of what a layer adds, and of logits.
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
    layers: tuple[LayerKind, ...]
    norm: Literal["rms", "rms_one", "layer"]
    norm_epsilon: float
    activation: str
    gated: bool
    tied: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    dtype: str | None
    learned_positions: bool = False
    qk_norm: Literal["head", "all"] | None = None
    pre_norm: bool = True
    post_norm: bool = False
    parallel: bool = False
    shared_norm: bool = False
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    slopes: tuple[float, ...] | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    quantization: Quantization | None = None

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
        reader = Fields(fields, source)
        family = reader.take("model_type", str)
        if family not in FAMILIES:
            raise ModelError(
                f"{source}: model_type is {family!r}, which is not supported. Use a checkpoint of one of"
                f" {', '.join(sorted(FAMILIES))}"
            )
        config = cls(family=family, dtype=reader.dtype(), **FAMILIES[family].fields(reader))
        config._check(source)
        found = quantization_of(reader)
        config = config if found is None else config._with(found, source)
        return config.for_length(config.max_positions)

    def quantized(self, name: str | None) -> DecoderConfig:
        """The configuration with float weights that are quantized when they are read.

        Args:
            name: as for `Quantization.named`; None changes nothing.

        Raises:
            ModelError: there is no such quantization, or the checkpoint's weights are quantized already.
        """
        if name is None:
            return self
        if self.quantization is not None:
            raise ModelError(f"the weights are quantized already, so they cannot be quantized as {name!r}: omit it")
        return self._with(Quantization.named(name), "the model")

    def _with(self, how: Quantization, source: str) -> DecoderConfig:
        """The configuration with quantized weights, and the modules of each layer that are not quantized."""
        experts = [kind.experts for kind in self.layers if kind.experts is not None]
        sizes = {"hidden_size": self.hidden_size, "heads x head_dim": self.num_heads * self.head_dim}
        sizes |= {"intermediate_size": self.mlp_size} if len(experts) < self.num_layers else {}
        sizes |= {"moe_intermediate_size": experts[0].size} if experts else {}
        sizes |= {"shared_expert_intermediate_size": experts[0].shared_size} if experts else {}
        unit = how.group or how.per_byte
        odd = [f"{name} is {size}" for name, size in sizes.items() if size % unit]
        odd += [f"head_dim is {self.head_dim}"] if self.head_dim % how.per_byte else []
        if odd:
            raise ModelError(
                f"{source}: weights cannot be quantized in {'groups' if how.group else 'bytes'} of {unit}:"
                f" {', '.join(odd)}, and must be a multiple of it"
            )
        names = FAMILIES[self.family].names(self)
        layers = []
        for layer, kind in enumerate(self.layers):
            stored = {module: names.prefix + name.format(layer, e=0) for module, name in names.modules.items()}
            plain = {module for module, name in stored.items() if how.is_skipped(name)} & LAYER_MODULES
            layers.append(replace(kind, plain=tuple(sorted(plain))))
        return replace(self, quantization=how, layers=tuple(layers))

    def quantization_of(self, module: str) -> Quantization | None:
        """The quantization of the weight of a module, by its name. Embedding and head have 8 bits, if the weights are
        quantized when they are read; a checkpoint has them as floats."""
        if self.quantization is None or module not in ("embed", "embed_positions", "head"):
            return self.quantization
        return Quantization(8, None) if self.quantization.format == "made" and module != "embed_positions" else None

    def _check(self, source: str) -> None:
        """Refuse sizes that contradict each other."""
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"{source}: there are {self.num_heads} heads for {self.num_kv_heads} heads of keys and values, and the"
                " first number must be a multiple of the second"
            )
        for kind in self.layers:
            if kind.rotary is None:
                continue
            rotated = kind.rotary.num_rotated(self.head_dim)
            if rotated % 2 or not rotated:
                raise ModelError(
                    f"{source}: the rotary embedding rotates {rotated} of {self.head_dim} elements of a head (head_dim),"
                    " and their number must be even"
                )
            long = kind.rotary.long
            if long is not None and {len(long.short), len(long.long)} != {rotated // 2}:
                raise ModelError(
                    f"{source}: `short_factor` and `long_factor` have {len(long.short)} and {len(long.long)} numbers, and"
                    f" must have {rotated // 2}, half of the elements of a head that are rotated"
                )

    @property
    def window(self) -> int | None:
        """The tokens that any token of any layer may see, itself included; None is all before it."""
        windows = [kind.window for kind in self.layers]
        return None if None in windows else max(each for each in windows if each is not None)

    def scores(self, layer: int) -> Scores:
        """How the attention of a layer makes weights from dot products."""
        return Scores(self.attention_scale, self.attention_softcap, self.layers[layer].window, self.slopes)

    def for_length(self, longest: int) -> DecoderConfig:
        """The configuration for sequences of at most `longest` tokens: windows as long have no effect, and LongRoPE
        chooses its divisors by this length."""
        return replace(self, layers=tuple(kind.for_length(longest) for kind in self.layers))
