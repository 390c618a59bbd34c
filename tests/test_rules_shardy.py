"""Our rules offer Shardy's: each loop that its registry of operations shards, unless sharding it costs communication.

For a StableHLO operation and the JAX primitive that lowers to it, the table lists the loops in Shardy's registry
(openxla/shardy, op_sharding_rule_registry.cc, as of commit 009a911). We leave out loops in capitals, each for a reason:
Shardy propagates shardings, so its loops may need communication. Our factors promise that an all-reduce suffices, or,
for operations that read windows, the halo slices of neighbours.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from test_rules import BY_KERNEL, FORWARD, Shapes, X, conv, gathers, ragged, rule_of, scatters, window

from autopar.rules.factors import DimFactors, Rule

S = ()
HALO = "Shardy marks it a permutation: neighbours change places, for which our factors have no price"
WHOLE = "Shardy marks it as one that needs replication"
MIXED = "each result needs all of the dim; Shardy says itself that splitting it takes communication"
COMBINED = "no all-reduce combines (index, value) pairs or a function of the user's"
ORDER = "which of two writes to one place comes last would change"
CUT = "it is in one tensor alone: the start of the slice decides which part of it is meant"
GATHERED = "XLA's partitioner gathers the operands (test_rules_forced.py)"
TAPS = "the elements of a small kernel are not worth splitting"
PARTLY = "the rest of each dim would be a loop of one tensor alone, which our rules do not have; no model was seen to need it"

#: StableHLO operation, primitive, operands, results, parameters, Shardy's loops, why those in capitals are left out.
TABLE: list[tuple[str, str, Shapes, Shapes, dict[str, Any], str, str]] = [
    ("add", "add", (X, X), (X,), {}, "a b, a b -> a b", ""),
    ("compare", "lt", (X, X), (X,), {}, "a b, a b -> a b", ""),
    ("convert", "convert_element_type", (X,), (X,), {}, "a b -> a b", ""),
    ("select", "select_n", (X, X, X), (X,), {}, "a b, a b, a b -> a b", ""),
    ("clamp", "clamp", (S, X, S), (X,), {}, ", a b, -> a b", ""),
    ("bitcast_convert", "bitcast_convert_type", (X,), ((4, 6, 2),), {}, "a b -> a b K", WHOLE),
    ("broadcast_in_dim", "broadcast_in_dim", ((4, 1),), ((4, 8, 6),), {"broadcast_dimensions": (0, 2)}, "a . -> a b c", ""),
    ("transpose", "transpose", (X,), ((6, 4),), {"permutation": (1, 0)}, "a b -> b a", ""),
    ("reshape", "reshape", ((8, 12),), ((8, 3, 4),), {}, "a (b c) -> a b c", ""),
    ("reshape", "reshape", ((2, 3, 4),), ((6, 4),), {}, "a b c -> (a b) c", ""),
    ("reshape", "reshape", ((2, 36),), ((2, 3, 3, 4),), {}, "a (b c d) -> a b c d", ""),
    ("reshape", "reshape", ((5, 12, 4),), ((5, 8, 6),), {}, "a (B .) . -> a (B .) .", PARTLY),
    ("reverse", "rev", (X,), (X,), {"dimensions": (0,)}, "K a -> K a", HALO),
    ("concatenate", "concatenate", (X, (4, 2)), ((4, 8),), {"dimension": 1}, "a K, a K -> a K", HALO),
    ("pad", "pad", (X, S), ((4, 8),), {"padding_config": ((0, 0, 0), (1, 1, 0))}, "a K, -> a K", HALO),
    ("slice", "slice", (X,), ((4, 3),), {}, "a K -> a K", HALO),
    ("dynamic_slice", "dynamic_slice", (X, S, S), ((2, 6),), {}, ". a, , -> . a", ""),
    ("dynamic_update_slice", "dynamic_update_slice", (X, (1, 6), S, S), (X,), {}, "k a, . a, , -> k a", ""),
    ("dot_general", "dot_general", (X, (6, 8)), ((4, 8),), {"dimension_numbers": (((1,), (0,)), ((), ()))},
     "a b, b c -> a c", ""),
    ("dot_general", "dot_general", ((2, 3, 4, 5), (2, 6, 4, 5)), ((2, 4, 3, 6),),
     {"dimension_numbers": (((3,), (3,)), ((0, 2), (0, 2)))}, "a b c d, a e c d -> a c b e", ""),
    ("chlo.ragged_dot", "ragged_dot_general", (X, (2, 6, 5), (2,)), ((4, 5),), ragged((1,), (1,), (0,), (0,)),
     ". a, . a b, . -> . b", ""),
    ("convolution", "conv_general_dilated", ((2, 8, 8, 3), (3, 3, 3, 16)), ((2, 8, 8, 16),), conv(*FORWARD),
     "a h w b, P Q b c -> a h w c", TAPS),
    ("convolution", "conv_general_dilated", ((2, 8, 8, 6), (3, 3, 1, 6)), ((2, 8, 8, 6),),
     conv(*FORWARD, feature_group_count=6), "a h w b, P Q . b -> a h w b", TAPS),
    ("convolution", "conv_general_dilated", ((2, 8, 8, 6), (3, 3, 3, 8)), ((2, 8, 8, 8),),
     conv(*FORWARD, feature_group_count=2), "n h w (g i), P Q i (g o) -> n h w (g o)", TAPS),
    ("convolution", "conv_general_dilated", ((2, 8, 8, 6), (2, 8, 8, 8)), ((3, 3, 3, 8),),
     conv(*BY_KERNEL, batch_group_count=2), "n h w (g a), n h w (g c) -> . . a (g c)", ""),
    ("reduce", "reduce_sum", (X,), ((4,),), {"axes": (1,)}, "a b -> a", ""),
    ("reduce", "reduce_max", (X,), ((6,),), {"axes": (0,)}, "a b -> b", ""),
    ("reduce", "reduce_and", (X,), ((6,),), {"axes": (0,)}, "a b -> b", ""),
    ("reduce", "argmax", (X,), ((4,),), {"axes": (1,)}, "a k -> a", ""),
    ("reduce", "reduce_xor", (X,), ((4,),), {"axes": (1,)}, "a K -> a", COMBINED),
    ("reduce", "reduce", (X, S), ((6,),), {"dimensions": (0,)}, "K a, -> a", COMBINED),
    ("reduce_window", "cumsum", (X,), (X,), {"axis": 1}, "a k -> a k", ""),
    ("reduce_window", "reduce_window_max", ((2, 8, 8, 3),), ((2, 4, 4, 3),), window(1, 2, 2, 1), "a h w b -> a h w b", ""),
    ("select_and_scatter", "select_and_scatter_add", ((4, 3), X), (X,), window(1, 2), "a k, a k -> a k", ""),
    ("sort", "sort", (X, X), (X, X), {"dimension": 0}, "K a, K a -> K a, K a", WHOLE),
    ("@mhlo.topk", "top_k", (X,), ((4, 2), (4, 2)), {"k": 2, "axis": 1}, "a . -> a ., a .", ""),
    ("@ApproxTopK", "approx_top_k", (X,), ((4, 2), (4, 2)), {"k": 2, "reduction_dimension": -1}, "a . -> a ., a .", ""),
    ("gather", "gather", ((10, 6), (2, 3, 1)), ((2, 3, 6),), gathers((2,), (0,), (1, 6)), "a b, c d . -> c d b", ""),
    ("gather", "gather", ((10, 6), (3, 1)), ((3, 4, 6),), gathers((1, 2), (), (4, 6)), "K a, b . -> b L a", CUT),
    ("scatter", "scatter-add", ((10, 6), (2, 3, 1), (2, 3, 6)), ((10, 6),), scatters((2,), (0,)),
     "a b, c d ., c d b -> a b", ""),
    ("scatter", "scatter-max", ((10, 6), (3, 1), (3, 6)), ((10, 6),), scatters((1,), (0,)), "a b, c ., c b -> a b", ""),
    ("scatter", "scatter-add", (X, (4, 3, 1), (4, 3)), (X,), scatters((), (1,), (0,)), "a b, a c ., a c -> a b", ""),
    ("scatter", "scatter", ((10, 6), (3, 1), (3, 6)), ((10, 6),), scatters((1,), (0,)), "a b, K ., K b -> a b", ORDER),
    ("scatter", "scatter-sub", ((10, 6), (3, 1), (3, 6)), ((10, 6),), scatters((1,), (0,)), "a b, K ., K b -> a b", GATHERED),
    ("fft", "fft", ((8, 4, 6),), ((8, 4, 6),), {"fft_lengths": (6,)}, "a b K -> a b K", MIXED),
    ("cholesky", "cholesky", ((8, 4, 4),), ((8, 4, 4),), {}, "a K L -> a K L", WHOLE),
    ("triangular_solve", "triangular_solve", ((8, 4, 4), (8, 4, 5)), ((8, 4, 5),), {"left_side": True},
     "a . K, a . L -> a K L", WHOLE),
    ("@Eigh", "eigh", ((8, 4, 4),), ((8, 4, 4), (8, 4)), {}, "a K L -> a K L, a L", MIXED),
    ("@Qr", "geqrf", ((8, 6, 4),), ((8, 6, 4), (8, 4)), {}, "a K L -> a K L, a .", MIXED),
    ("@ProductOfElementaryHouseholderReflectors", "householder_product", ((8, 6, 4), (8, 4)), ((8, 6, 4),), {},
     "a K L, a . -> a K L", MIXED),
]  # fmt: skip

#: A tensor's side and number, one of its dims, and how many loops of that dim are more major.
Place = tuple[str, int, int, int]


def places_in(text: str) -> dict[str, set[Place]]:
    """Where each loop of a rule written as text stands."""
    found: dict[str, set[Place]] = {}
    for side, part in zip(("operand", "result"), text.split("->"), strict=True):
        for t, term in enumerate(part.split(",")):
            for d, dim in enumerate(re.findall(r"\([^)]*\)|\S+", term)):
                for i, name in enumerate(dim.strip("()").split()):
                    if name != ".":
                        found.setdefault(name, set()).add((side, t, d, i))
    return found


def places_of(rule: Rule) -> list[set[Place]]:
    """The same for each factor of a rule."""
    found: list[set[Place]] = [set() for _ in rule.factors]

    def note(side: str, terms: tuple[DimFactors, ...]) -> None:
        for t, term in enumerate(terms):
            for d, dim in enumerate(term):
                for i, factor in enumerate(dim):
                    found[factor].add((side, t, d, i))

    note("operand", rule.operands)
    note("result", rule.results)
    return found


@pytest.mark.contract
@pytest.mark.parametrize(("operation", "primitive", "operands", "results", "params", "loops", "reason"), TABLE)
def test_a_rule_offers_what_shardy_offers(
    operation: str, primitive: str, operands: Shapes, results: Shapes, params: dict[str, Any], loops: str, reason: str
) -> None:
    ours = places_of(rule_of(primitive, operands, results, params))
    for name, places in places_in(loops).items():
        if name.islower():
            assert any(places <= factor for factor in ours), f"{primitive} lacks {name} of stablehlo's {operation}"
        else:
            assert reason, f"{name} of {operation} is left out without a reason"
            assert not any(places <= factor for factor in ours), f"{primitive} has {name}: write it small"
