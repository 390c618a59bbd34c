"""Define the measured train steps in plain Flax, at the size of a GPU and at a size that a CPU runs in a second."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from benchmarks.gpu import transformer
from benchmarks.gpu.resnet import resnet
from benchmarks.gpu.transformer import Sizes
from benchmarks.zoo import diffusion
from benchmarks.zoo.training import Training

_GPT2 = Sizes(768, 12, 12, 3072, 50257, 1024, 16, dropout=0.1)
_BERT = Sizes(768, 12, 12, 3072, 30522, 512, 64, causal=False, dropout=0.1)
_LLAMA_1B = Sizes(2048, 16, 16, 5504, 32000, 2048, 4, is_llama=True)
_VIT = Sizes(768, 12, 12, 3072, 0, 197, 128, causal=False, dropout=0.1)
_EXPERTS = Sizes(1024, 8, 16, 4096, 32000, 2048, 4, is_llama=True, num_experts=8)
_SCANNED = Sizes(1536, 24, 12, 4096, 32000, 2048, 8, kv_heads=4, is_llama=True, rematerialized=True, scanned=True)

#: Function from a multiple of one GPU's batch to the train step: the batch grows with the number of GPUs.
Maker = Callable[[int], Training]


def _language(sizes: Sizes, make: Callable[[Sizes], Training] = transformer.language) -> Mapping[str, Maker]:
    """A language model at both scales; the small one has one layer, or two in a scan."""
    tiny = replace(
        sizes,
        hidden=32,
        layers=2 if sizes.scanned else 1,
        heads=4,
        kv_heads=2 if sizes.kv_heads else 0,
        feed_forward=64,
        vocabulary=min(sizes.vocabulary, 128),
        tokens=16,
        batch=4,
        num_experts=min(sizes.num_experts, 4),
    )
    return {
        "full": lambda times: make(replace(sizes, batch=times * sizes.batch)),
        "tiny": lambda times: make(replace(tiny, batch=times * tiny.batch)),
    }


def _vit() -> Mapping[str, Maker]:
    tiny = replace(_VIT, hidden=32, layers=1, heads=4, feed_forward=64, tokens=17, batch=4)
    return {
        "full": lambda times: transformer.images(replace(_VIT, batch=times * _VIT.batch), 224, 16, 1000),
        "tiny": lambda times: transformer.images(replace(tiny, batch=times * tiny.batch), 16, 4, 10),
    }


#: name -> scale ("full", "tiny") -> function from the multiple of one GPU's batch to the train step. In the order in which
#: they are measured.
MODELS: Mapping[str, Mapping[str, Maker]] = MappingProxyType(
    {
        "gpt2": _language(_GPT2),
        "vit": _vit(),
        "llama_1b": _language(_LLAMA_1B),
        "experts": _language(_EXPERTS),
        "scanned": _language(_SCANNED),
        "resnet50": {
            "full": lambda times: resnet((3, 4, 6, 3), 64, 256 * times, 224, 1000),
            "tiny": lambda times: resnet((1, 1), 8, 4 * times, 16, 10),
        },
        "bert": _language(_BERT, transformer.masked),
        "unet": {
            "full": lambda times: diffusion.unet((128, 256, 384), 2, 64 * times, 64),
            "tiny": lambda times: diffusion.unet((8, 16), 1, 4 * times, 8),
        },
        "llama_1b_rematerialized": _language(replace(_LLAMA_1B, rematerialized=True)),
        "gpt2_fused": _language(_GPT2),
        "llama_1b_fused": _language(_LLAMA_1B),
        "bert_fused": _language(_BERT, transformer.masked),
    }
)
#: name -> options of `autopar.plan`.
OPTIONS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {name: {"attention": "auto"} for name in MODELS if name.endswith("_fused")}
)
#: name -> the same step at full size as a user would write it for plain `jit`: with cuDNN's attention where the plan may
#: replace attention by it.
BY_HAND: Mapping[str, Maker] = MappingProxyType(
    {
        "gpt2_fused": _language(replace(_GPT2, attention="cudnn"))["full"],
        "llama_1b_fused": _language(replace(_LLAMA_1B, attention="cudnn"))["full"],
        "bert_fused": _language(replace(_BERT, attention="cudnn"), transformer.masked)["full"],
    }
)
#: Models that are also measured on several GPUs, against hand-written shardings.
ON_SEVERAL = ("gpt2", "llama_1b_rematerialized", "experts")
