"""Describe the configurations of held-out models, and estimate their FLOPs and memory.

In: sizes. Out: `Text`, `Patches` and `Convolutions`. The estimates are coarse: they only keep a drawn model in the range
of steps that are worth planning. Plain Python: no JAX.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

#: Bytes of a parameter with AdamW: value, gradient and two moments in f32.
_STATE_BYTES = 16
#: Bytes of a layer's saved activations for each token and channel, of its attention weights for each pair of tokens, and
#: of a logit: bf16 values, f32 copies, dropout masks.
_CHANNEL_BYTES, _PAIR_BYTES, _LOGIT_BYTES = 34, 10, 12
#: A backward pass has two matmuls for each one of the forward pass; a multiply and an add are two FLOPs.
_FLOPS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """Layers of attention and a feed-forward.

    Args:
        layers: number in each stack: an encoder-decoder has two.
        kv_heads: heads of keys and values; fewer than `heads` with grouped-query attention.
        hidden: width of the feed-forward, of each expert if there are experts.
        gated: whether the feed-forward has a second input matmul.
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    gated: bool
    activation: str
    dropout: float

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    @property
    def attention_parameters(self) -> int:
        return 2 * self.width * (self.heads + self.kv_heads) * self.head_dim

    @property
    def feed_forward_parameters(self) -> int:
        return (3 if self.gated else 2) * self.width * self.hidden

    def activation_bytes(self, tokens: int, length: int) -> float:
        """Saved activations of one layer for so many tokens, each of which attends to `length` tokens."""
        channels = _CHANNEL_BYTES * (self.width + self.hidden // 4) / 2
        return tokens * (channels + _PAIR_BYTES * self.heads * length)

    def __str__(self) -> str:
        heads = f"{self.heads} heads of {self.head_dim}"
        grouped = "" if self.kv_heads == self.heads else f" ({self.kv_heads} of keys and values)"
        forward = f"{'gated ' if self.gated else ''}{self.activation} of {self.hidden:,}"
        return f"width {self.width:,}, {heads}{grouped}, {forward}, dropout {self.dropout}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A model of tokens.

    Args:
        stacks: 2 for an encoder-decoder, whose input and output have the same length.
        tied: whether the head is the embedding.
        experts: experts in each layer, of which each token takes two; 0 for a plain feed-forward.
    """

    architecture: str
    body: Layers
    stacks: int
    vocab: int
    seq: int
    batch: int
    tied: bool
    experts: int = 0

    @property
    def num_parameters(self) -> float:
        per_layer = self.attention_parameters + max(1, self.experts) * self.body.feed_forward_parameters
        return self.stacks * self.body.layers * per_layer + (2 - self.tied) * self.vocab * self.body.width

    @property
    def attention_parameters(self) -> float:
        """Those of one layer; half of the layers of two stacks have cross-attention too."""
        return self.body.attention_parameters * (1.5 if self.stacks == 2 else 1)

    @property
    def flops(self) -> float:
        """FLOPs of a step."""
        used = self.attention_parameters + (2.5 if self.experts else 1) * self.body.feed_forward_parameters
        pairs = 2 * self.seq * self.body.width * (1.5 if self.stacks == 2 else 1)
        dispatch = 5 * self.seq * self.body.width if self.experts else 0
        per_layer = used + pairs + dispatch
        head = self.vocab * self.body.width
        return _FLOPS * self.batch * self.seq * (self.stacks * self.body.layers * per_layer + head)

    def memory_bytes(self, num_gpus: int) -> float:
        """Peak memory of a GPU, with everything sharded."""
        tokens = self.batch * self.seq
        saved = self.stacks * self.body.layers * self.body.activation_bytes(tokens, self.seq)
        logits = _LOGIT_BYTES * tokens * self.vocab
        routed = self.body.layers * 16 * tokens * self.seq if self.experts else 0
        return (_STATE_BYTES * self.num_parameters + saved + logits + routed) / num_gpus

    def __str__(self) -> str:
        layers = f"{self.body.layers} layers" if self.stacks == 1 else f"{self.body.layers} + {self.body.layers} layers"
        experts = f", {self.experts} experts" if self.experts else ""
        head = "tied" if self.tied else "untied"
        return (
            f"{self.architecture}: {layers}, {self.body}{experts}, {head} vocabulary of {self.vocab:,},"
            f" {self.batch} x {self.seq:,} tokens"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Patches:
    """A transformer of the patches of an image, and a class token."""

    architecture: str
    body: Layers
    size: int
    patch: int
    labels: int
    batch: int

    @property
    def length(self) -> int:
        return (self.size // self.patch) ** 2 + 1

    @property
    def num_parameters(self) -> int:
        per_layer = self.body.attention_parameters + self.body.feed_forward_parameters
        return self.body.layers * per_layer + self.body.width * (3 * self.patch**2 + self.length + self.labels)

    @property
    def flops(self) -> float:
        """FLOPs of a step."""
        per_layer = self.body.attention_parameters + self.body.feed_forward_parameters
        per_token = self.body.layers * (per_layer + 2 * self.length * self.body.width)
        return _FLOPS * self.batch * self.length * (per_token + self.body.width * 3 * self.patch**2)

    def memory_bytes(self, num_gpus: int) -> float:
        """Peak memory of a GPU, with everything sharded."""
        saved = self.body.layers * self.body.activation_bytes(self.batch * self.length, self.length)
        return (_STATE_BYTES * self.num_parameters + saved) / num_gpus

    def __str__(self) -> str:
        return (
            f"{self.architecture}: {self.body.layers} layers, {self.body}, patches of {self.patch}, {self.labels:,} labels,"
            f" {self.batch} images of {self.size}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolutions:
    """A residual network.

    Args:
        depths: blocks of each stage.
        channels: channels at the end of each stage; each stage but the first halves the image.
        is_bottleneck: whether a block has 1 x 1, 3 x 3 and 1 x 1 convolutions, rather than two of 3 x 3.
    """

    architecture: str
    depths: tuple[int, ...]
    channels: tuple[int, ...]
    stem: int
    is_bottleneck: bool
    activation: str
    size: int
    labels: int
    batch: int

    @property
    def num_parameters(self) -> int:
        blocks = sum(depth * self._weights(width) for depth, width in zip(self.depths, self.channels, strict=True))
        shortcuts = sum(before * after for before, after in pairwise((self.stem, *self.channels)))
        return 49 * 3 * self.stem + blocks + shortcuts + self.channels[-1] * self.labels

    @property
    def flops(self) -> float:
        """FLOPs of a step."""
        stem = 49 * 3 * self.stem * (self.size // 2) ** 2
        stages = zip(self.depths, self.channels, self._pixels, strict=True)
        blocks = sum(depth * self._weights(width) * pixels for depth, width, pixels in stages)
        return _FLOPS * self.batch * (stem + blocks)

    def memory_bytes(self, num_gpus: int) -> float:
        """Peak memory of a GPU, with everything sharded."""
        per_channel = 1.5 if self.is_bottleneck else 2
        stages = zip(self.depths, self.channels, self._pixels, strict=True)
        saved = sum(depth * per_channel * width * pixels for depth, width, pixels in stages)
        stem = self.stem * (self.size // 2) ** 2
        return (_STATE_BYTES * self.num_parameters + 8 * self.batch * (saved + stem)) / num_gpus

    @property
    def _pixels(self) -> tuple[int, ...]:
        """Pixels of each stage's result."""
        return tuple((self.size // (4 * 2**stage)) ** 2 for stage in range(len(self.depths)))

    def _weights(self, width: int) -> int:
        """Parameters of a block."""
        return 2 * width * width // 4 + 9 * (width // 4) ** 2 if self.is_bottleneck else 18 * width * width

    def __str__(self) -> str:
        block = "bottleneck" if self.is_bottleneck else "basic"
        return (
            f"{self.architecture}: {block} blocks {'-'.join(map(str, self.depths))} of"
            f" {'-'.join(map(str, self.channels))} channels, {self.activation}, {self.labels:,} labels, {self.batch}"
            f" images of {self.size}"
        )


Sizes = Text | Patches | Convolutions
