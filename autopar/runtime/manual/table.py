"""List the local implementations of primitives.

In: a node.
Out: its `LocalFunction`. A manual factor of a rule is offered only for primitives with an entry here or with a local
function that the user registered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from autopar.rules.node_view import NodeView
from autopar.rules.table import RULES, TRAITS
from autopar.rules.user_rules import called, no_local, registered_local
from autopar.runtime.manual.kernels import attention, pallas
from autopar.runtime.manual.part import LocalFunction, Part
from autopar.runtime.manual.ragged_dot import ragged_dot_general
from autopar.runtime.manual.scans import cumulative
from autopar.runtime.manual.slices import dynamic_slice, dynamic_update_slice
from autopar.runtime.manual.top_k import approx_top_k, arg_extreme, top_k
from autopar.runtime.manual.windows import convolution, pooling, unpooling


def _batch(part: Part, *operands: Any) -> Sequence[Any]:
    """Each device runs the primitive on its elements of the batch."""
    return part.bind(operands)


#: All primitives of autopar's own table that have manual factors. Read-only.
LOCAL: Mapping[str, LocalFunction] = MappingProxyType(
    {
        **dict.fromkeys((name for name in RULES if TRAITS[name].independent), _batch),
        **dict.fromkeys((name for name, traits in TRAITS.items() if traits.reduces == "position"), arg_extreme),
        **dict.fromkeys((name for name, traits in TRAITS.items() if traits.reduces == "running"), cumulative),
        "top_k": top_k,
        "approx_top_k": approx_top_k,
        "dynamic_slice": dynamic_slice,
        "dynamic_update_slice": dynamic_update_slice,
        "ragged_dot_general": ragged_dot_general,
        "conv_general_dilated": convolution,
        **{f"reduce_window_{kind}": pooling for kind in ("sum", "max", "min")},
        "select_and_scatter_add": unpooling,
    }
)


#: Kernels whose loops devices share, unless the user registers a function for them. Read-only.
KERNELS: Mapping[str, LocalFunction] = MappingProxyType(
    {"pallas_call": pallas, **dict.fromkeys((name for name, one in TRAITS.items() if one.partitioned), attention)}
)


def local_function(view: NodeView) -> LocalFunction:
    """The local implementation of a node.

    Raises:
        RuleError: the node was planned with a function that is not registered here.
    """
    if view.primitive in LOCAL:
        return LOCAL[view.primitive]
    own = registered_local(called(view), view.primitive)
    if own is None and view.primitive in KERNELS:
        return KERNELS[view.primitive]
    if own is None:
        raise no_local(called(view))

    def run(_: Part, *operands: Any) -> Sequence[Any]:
        results = own(*operands)
        return tuple(results) if isinstance(results, tuple | list) else (results,)

    return run
