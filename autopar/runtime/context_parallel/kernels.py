"""List the attention kernels that one device can run on its part of the queries and one block of the keys.

In: [batch, tokens, heads, dim], the heads of the queries a multiple of those of keys and values.
Out: results that can be merged over blocks of keys: the output with its log-sum-exp, and terms of the gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autopar.errors import AttentionError
from autopar.jax_interop import cudnn_attention
from autopar.runtime.context_parallel import blockwise


@dataclass(frozen=True, slots=True)
class Kernel:
    """An attention kernel for one device.

    Args:
        forward: function from query, key, value, and by name `scale` and `is_causal`, to the output and the log-sum-exp
            [batch, heads, tokens] of the scores. A causal mask aligns the first query with the first key.
        backward: function from query, key, value, output, log-sum-exp, gradient of the output, and the same names, to
            the gradients of query, key and value. The output and the log-sum-exp may be those over more keys.
        has_segments: whether both take segment ids of queries and keys as `segments`.
    """

    name: str
    forward: Callable[..., Any]
    backward: Callable[..., Any]
    has_segments: bool = False

    def options(self, scale: float, is_causal: bool, segments: Any | None) -> dict[str, Any]:
        """The named arguments of `forward` and `backward`.

        Raises:
            AttentionError: segment ids for a kernel that takes none.
        """
        given: dict[str, Any] = {"scale": scale, "is_causal": is_causal}
        if segments is None:
            return given
        if not self.has_segments:
            raise AttentionError(
                f"the {self.name} kernel takes no segment ids: a bias would have to hold a score for each pair of tokens;"
                f" attention over packed sequences needs the {BLOCKWISE.name} kernel"
            )
        return given | {"segments": segments}


#: The kernel in plain JAX, on every platform.
BLOCKWISE = Kernel("blockwise", blockwise.forward, blockwise.backward, has_segments=True)

#: cuDNN's kernel on NVIDIA GPUs, in bfloat16 and float16.
CUDNN = Kernel("cuDNN", cudnn_attention.forward, cudnn_attention.backward)
