"""Define the models whose plans are compared with hand-written sharding, at training size.

All have bf16 compute, f32 parameters and AdamW. For each name: the examples per GPU in a full batch, and a function
from the batch of the whole job to `Training`. A "sequence" means an image for image models, and a sixteenth of a GPU's
nodes for a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from benchmarks.gpu import transformer
from benchmarks.gpu.transformer import Sizes
from benchmarks.zoo import experts, graph_network, language, speech, vision
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


@dataclass(frozen=True, slots=True)
class Model:
    """A model for any batch.

    Args:
        description: its name and size.
        per_gpu: examples per GPU if only the batch is sharded.
    """

    description: str
    per_gpu: int
    training: Callable[[int], Training]


def _bart(batch: int) -> Training:
    config = BartConfig(
        d_model=768,
        encoder_layers=6,
        decoder_layers=6,
        encoder_attention_heads=12,
        decoder_attention_heads=12,
        encoder_ffn_dim=3072,
        decoder_ffn_dim=3072,
    )
    return language.bart(config, batch, 1024, BF16)


def _llama_1b(batch: int) -> Training:
    config = LlamaConfig(hidden_size=2048, intermediate_size=5504, num_hidden_layers=16, num_attention_heads=16)
    return language.llama(config, batch, 2048, BF16)


def _vit(batch: int) -> Training:
    config = ViTConfig(num_labels=1000, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)
    return vision.vit(config, batch, BF16)


def _clip(batch: int) -> Training:
    return vision.clip(CLIPConfig.from_text_vision_configs(CLIPTextConfig(), CLIPVisionConfig()), batch, 77, BF16)


def _whisper(batch: int) -> Training:
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
    return speech.whisper(config, batch, 448, BF16)


def _llama3_8b(batch: int) -> Training:
    sizes = Sizes(4096, 32, 32, 14336, 128_256, 4096, batch, kv_heads=8, is_llama=True)
    return transformer.language(replace(sizes, rematerialized=True, scanned=True))


MODELS = {
    "gpt2": Model("GPT-2 small, 1,024 tokens", 8, lambda batch: language.gpt2(GPT2Config(), batch, 1024, BF16)),
    "bert": Model("BERT base, 512 tokens", 8, lambda batch: language.bert(BertConfig(), batch, 512, BF16)),
    "llama_1b": Model("LLaMA of 0.94 billion parameters, 2,048 tokens", 1, _llama_1b),
    "llama_7b": Model("LLaMA 7B, 2,048 tokens", 1, lambda batch: language.llama(LlamaConfig(), batch, 2048, BF16)),
    "gptj": Model("GPT-J 6B, 2,048 tokens", 1, lambda batch: language.gptj(GPTJConfig(), batch, 2048, BF16)),
    "llama3_8b": Model("LLaMA-3 8B in Flax, scanned, rematerialized, 4,096 tokens", 1, _llama3_8b),
    "experts": Model("LLaMA with 8 experts in each layer, 2,048 tokens", 1, experts.mixture_1b),
    "bart": Model("BART base, 1,024 tokens in and out", 8, _bart),
    "vit": Model("ViT base, patches of 16", 32, _vit),
    "clip": Model("CLIP with ViT-B/32", 64, _clip),
    "resnet": Model(
        "ResNet-50",
        64,
        lambda batch: vision.resnet(ResNetConfig(num_labels=1000), batch, 224, BF16),
    ),
    "whisper": Model("Whisper base, 30 seconds, 448 tokens", 16, _whisper),
    "graph_network": Model(
        "a graph network of 6 layers of 512",
        16,
        lambda batch: graph_network.graph_network(1024 * batch, 8192 * batch, 128, 512, 6, 40, BF16),
    ),
}
