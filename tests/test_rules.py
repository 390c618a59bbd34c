"""Rules on hand-written cases. `test_rules_hold` checks them on real equations."""

from __future__ import annotations

import ast
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax

from autopar.ir.params import plain_params
from autopar.rules.control_flow import BORDERS
from autopar.rules.elementwise import FLOPS_PER_ELEMENT
from autopar.rules.factors import DimFactors, Rule
from autopar.rules.node_view import NodeView
from autopar.rules.table import RULES, TRAITS, rule_for, traits_of, unknown_rule
from autopar.rules.traits import Traits

Shapes = tuple[tuple[int, ...], ...]


def text(rule: Rule) -> str:
    """`a b, b C -> a C; b sum`: factors by letter in order of appearance, manual ones large, `.` for a dim without
    one."""
    letters: dict[int, str] = {}

    def dim(factors: tuple[int, ...]) -> str:
        first = [ord("A" if f in rule.manual else "a") for f in factors]
        names = [letters.setdefault(f, chr(start + len(letters))) for f, start in zip(factors, first, strict=True)]
        return "." if not names else names[0] if len(names) == 1 else f"({' '.join(names)})"

    def tensors(terms: tuple[DimFactors, ...]) -> str:
        return ", ".join(" ".join(map(dim, term)) for term in terms)

    written = f"{tensors(rule.operands)} -> {tensors(rule.results)}"
    pending = [f"{letters[i]} {f.reduction}" for i, f in enumerate(rule.factors) if f.reduction]
    return "; ".join([written, *pending])


def rule_of(primitive: str, operands: Shapes, results: Shapes, params: dict[str, Any]) -> Rule:
    rule = rule_for(NodeView(primitive, params, operands, results))
    assert rule is not None
    return rule


def conv(lhs: str, rhs: str, out: str, **params: Any) -> dict[str, Any]:
    """Parameters of a 2-D convolution, dims written as `nhwc` / `hwio`, as JAX's `conv_dimension_numbers`."""
    rank = {"window_strides": (1, 1), "padding": ((1, 1), (1, 1)), "lhs_dilation": (1, 1), "rhs_dilation": (1, 1)}
    specs = {"lhs_spec": (lhs, "nchw"), "rhs_spec": (rhs, "oihw"), "out_spec": (out, "nchw")}
    numbers = {name: tuple(map(spec.index, order)) for name, (spec, order) in specs.items()}
    return {"dimension_numbers": numbers, "feature_group_count": 1, "batch_group_count": 1} | rank | params


def window(*sizes: int) -> dict[str, Any]:
    return {"window_dimensions": sizes, "window_strides": sizes, "padding": ((0, 0),) * len(sizes)}


def gathers(
    offset: tuple[int, ...], collapsed: tuple[int, ...], sizes: tuple[int, ...], indexed: tuple[int, ...] = (0,)
) -> dict[str, Any]:
    numbers = {"offset_dims": offset, "collapsed_slice_dims": collapsed, "start_index_map": indexed}
    batching = {"operand_batching_dims": (), "start_indices_batching_dims": ()}
    return {"slice_sizes": sizes, "dimension_numbers": numbers | batching}


def scatters(window_dims: tuple[int, ...], inserted: tuple[int, ...], batching: tuple[int, ...] = ()) -> dict[str, Any]:
    numbers = {"update_window_dims": window_dims, "inserted_window_dims": inserted}
    pairs = {"operand_batching_dims": batching, "scatter_indices_batching_dims": batching}
    return {"dimension_numbers": numbers | pairs | {"scatter_dims_to_operand_dims": inserted}}


def ragged(
    left: tuple[int, ...], right: tuple[int, ...], ragged: tuple[int, ...], groups: tuple[int, ...]
) -> dict[str, Any]:
    numbers = {"dot_dimension_numbers": ((left, right), ((), ()))}
    numbers |= {"lhs_ragged_dimensions": ragged, "rhs_group_dimensions": groups}
    return {"ragged_dot_dimension_numbers": numbers}


X, S = (4, 6), ()
FORWARD = ("nhwc", "hwio", "nhwc")
#: How JAX writes a convolution's gradients: the one by the kernel sums over the batch as over input channels.
BY_KERNEL, BY_INPUT = ("chwn", "ihwo", "hwnc"), ("nhwc", "hwoi", "nhwc")
CASES: list[tuple[str, Shapes, Shapes, dict[str, Any], str]] = [
    ("add", (X, X), (X,), {}, "a b, a b -> a b"),
    ("mul", (X, (1, 6)), (X,), {}, "a b, . b -> a b"),
    ("add", (X, S), (X,), {}, "a b,  -> a b"),
    ("select_n", (S, X, X), (X,), {}, ", a b, a b -> a b"),
    ("clamp", (S, X, S), (X,), {}, ", a b,  -> a b"),
    *((name, (X,), (X,), {}, "a b -> a b") for name in ("enter_const", "enter_carry", "enter_branch", "exit_carry")),
    ("barrier", (X,), (X,), {}, "a b -> a b"),
    ("exit_branch", (X, X), (X,), {}, "a b, a b -> a b"),
    ("enter_slice", ((3, *X),), (X,), {}, ". a b -> a b"),
    ("exit_stack", (X,), ((3, *X),), {}, "a b -> . a b"),
    *((name, ((),), (), {}, " -> ") for name in ("index", "predicate")),
    ("shard_map", (X,), (X,),
     {"in_dims": ((("data",), ()),), "out_dims": (((), ("data",)),), "axis_sizes": (("data", 2),), "flops": 24.0},
     "a . -> . b"),
    ("sharding_constraint", (X,), (X,), {"dims": (("data",), None)}, "a b -> a b"),
    ("device_put", (X,), (X,), {}, "a b -> a b"),
    ("integer_pow", (X,), (X,), {"y": -3}, "a b -> a b"),
    ("polynomial", (X, S, S), (X,), {}, "a b, ,  -> a b"),
    ("bitcast_convert_type", (X,), ((4, 6, 2),), {}, "a b -> a b ."),
    ("iota", (), (X,), {"dimension": 0}, " -> a b"),
    ("iota_2x32_shape", (), (X, X), {}, " -> a b, a b"),
    ("empty", (), (X,), {}, " -> a b"),
    ("platform_index", (), (S,), {}, " -> "),
    ("rng_uniform", (S, S), (X,), {}, ",  -> . ."),
    ("random_bits", (S,), (X,), {"shape": X}, " -> a b"),
    ("random_wrap", ((4, 2),), ((4,),), {}, "a . -> a"),
    ("random_unwrap", ((4,),), ((4, 2),), {}, "a -> a ."),
    ("random_seed", (S,), (S,), {}, " -> "),
    ("random_split", (S,), ((2,),), {"shape": (2,)}, " -> ."),
    ("rng_bit_generator", ((4,),), ((4,), X), {"shape": X}, ". -> ., a b"),
    ("dot_general", (X, (6, 8)), ((4, 8),), {"dimension_numbers": (((1,), (0,)), ((), ()))}, "a b, b c -> a c; b sum"),
    ("dot_general", ((2, 3, 4, 5), (2, 6, 4, 5)), ((2, 4, 3, 6),),
     {"dimension_numbers": (((3,), (3,)), ((0, 2), (0, 2)))}, "a b c d, a e c d -> a c b e; d sum"),
    ("conv_general_dilated", ((2, 8, 8, 3), (3, 3, 3, 16)), ((2, 8, 8, 16),),
     conv(*FORWARD), "a B C d, . . d e -> a B C e; d sum"),
    ("conv_general_dilated", ((2, 8, 8, 3), (2, 8, 8, 16)), ((3, 3, 3, 16),),
     conv(*BY_KERNEL), "a B C d, a B C e -> . . d e; a sum; B sum; C sum"),
    ("conv_general_dilated", ((2, 8, 8, 16), (3, 3, 3, 16)), ((2, 8, 8, 3),),
     conv(*BY_INPUT), "a B C d, . . e d -> a B C e; d sum"),
    # two groups of three channels each, and the gradient by the kernel; then depthwise
    ("conv_general_dilated", ((2, 8, 8, 6), (3, 3, 3, 8)), ((2, 8, 8, 8),),
     conv(*FORWARD, feature_group_count=2), "A B C (D E), . . E (D F) -> A B C (D F); E sum"),
    ("conv_general_dilated", ((2, 8, 8, 6), (2, 8, 8, 8)), ((3, 3, 3, 8),),
     conv(*BY_KERNEL, batch_group_count=2), "A B C (D E), A B C (D F) -> . . E (D F); A sum; B sum; C sum"),
    ("conv_general_dilated", ((2, 8, 8, 6), (3, 3, 1, 6)), ((2, 8, 8, 6),),
     conv(*FORWARD, feature_group_count=6), "a B C d, . . . d -> a B C d"),
    ("reduce_sum", (X,), ((4,),), {"axes": (1,)}, "a b -> a; b sum"),
    ("reduce_max", (X,), (S,), {"axes": (0, 1)}, "a b -> ; a max; b max"),
    *((f"reduce_{kind}", (X,), ((6,),), {"axes": (0,)}, f"a b -> b; a {kind}")
      for kind in ("min", "prod", "and", "or")),
    ("reduce_xor", (X,), ((4,),), {"axes": (1,)}, "a . -> a"),
    ("reduce", (X, S), ((6,),), {"dimensions": (0,)}, ". a,  -> a"),
    ("argmax", (X,), ((4,),), {"axes": (1,)}, "a B -> a"),
    ("argmin", (X,), ((6,),), {"axes": (0,)}, "A b -> b"),
    *((f"cum{kind}", (X,), (X,), {"axis": 1}, "a B -> a B") for kind in ("sum", "prod", "max", "min", "logsumexp")),
    ("sort", (X, X), (X, X), {"dimension": 0}, ". a, . a -> . a, . a"),
    ("top_k", (X,), ((4, 2), (4, 2)), {"k": 2, "axis": 1}, "A B -> A ., A ."),
    ("approx_top_k", (X,), ((4, 2), (4, 2)), {"k": 2, "reduction_dimension": -1}, "A B -> A ., A ."),
    ("approx_top_k", (X,), ((4, 6), (4, 6)), {"k": 2, "reduction_dimension": -1}, "a . -> a ., a ."),
    *((f"reduce_window_{kind}", ((2, 8, 8, 3),), ((2, 4, 4, 3),), window(1, 2, 2, 1), "a B C d -> a B C d")
      for kind in ("sum", "max", "min")),
    ("reduce_window", (X, S), ((4, 3),), window(1, 2), "a .,  -> a ."),
    ("reduce_window_sum", (X,), ((5, 6),), window(1, 1) | {"padding": ((0, 1), (0, 0))}, ". a -> . a"),
    ("select_and_scatter_add", ((4, 3), X), (X,), window(1, 2), "a B, a B -> a B"),
    ("select_and_scatter", ((4, 3), X), (X,), window(1, 2), "a ., a . -> a ."),
    ("select_and_gather_add", (X, X), ((4, 3),), window(1, 2), "a ., a . -> a ."),
    ("reshape", ((8, 3, 4),), ((8, 12),), {}, "a b c -> a (b c)"),
    ("reshape", ((24,),), ((2, 1, 12),), {}, "(a b) -> a . b"),
    ("reshape", ((5, 6, 4),), ((5, 4, 6),), {}, "a . . -> a . ."),
    ("reshape", ((3, 3, 1, 6, 2),), ((3, 3, 6, 2),), {"dimensions": (0, 1, 3, 2, 4)}, "a b . c d -> a b c d"),
    ("reshape", ((2, 3, 4),), ((3, 8),), {"dimensions": (1, 0, 2)}, "a b c -> b (a c)"),
    ("squeeze", ((4, 1, 6),), (X,), {"dimensions": (1,)}, "a . b -> a b"),
    ("transpose", ((4, 6, 2),), ((2, 4, 6),), {"permutation": (2, 0, 1)}, "a b c -> c a b"),
    ("broadcast_in_dim", ((4, 1),), ((4, 8, 6),), {"broadcast_dimensions": (0, 2)}, "a . -> a b c"),
    ("concatenate", (X, (4, 2)), ((4, 8),), {"dimension": 1}, "a ., a . -> a ."),
    ("split", (X,), ((4, 2), (4, 4)), {"axis": 1}, "a . -> a ., a ."),
    ("slice", (X,), ((4, 3),), {"start_indices": (0, 0), "limit_indices": X, "strides": (1, 2)}, "a . -> a ."),
    ("pad", (X, S), ((4, 8),), {"padding_config": ((0, 0, 0), (1, 1, 0))}, "a .,  -> a ."),
    ("pad", (X, S), (X,), {"padding_config": ((0, 0, 0), (1, -1, 0))}, "a .,  -> a ."),
    ("rev", (X,), (X,), {"dimensions": (0,)}, ". a -> . a"),
    ("dynamic_slice", (X, S, S), ((2, 6),), {"slice_sizes": (2, 6)}, "A b, ,  -> . b; A sum"),
    ("dynamic_update_slice", (X, (2, 6), S, S), (X,), {}, "A b, . b, ,  -> A b"),
    ("stack", (X, X), ((4, 2, 6),), {"axis": 1}, "a b, a b -> a . b"),
    ("unstack", ((4, 2, 6),), (X, X), {"axis": 1}, "a . b -> a b, a b"),
    ("tile", (X,), ((8, 6),), {"reps": (2, 1)}, "a b -> (c a) b"),
    ("gather", ((10, 6), (2, 3, 1)), ((2, 3, 6),), gathers((2,), (0,), (1, 6)), "a b, c d . -> c d b; a sum"),
    ("gather", ((10, 6), (3, 1)), ((3, 4, 6),), gathers((1, 2), (), (4, 6), (0,)), ". a, b . -> b . a"),
    ("scatter-add", ((10, 6), (2, 3, 1), (2, 3, 6)), ((10, 6),), scatters((2,), (0,)),
     "a b, c d ., c d b -> a b; c sum; d sum"),
    ("scatter-add", (X, (4, 3, 1), (4, 3)), (X,), scatters((), (1,), (0,)), "a b, a c ., a c -> a b; c sum"),
    *((f"scatter-{kind}", ((10, 6), (3, 1), (3, 6)), ((10, 6),), scatters((1,), (0,)), f"a b, c ., c b -> a b; c {name}")
      for kind, name in (("mul", "prod"), ("min", "min"), ("max", "max"))),
    *((f"scatter{kind}", ((10, 6), (3, 1), (3, 6)), ((10, 6),), scatters((1,), (0,)), "a b, . ., . b -> a b")
      for kind in ("", "-sub")),
    ("ragged_dot_general", ((6, 4), (2, 4, 5), (2,)), ((6, 5),), ragged((1,), (1,), (0,), (0,)),
     "A b, C b d, . -> A d; b sum; C sum"),
    ("ragged_dot_general", ((6, 4), (6, 5), (2,)), ((2, 4, 5),), ragged((0,), (0,), (0,), ()),
     "A b, A c, . -> D b c; A sum"),
    ("paged_attention", ((4, 2, 6, 8), (9, 4, 3, 8), (9, 4, 3, 8), (4, 2), (4, 2)), ((4, 2, 6, 8),), {},
     "A B (C D) ., . . C ., . . C ., A ., A B -> A B (C D) ."),
    ("paged_attention", ((4, 1, 6, 8), (9, 4, 1, 8), (9, 4, 1, 8), (4, 2), (4, 1)), ((4, 1, 6, 8),), {},
     "A . B ., . . . ., . . . ., A ., A . -> A . B ."),
    ("symmetric_product", ((8, 4, 6), (8, 4, 4)), ((8, 4, 4),), {}, "A . ., A . . -> A . ."),
    ("fft", ((8, 4, 6),), ((8, 4, 4),), {"fft_lengths": (4, 6)}, "a . . -> a . ."),
    ("cholesky", ((8, 4, 4),), ((8, 4, 4),), {}, "a . . -> a . ."),
    ("lu", ((8, 4, 4),), ((8, 4, 4), (8, 4), (8, 4)), {}, "a . . -> a . ., a ., a ."),
    ("qr", ((8, 6, 4),), ((8, 6, 6), (8, 6, 4)), {}, "a . . -> a . ., a . ."),
    *((name, ((8, 6, 4),), ((8, 6, 4), (8, 4)), {}, "a . . -> a . ., a .") for name in ("geqrf", "hessenberg")),
    ("geqp3", ((8, 6, 4), (8, 4)), ((8, 6, 4), (8, 4), (8, 4)), {}, "a . ., a . -> a . ., a ., a ."),
    ("householder_product", ((8, 6, 4), (8, 4)), ((8, 6, 4),), {}, "a . ., a . -> a . ."),
    ("ormqr", ((8, 6, 4), (8, 4), (8, 6, 5)), ((8, 6, 5),), {}, "a . ., a ., a . . -> a . ."),
    *((name, ((8, 4, 4),), ((8, 4, 4), (8, 4)), {}, "a . . -> a . ., a .") for name in ("eigh", "eig", "schur")),
    ("svd", ((8, 6, 4),), ((8, 4), (8, 6, 4), (8, 4, 4)), {}, "a . . -> a ., a . ., a . ."),
    ("tridiagonal", ((8, 4, 4),), ((8, 4, 4), (8, 4), (8, 3), (8, 3)), {}, "a . . -> a . ., a ., a ., a ."),
    ("cholesky_update", ((4, 4), (4,)), ((4, 4),), {}, ". ., . -> . ."),
    ("lu_pivots_to_permutation", ((8, 4),), ((8, 6),), {}, "a . -> a ."),
    ("triangular_solve", ((8, 4, 4), (8, 4, 5)), ((8, 4, 5),), {"left_side": True}, "a . ., a . . -> a . ."),
    ("tridiagonal_solve", ((8, 4), (8, 4), (8, 4), (8, 4, 5)), ((8, 4, 5),), {}, "a ., a ., a ., a . . -> a . ."),
]  # fmt: skip


@pytest.mark.parametrize(("primitive", "operands", "results", "params", "expected"), CASES)
def test_rule_says(primitive: str, operands: Shapes, results: Shapes, params: dict[str, Any], expected: str) -> None:
    assert text(rule_of(primitive, operands, results, params)) == expected


@pytest.mark.parametrize(
    ("shape", "result", "pointwise"),
    [((4, 6), (4, 1, 6), True), ((4, 6), (24,), False), ((4, 6), (6, 4), False), ((4, 6), (4, 2, 3), False)],
)
def test_only_reshapes_by_dims_of_one_are_pointwise(shape: Any, result: Any, pointwise: bool) -> None:
    assert rule_of("reshape", (shape,), (result,), {}).pointwise is pointwise


@pytest.mark.contract
def test_every_entry_has_a_case() -> None:
    assert set(RULES) - {case[0] for case in CASES} - set(FLOPS_PER_ELEMENT) == set()


@pytest.mark.contract
@pytest.mark.parametrize("primitive", FLOPS_PER_ELEMENT)
def test_elementwise_entries_are_pointwise(primitive: str) -> None:
    rule = rule_of(primitive, (X, X), (X,), {})
    assert rule.pointwise and text(rule) == "a b, a b -> a b"


def test_rules_need_no_jax() -> None:
    # a bare package in the place of `autopar`, whose own list of public names imports JAX
    program = (
        "import sys, types; package = types.ModuleType('autopar'); package.__path__ = [sys.argv[1]];"
        "sys.modules['autopar'] = package; import autopar.rules.table, autopar.ir.params;"
        "sys.exit('jax' in sys.modules)"
    )
    folder = Path(__file__).parents[1] / "autopar"
    assert subprocess.run([sys.executable, "-c", program, str(folder)], check=False).returncode == 0


def flops(primitive: str, operands: Shapes, results: Shapes, params: dict[str, Any]) -> float:
    rule = rule_of(primitive, operands, results, params)
    return rule.flops_per_point * math.prod(f.size for f in rule.factors)


def test_flops_count_dims_without_a_factor() -> None:
    kernel, image = (3, 3, 3, 16), (2, 8, 8, 3)
    # of the 8 positions of an edge, a 3-wide kernel meets 6 * 3 + 2 * 2 = 22 elements
    expected = 2.0 * 2 * 22 * 22 * 3 * 16
    assert flops("conv_general_dilated", (image, kernel), ((2, 8, 8, 16),), conv(*FORWARD)) == expected
    assert flops("conv_general_dilated", (image, (2, 8, 8, 16)), (kernel,), conv(*BY_KERNEL)) == expected
    grouped = conv(*FORWARD, feature_group_count=2)
    assert flops("conv_general_dilated", ((2, 8, 8, 6), kernel), ((2, 8, 8, 16),), grouped) == expected
    assert flops("scatter-add", ((10, 6), (3, 1), (3, 6)), ((10, 6),), scatters((1,), (0,))) == pytest.approx(18)
    assert flops("cumsum", (X,), (X,), {"axis": 1}) == flops("argmax", (X,), ((4,),), {"axes": (1,)}) == 24


def test_an_unknown_primitive_is_replicated_and_not_free() -> None:
    view = NodeView("mystery", {}, (X, S), ((4, 6, 2),))
    assert rule_for(view) is None
    assert text(unknown_rule(view)) == ". .,  -> . . ."
    assert unknown_rule(view).flops_per_point == 48


def test_params_become_plain() -> None:
    index = np.int64(3)
    params = {"sizes": (index, [1, 2]), "new_dtype": np.dtype("float32"), "body": len,
              "mode": lax.GatherScatterMode.CLIP, "flag": np.bool_(True), "fill": np.float32(0.5), "pair": (1, len),
              "table": np.ones(3), "key": jax.random.key(0).dtype, "prim": lax.add_p, "nothing": None}  # fmt: skip
    plain = plain_params("gather", params)
    assert plain == {"sizes": (3, (1, 2)), "new_dtype": "float32", "mode": "CLIP", "flag": True, "fill": 0.5,
                     "key": "key<fry>", "prim": "add", "nothing": None}  # fmt: skip
    assert type(plain["sizes"][0]) is int and type(plain["flag"]) is bool


def test_every_primitive_with_a_rule_has_traits() -> None:
    assert not RULES.keys() - TRAITS.keys()
    assert traits_of("never_heard_of") == Traits()


@pytest.mark.parametrize("primitive", sorted({case[0] for case in CASES}))
def test_traits_agree_with_the_rule(primitive: str) -> None:
    traits, cases = traits_of(primitive), [case for case in CASES if case[0] == primitive]
    rules = [rule_of(*case[:4]) for case in cases]
    assert not traits.terms or any(factor.reduction for rule in rules for factor in rule.factors)
    assert not traits.independent or any(rule.manual for rule in rules)
    assert not traits.elementwise or all(rule.pointwise for rule in rules)
    assert not traits.permutes or all("permutation" in params for _, _, _, params, _ in cases)
    read = [{f for term in rule.operands for dim in term for f in dim} for rule in rules]
    assert not traits.uniform or any(len(rule.factors) > len(found) for rule, found in zip(rules, read, strict=True))


#: So many tests outside `rules/` are on the name of a primitive or of a loop's piece. May it only shrink: what a pass needs to know
#: of a primitive is a trait. What stays reads parameters of that one primitive, or is a table of one of XLA's passes.
MOST_ON_PRIMITIVES, MOST_ON_PIECES = 35, 53


def names_tested(module: ast.Module) -> Iterator[list[str]]:
    """The names in each comparison of a `.primitive` or `.piece`, and in each other collection of two names or more."""
    compared = set[ast.AST]()
    for node in ast.walk(module):
        if isinstance(node, ast.Compare):
            compared.update(ast.walk(node))
            sides = [ast.unparse(side) for side in (node.left, *node.comparators)]
            if not any(side.removesuffix(".name").endswith(("primitive", "piece")) for side in sides):
                continue
        elif not isinstance(node, ast.Set | ast.Tuple | ast.List) or node in compared:
            continue
        own = ast.walk(node) if isinstance(node, ast.Compare) else node.elts
        strings = [one.value for one in own if isinstance(one, ast.Constant) and isinstance(one.value, str)]
        named = [name for name in strings if name in TRAITS and name not in ("max", "min", "and", "or")]
        if named and (isinstance(node, ast.Compare) or 1 < len(named) >= len(node.elts) / 2):
            yield named


def test_modules_outside_the_rules_ask_for_traits_not_names() -> None:
    package = Path(__file__).parents[1] / "autopar"
    other = {"rules", "xla_compiler", "xla_replay"}  # the last two test opcodes of HLO, which are no primitives
    files = [file for file in package.rglob("*.py") if not other & {*file.relative_to(package).parts}]
    found = [named for file in files for named in names_tested(ast.parse(file.read_text(encoding="utf-8")))]
    pieces = [named for named in found if BORDERS.keys() >= set(named)]
    assert len(found) - len(pieces) <= MOST_ON_PRIMITIVES
    assert len(pieces) <= MOST_ON_PIECES
