"""Every model at training size, to be planned for GPUs: bf16 compute, f32 parameters, AdamW.

Models have base sizes, except LLaMA (7B) and GPT-J (which only exists as 6B); these two have the same batch on any
number of GPUs.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.zoo import graph_network, language, recurrent, speech, vision
from benchmarks.zoo.training import BF16, Training

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


def gpt2(num_gpus: int) -> Training:
    """GPT-2, 124 million parameters, vocabulary of 50,257: 8 x 1,024 tokens a GPU."""
    return language.gpt2(GPT2Config(), 8 * num_gpus, 1024, BF16)


def bert(num_gpus: int) -> Training:
    """BERT base: 16 x 512 tokens a GPU."""
    return language.bert(BertConfig(), 16 * num_gpus, 512, BF16)


def llama(_: int) -> Training:
    """LLaMA 7B: 8 x 2,048 tokens in all."""
    return language.llama(LlamaConfig(), 8, 2048, BF16)


def gptj(_: int) -> Training:
    """GPT-J 6B: 8 x 2,048 tokens in all."""
    return language.gptj(GPTJConfig(), 8, 2048, BF16)


def bart(num_gpus: int) -> Training:
    """BART base: 8 x 1,024 tokens a GPU, in and out."""
    config = BartConfig(
        d_model=768,
        encoder_layers=6,
        decoder_layers=6,
        encoder_attention_heads=12,
        decoder_attention_heads=12,
        encoder_ffn_dim=3072,
        decoder_ffn_dim=3072,
    )
    return language.bart(config, 8 * num_gpus, 1024, BF16)


def vit(num_gpus: int) -> Training:
    """ViT base, patches of 16: 32 images of 224 x 224 a GPU."""
    config = ViTConfig(num_labels=1000, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)
    return vision.vit(config, 32 * num_gpus, BF16)


def clip(num_gpus: int) -> Training:
    """CLIP with ViT-B/32: 64 images with captions per GPU, contrasted with those of all GPUs."""
    config = CLIPConfig.from_text_vision_configs(CLIPTextConfig(), CLIPVisionConfig())
    return vision.clip(config, 64 * num_gpus, 77, BF16)


def resnet(num_gpus: int) -> Training:
    """ResNet-50: 64 images of 224 x 224 a GPU."""
    return vision.resnet(ResNetConfig(num_labels=1000), 64 * num_gpus, 224, BF16)


def whisper(num_gpus: int) -> Training:
    """Whisper base: 16 x 30 seconds a GPU, 448 tokens each."""
    config = WhisperConfig(
        d_model=512,
        encoder_layers=6,
        decoder_layers=6,
        encoder_attention_heads=8,
        decoder_attention_heads=8,
        encoder_ffn_dim=2048,
        decoder_ffn_dim=2048,
        dropout=0.1,
    )
    return speech.whisper(config, 16 * num_gpus, 448, BF16)


def lstm(num_gpus: int) -> Training:
    """Two LSTM layers of 1,024 cells, vocabulary of 33,278: 32 x 256 tokens a GPU."""
    return recurrent.lstm(33_278, 1024, 2, 32 * num_gpus, 256, dtype=BF16)


def graph_network_(num_gpus: int) -> Training:
    """A graph network of 6 layers of 512: 16,384 nodes and 131,072 edges per GPU, all in one graph."""
    return graph_network.graph_network(16_384 * num_gpus, 131_072 * num_gpus, 128, 512, 6, 40, BF16)


#: By name, as functions of the number of GPUs.
REAL: dict[str, Callable[[int], Training]] = {
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
