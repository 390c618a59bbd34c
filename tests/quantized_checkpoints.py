"""Write quantized checkpoints as their formats define them, value by value, next to float checkpoints of the same weights.

`scripts/quantized_logits.py` writes the logits that the packages which define the formats compute from them.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from family_checkpoints import CHECKPOINTS
from safetensors.numpy import load_file, save_file

from autopar.inference import write_checkpoint

GROUP = 16
#: The tokens of a sequence whose last logits are kept.
LENGTH = 12
LOGITS = Path(__file__).parent / "logits" / "quantized"


def _words(values: np.ndarray, bits: int) -> np.ndarray:
    """Pack the last dim into int32 words: value j of a word is at bit `bits * j`."""
    num = 32 // bits
    words = np.zeros((*values.shape[:-1], values.shape[-1] // num), np.uint32)
    for j in range(num):
        words |= values[..., j::num].astype(np.uint32) << np.uint32(bits * j)
    return words.view(np.int32)


def _awq_words(values: np.ndarray) -> np.ndarray:
    """AWQ packs columns 0, 2, 4, 6, 1, 3, 5, 7 of each eight into one word, in this order."""
    order = [8 * (column // 8) + (0, 2, 4, 6, 1, 3, 5, 7)[column % 8] for column in range(values.shape[-1])]
    return _words(values[..., order], 4)


def _compressed(bits: int, strategy: str, symmetric: bool = True, kind: str = "pack-quantized") -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy, "dynamic": False}
    weights["group_size"] = GROUP if strategy == "group" else None
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
        "format": kind,
    }
    return {
        "quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*block_sparse_moe.gate$"], "kv_cache_scheme": None, "quantization_status": "compressed",
    }  # fmt: skip


def _gptq(bits: int, group: int, kind: str = "gptq") -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, "checkpoint_format": kind}


#: The `quantization_config` of each format.
FORMATS: dict[str, dict[str, Any]] = {
    "int8": _compressed(8, "channel", kind="int-quantized"),
    "int8 in groups, with zeros": _compressed(8, "group", False, "int-quantized"),
    "packed 4 bits": _compressed(4, "group"),
    "packed 4 bits by channel": _compressed(4, "channel"),
    "packed 4 bits with zeros": _compressed(4, "group", False),
    "packed 8 bits": _compressed(8, "group"),
    "gptq": _gptq(4, GROUP),
    "gptq of 8 bits": _gptq(8, -1),
    "gptq_v2": _gptq(4, GROUP, "gptq_v2"),
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
}


def _stored(
    name: str, q: np.ndarray, scale: np.ndarray, zero: np.ndarray, how: dict[str, Any], bits: int
) -> dict[str, Any]:
    """The tensors of one matmul, from unsigned q [out, in], and scale and unsigned zero [out, groups]."""
    module, scale = name.removesuffix(".weight"), scale.astype(np.float32)
    if how["quant_method"] == "awq":
        tensors = {"qweight": _awq_words(q.T), "scales": scale.T, "qzeros": _awq_words(zero.T)}
    elif how["quant_method"] == "gptq":
        less = 1 if how["checkpoint_format"] == "gptq" else 0
        tensors = {"qweight": _words(q, bits).T, "scales": scale.T, "qzeros": _words((zero.T - less) % 2**bits, bits)}
        tensors["g_idx"] = (np.arange(q.shape[1]) // (q.shape[1] // scale.shape[1])).astype(np.int32)
    elif how["format"] == "int-quantized":
        tensors = {"weight": (q.astype(int) - 128).astype(np.int8), "weight_scale": scale}
        tensors["weight_zero_point"] = (zero.astype(int) - 128).astype(np.int8)
    else:
        tensors = {"weight_packed": _words(q, bits), "weight_scale": scale, "weight_shape": np.array(q.shape)}
        tensors["weight_zero_point"] = _words(zero.T, bits).T
    symmetric = "config_groups" in how and how["config_groups"]["group_0"]["weights"]["symmetric"]
    kept = {key: np.ascontiguousarray(tensor) for key, tensor in tensors.items() if not (symmetric and "zero" in key)}
    return {f"{module}.{key}": tensor for key, tensor in kept.items()}


def write_quantized(folder: Path, family: str, name: str) -> tuple[Path, Path]:
    """Write a quantized checkpoint, and one with the same weights as floats.

    Args:
        family: a name in `CHECKPOINTS`. name: a name in `FORMATS`.
    """
    how, fields = FORMATS[name], CHECKPOINTS[family]
    if how["quant_method"] == "compressed-tensors":
        weights = how["config_groups"]["group_0"]["weights"]
        bits, group, symmetric = weights["num_bits"], weights["group_size"], weights["symmetric"]
    else:
        bits, group, symmetric = how["bits"], how["group_size"], False
    floats, quantized = folder / "floats", folder / "quantized"
    write_checkpoint(floats, fields)
    tensors = load_file(floats / "model.safetensors")
    stored: dict[str, Any] = {}
    chance, middle = np.random.default_rng(1), 2 ** (bits - 1)
    for key, tensor in tensors.items():
        is_matmul = tensor.ndim == 2 and not any(
            part in key for part in ("embed", "lm_head", "moe.gate", "mlp.gate.weight")
        )
        if not is_matmul:
            stored[key] = tensor
            continue
        outs, ins = tensor.shape
        groups = ins // group if group and group > 0 else 1
        q = chance.integers(0, 2**bits, (outs, ins))
        zero = np.full((outs, groups), middle) if symmetric else chance.integers(0, 2**bits, (outs, groups))
        scale = (chance.uniform(0.5, 1.5, (outs, groups)) / (middle * ins**0.5)).astype(np.float16)
        size = ins // groups
        tensors[key] = ((q - np.repeat(zero, size, 1)) * np.repeat(scale, size, 1).astype(np.float32)).astype(
            np.float32
        )
        stored |= _stored(key, q, scale, zero, how, bits)
    save_file(tensors, floats / "model.safetensors")
    quantized.mkdir()
    save_file(stored, quantized / "model.safetensors", metadata={"format": "pt"})
    (quantized / "config.json").write_text(json.dumps({**fields, "quantization_config": how, "torch_dtype": "float32"}))
    return quantized, floats


def file_of(name: str) -> Path:
    """The file of the logits of a format."""
    return LOGITS / f"{name.replace(', ', '-').replace(' ', '-')}.npz"


def digest_of(folder: Path) -> str:
    """A digest of all tensors of a checkpoint."""
    found = hashlib.sha256()
    for name, tensor in sorted(load_file(folder / "model.safetensors").items()):
        found.update(name.encode() + np.ascontiguousarray(tensor).tobytes())
    return found.hexdigest()


def logits_elsewhere(name: str, folder: Path) -> np.ndarray:
    """The last logits of the sequences, [2, vocabulary], by the packages that define the format."""
    stored = np.load(file_of(name))
    assert str(stored["digest"]) == digest_of(folder), f"the weights of {name} are others: write its logits again"
    return stored["logits"]
