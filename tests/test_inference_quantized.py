"""Test quantized weights: checkpoints of every format compute what their definition says, and weights quantized on load."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from family_checkpoints import CHECKPOINTS, tokens_of, write_family
from quantized_checkpoints import FORMATS, LENGTH, logits_elsewhere, write_quantized
from safetensors.numpy import load_file, save_file

from autopar.errors import ModelError
from autopar.inference import Checkpoint, DecoderConfig
from autopar.inference.model.parameter_names import Source
from autopar.inference.model.quantization import Quantization
from autopar.inference.model.quantized_sources import QuantizedSource
from autopar.inference.model.quantized_weights import dequantized, quantized


def logits_of(folder: Path, quantize: str | None = None) -> np.ndarray:
    checkpoint = Checkpoint.open(folder, quantize)
    model: Any = checkpoint.model
    return np.asarray(jax.jit(model.apply)(checkpoint.load(), tokens_of(LENGTH))[0])


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", FORMATS)
def test_a_quantized_checkpoint_computes_what_its_format_defines(name: str, tmp_path: Path) -> None:
    """By the definition, and by the package that defines it."""
    stored, floats = write_quantized(tmp_path, "llama", name)
    expected = logits_of(floats)
    assert expected.std() > 0.1
    found = logits_of(stored)
    np.testing.assert_allclose(found, expected, atol=2e-5)
    np.testing.assert_allclose(found[:, -1], logits_elsewhere(name, stored), atol=1e-4)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["packed 4 bits with zeros", "gptq", "awq"])
@pytest.mark.parametrize("family", ["phi3", "mixtral", "glm4", "gemma2"])
def test_fused_tensors_and_experts(family: str, name: str, tmp_path: Path) -> None:
    """The parameters read from a quantized checkpoint are those of the float one."""
    stored, floats = (Checkpoint.open(folder) for folder in write_quantized(tmp_path, family, name))
    num = 0
    for path, source in stored.sources.items():
        if not isinstance(source, QuantizedSource) or path[-1] != "weight":
            continue
        plain = floats.sources[path]
        assert isinstance(plain, Source)
        expected = plain.of(floats.stored)[tuple(map(slice, plain.shape))]
        ins = math.prod(plain.shape[plain.num_outs + plain.is_stacked :])
        expected = expected.reshape(-1, ins)
        weight = source.read(stored.stored, None).reshape(len(expected), -1)
        weight = np.stack([weight & 15, weight >> 4], -1).reshape(expected.shape).astype(np.float32)
        scale, zero = (stored.sources[(*path[:-1], leaf)] for leaf in ("scale", "zero"))
        assert isinstance(scale, QuantizedSource) and isinstance(zero, QuantizedSource)
        scales, zeros = (each.read(stored.stored, None).reshape(len(expected), -1) for each in (scale, zero))
        size = ins // scales.shape[1]
        np.testing.assert_array_equal((weight - np.repeat(zeros, size, 1)) * np.repeat(scales, size, 1), expected)
        num += 1
    assert num == 14, "four of attention and three of the feed-forward network, in two layers"


@pytest.mark.contract
@pytest.mark.parametrize(
    ("name", "most"), [("int8", 1 / 254), ("int8-g16", 1 / 254), ("int4", 1 / 14), ("int4-g16", 1 / 14)]
)
def test_weights_are_rounded_to_the_nearest(name: str, most: float) -> None:
    """The error of each weight is at most half a step, which is the largest weight of its group by the number of steps."""
    how = Quantization.named(name)
    weights = np.random.default_rng(0).standard_normal((6, 128)).astype(np.float32)
    weights[2] = 0
    for dtype in (np.float32, jnp.bfloat16):
        made = quantized(weights, how, dtype)
        again = dequantized(jnp.asarray(made["weight"]), jnp.asarray(made["scale"]), None, how, jnp.float32)
        group = how.group or 128
        largest = np.abs(weights.reshape(6, -1, group)).max(-1).repeat(group, 1)
        slack = 1e-6 if dtype == np.float32 else 1 / 200
        assert (np.abs(again - weights) <= largest * (most + slack)).all()
        assert made["weight"].dtype == (np.uint8 if how.bits == 4 else np.int8)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["int8", "int4-g16"])
def test_quantized_on_load(name: str, tmp_path: Path) -> None:
    """Embedding and head too. The logits are near those of floats, and not equal."""
    folder = write_family(tmp_path / "llama", "llama")
    expected = logits_of(folder)
    difference = np.square(logits_of(folder, name) - expected).mean() ** 0.5
    assert 1e-4 < difference < (0.06 if name == "int8" else 0.6) * expected.std()
    params = Checkpoint.open(folder, name).load(dtype=jnp.bfloat16)["params"]
    assert params["embed"]["weight"].dtype == params["head"]["weight"].dtype == jnp.int8
    assert params["layers_0"]["query"]["scale"].dtype == jnp.bfloat16
    assert params["norm"]["weight"].dtype == jnp.bfloat16


def _compressed(**changes: Any) -> dict[str, Any]:
    how = json.loads(json.dumps(FORMATS["packed 4 bits"]))
    group = how["config_groups"]["group_0"]
    for key, value in changes.items():
        place = how if key in how else group if key in group else group["weights"]
        place[key] = value
    return how


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            "'bitsandbytes'|\"bitsandbytes\".*compressed-tensors, gptq, awq",
        ),
        ({"quant_method": "fp8"}, '`quant_method` is "fp8"'),
        (_compressed(format="float-quantized"), '`format` is "float-quantized"'),
        (_compressed(input_activations={"num_bits": 8}), "`input_activations`.*only weights are"),
        (_compressed(type="float"), '`type` is "float"'),
        (_compressed(strategy="tensor"), '`strategy` is "tensor"'),
        (_compressed(num_bits=3), "`num_bits` is 3"),
        (_compressed(actorder="group"), '`actorder` is "group"'),
        (_compressed(group_size=12), "`group_size` is 12, and must be a multiple of 8"),
        (_compressed(group_size=128), "groups of 128: hidden_size is 32"),
        (_compressed(config_groups={}), "0 groups"),
        ({**FORMATS["gptq"], "desc_act": True}, "`desc_act` is true"),
        ({**FORMATS["gptq"], "bits": 2}, "`bits` is 2"),
        ({**FORMATS["awq"], "version": "gemv"}, '`version` is "gemv"'),
        ({**FORMATS["awq"], "zero_point": False}, "`zero_point` is false"),
    ],
)
def test_unsupported_quantizations_are_refused_by_name(how: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        DecoderConfig.of({**CHECKPOINTS["llama"], "quantization_config": how})


def test_requests_for_quantization_are_checked() -> None:
    config = DecoderConfig.of(CHECKPOINTS["llama"])
    with pytest.raises(ModelError, match="no quantization 'int3': give int8, int4"):
        config.quantized("int3")
    with pytest.raises(ModelError, match="groups of 64: hidden_size is 32"):
        config.quantized("int4")
    with pytest.raises(ModelError, match="quantized already"):
        config.quantized("int8").quantized("int8")


def test_damaged_quantized_checkpoints_name_the_tensor_and_the_file(tmp_path: Path) -> None:
    folder, _ = write_quantized(tmp_path, "llama", "gptq")
    file = folder / "model.safetensors"
    tensors, module = load_file(file), "model.layers.1.self_attn.k_proj"

    def refused(message: str, **changes: np.ndarray | None) -> None:
        changed = {**tensors, **{f"{module}.{key}": value for key, value in changes.items()}}
        save_file({key: value for key, value in changed.items() if value is not None}, file, metadata={"format": "pt"})
        with pytest.raises(ModelError, match=message):
            Checkpoint.open(folder).load()

    scales = tensors[f"{module}.scales"].copy()
    scales[1, 3] = np.nan
    refused(f"{file}: `{module}.scales` has values that are NaN", scales=scales)
    refused(rf"`{module}.scales` has the shape \[1, 16\], but config.json requires \[2, 16\]", scales=scales[:1])
    refused(rf"lacks `{module}.qweight` of the shape \[4, 16\]", qweight=None)
    refused(f"`{module}.g_idx` gives inputs to groups out of order", g_idx=tensors[f"{module}.g_idx"][::-1].copy())
    refused(f"holds `{module}.weight`", weight=np.zeros((16, 32), np.float32))
    refused("the dtype of .*qweight. is F16", qweight=tensors[f"{module}.qweight"].astype(np.float16))
    save_file(tensors, file, metadata={"format": "pt"})
    whole = file.read_bytes()
    file.write_bytes(whole[:-5])
    with pytest.raises(ModelError, match=f"{file} is truncated within `"):
        Checkpoint.open(folder)
