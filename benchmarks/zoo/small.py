"""Every model small enough to train for two steps in a test, and large enough to shard.

Sizes are awkward on purpose: odd vocabularies, and sequences and batches that no axis divides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.zoo import graph_network, language, recurrent, speech, vision
from benchmarks.zoo.training import Training

# isort: split
from transformers import (
    BartConfig,
    BertConfig,
    CLIPConfig,
    CLIPTextConfig,
    CLIPVisionConfig,
    GPT2Config,
    GPTJConfig,
    LlamaConfig,
    ResNetConfig,
    ViTConfig,
    WhisperConfig,
)


def gpt2() -> Training:
    """A sequence that no axis divides, and an odd vocabulary with tied embeddings."""
    return language.gpt2(GPT2Config(vocab_size=251, n_positions=32, n_embd=64, n_layer=2, n_head=4), batch=8, seq=15)


def bert() -> Training:
    config = BertConfig(
        vocab_size=259,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=32,
    )
    return language.bert(config, batch=8, seq=16)


def llama() -> Training:
    """Batch 1: only the sequence and the features can be sharded."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=8,
        max_position_embeddings=64,
    )
    return language.llama(config, batch=1, seq=64)


def gptj() -> Training:
    config = GPTJConfig(vocab_size=257, n_positions=32, n_embd=64, n_layer=2, n_head=4, rotary_dim=8, n_inner=128)
    return language.gptj(config, batch=4, seq=32)


def bart() -> Training:
    config = BartConfig(
        vocab_size=263,
        max_position_embeddings=32,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
    )
    return language.bart(config, batch=8, seq=24)


def vit() -> Training:
    """17 tokens an image: 16 patches and the class."""
    config = ViTConfig(
        image_size=32,
        patch_size=8,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        num_labels=10,
    )
    return vision.vit(config, batch=16)


def clip() -> Training:
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = CLIPConfig.from_text_vision_configs(
        CLIPTextConfig(vocab_size=253, max_position_embeddings=16, eos_token_id=2, **sizes),
        CLIPVisionConfig(image_size=32, patch_size=8, **sizes),
        projection_dim=32,
    )
    return vision.clip(config, batch=8, seq=16)


def resnet() -> Training:
    """Images whose sides no axis divides."""
    config = ResNetConfig(embedding_size=16, hidden_sizes=[32, 64], depths=[1, 1], layer_type="basic", num_labels=10)
    return vision.resnet(config, batch=16, size=36)


def whisper() -> Training:
    """6 heads, which no axis divides."""
    config = WhisperConfig(
        vocab_size=261,
        num_mel_bins=20,
        d_model=96,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=6,
        decoder_attention_heads=6,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        max_source_positions=32,
        max_target_positions=16,
        dropout=0.1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    return speech.whisper(config, batch=8, seq=12)


def lstm() -> Training:
    return recurrent.lstm(vocabulary=211, width=64, num_layers=2, batch=8, seq=12)


def graph_network_() -> Training:
    """Nodes that no axis divides."""
    return graph_network.graph_network(num_nodes=100, num_edges=320, features=24, width=32, num_layers=2, num_classes=7)


#: By the names that are also in the tables of results.
SMALL: dict[str, Callable[[], Training]] = {
    "gpt2": gpt2,
    "bert": bert,
    "llama": llama,
    "gptj": gptj,
    "bart": bart,
    "vit": vit,
    "clip": clip,
    "resnet": resnet,
    "whisper": whisper,
    "lstm": lstm,
    "graph_network": graph_network_,
}
