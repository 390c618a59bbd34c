"""Draw configurations of held-out models from a seed.

In: a seed. Out: twelve `Drawn`, the same for the same seed on any Python. Every family is drawn at least twice, and one
host, two and eight at least three times each. The sizes are those of models that people train, but with few layers, so
that XLA compiles the unrolled step in about a minute. A configuration is valid by construction: a width is heads times
their dim, the heads of keys and values divide the heads, and the batch is GPUs times a number or half a one. It is drawn
again until the step takes some milliseconds and fits. Plain Python: no JAX.

A change here changes the models of every seed: make it only for a configuration that its library rejects.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from benchmarks.held_out.sizes import Convolutions, Layers, Patches, Sizes, Text

Option = TypeVar("Option")

NUM_MODELS = 12
GPUS_PER_HOST = 8
#: How often each number of GPUs is drawn.
_GPUS = {8: 6, 16: 3, 64: 3}
#: Bounds of a step's time if a GPU makes so many FLOPs per second, and of its estimated memory.
_FLOPS_PER_S, _SHORTEST_S, _LONGEST_S, _MOST_BYTES = 400e12, 4e-3, 150e-3, 45e9
#: Real vocabularies: BERT's, LLaMA's, T5's, GPT-2's (and padded), LLaMA 3's, Qwen's, mBART's.
_VOCABULARIES = (30_522, 32_000, 32_128, 50_257, 50_304, 65_536, 128_256, 151_936, 250_027)
_MOST_DRAWS = 100_000


@dataclass(frozen=True, slots=True)
class Drawn:
    """A held-out model and its GPUs; the step computes in bf16, with f32 parameters and AdamW.

    Args:
        seed: eight hex digits.
        number: from 1 to 12.
    """

    seed: str
    number: int
    family: str
    num_gpus: int
    sizes: Sizes

    @property
    def num_hosts(self) -> int:
        return -(-self.num_gpus // GPUS_PER_HOST)


class Choices:
    """Choices that depend on a text alone. Only `Random.random` gives the same numbers in every version of Python."""

    def __init__(self, text: str) -> None:
        self._random = random.Random(int.from_bytes(hashlib.sha256(text.encode()).digest()))

    def one_of(self, options: Sequence[Option]) -> Option:
        """One of them, each as likely as the others."""
        return options[int(self._random.random() * len(options))]

    def shuffled(self, options: Sequence[Option]) -> list[Option]:
        """All of them, in any order."""
        left, order = list(options), []
        while left:
            order.append(left.pop(int(self._random.random() * len(left))))
        return order


def models(seed: str) -> tuple[Drawn, ...]:
    """The models of a seed.

    Args:
        seed: eight hex digits.
    """
    choices = Choices(seed)
    families = [*FAMILIES] * 2
    families += [choices.one_of([*FAMILIES]) for _ in range(NUM_MODELS - len(families))]
    gpus = choices.shuffled([number for number, times in _GPUS.items() for _ in range(times)])
    return tuple(
        Drawn(seed, number, family, num_gpus, _sizes(family, num_gpus, Choices(f"{seed}/{number}")))
        for number, (family, num_gpus) in enumerate(zip(choices.shuffled(families), gpus, strict=True), 1)
    )


def model(seed: str, number: int) -> Drawn:
    """One of them."""
    return models(seed)[number - 1]


def _sizes(family: str, num_gpus: int, choices: Choices) -> Sizes:
    """Sizes of a step that takes some milliseconds, and fits."""
    for _ in range(_MOST_DRAWS):
        sizes = FAMILIES[family](num_gpus, choices)
        seconds = sizes.flops / num_gpus / _FLOPS_PER_S
        if _SHORTEST_S <= seconds <= _LONGEST_S and sizes.memory_bytes(num_gpus) <= _MOST_BYTES:
            return sizes
    raise AssertionError(f"no {family} of {_MOST_DRAWS} for {num_gpus} GPUs is of the right size")


# -- families ------------------------------------------------------------------------------------


def decoder(num_gpus: int, choices: Choices) -> Text:
    """A decoder as GPT or as LLaMA."""
    architecture = choices.one_of(("gpt2", "gpt_neo", "llama", "mistral", "gemma"))
    is_gpt, layers = architecture in ("gpt2", "gpt_neo"), choices.one_of((2, 3, 4, 6, 8))
    if is_gpt:
        body = _plain(choices, layers, ("gelu_new", "gelu", "relu"))
    else:
        activation = choices.one_of(("gelu_pytorch_tanh",) if architecture == "gemma" else ("silu", "gelu"))
        body = _gated(choices, layers, activation, (64, 128, 256) if architecture == "gemma" else (64, 80, 128))
    tied = choices.one_of((True, True, False)) if is_gpt else architecture == "gemma"
    return _text(architecture, body, num_gpus, choices, tied=tied, lengths=(512, 1024, 2048, 3072, 4096))


def encoder_decoder(num_gpus: int, choices: Choices) -> Text:
    """An encoder and a decoder as BART's or T5's."""
    architecture, layers = choices.one_of(("bart", "mbart", "t5", "t5_v1_1")), choices.one_of((2, 3, 4))
    if architecture == "t5_v1_1":
        body = _gated(choices, layers, "gelu_new", (64,), grouped=False, dropout=choices.one_of((0.0, 0.1)))
    else:
        body = _plain(choices, layers, ("relu",) if architecture == "t5" else ("gelu", "relu"))
    return _text(
        architecture, body, num_gpus, choices, stacks=2, tied=architecture != "t5_v1_1", lengths=(256, 512, 1024, 2048)
    )


def vision(num_gpus: int, choices: Choices) -> Patches | Convolutions:
    """An image classifier as ViT or as ResNet."""
    labels, per_gpu = choices.one_of((1000, 21_843)), choices.one_of((16, 32, 48, 64, 96, 128, 256))
    if choices.one_of((True, True, False)):
        body = _plain(choices, choices.one_of((4, 6, 8)), ("gelu",))
        size, patch = choices.one_of(((224, 16), (224, 14), (256, 16), (288, 16), (384, 16), (384, 32)))
        return Patches(architecture="vit", body=body, size=size, patch=patch, labels=labels, batch=per_gpu * num_gpus)
    is_bottleneck, stem = choices.one_of((True, True, False)), choices.one_of((64, 96, 128))
    return Convolutions(
        architecture="resnet",
        depths=choices.one_of(((2, 2, 2, 2), (3, 4, 6, 3), (2, 3, 4, 2), (3, 3, 3, 3))),
        channels=tuple(stem * 2**stage * (4 if is_bottleneck else 1) for stage in range(4)),
        stem=stem,
        is_bottleneck=is_bottleneck,
        activation=choices.one_of(("relu", "silu")),
        size=choices.one_of((192, 224, 256, 288)),
        labels=labels,
        batch=per_gpu * num_gpus,
    )


def mixture(num_gpus: int, choices: Choices) -> Text:
    """A decoder with LLaMA's attention and a mixture of experts in each layer."""
    body = _gated(choices, choices.one_of((2, 3, 4, 6)), "silu", (64, 128))
    experts = choices.one_of((4, 8, 16, 32))
    lengths = (512, 1024, 2048)
    return _text("llama with experts", body, num_gpus, choices, tied=False, lengths=lengths, experts=experts)


#: By name.
FAMILIES: dict[str, Callable[[int, Choices], Sizes]] = {
    "decoder": decoder,
    "encoder-decoder": encoder_decoder,
    "vision": vision,
    "mixture of experts": mixture,
}


def _plain(choices: Choices, layers: int, activations: Sequence[str]) -> Layers:
    """Layers as GPT's: as many heads of keys and values as of queries, a feed-forward of one input matmul."""
    heads, head_dim = choices.one_of((8, 12, 16, 20, 24, 32)), choices.one_of((64, 64, 80, 96, 128))
    return Layers(
        layers=layers,
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        hidden=choices.one_of((2, 4, 4, 4)) * heads * head_dim,
        gated=False,
        activation=choices.one_of(activations),
        dropout=choices.one_of((0.0, 0.1)),
    )


def _gated(
    choices: Choices,
    layers: int,
    activation: str,
    head_dims: Sequence[int],
    *,
    grouped: bool = True,
    dropout: float = 0.0,
) -> Layers:
    """Layers as LLaMA's: grouped-query attention, a gated feed-forward whose width is a multiple of 256."""
    heads, head_dim = choices.one_of((8, 12, 16, 24, 32, 40)), choices.one_of(head_dims)
    width = heads * head_dim
    return Layers(
        layers=layers,
        heads=heads,
        kv_heads=heads // choices.one_of([n for n in (1, 2, 4, 8) if heads % n == 0]) if grouped else heads,
        head_dim=head_dim,
        hidden=-(-round(width * choices.one_of((2.5, 8 / 3, 3.5, 4.0))) // 256) * 256,
        gated=True,
        activation=activation,
        dropout=dropout,
    )


def _text(
    architecture: str,
    body: Layers,
    num_gpus: int,
    choices: Choices,
    *,
    tied: bool,
    lengths: Sequence[int],
    stacks: int = 1,
    experts: int = 0,
) -> Text:
    return Text(
        architecture=architecture,
        body=body,
        stacks=stacks,
        vocab=choices.one_of(_VOCABULARIES),
        seq=choices.one_of(lengths),
        batch=round(choices.one_of((0.5, 1, 1, 2, 4, 8, 12, 16)) * num_gpus),
        tied=tied,
        experts=experts,
    )
