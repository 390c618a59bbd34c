"""Define what may differ between the layers of a decoder: rotary embedding, sliding window, experts.

In: values of a `config.json`. Out: `LayerKind`, one for each layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.inference.model.rotary import Rotary

#: The matmuls of a layer.
LAYER_MODULES = frozenset(
    [
        *("query", "key", "value", "out", "gate", "up", "down"),
        *(f"experts/{name}" for name in ("router", "gate", "up", "down")),
        *(f"experts/shared_{name}" for name in ("router", "gate", "up", "down")),
    ]
)


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts in place of one feed-forward network.

    Args:
        num, per_token: the number of experts, and of those that compute each token.
        size: the elements between the projections of an expert.
        is_normalized: whether the weights of a token's experts are scaled to a sum of one.
        shared_size: the same size for a further expert that computes every token, with a gate; 0 if there is none.
    """

    num: int
    per_token: int
    size: int
    is_normalized: bool
    shared_size: int = 0


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What may differ between layers.

    Args:
        rotary: the rotary embedding; None if there is none.
        window: the tokens that each token sees, itself included; None is all before it.
        experts: the mixture of experts; None is one feed-forward network.
        plain: the modules whose weights are not quantized, if the others' are.
    """

    rotary: Rotary | None = None
    window: int | None = None
    experts: Experts | None = None
    plain: tuple[str, ...] = ()

    def for_length(self, longest: int) -> LayerKind:
        """The same for sequences of at most `longest` tokens."""
        window = None if self.window is None or self.window >= longest else self.window
        rotary = None if self.rotary is None else replace(self.rotary, longest=longest)
        return replace(self, window=window, rotary=rotary)


def layers_of(
    num: int,
    *,
    rotary: Rotary | Sequence[Rotary | None] | None = None,
    window: int | None = None,
    has_window: Sequence[bool] | None = None,
    experts: Experts | None = None,
    has_experts: Sequence[bool] | None = None,
) -> tuple[LayerKind, ...]:
    """The kinds of all layers.

    Args:
        num: the number of layers.
        rotary: the rotary embedding of all layers, or of each.
        window, has_window: the window, and which layers have it; by default all.
        experts, has_experts: the experts, and which layers have them; by default all.
    """
    rotaries = [rotary] * num if rotary is None or isinstance(rotary, Rotary) else rotary
    windows = [window if has_window is None or has_window[layer] else None for layer in range(num)]
    mixtures = [experts if has_experts is None or has_experts[layer] else None for layer in range(num)]
    return tuple(LayerKind(*each) for each in zip(rotaries, windows, mixtures, strict=True))
