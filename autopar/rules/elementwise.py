"""Rules of primitives whose result elements each depend on one element of each operand.

In: `NodeView`. Out: `ELEMENTWISE`, part of the table. Every rule here is pointwise: the node may join its neighbours'
group, and any dim may be split.

The operations per element are rough counts of XLA's libdevice expansions. These nodes are bound by memory, so only the
order of magnitude matters.
"""

from __future__ import annotations

import math
from functools import partial

from autopar.rules.factors import Rule, build_rule, by_position
from autopar.rules.node_view import NodeView, RuleFunction, rule_by_position
from autopar.rules.traits import Traits, with_traits

_MOVES = """
    conj convert_element_type copy imag layout_constraint name random_clone real reduce_precision reshard
    stop_gradient xla_metadata_value
"""
_ARITHMETIC = """
    abs add add_any and ceil clamp clz complex eq eq_to floor ge gt is_finite le le_to lt lt_to max min mul mulhi ne neg
    nextafter not one_minus_square or population_count round select_n shift_left shift_right_arithmetic
    shift_right_logical sign square sub xor
"""
_DIVISIONS = "div rem rsqrt sqrt cbrt"
_TRANSCENDENTAL = """
    acos acosh asin asinh atan atan2 atanh cos cosh erf erf_inv erfc exp exp2 expm1 log log1p log2 logistic pow sin sinh
    tan tanh
"""
_SPECIAL = """
    bessel_i0e bessel_i1e digamma igamma igamma_grad_a igammac lgamma polygamma random_gamma regularized_incomplete_beta
    zeta
"""
#: threefry takes about 115 integer operations for two 32-bit words, philox about the same for four.
_RANDOM_WORDS = {"threefry2x32": 60.0, "threefry4x32": 60.0, "philox2x32": 40.0, "philox4x32": 30.0}

FLOPS_PER_ELEMENT: dict[str, float] = {
    **dict.fromkeys(_MOVES.split(), 0.0),
    **dict.fromkeys(_ARITHMETIC.split(), 1.0),
    **dict.fromkeys(_DIVISIONS.split(), 4.0),
    **dict.fromkeys(_TRANSCENDENTAL.split(), 10.0),
    **dict.fromkeys(_SPECIAL.split(), 100.0),
    **_RANDOM_WORDS,
    "random_fold_in": 60.0,
}


def elementwise(view: NodeView, flops: float) -> Rule:
    """All dims are free. An operand may be a scalar, or have size 1 where the result has more."""
    return rule_by_position(view, pointwise=True, flops_per_point=flops)


def _integer_pow(view: NodeView) -> Rule:
    return elementwise(view, float(max(1, abs(view.params["y"]).bit_length())))


def _polynomial(view: NodeView) -> Rule:
    """Horner's rule: one multiply and one add per coefficient."""
    return elementwise(view, 2.0 * max(1, len(view.operand_shapes) - 1))


def _separate(view: NodeView) -> Rule:
    """Operand *i* passes to result *i*; the pairs are independent."""
    terms = [[(f"{t}.{i}",) for i in range(len(shape))] for t, shape in enumerate(view.operand_shapes)]
    return build_rule(terms, terms, view.operand_shapes, view.result_shapes, pointwise=True, flops_per_point=0.0)


def _leading(view: NodeView) -> Rule:
    """The tensors share their leading dims. Dims that only one side has (words of a key, bytes of a wider element, new
    keys) need replication."""
    ranks = [len(shape) for shape in (*view.operand_shapes, *view.result_shapes)]
    return rule_by_position(view, range(min(ranks), max(ranks)), pointwise=True, flops_per_point=0.0)


def _created(view: NodeView, flops: float) -> Rule:
    """Each dim of the results is free; operands (a key, bounds) need replication.

    JAX's threefry is partitionable: every device draws its own part of the numbers.
    """
    return build_rule(
        [[()] * len(shape) for shape in view.operand_shapes],
        [by_position(shape) for shape in view.result_shapes],
        view.operand_shapes,
        view.result_shapes,
        pointwise=True,
        flops_per_point=flops,
    )


def _rng_uniform(view: NodeView) -> Rule:
    """No dim is split: each device has its own generator state, and XLA broadcasts the first device's numbers."""
    terms = [[()] * len(shape) for shape in view.operand_shapes], [[()] * len(shape) for shape in view.result_shapes]
    size = float(math.prod(view.result_shapes[0]))
    return build_rule(*terms, view.operand_shapes, view.result_shapes, flops_per_point=60.0 * size)


def _rng_bit_generator(view: NodeView) -> Rule:
    state, data = view.result_shapes
    return build_rule(
        [[()] * len(shape) for shape in view.operand_shapes],
        [[()] * len(state), by_position(data)],
        view.operand_shapes,
        view.result_shapes,
        pointwise=True,
        flops_per_point=30.0,
    )


ELEMENTWISE: dict[str, RuleFunction] = {
    **{name: partial(elementwise, flops=flops) for name, flops in FLOPS_PER_ELEMENT.items()},
    "integer_pow": _integer_pow,
    "polynomial": _polynomial,
    "device_put": _separate,
    "bitcast_convert_type": _leading,
    "random_wrap": _leading,
    "random_unwrap": _leading,
    "random_split": _leading,
    "random_seed": _leading,
    "random_bits": partial(_created, flops=60.0),
    "rng_uniform": _rng_uniform,
    "rng_bit_generator": _rng_bit_generator,
    "iota": partial(_created, flops=0.0),
    "iota_2x32_shape": partial(_created, flops=1.0),
    "empty": partial(_created, flops=0.0),
    "platform_index": partial(_created, flops=0.0),
}

#: Primitives whose parameters (a sharding, a layout or a key) are valid for one shape only.
_OF_ONE_SHAPE = {"layout_constraint", "random_clone", "random_fold_in", "reshard", "xla_metadata_value"}
_at_any_shape = partial(Traits, elementwise=True)
ELEMENTWISE_TRAITS = with_traits(
    ELEMENTWISE,
    {
        **dict.fromkeys((FLOPS_PER_ELEMENT.keys() | {"integer_pow"}) - _OF_ONE_SHAPE, _at_any_shape()),
        **dict.fromkeys(("stop_gradient", "reduce_precision"), _at_any_shape(view=True)),
        **dict.fromkeys(("bitcast_convert_type", "random_wrap", "random_unwrap"), Traits(view=True)),
        "reshard": Traits(view=True, constrains=True),
        "copy": _at_any_shape(view=True, linear="one", one_to_one=True),
        "convert_element_type": _at_any_shape(linear="one", one_to_one=True, casts=True),
        "neg": _at_any_shape(linear="one", one_to_one=True, scales=True),
        **dict.fromkeys(("real", "imag"), _at_any_shape(linear="one")),
        **dict.fromkeys(("add", "add_any"), _at_any_shape(linear="all", adds=True, accumulates=True)),
        "sub": _at_any_shape(linear="all"),
        "mul": _at_any_shape(linear="either", scales=True, accumulates=True),
        **dict.fromkeys(("max", "min", "and", "or"), _at_any_shape(accumulates=True)),
        "div": _at_any_shape(linear="first", scales=True),
        "select_n": _at_any_shape(linear="cases"),
        "iota": Traits(moves="fixed"),
        "empty": Traits(uniform=True),
        "rng_bit_generator": Traits(library=True),
    },
)
