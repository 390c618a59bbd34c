"""Define the programs that are measured, built from their libraries without changes.

Each is a train step and the shapes of its arguments, `state` and `batch`; no array is built. A batch size is that of
the whole job. `gpt2_small_target` is also a target of the command line: `USE_TORCH=0 HF_HUB_OFFLINE=1 autopar plan
benchmarks/models.py:gpt2_small_target --devices 8 --hardware h100-sxm`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import optax

from autopar.ir.mesh import MeshShape
from benchmarks.baselines import pinned
from benchmarks.baselines.jitted import jitted
from benchmarks.zoo import language, vision
from benchmarks.zoo.training import BF16, Target

# isort: split
from transformers import BartConfig, BertConfig, GPT2Config, LlamaConfig, ResNetConfig, ViTConfig

DEMO = Path(__file__).parents[1] / "examples" / "train_gpt.py"


@dataclass(frozen=True, slots=True)
class Model:
    """A program that is planned for several numbers of GPUs.

    Args:
        target: function from the batch size of the whole job to a step and its arguments.
        batch_per_gpu: examples per GPU if only the batch is sharded.
        lengths: tokens per example, if the example's own shape does not show it.
        fitted: whether the cost model's constants may be fitted to this program; the others are held out.
    """

    target: Callable[[int], Target]
    batch_per_gpu: int
    lengths: tuple[int, ...] = ()
    fitted: bool = True


def demo_gpt_target(batch: int = 8) -> Target:
    """The model of `make demo`: 4 layers, 64 tokens per sequence, f32, dropout, AdamW."""
    module = demo()
    shape = jax.ShapeDtypeStruct((batch, module.SEQ), jnp.int32)
    state = jax.eval_shape(module.create_state, jax.random.key(0))
    return module.train_step, (state, {"inputs": shape, "targets": shape})


def gpt2_small_target(batch: int = 64, seq: int = 1024) -> Target:
    """Hugging Face's GPT-2 small: 12 unrolled layers, bf16 compute, dropout, AdamW."""
    return language.gpt2(GPT2Config(), batch, seq, BF16).target


def gpt2_small_megatron_target(batch: int = 64, seq: int = 1024) -> Target:
    """The same, sharded by hand as in Megatron-LM over a 2x4 mesh, for `autopar diagnose`."""
    mesh = MeshShape(("data", "model"), (2, 4))
    step, args = gpt2_small_target(batch, seq)
    return jitted(step, args, pinned.tensor_parallel(args, mesh), mesh), args


def bert_base_target(batch: int = 128, seq: int = 512) -> Target:
    """Hugging Face's BERT base in pre-training: masked words, and the next sentence by the pooler; AdamW."""
    return language.bert(BertConfig(max_position_embeddings=seq), batch, seq, BF16).target


def llama_1b_target(batch: int = 16, seq: int = 2048) -> Target:
    """Hugging Face's LLaMA with 0.94 billion parameters: 16 unrolled layers, bf16 compute, AdamW."""
    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=5504,
        num_hidden_layers=16,
        num_attention_heads=16,
        max_position_embeddings=seq,
    )
    return language.llama(config, batch, seq, BF16).target


def llama_8b_config(seq: int, layers: int = 32) -> LlamaConfig:
    """The sizes of LLaMA 3 8B: 8.0 billion parameters."""
    return LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=seq,
    )


def llama_8b_target(batch: int = 64, seq: int = 2048, layers: int = 32) -> Target:
    """Hugging Face's LLaMA of 8 billion parameters: 32 unrolled layers, bf16 compute, AdamW."""
    return language.llama(llama_8b_config(seq, layers), batch, seq, BF16).target


def llama_8b_scanned_target(batch: int = 64, seq: int = 2048, layers: int = 32) -> Target:
    """The same with its layers in a scan, each rematerialized in the backward pass."""
    return language.llama_scanned(llama_8b_config(seq, layers), batch, seq, BF16).target


def resnet50_target(batch: int = 512, size: int = 224) -> Target:
    """Hugging Face's ResNet-50 on ImageNet's shapes: bf16 compute, running statistics, SGD with momentum."""
    tx = optax.sgd(0.1, momentum=0.9, nesterov=True)
    return vision.resnet(ResNetConfig(num_labels=1000), batch, size, BF16, tx).target


def vit_base_target(batch: int = 256, size: int = 224) -> Target:
    """Hugging Face's ViT base, patches of 16: bf16 compute, dropout, AdamW."""
    config = ViTConfig(image_size=size, num_labels=1000, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)
    return vision.vit(config, batch, BF16).target


def bart_base_target(batch: int = 64, seq: int = 512) -> Target:
    """Hugging Face's BART base: equal input and output lengths, bf16 compute, dropout, AdamW."""
    config = BartConfig(
        max_position_embeddings=seq,
        d_model=768,
        encoder_layers=6,
        decoder_layers=6,
        encoder_attention_heads=12,
        decoder_attention_heads=12,
        encoder_ffn_dim=3072,
        decoder_ffn_dim=3072,
    )
    return language.bart(config, batch, seq, BF16).target


#: The models, in the order of measurement.
MODELS = {
    "gpt2_small": Model(gpt2_small_target, 8),
    "llama_1b": Model(llama_1b_target, 2),
    "bert_base": Model(bert_base_target, 16),
    "resnet50": Model(resnet50_target, 64),
    "demo_gpt": Model(demo_gpt_target, 1),
    "vit_base": Model(vit_base_target, 32, lengths=(196, 197), fitted=False),
    "bart_base": Model(bart_base_target, 8, fitted=False),
}


def demo() -> ModuleType:
    """The module of `make demo`, which is a script outside any package."""
    spec = importlib.util.spec_from_file_location(DEMO.stem, DEMO)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
