"""List small checkpoints of every family, and read the logits that `transformers` computed for them.

`scripts/transformers_logits.py` writes the logits. They are those of a few positions, in float32.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from autopar.inference import write_checkpoint
from autopar.inference.model.safetensors import read_header

FOLDER = Path(__file__).parent / "logits"
VOCABULARY, LENGTH = 96, 40
#: The positions whose logits are kept: the first, some within and beyond a window, the last.
POSITIONS = (0, 7, 19, 38, 39)

_LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": 32, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_hidden_layers": 2, "intermediate_size": 48, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "pad_token_id": 0,
}  # fmt: skip


def _like_llama(family: str, **fields: Any) -> dict[str, Any]:
    return {**_LLAMA, "model_type": family, **fields}


def _scaled(kind: str, **fields: Any) -> dict[str, Any]:
    return {"rope_scaling": {"rope_type": kind, **fields}}


_LONG = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 2.0, 3.0, 4.5]}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_GPT2 = {
    "model_type": "gpt2", "vocab_size": VOCABULARY, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64,
    "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new",
}  # fmt: skip
_NEOX = {
    "model_type": "gpt_neox", "vocab_size": VOCABULARY, "hidden_size": 32, "num_attention_heads": 2,
    "num_hidden_layers": 2, "intermediate_size": 48, "max_position_embeddings": 64, "rotary_pct": 0.25,
}  # fmt: skip
_FALCON = {
    "model_type": "falcon", "vocab_size": VOCABULARY, "hidden_size": 32, "num_attention_heads": 4,
    "num_hidden_layers": 2, "max_position_embeddings": 64,
}  # fmt: skip

#: The fields of `config.json`, by name.
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "falcon-7b": _FALCON,
    "falcon-11b": {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    "falcon-40b": {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 48},
    "falcon-alibi": {
        **_FALCON, "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True,
        "hidden_size": 24, "num_attention_heads": 6,
    },
    "gemma": _like_llama("gemma", head_dim=16, hidden_act="gelu", num_key_value_heads=1, tie_word_embeddings=True),
    "gemma2": _like_llama(
        "gemma2", head_dim=16, sliding_window=8, query_pre_attn_scalar=24, tie_word_embeddings=True,
        attn_logit_softcapping=2.0, final_logit_softcapping=3.0,
    ),
    "gemma3_text": _like_llama(
        "gemma3_text", head_dim=16, sliding_window=8, sliding_window_pattern=2, rope_local_base_freq=1e4,
        rope_theta=1e6, rope_scaling={"rope_type": "linear", "factor": 8.0}, tie_word_embeddings=True,
    ),
    "glm": _like_llama("glm", head_dim=8, attention_bias=True),
    "glm4": _like_llama("glm4", head_dim=8, attention_bias=True, partial_rotary_factor=0.5),
    "gpt2": _GPT2,
    "gpt2-untied": {**_GPT2, "tie_word_embeddings": False, "n_inner": 40, "activation_function": "gelu"},
    "gpt_neox": _NEOX,
    "gpt_neox-sequential": {**_NEOX, "use_parallel_residual": False, "attention_bias": False},
    "granite": _like_llama(
        "granite", embedding_multiplier=3.0, residual_multiplier=0.4, attention_multiplier=0.2, logits_scaling=0.5
    ),
    "llama": _LLAMA,
    "llama-linear": {**_LLAMA, **_scaled("linear", factor=4.0), "head_dim": 16},
    "llama-llama3": {
        **_LLAMA, "rope_theta": 500000.0, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True,
        **_scaled("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16),
    },
    "llama-dynamic": {**_LLAMA, **_scaled("dynamic", factor=2.0)},
    "llama-yarn": {**_LLAMA, **_scaled("yarn", factor=4.0, original_max_position_embeddings=16), "head_dim": 16},
    "mistral": _like_llama("mistral", sliding_window=8, head_dim=16),
    "mistral-no-window": _like_llama("mistral", sliding_window=None),
    "mixtral": _like_llama("mixtral", num_local_experts=4, num_experts_per_tok=2),
    "mixtral-window": _like_llama("mixtral", num_local_experts=4, num_experts_per_tok=2, sliding_window=8),
    "olmo2": _like_llama("olmo2"),
    "phi3": _like_llama("phi3", sliding_window=8, partial_rotary_factor=0.5),
    "phi3-longrope": _like_llama("phi3", original_max_position_embeddings=32, **_scaled("longrope", **_LONG)),
    "qwen2": _like_llama("qwen2", use_sliding_window=False, rope_theta=1e6),
    "qwen2-window": _like_llama("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1),
    "qwen2_moe": _like_llama(
        "qwen2_moe", **_EXPERTS, shared_expert_intermediate_size=40, num_hidden_layers=3, mlp_only_layers=[1]
    ),
    "qwen3": _like_llama("qwen3", head_dim=16, rope_theta=1e6, tie_word_embeddings=True),
    "qwen3_moe": _like_llama(
        "qwen3_moe", **_EXPERTS, head_dim=16, norm_topk_prob=True, decoder_sparse_step=2, num_hidden_layers=2
    ),
    "smollm3": _like_llama(
        "smollm3", num_hidden_layers=4, no_rope_layer_interval=2, use_sliding_window=True, sliding_window=8
    ),
}  # fmt: skip
#: Checkpoints of several files.
_SHARDED = ("qwen2", "mixtral")


def write_family(folder: Path, name: str) -> Path:
    """Write the checkpoint of a name, with random weights."""
    write_checkpoint(folder, CHECKPOINTS[name], max_file_bytes=20_000 if name in _SHARDED else 1 << 30)
    return folder


def tokens_of(length: int = LENGTH) -> np.ndarray:
    """The tokens of two sequences."""
    return np.random.default_rng(0).integers(0, VOCABULARY, (2, length), dtype=np.int32)


def digest_of(folder: Path) -> str:
    """A digest of all weights of a checkpoint."""
    found = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in sorted(read_header(file).items()):
            found.update(name.encode() + np.ascontiguousarray(tensor.mapped()).tobytes())
    return found.hexdigest()


def logits_of(name: str, folder: Path) -> np.ndarray:
    """The logits of `transformers` at `POSITIONS`, [2, positions, vocabulary], of a checkpoint that `write_family` wrote."""
    stored = np.load(FOLDER / f"{name}.npz")
    assert str(stored["digest"]) == digest_of(folder), f"the weights of {name} are others: write its logits again"
    return stored["logits"]
